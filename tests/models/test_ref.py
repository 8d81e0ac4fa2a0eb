"""References to models: what a name names, and that it is text where it leaves the program."""

import copy
import json
import pickle

import pytest

from specdemo.engine.comparison import Comparison, Lane
from specdemo.models.ref import ModelRef
from specdemo.models.shipped import embedded_folder


@pytest.mark.parametrize(
    ("name", "gguf", "repository", "revision", "quantisation", "short_label"),
    [
        ("stories", False, "stories", None, "", "stories"),
        ("org/Model-7B@v1", False, "org/Model-7B", "v1", "", "Model-7B"),
        ("org/Model-GGUF@v1:Q8_0", True, "org/Model-GGUF", "v1", "Q8_0", "Model-GGUF"),
        ("org/Model-GGUF:Q4_K_M", True, "org/Model-GGUF", None, "Q4_K_M", "Model-GGUF:Q4_K_M"),
        ("/home/ann/model.gguf", True, "/home/ann/model.gguf", None, "", "model.gguf"),
    ],
)
def test_a_name_says_what_it_names(name, gguf, repository, revision, quantisation, short_label):
    ref = ModelRef(name)
    assert (ref.gguf, ref.repository, ref.revision, ref.quantisation) == (gguf, repository, revision, quantisation)
    assert ref.short_label == short_label


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-8B-GGUF:Q4_K_M", True),
        ("Qwen/Qwen3-8B-GGUF@main:Q8_0", True),
        ("ollama:qwen3:1.7b", True),
        ("anything.GGUF", True),
        ("Qwen/Qwen3-8B", False),
        ("https://example.com:80/x", False),
    ],
)
def test_gguf_models_are_known_by_their_names(name, expected):
    assert ModelRef(name).gguf is expected


def test_a_name_states_a_path_or_none():
    assert ModelRef("stories").embedded and ModelRef("stories").path == embedded_folder() / "stories"
    assert ModelRef("stories").location == str(embedded_folder() / "stories")
    assert ModelRef("org/Model@v1").path is None and ModelRef("org/Model@v1").location == "org/Model@v1"


def test_settings_hold_references_and_their_json_is_text():
    spec = Comparison(id="a", target="stories", prompt="Once", lanes=[Lane(method="cascade", model="code-draft")])
    names = [spec.target, spec.lanes[0].model, *spec.lanes[0].models]
    for each in (spec, spec.changed(target="code"), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert {type(name) for name in (each.target, *each.lanes[0].models)} == {ModelRef}
    assert all(name.embedded for name in names)
    assert json.loads(spec.model_dump_json())["target"] == "stories" == json.loads(json.dumps(spec.target))
