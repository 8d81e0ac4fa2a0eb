"""llama.cpp started for a preset: with a stand-in, and, if `xllamacpp` and `gguf` are installed, with the real one."""

import json
from importlib.util import find_spec

import pytest
from transformers import Qwen3Config

from specdemo.__main__ import main
from specdemo.models.load import load_meta_target
from specdemo.presets.files import preset
from specdemo.presets.serve import serve_commands
from specdemo.servers.engines import llamacpp as llamacpp_engine
from specdemo.servers.engines.llamacpp import PACKAGES
from specdemo.servers.llamacpp import main as child
from tests.servers.stand_in import gone, make, prompts_sent, started

installed = pytest.mark.skipif(not all(map(find_spec, PACKAGES)), reason="pip install xllamacpp gguf")
SHORT = ["--max-new-tokens", "32", "--dtype", "float32"]


@pytest.fixture
def engine(tmp_path):
    return make(tmp_path)


def test_a_text_is_sent_as_the_tokens_of_the_targets_own_tokenizer(engine):
    assert main(["run", "embedded-draft", "--engine", "llamacpp", "--command", str(engine)]) == 0
    plain, drafting = started(engine)
    assert plain["args"][:3] == ["-m", "specdemo.servers.llamacpp", "stories"] and "--draft-model" not in plain["args"]
    flag, draft, *k = drafting["args"][-4:]
    assert flag == "--draft-model" and draft.endswith("stories-draft-wide") and k == ["--k", "4"]
    ids = load_meta_target("stories").tokenizer(preset("embedded-draft").prompt)["input_ids"]
    assert [prompt for prompt in prompts_sent(engine) if isinstance(prompt, list)] == [ids, ids]
    assert gone(engine)


def test_prompt_lookup_looks_for_one_length():
    def line(**options):
        chosen = preset("embedded-ngram").with_changes(lanes=[{"method": "ngram", "k": 5, "options": options}])
        return serve_commands(chosen, "llamacpp")[4]

    assert line().endswith("--ngram 3 --k 5")
    assert line(min_n=4).endswith("--ngram 4 --k 5") and line(max_n=2).endswith("--ngram 2 --k 5")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ["embedded-medusa"],
            "lane 1: medusa is not served: specdemo starts it only with a draft model or prompt lookup",
        ),
        (["embedded-draft", "--gpus", "2"], "specdemo starts llama.cpp on the CPU; omit --gpus"),
    ],
)
def test_unsupported_lane_is_rejected_before_start(arguments, reason, engine, capsys):
    assert main(["run", *arguments, "--engine", "llamacpp", "--command", str(engine)]) == 2
    assert reason in capsys.readouterr().err and not (engine.parent / "started").exists()


def test_a_folder_that_is_no_llama_is_not_served(tmp_path):
    Qwen3Config(hidden_size=32, num_hidden_layers=1, vocab_size=64).save_pretrained(tmp_path)
    chosen = preset("embedded-ngram").with_changes(target=str(tmp_path), dtype="bfloat16")
    lines = [text for text in serve_commands(chosen, "llamacpp") if text.startswith("# ")][1:]
    reason = (
        "not served, export to llama.cpp supports Llama models without bias and RoPE scaling, in float32 or bfloat16"
    )
    assert [reason in text and "this is Qwen3ForCausalLM in bfloat16" in text for text in lines] == [True, True]


def test_half_precision_is_not_served():
    chosen = preset("embedded-draft").with_changes(dtype="float16")
    assert "this is LlamaForCausalLM in float16" in serve_commands(chosen, "llamacpp")[1]


def test_a_gguf_file_is_served_as_it_is():
    chosen = preset("embedded-draft").with_changes(target="a/model.gguf", model="a/draft.GGUF")
    baseline, drafting = (text for text in serve_commands(chosen, "llamacpp") if "specdemo.servers.llamacpp" in text)
    assert baseline.endswith("-m specdemo.servers.llamacpp a/model.gguf --host 127.0.0.1 --port 8000")
    assert drafting.endswith("--port 8001 --draft-model a/draft.GGUF --k 4")
    mixed = chosen.with_changes(model="stories-draft-wide")
    assert (
        "not served, one of target and draft is a GGUF file, the other is not" in serve_commands(mixed, "llamacpp")[3]
    )


def test_a_model_that_is_not_here_is_not_checked(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    chosen = preset("two-servers").with_changes(target="nobody/absent")
    comment = serve_commands(chosen, "llamacpp")[1]
    assert comment.startswith(
        "# baseline; not checked, since the config of nobody/absent is not on this machine; llama.cpp "
    )


@installed
def test_a_written_gguf_file_is_read_back(tmp_path):
    from specdemo.models.gguf import GGUFVocab, context_length, write_gguf
    from specdemo.models.load import load_model

    loaded = load_model("stories-draft-wide", "float32", "cpu", kernels="transformers")
    words = GGUFVocab.of(loaded.tokenizer, loaded.model.config.vocab_size)
    write_gguf(loaded.model, words, tmp_path / "draft.gguf")
    assert context_length(str(tmp_path / "draft.gguf")) == loaded.model.config.max_position_embeddings
    (tmp_path / "other.gguf").write_bytes(b"GGML")
    with pytest.raises(ValueError, match=r"other\.gguf is not a GGUF file"):
        context_length(str(tmp_path / "other.gguf"))


def test_missing_packages_are_named_with_the_install_command(monkeypatch, capsys):
    monkeypatch.setattr(llamacpp_engine, "find_spec", lambda name: None)
    assert main(["serve", "embedded-draft", "--engine", "llamacpp"]) == 2
    assert "pip install xllamacpp gguf" in capsys.readouterr().err


def test_a_load_is_not_for_one_text_at_a_time(capsys):
    assert main(["bench", "load", "--engine", "llamacpp"]) == 2
    assert "specdemo starts llama.cpp for one request at a time" in capsys.readouterr().err


@installed
def test_a_model_that_is_no_llama_is_one_line(monkeypatch):
    from specdemo.servers import llamacpp

    loaded = load_meta_target("stories")
    loaded.model.config.attention_bias = True
    monkeypatch.setattr(llamacpp, "load_model", lambda *_, **__: loaded)
    with pytest.raises(
        SystemExit, match="export to llama.cpp supports Llama models without bias and RoPE scaling, in float32"
    ):
        child(["stories", "--port", "1"])


@installed
def test_draft_with_another_vocabulary_is_one_line(capsys):
    assert main(["run", "embedded-other-vocabulary", "--engine", "llamacpp"]) == 2
    assert "is not the target's, which llama.cpp requires" in capsys.readouterr().err


@installed
@pytest.mark.parametrize("name", ["embedded-draft", "embedded-ngram"])
def test_llama_cpp_output_equals_the_engines(name, tmp_path):
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    assert main(["run", name, *SHORT, "--out", str(here)]) == 0
    assert main(["run", name, *SHORT, "--engine", "llamacpp", "--out", str(there)]) == 0
    own_lanes, other_lanes = (json.loads(file.read_text(encoding="utf-8"))["lanes"] for file in (here, there))
    assert [lane["text"] for lane in other_lanes] == [lane["text"] for lane in own_lanes]
    counted = other_lanes[1]["remote"]["counters"]
    assert counted["accepted"] > 0
    assert all(event["path"] != [[]] for event in other_lanes[1]["events"])  # llama.cpp reports every step
    if name == "embedded-draft":
        passes = [[len(event["path"][0]) for event in lanes[1]["events"]] for lanes in (own_lanes, other_lanes)]
        assert passes[0] == passes[1] and "?" not in other_lanes[1]["pieces"]
