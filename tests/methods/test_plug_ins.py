"""A method from another package: the one of docs/add-a-method.md, built and installed from the code on that page."""

import dataclasses
import json
import os
import re
import sys

import pytest
import torch

from specdemo.__main__ import main
from specdemo.analysis.predict import predict
from specdemo.core.protocol import Budget, Progress
from specdemo.core.tree import Draft
from specdemo.engine.comparison import Lane
from specdemo.methods import METHODS, PLUG_INS, _plug_in, detect_method, load_drafter, method, method_options, recipes
from specdemo.methods.pairs import load_target
from specdemo.models.checkpoints import Checkpoint, open_meta_checkpoint
from specdemo.models.toy import ToyTarget
from specdemo.testing import saved_head_loads
from tests.plug_in import PAGE, ROOT, install_bigram, run

USED = """
import json, sys
from specdemo.__main__ import main
from specdemo.core.protocol import Budget, Progress
from specdemo.core.tree import Draft
from specdemo.methods import METHODS, load_drafter, method_options
from specdemo.testing import check_method
from specdemo.ui.model_menus import DRAFTING

check_method("bigram")
print(json.dumps({
    "last": list(METHODS)[-1],
    "offered": "bigram" in DRAFTING,
    "options": [option.name for option in method_options("bigram")],
    "codes": [
        main(["run", "embedded-ngram", "--method", "bigram", "--max-new-tokens", "24", "--out", sys.argv[1]]),
        main(["run", "embedded-ngram", "--method", "bigrams"]),
    ],
}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return install_bigram(tmp_path_factory.mktemp("bigram"))


def test_documented_plug_in_runs_like_a_builtin_method(installed, tmp_path):
    paths = os.pathsep.join([str(installed), str(ROOT)])
    printed = run("-c", USED, str(tmp_path / "trace.json"), PYTHONPATH=paths).splitlines()[-1]
    assert json.loads(printed) == {"last": "bigram", "offered": True, "options": ["longest"], "codes": [0, 2]}
    lane = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["lanes"][1]
    assert lane["method"] == "bigram" and lane["summary"]["drafted"] > 0


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """Return a function that installs a module with the given text as the plug-in `parrot`."""

    def install(text):
        (tmp_path / "parrot_plug_in.py").write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(PLUG_INS, "parrot", "parrot_plug_in:Parrot")
        monkeypatch.setitem(METHODS, "parrot", "parrot_plug_in:Parrot")
        _plug_in.cache_clear()

    yield install
    _plug_in.cache_clear()
    sys.modules.pop("parrot_plug_in", None)


BROKEN = {
    "raise RuntimeError('first line\\nsecond line')": "RuntimeError: first line",
    "raise KeyError('name')": "KeyError: 'name'",
    "import sys; sys.exit(3)": "SystemExit: 3",
    "def (": "SyntaxError: invalid syntax (parrot_plug_in.py, line 1)",
    "class Odd(BaseException): pass\nraise Odd": "Odd",
    "Parrot = None": "TypeError: parrot_plug_in:Parrot is not a subclass of specdemo.methods.base.Method",
}


@pytest.mark.parametrize("text, error", BROKEN.items())
def test_failing_plug_in_breaks_nothing_else(plug_in, capsys, text, error):
    plug_in(text)
    line = f"specdemo: method 'parrot' of another package cannot be imported ({error}); fix or uninstall it\n"
    assert main(["methods"]) == 0
    out, err = capsys.readouterr()
    assert "\nmedusa: " in out and err == line
    assert main(["run", "embedded-draft", "--method", "parrot"]) == 2
    assert capsys.readouterr().err == line
    assert detect_method(open_meta_checkpoint("stories-medusa")) == "medusa"


def test_doctor_names_plug_ins(plug_in, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEMO_MODELS", str(tmp_path))  # doctor stops if models are missing
    plug_in("raise SystemExit")
    main(["doctor"])
    assert "\nplug-in           method 'parrot' of another package cannot be imported" in capsys.readouterr().out


def test_ctrl_c_during_an_import_ends_the_command(plug_in):
    plug_in("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        method("parrot")


VARIANT = """
from specdemo.methods.heads.medusa import Medusa

class Parrot(Medusa):
    title = "Parrot"
