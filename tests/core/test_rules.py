"""A new acceptance rule: one file and a line in core/rules.py."""

import subprocess
import sys
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from specdemo.core.rules import accept_rule

ROOT = Path(__file__).parents[2]
RULE = '''
from specdemo.core.accept import AcceptResult, end_probs
from specdemo.core.sampling import draw


class Nothing:
    """Rejects every draft token."""

    exact, note = True, ""

    def __call__(self, draft, target, rng):
        path = [[0] for _ in target]
        return AcceptResult(path, draw(end_probs(target, path), rng))
'''
ENTRY = '    "nothing": RuleEntry("specdemo.core.nothing:Nothing", lossless=True, comment="rejects everything"),\n'
RUN = """
import sys
from typer.testing import CliRunner
from specdemo.core.rules import RULES
assert list(RULES) == ["lossless", "block", "typical", "nothing"] and "torch" not in sys.modules
from specdemo.__main__ import app
from specdemo.engine.comparison import Lane
from specdemo.presets.files import load_presets, preset
from specdemo.presets.link import from_query, to_query

help = " ".join(CliRunner().invoke(app, ["run", "--help"]).output.split())
assert "typical (lossy); nothing (rejects everything)." in help, help
changed = preset("embedded-ngram").with_changes(acceptance="nothing")
assert changed.lanes[0] == Lane.build(changed.lanes[0].model_dump())
assert from_query(to_query(changed, preset("embedded-ngram")), load_presets()) == (changed, [])

import torch
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.rules import accept_rule
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.toy import ToyTarget

target, prompt = ToyTarget(16, seed=1), torch.tensor([[3, 1, 4, 1, 5]])
def text(name, **rule):
    run = generate(target, load_drafter(name, target), prompt, GenerationConfig(20, budget=Budget(4, 4)), **rule)
    return [event.emitted[0] for event in run]
steps = text("ngram", accept=accept_rule("nothing"))
assert sum(steps, []) == sum(text("none"), []) and set(map(len, steps)) == {1}
"""


def test_a_rule_is_one_file_and_one_line(tmp_path):
    copytree(ROOT / "specdemo", tmp_path / "specdemo", ignore=ignore_patterns("__pycache__", "embedded"))
    copytree(ROOT / "presets", tmp_path / "presets", ignore=ignore_patterns("recorded"))
    (tmp_path / "specdemo" / "core" / "nothing.py").write_text(RULE, encoding="utf-8")
    registry = tmp_path / "specdemo" / "core" / "rules.py"
    text = registry.read_text(encoding="utf-8")
    last = next(line for line in text.splitlines(keepends=True) if line.startswith('    "typical"'))
    registry.write_text(text.replace(last, last + ENTRY), encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_rule_is_one_line():
    with pytest.raises(ValueError, match="unknown acceptance rule 'tipical'; did you mean 'typical'\\?"):
        accept_rule("tipical")
