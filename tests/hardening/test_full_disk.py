"""Every command that writes, on a full disk: the old file stays, one line names it, exit code 2. One line for a
model that does not fit into the memory of its process.
"""

import json
import shutil
import struct
from pathlib import Path

import pytest

from specdemo.__main__ import main
from specdemo.methods import load_drafter
from specdemo.models.load import load_target
from specdemo.models.shipped import embedded_folder
from specdemo.training.collect import Plan
from specdemo.training.shares import Shares
from tests import processes
from tests.models.tiny import build
from tests.processes import full_disk


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    build("llama").save_pretrained(folder)
    return folder


def refused(capsys, left, *arguments):
    """Return the line on stderr of a command on a disk with `left` bytes of free space."""
    with full_disk(left):
        assert main([str(argument) for argument in arguments]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("specdemo: cannot write ") and line.endswith("; free disk space or choose another path")
    return line


def test_training_keeps_what_it_has_at_every_stage(capsys, monkeypatch, tmp_path, target):
    plan = Plan(text_rows=8, sampled_rows=4, rows_per_shard=4, context=32, sample_length=16, taps=(-1,))
    monkeypatch.setattr("specdemo.methods.recipes.share_minutes", lambda *_: Shares(plan, 0.06))
    monkeypatch.setattr("specdemo.methods.recipes.remove_intermediate", lambda out: None)
    train = ("train", "medusa", "--target", target, "--out", tmp_path, "--minutes")
    cache = tmp_path / "cache"
    assert str(cache / "cache.json") in refused(capsys, 10, *train, 0.001)
    assert str(cache / "text-000.safetensors") in refused(capsys, 10_000, *train, 0.001)
    assert main([str(argument) for argument in (*train, 0.001)]) == 0
    saved = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    monkeypatch.setattr("specdemo.training.fit.FIRST_CHECKPOINT_SECONDS", 0.0)
    assert str(tmp_path / "checkpoint.pt") in refused(capsys, 10_000, *train, 5)
    # Training is complete, and only the head remains to be written.
    assert f"cannot write {tmp_path}:" in refused(capsys, 3_000, *train, 1e-6)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.*")} == saved
    assert load_drafter("medusa", load_target(str(target)), str(tmp_path))


BEGIN = """
import resource, sys
import specdemo.engine.session, specdemo.presets.pair, transformers.models.llama.modeling_llama
from pathlib import Path
from specdemo.__main__ import main
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]),) * 2)
sys.exit(main(sys.argv[2:]))
"""
HERE = Path("/proc/self/statm").exists()
in_proc = pytest.mark.skipif(not HERE, reason="reads the size of its process from /proc")


def run_within(more, *arguments):
    done = processes.run("-W", "ignore", "-c", BEGIN, more, "run", "embedded-ngram", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("specdemo: ") and done.stderr.count("\n") == 1
    return done.stderr


@in_proc
def test_a_model_without_room_for_its_headers_is_one_line():
    assert "does not fit into the memory" in run_within(4_000_000)


@in_proc
def test_a_model_without_room_for_its_weights_is_one_line(tmp_path):
    stories, folder = embedded_folder() / "stories", tmp_path / "wide"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(stories / name, folder)
    config = json.loads((stories / "config.json").read_text())
    vocabulary, width = 2**18, 2**10
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": vocabulary, "hidden_size": width}))
    size = 2 * vocabulary * width  # 0.5 GB mapped, 1 GB in float32
    entry = {"dtype": "BF16", "shape": [vocabulary, width], "data_offsets": [0, size]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)  # a sparse file, which takes no space on the disk
    assert "does not fit into the memory" in run_within(size + size // 2, "--target", str(folder), "--dtype", "float32")
