"""References to models: what a name names, and that it is text where it leaves the program."""

import copy
import json
import pickle

import pytest

from specdemo.engine.comparison import Comparison, Lane
from specdemo.models.packaged import embedded_folder
from specdemo.models.ref import ModelRef


@pytest.mark.parametrize(
    ("name", "gguf", "repository", "revision", "quantisation"),
    [
        ("stories", False, "stories", None, ""),
        ("org/Model-7B@v1", False, "org/Model-7B", "v1", ""),
        ("org/Model-GGUF@v1:Q8_0", True, "org/Model-GGUF", "v1", "Q8_0"),
        ("org/Model-GGUF:Q4_K_M", True, "org/Model-GGUF", None, "Q4_K_M"),
        ("/home/ann/model.GGUF", True, "/home/ann/model.GGUF", None, ""),
        ("ollama:qwen3:1.7b", True, "ollama", None, "qwen3:1.7b"),
        ("https://example.com:80/x", False, "https", None, "//example.com:80/x"),
    ],
)
def test_a_name_says_what_it_names(name, gguf, repository, revision, quantisation):
    ref = ModelRef(name)
    assert (ref.gguf, ref.repository, ref.revision, ref.quantisation) == (gguf, repository, revision, quantisation)


@pytest.mark.parametrize(
    ("name", "title", "size"),
    [
        ("stories-draft-wide", "stories-draft-wide", "1.3M"),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen2.5 Coder 1.5B", "1.5B"),
        ("/home/ann/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "Qwen2.5 Coder 1.5B · Q4_K_M", "1.5B"),
        ("/home/ann/mistral-7b-instruct-v0.3.Q5_K_M.gguf", "Mistral 7B v0.3 · Q5_K_M", "7B"),
        ("unsloth/Qwen3.6-35B-A3B-MTP-GGUF:UD-Q4_K_M", "Qwen3.6 35B A3B MTP · Q4_K_M", "35B"),
        ("~/models/smollm2-135m-instruct/", "SmolLM2 135M", "135M"),
        ("ollama:llama3.2:3b-instruct-q4_K_M", "Llama3.2 3B · Q4_K_M", "3B"),
        ("ollama:llama3.2:latest", "Llama3.2", ""),
        ("mistralai/Mixtral-8x7B-v0.1", "Mixtral 8x7B v0.1", "8x7B"),
        ("google/gemma-4-E2B-it@v1", "Gemma 4 E2B", "E2B"),
        ("openai/gpt-oss-120b", "gpt-oss 120B", "120B"),
        ("/home/ann/mine.gguf", "mine.gguf", ""),
    ],
)
def test_a_model_has_a_name_for_people(name, title, size):
    assert (ModelRef(name).short_name, ModelRef(name).size) == (title, size)


@pytest.mark.parametrize(
    ("name", "gb", "read_gb"),
    [
        ("Qwen/Qwen3-4B", 8.0, 8.0),
        ("Qwen/Qwen3-4B-GGUF:Q4_K_M", 2.4, 2.4),
        ("Qwen/Qwen3-30B-A3B", 60.0, 6.0),
        ("mistralai/Mixtral-8x7B-v0.1", 112.0, 112.0),
        ("org/model", 0.0, 0.0),
    ],
)
def test_the_size_of_a_model_is_estimated_from_its_name(name, gb, read_gb):
    assert ModelRef(name).estimated_bytes == pytest.approx((gb * 1e9, read_gb * 1e9))


def test_what_the_name_of_a_file_does_not_say_is_read_from_its_header(tmp_path):
    named = {"general.name": "Qwen2.5 Coder 1.5B Instruct GGUF", "general.size_label": "1.5B", "general.file_type": 15}
    for file, stated, title in (
        ("mine.gguf", named, "Qwen2.5 Coder 1.5B · Q4_K_M"),
        ("mine-q8_0.gguf", {"general.size_label": "270M"}, "Mine 270M · Q8_0"),
        ("mine-7b.gguf", named, "Mine 7B · Q4_K_M"),
    ):
        header(tmp_path / file, stated)
        assert ModelRef(str(tmp_path / file)).short_name == title
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    assert ModelRef(str(tmp_path / "bad.gguf")).short_name == "bad.gguf"


def header(path, metadata):
    """Write a GGUF file without tensors."""
    writer = pytest.importorskip("gguf").GGUFWriter(path, "llama")
    for key, value in metadata.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_lanes_of_one_title_say_what_tells_them_apart():
    def names(*lanes):
        return Comparison(id="a", target="stories", prompt="Once", lanes=[*lanes]).lane_names

    wide, deep = (Lane(method="draft_model", model=f"stories-draft-{kind}", k=4) for kind in ("wide", "deep"))
    small, auto = Lane(method="draft_model", model="org/Qwen3-0.6B"), wide.model_copy(update={"k": 0})
    assert names(wide, small) == ("Baseline", "Draft 1.3M", "Draft 0.6B")
    assert names(wide, deep) == ("Baseline", "Draft 1.3M, stories-draft-wide", "Draft 1.3M, stories-draft-deep")
    assert names(wide, auto) == ("Baseline", "Draft 1.3M, k = 4", "Draft 1.3M, k = auto")
    lossy = wide.model_copy(update={"acceptance": "typical"})
    assert names(wide, lossy) == ("Baseline", "Draft 1.3M", "Draft 1.3M, typical (lossy)")
    assert names(wide, wide)[1:] == ("Draft 1.3M", "Draft 1.3M")


@pytest.mark.parametrize(
    ("method", "options", "model", "title"),
    [
        ("medusa", {}, "stories-medusa", "Medusa"),
        ("adaptive", {"drafter": "ngram"}, None, "Adaptive lookup"),
        ("adaptive", {"drafter": "suffix"}, None, "Adaptive suffix"),
        ("adaptive", {}, "stories-draft-wide", "Adaptive draft 1.3M"),
        ("adaptive", {"drafter": "medusa"}, "stories-medusa", "Adaptive Medusa"),
        ("adaptive", {"drafter": "mtp"}, "stories-bytes-heads", "Adaptive MTP"),
        ("online", {}, "a-draft", "Online draft"),
        ("gated", {}, "stories-draft-wide", "Gated lookup"),
        ("router", {"drafts": "ngram"}, "stories-draft-wide", "Router"),
        ("synthetic", {}, None, "Synthetic acceptance"),
        ("synthetic", {"drafter": "eagle"}, "stories-eagle-3", "Synthetic EAGLE"),
    ],
)
def test_a_lane_has_a_short_name_for_its_policy_and_drafter(method, options, model, title):
    assert Lane(method=method, options=options, model=model).title == title


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
