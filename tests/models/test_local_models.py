"""Models in the stores of other programs."""

import json
import struct

import pytest

from specdemo.__main__ import main
from specdemo.bench.candidates import shareable
from specdemo.bench.result import Result, to_json
from specdemo.models import packaged
from specdemo.models.gguf_files import fetch_parts
from specdemo.models.local_models import draft_models, in_words, local_models, size_words
from specdemo.models.ref import ModelRef
from specdemo.presets.drafters import drafters_of
from tests.models.test_gguf_files import gguf, text

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


def smaller(target, models):
    return [fit.drafter for fit in draft_models(target, models) if fit.fits]


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
    assert found[str(cached)].bytes == 2 * cached.stat().st_size and found[str(cached)].token_bytes == 2 * 4 * 32 * 64
    reasons = {fit.drafter: fit.reason for fit in draft_models(found[str(studio)], found.values())}
    assert reasons == {
        "ollama:tiny:1b": "10x smaller",
        "org/small": "308x smaller",
        "org/r-GGUF:Q8_0": "another vocabulary",
        str(cached): "another vocabulary",
    }
    assert smaller(found["ollama:tiny:1b"], found.values()) == ["org/small"]
    assert in_words(draft_models(found["org/small"], found.values())) == (
        f"no draft model; another vocabulary: org/r-GGUF:Q8_0, {cached}; not smaller: {studio}, ollama:tiny:1b"
    )


def test_a_model_drafts_by_the_method_of_its_config(home):
    for name, config in (("plain", {}), ("parallel", {"pard_token": 2})):
        transformers_model(home, name=name, **config)
    transformers_model(home, rows=64, name="big")
    big, *smaller_ones = local_models()
    assert {fit.drafter: fit.method for fit in draft_models(big, smaller_ones) if fit.fits} == {
        "org/plain": "draft_model",
        "org/parallel": "pard",
    }


def test_models_next_to_a_file_and_those_that_specdemo_downloaded(home, monkeypatch, tmp_path):
    small = home("mine/small.gguf", gguf(tokens=TOKENS))
    home("mine/sub/other.gguf", gguf(tokens=TOKENS))
    big = home("mine/big.gguf", gguf(tokens=TOKENS, rows=64_000))
    assert local_models() == []
    found = {model.name: model for model in local_models(ModelRef(big))}
    assert [*found] == [str(big), str(small)] and {model.store for model in found.values()} == {"its folder"}
    assert smaller(found[str(big)], found.values()) == [str(small)]
    monkeypatch.chdir(tmp_path)  # names are as the user writes them; a file in a store is listed once
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "mine"))
    assert [model.name for model in local_models(ModelRef("mine/big.gguf"))] == ["mine/big.gguf", "mine/small.gguf"]
    assert [fit.drafter for fit in drafters_of(ModelRef("mine/big.gguf"))] == ["mine/small.gguf"]
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
        (loaded,) = fetch_parts(ModelRef(name))
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


MATRICES = {"token_embd.weight": 600, "blk.0.ffn_down.weight": 40}  # name -> rows of 32 numbers of 4 bytes


def matrices(changes, **more):
    """Return a file with several matrices."""
    sizes = MATRICES | changes
    head = gguf(tokens=TOKENS, rows=0, tensor="only", **more).rpartition(text("only"))[0]
    content, place = head.replace(struct.pack("<IQ", 3, 1), struct.pack("<IQ", 3, len(sizes)), 1), 0
    for name, rows in sizes.items():
        content += text(name) + struct.pack("<IQQIQ", 2, 32, rows, 0, place)
        place += 128 * rows
    return content + bytes(-len(content) % 32) + bytes(place)


@pytest.mark.parametrize(
    ("changes", "more", "rows"),
    [
        ({}, {}, 640),  # tied: the embeddings are the output matrix
        ({"output.weight": 600}, {}, 640),  # a copy of the embeddings
        ({"per_layer_token_embd.weight": 900}, {}, 640),
        ({"blk.0.ffn_up_exps.weight": 800}, {"_ALL___expert_count": 8, "_ALL___expert_used_count": 2}, 840),
    ],
)
def test_a_pass_reads_tied_matrices_once_and_the_experts_of_a_token(home, changes, more, rows):
    (model,) = local_models(ModelRef(str(home("mine/model.gguf", matrices(changes, **more)))))
    assert model.token_bytes == 128 * rows


def test_a_transformers_model_reads_what_its_config_states(home):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    for name, tied in (("tied", True), ("untied", False)):
        transformers_model(home, 100, name, **sizes, vocab_size=80, tie_word_embeddings=tied, model_type="llama")
    tied, untied = local_models()
    assert tied.token_bytes == tied.bytes and untied.token_bytes == int(untied.bytes * (1.0 - 640 / 1920))


def test_a_smaller_model_is_offered_at_any_ratio_and_a_low_one_warns(home, capsys, monkeypatch):
    assert [size_words(ratio) for ratio in (1.25, 2.72, 3.0, 14.96)] == [
        "1.2x smaller, pays only if over 80 % of its tokens are accepted",
        "2.7x smaller, pays only if over 37 % of its tokens are accepted",
        "3x smaller",
        "15x smaller",
    ]
    sizes = {"big": 1000, "near": 900, "half": 450, "tenth": 100, "same": 1000}
    files = {name: home(f"mine/{name}.gguf", gguf(tokens=TOKENS, rows=rows)) for name, rows in sizes.items()}
    other = home("mine/other.gguf", gguf(tokens=("x",), rows=9))
    bad = home("mine/bad.gguf", b"GGUF")
    big = str(files["big"])
    found = {model.name: model for model in local_models(ModelRef(big))}
    fits = draft_models(found[big], found.values())
    assert [fit.drafter for fit in fits if fit.fits] == [str(files[name]) for name in ("tenth", "half", "near")]
    reasons = {fit.drafter: fit.reason for fit in fits if not fit.fits}
    assert reasons == {str(files["same"]): "not smaller", str(other): "another vocabulary", str(bad): "damaged"}
    assert drafters_of(ModelRef(big)) == fits[:3]

    def here(name):
        assert main(["drafters", str(name)]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    assert here(big).endswith("(1.1x smaller, pays only if over 90 % of its tokens are accepted)")
    assert here(other).startswith(f"On this machine: no draft model; damaged: {bad}; ")
    assert drafters_of(ModelRef("org/elsewhere")) == []
    result = Result("tune", 1, {}, {}, [], [here(other)])
    assert str(other.parent) not in to_json(shareable(result, [ModelRef(other)]))
    monkeypatch.setenv("LLAMA_CACHE", str(other.parent))
    assert main(["models", "--json"]) == 0
    assert {row["model"]: row["drafts"] for row in json.loads(capsys.readouterr().out)}[big] == in_words(fits)


def test_no_models(home, capsys):
    assert main(["models"]) == 0
    assert capsys.readouterr().out.startswith("no models in the stores")
