"""Models in the stores of other programs."""

import json
import struct

import pytest

from specdemo.__main__ import main
from specdemo.models import packaged
from specdemo.models.gguf_files import fetch_parts
from specdemo.models.local_models import local_models, matching_drafts
from specdemo.presets.at_hand import drafters
from tests.models.test_gguf_files import gguf

TOKENS = ("a", "b", "c")


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name, folder in (("HOME", ""), ("USERPROFILE", ""), ("LLAMA_CACHE", "llama"), ("OLLAMA_MODELS", "ollama")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def add(path, content):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
        return tmp_path / path

    return add


def ollama(home, name, content, digest):
    layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest * 64}"}]
    home(f"ollama/manifests/registry.ollama.ai/library/{name}", json.dumps({"layers": layers}).encode())
    home(f"ollama/blobs/sha256-{digest * 64}", content)


def transformers_model(home, rows=4, name="small", **config):
    folder = f"hub/models--org--{name}/snapshots/abc"
    home(f"hub/models--org--{name}/refs/main", b"abc")
    home(f"{folder}/config.json", json.dumps({"dtype": "bfloat16"} | config).encode())
    home(f"{folder}/model.safetensors", struct.pack("<Q", 2) + b"{}" + bytes(64 * rows))
    vocab = {"model": {"vocab": {"b": 1, "a": 0}}, "added_tokens": [{"id": 2, "content": "c"}]}
    home(f"{folder}/tokenizer.json", json.dumps(vocab).encode())


def test_models_of_every_store(home):
    studio = home(".lmstudio/models/pub/big-GGUF/big-Q4_K_M.gguf", gguf(tokens=TOKENS, rows=640))
    home(".lmstudio/models/pub/big-GGUF/mmproj-big.gguf", gguf(architecture="clip"))
    home(".lmstudio/models/pub/big-GGUF/mtp-big.gguf", gguf(tokens=TOKENS, tensor="blk.9.nextn.eh_proj.weight"))
    ollama(home, "embed/latest", gguf(architecture="bert", tokens=TOKENS), "b")
    home("llama/eagle.gguf", gguf(architecture="eagle3", tokens=TOKENS))
    transformers_model(home, name="encoder", architectures=["BertModel"])
    transformers_model(home, name="assistant", architectures=["Gemma4AssistantForCausalLM"])
    ollama(home, "tiny/1b", gguf(7, tokens=(*TOKENS, "[PAD3]"), rows=64), "a")
    cached = home("llama/org_split-Q8_0-00001-of-00002.gguf", gguf(7))
    home("llama/org_split-Q8_0-00002-of-00002.gguf", gguf(7))
    home("hub/models--org--r-GGUF/refs/main", b"abc")
    home("hub/models--org--r-GGUF/snapshots/abc/r-Q8_0.gguf", gguf(7))
    transformers_model(home, architectures=["LlamaForCausalLM"])
    found = {model.name: model for model in local_models()}
    stores = {name: model.store for name, model in found.items()}
    assert stores == {
        "org/r-GGUF:Q8_0": "Hugging Face",
        "org/small": "Hugging Face",
        str(studio): "LM Studio",
        "ollama:tiny:1b": "Ollama",
        str(cached): "llama.cpp",
    }
    assert found[str(cached)].bytes == 2 * cached.stat().st_size and found[str(cached)].weights == 2 * 32 * 64
    drafts = matching_drafts(found[str(studio)], found.values())
    assert [(draft.name, round(ratio)) for draft, ratio in drafts] == [("ollama:tiny:1b", 10), ("org/small", 154)]
    assert not matching_drafts(found["ollama:tiny:1b"], found.values())[1:]


def test_models_next_to_a_file_and_those_that_specdemo_downloaded(home, monkeypatch, tmp_path):
    small = home("mine/small.gguf", gguf(tokens=TOKENS))
    home("mine/sub/other.gguf", gguf(tokens=TOKENS))
    big = home("mine/big.gguf", gguf(tokens=TOKENS, rows=64_000))
    assert local_models() == []
    found = {model.name: model for model in local_models(str(big))}
    assert [*found] == [str(big), str(small)] and {model.store for model in found.values()} == {"its folder"}
    assert [draft.name for draft, _ in matching_drafts(found[str(big)], found.values())] == [str(small)]
    monkeypatch.chdir(tmp_path)  # names are as the user writes them; a file in a store is listed once
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "mine"))
    assert [model.name for model in local_models("mine/big.gguf")] == ["mine/big.gguf", "mine/small.gguf"]
    lanes = drafters("mine/big.gguf", (), download=False)
    assert [lane.model for lane in lanes.values() if lane.model] == ["mine/small.gguf"]
    made = home("packages/smollm2-135m-instruct-q4_1.gguf", gguf(tokens=TOKENS))
    monkeypatch.setattr(packaged, "cache", lambda: made.parent)
    (one,) = [model for model in local_models() if model.store == "specdemo"]
    assert (one.name, one.path, one.bytes) == ("smollm2.gguf", made, made.stat().st_size)


def test_a_name_loads_the_file_that_is_listed_under_it(home, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    contents = {  # files of one quantisation, of which one is a head
        "Big-Q8_0.gguf": gguf(7, rows=640),
        "Big-eagle3-Q8_0.gguf": gguf(7, architecture="eagle3"),
        "Big-v2-Q8_0.gguf": gguf(7, rows=320),
        "Big-Q4_K_M.gguf": gguf(rows=160),
        "other/Big v3-Q8_0.gguf": gguf(7, rows=80),
    }
    home("hub/models--lab--Two-GGUF/refs/main", b"abc")
    for file, content in contents.items():
        home(f"hub/models--lab--Two-GGUF/snapshots/abc/{file}", content)
    listed = {model.name: model for model in local_models()}
    short = {name for name in listed if not name.endswith(".gguf")}
    assert short == {"lab/Two-GGUF:Q8_0", "lab/Two-GGUF:Big-v2-Q8_0", "lab/Two-GGUF:Q4_K_M"} and len(listed) == 4
    for name, model in listed.items():
        (loaded,) = fetch_parts(name)
        assert loaded.samefile(model.path) and loaded.stat().st_size == model.bytes


def test_command_prints_drafts_and_damaged_files(home, capsys):
    big = home(".lmstudio/models/pub/big/big [v2].gguf", gguf(tokens=TOKENS, rows=64_000))
    home(".lmstudio/models/pub/bad/bad.gguf", b"GGML")
    home(".lmstudio/models/pub/small/small.gguf", gguf(tokens=TOKENS))
    assert main(["models", "--json"]) == 0
    rows = {row["model"].rpartition("/")[2]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["big [v2].gguf"]["drafts"].endswith("small.gguf (1000x smaller)")
    assert rows["big [v2].gguf"]["size"] == "8.2 MB" and rows["bad.gguf"]["weights"] == "damaged"
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert str(big) in out and "Q4_K_M" in out and "ui --target MODEL --draft DRAFT" in out


def test_no_models(home, capsys):
    assert main(["models"]) == 0
    assert capsys.readouterr().out.startswith("no models in the stores")