"""


@pytest.mark.parametrize("name", ["parrot", "medusa"])
def test_a_variant_of_a_head_and_the_head_itself_read_the_same_file(plug_in, name):
    plug_in(VARIANT)
    target = load_target("stories")
    assert load_drafter(name, target, "stories-medusa").title == method(name).title
    with pytest.raises(
        ValueError, match="is a head for method 'eagle', not for method 'medusa'; choose method 'eagle'"
    ):
        load_drafter(name, target, "stories-eagle-1")


@pytest.mark.parametrize("name", ["parrot", "medusa"])
def test_a_variant_and_its_head_keep_the_contract(plug_in, name):
    plug_in(VARIANT)
    saved_head_loads(name)


def test_a_variant_does_not_replace_the_recipes_of_its_head(plug_in):
    plug_in(VARIANT)
    assert recipes._collect_recipes()["medusa"].method == "medusa"


def test_a_plug_in_that_fails_on_a_file_is_named_only_where_no_other_method_reads_it(plug_in):
    plug_in(VARIANT + "    @classmethod\n    def recognises(cls, checkpoint):\n        raise KeyError('tensor')\n")
    assert detect_method(open_meta_checkpoint("stories-eagle-1")) == "eagle"
    unknown = Checkpoint("unknown", {}, {"a": torch.zeros(1)})
    with pytest.raises(
        ValueError, match="begin a; method 'parrot' of another package failed on it \\(KeyError: 'tensor'"
    ):
        detect_method(unknown)


@pytest.mark.parametrize("of", [Progress, Budget, Draft])
def test_the_page_lists_every_field_of_what_a_method_is_given(of):
    table = PAGE.read_text(encoding="utf-8").partition(f"| `{of.__name__}` | type")[2].partition("\n\n")[0]
    fields = [field.name for field in dataclasses.fields(of) if not field.name.startswith("_")]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == fields


WITH_DATACLASS = """
from dataclasses import dataclass
from specdemo.methods import setting
from specdemo.methods.ngram import NGram

class Parrot(NGram):
    @dataclass(frozen=True, slots=True)
    class Options:
        max_n: int = setting(4, "longest suffix", low=1, high=8, step=1)
        min_n: int = setting(1, "shortest suffix", low=1, high=8, step=1)
        style: str = setting("loud", "style", choices=("loud", "quiet"))

        def __post_init__(self):
            if self.min_n > self.max_n:
                raise ValueError("option 'min_n' must not exceed 'max_n'")
"""


def test_options_of_a_plug_in_may_be_a_dataclass(plug_in):
    plug_in(WITH_DATACLASS)
    assert [(k.name, k.type, k.default, k.low, k.choices) for k in method_options("parrot")] == [
        ("max_n", int, 4, 1, ()),
        ("min_n", int, 1, 1, ()),
        ("style", str, "loud", None, ("loud", "quiet")),
    ]
    assert Lane(method="parrot", options={"max_n": 4, "style": "quiet"}).validated().options == {"style": "quiet"}
    assert load_drafter("parrot", ToyTarget(16), max_n="2")._sizes == range(1, 3)
    for wrong, line in [
        ({"max_n": 9}, "option 'max_n' must be between 1 and 8, not 9"),
        ({"style": "odd"}, "option 'style' must be one of loud, quiet, not 'odd'"),
        ({"max_n": 2, "min_n": 3}, "option 'min_n' must not exceed 'max_n'"),
        ({"size": 1}, "unknown option 'size' of method 'parrot'; choose one of max_n, min_n, style"),
    ]:
        with pytest.raises(ValueError) as error:
            load_drafter("parrot", ToyTarget(16), **wrong)
        assert str(error.value) == line


PREDICTED = """
from specdemo.costs.shapes import number, with_layers
from specdemo.costs.drafting import Drafting
from specdemo.methods.ngram import NGram

class Parrot(NGram):
    title = "Parrot"
    config_marks = ("parrot_layers",)

    @classmethod
    def drafting_cost(cls, target, config, options):
        layers = with_layers(target, number(config, "parrot_layers", default=1))
        return Drafting(layers, layers, own=layers, longest=5)
"""


def test_prediction_uses_the_cost_that_a_plug_in_declares(plug_in):
    plug_in(PREDICTED)
    small, large = (predict("llama-8b", model={"parrot_layers": layers}) for layers in (1, 8))
    assert small.scenario.draft.method == large.scenario.draft.method == "parrot"
    assert len(small.rows) == 5 and 0.0 < small.rows[0].draft_ms < large.rows[0].draft_ms


UNPREDICTED = """
from specdemo.methods.base import Method

class Parrot(Method):
    title, summary = "Parrot", "Repeats."
"""


def test_prediction_refuses_a_plug_in_without_a_cost(plug_in):
    plug_in(UNPREDICTED)
    with pytest.raises(ValueError, match="^method 'parrot' declares no drafting cost and cannot be predicted; "):
        predict("llama-8b", method="parrot")
