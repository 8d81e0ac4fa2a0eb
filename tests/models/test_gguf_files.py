"""Names of GGUF models, and checks of their files before llama.cpp loads them."""

import json
import os
import struct
from dataclasses import replace

import pytest

from specdemo.costs.shapes import Footprint
from specdemo.models import llamacpp
from specdemo.models.gguf_files import (
    _choose,
    check_file,
    check_files,
    fetch_parts,
    has_chat_template,
    local_header,
    models_in,
    quantisation_in,
)
from specdemo.models.gguf_header import read_header
from specdemo.models.llamacpp import LlamaCppSettings, library
from specdemo.models.memory import Needs, gguf_footprint
from specdemo.models.ref import ModelRef
from tests.models.fake_hub import serve

TOKENS = ("a", "b", "[PAD2]", "[PAD3]")


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def value(entry):
    """Return a text, a truth value or a number of four bytes, with its type."""
    if isinstance(entry, bool):
        return struct.pack("<I?", 7, entry)
    return struct.pack("<II", 4, entry) if isinstance(entry, int) else struct.pack("<I", 8) + text(entry)


def gguf(
    quantisation=15,
    tokens=TOKENS,
    heads=(2, 2),
    rows=64,
    cut=0,
    version=3,
    architecture="llama",
    tensor="token_embd.weight",
    **more,
):
    """Return a file with one F32 matrix of 32 x `rows`. more: other entries, with __ for a point and _ALL_ for the
    architecture."""
    numbers = struct.pack("<IQ", 4, len(heads)) + b"".join(struct.pack("<I", head) for head in heads)
    entries = [
        text("general.architecture") + value(architecture),
        *(
            text(f"{architecture}.{name}") + value(number)
            for name, number in (("block_count", 2), ("embedding_length", 32), ("attention.head_count", 4))
        ),
        text(f"{architecture}.attention.head_count_kv") + struct.pack("<I", 9) + numbers,
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, len(tokens)) + b"".join(map(text, tokens)),
    ]
    if quantisation is not None:
        entries.append(text("general.file_type") + value(quantisation))
    entries += [text(key.replace("_ALL_", architecture).replace("__", ".")) + value(v) for key, v in more.items()]
    tensors = text(tensor) + struct.pack("<IQQIQ", 2, 32, rows, 0, 0)
    content = b"GGUF" + struct.pack("<IQQ", version, 1, len(entries)) + b"".join(entries) + tensors
    content += b"\0" * (-len(content) % 32) + b"\0" * (4 * 32 * rows)
    return content[: len(content) - cut]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf())
    return path


def test_header(file):
    header = check_file(file, "model")
    assert (header.architecture, header.quantisation, header.weights) == ("llama", "Q4_K_M", 32 * 64)
    assert header.cache_bytes(2) == 2 * 2 * (2 * 8) * 2  # layers x heads x keys and values x bytes
    file.write_bytes(gguf(quantisation=None))
    assert read_header(file).quantisation == "F32"


def test_chat_template(file, tmp_path):
    assert has_chat_template(ModelRef(file)) is False
    file.write_bytes(gguf(tokenizer__chat_template="{{ messages }}"))
    assert has_chat_template(ModelRef(file)) is True
    assert (
        has_chat_template(ModelRef(tmp_path / "absent.gguf")) is None
        and has_chat_template(ModelRef("stories")) is False
    )


def test_vocabularies_are_equal_without_padding(file, tmp_path):
    same, other = tmp_path / "same.gguf", tmp_path / "other.gguf"
    same.write_bytes(gguf(tokens=("a", "b")))
    other.write_bytes(gguf(tokens=("a", "c")))
    assert read_header(same).vocabulary == read_header(file).vocabulary != read_header(other).vocabulary


def with_entry(key, kind, value, dimensions=1):
    """Return a file of the architecture llama with another entry, and one tensor of so many dimensions."""
    architecture = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    tensor = text("t") + struct.pack("<I", dimensions) + b"\xff" * 8 * dimensions + bytes(12)
    content = b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + architecture + text(key) + struct.pack("<I", kind) + value
    return content + tensor + bytes(64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file; fetch it again"),
        (with_entry("general.alignment", 4, bytes(4)), "general.alignment is not a whole number"),
        (with_entry("general.file_type", 9, struct.pack("<IQI", 4, 1, 0)), "general.file_type is not a whole number"),
        (with_entry("llama.block_count", 8, text("two")), "llama.block_count is not a whole number"),
        (with_entry("llama.block_count", 6, struct.pack("<f", float("inf"))), "llama.block_count is not a whole"),
        (with_entry("", 4, bytes(4)), r"cannot be read as GGUF \(a key is empty\)"),
        (gguf(version=1), "cannot be read as GGUF"),
        (gguf()[:150], "is truncated: its header ends after 150 bytes; download it again"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "its header ends after 32 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 1 << 40), "cannot be read"),
    ],
)
def test_damaged_files_are_one_line(file, content, message):
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_header(file)
    assert "\n" not in str(raised.value)


def test_file_that_was_cut_short(file):
    pytest.importorskip("gguf")
    file.write_bytes(gguf(cut=100))
    with pytest.raises(ValueError, match=r"model is incomplete: model.gguf has 8,\d+ of 8,\d+ bytes; fetch it again"):
        check_file(file, "model")


def test_vocabulary_with_repeated_tokens(file):
    file.write_bytes(gguf(tokens=("a", "b", "", "", "a")))
    with pytest.raises(ValueError, match="model has 1 tokens twice, which llama.cpp cannot load; choose another file"):
        check_file(file, "model")


def test_pipe_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ValueError, match="does not exist"):
        fetch_parts(ModelRef(tmp_path / "pipe.gguf"))


def test_folder_of_one_model(tmp_path, file):
    (tmp_path / "extra.gguf").write_bytes(gguf(architecture="clip"))
    assert ModelRef(tmp_path).gguf and fetch_parts(ModelRef(tmp_path)) == (file,)
    (tmp_path / "second.gguf").write_bytes(gguf())
    with pytest.raises(ValueError, match=r"has 2 GGUF models \(model.gguf, second.gguf\); name one of the files"):
        fetch_parts(ModelRef(tmp_path))


OTHERS = {  # file of another kind -> what it is, and a word of what runs it
    "eagle-3": (gguf(architecture="eagle3"), r"an EAGLE head of another model \(architecture eagle3\)", "draft-eagle3"),
    "dflash": (gguf(architecture="dflash", _ALL___target_layers=3), "a DFlash head", "draft-dflash"),
    "assistant": (
        gguf(architecture="gemma4-assistant"),
        r"an assistant head of another model \(architecture gemma4-assistant\)",
        "draft-mtp",
    ),
    "unknown head": (gguf(architecture="llama-next", _ALL___target_hidden_size=64), "a head", "spec-draft-model"),
    "last block": (
        gguf(architecture="qwen3", tensor="blk.46.nextn.eh_proj.weight"),
        "multi-token prediction",
        "draft-mtp",
    ),
    "projector": (gguf(architecture="clip"), "a projector of images or sound", "--mmproj x.gguf"),
    "projector by type": (gguf(general__type="mmproj"), "a projector of images or sound", "--mmproj"),
    "adapter": (gguf(general__type="adapter", tensor="blk.0.attn_q.weight.lora_a"), "a LoRA adapter", "--lora x.gguf"),
    "imatrix": (gguf(general__type="imatrix"), "an importance matrix", "llama-quantize"),
    "embedding": (gguf(architecture="qwen3", _ALL___pooling_type=3), "an embedding model", "--embedding"),
    "reranker": (gguf(architecture="qwen3", _ALL___pooling_type=4), "a reranker", "--reranking"),
    "encoder": (gguf(architecture="nomic-bert"), r"an encoder \(architecture nomic-bert\)", "--embedding"),
    "diffusion": (
        gguf(architecture="dream", _ALL___attention__causal=False),
        "does not write from left to right",
        "diff",
    ),
    "part": (gguf(tensor="blk.0.attn_q.weight"), "without its token embeddings", "the program that made it"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_files_of_other_kinds_are_no_models(kind, tmp_path):
    content, name, program = OTHERS[kind]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=f"x.gguf is .*{name}.*, not a language model; choose a.*: .*{program}"
    ) as raised:
        check_files([path], "x.gguf")
    assert "\n" not in str(raised.value)
    assert ModelRef(tmp_path).gguf and models_in(tmp_path) == []
    with pytest.raises(
        ValueError,
        match=f"has no GGUF model: .*x.gguf is .*{name.split(' ')[-1] if '(' not in name else name.split(' ')[1]}",
    ):
        fetch_parts(ModelRef(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        gguf(architecture="pangu-embedded"),
        gguf(architecture="qwen3", _ALL___pooling_type=0, _ALL___attention__causal=True, general__type="model"),
        gguf(architecture="qwen35", _ALL___nextn_predict_layers=1),
    ],
)
def test_language_models_with_the_marks_of_other_kinds(content, file):
    file.write_bytes(content)
    assert check_files([file], "model").tokens == len(TOKENS) and models_in(file.parent) == [file]


def test_parts_of_a_split_model_are_judged_together(tmp_path):
    parts = [tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    parts[0].write_bytes(gguf(tensor="blk.0.attn_q.weight"))
    parts[1].write_bytes(gguf())
    assert models_in(tmp_path) == [parts[0]] and check_files(parts, "big")


@pytest.mark.parametrize(
    ("repository", "files", "word", "expected"),
    [
        (
            "lab/Big-27B-GGUF",
            ["Big-27B-Q4_K_M.gguf", "mtp-Big-27B-Q4_0.gguf"],
            "Q4_0",
            "has no Q4_0; choose one of Big",
        ),
        ("lab/Big-GGUF", ["Big-eagle3-Q8_0.gguf", "Big-Q8_0.gguf"], "Q8_0", "Big-Q8_0.gguf"),
        ("lab/Big-GGUF", ["Big-DFlash-Q8_0.gguf", "x_mmproj.gguf", "Big.gguf"], "", "Big.gguf"),
        ("lab/Big-GGUF", ["Big-Q8_0.gguf", "Big-v2-Q8_0.gguf"], "Big-v2-Q8_0", "Big-v2-Q8_0.gguf"),
        ("lab/heads", ["Big-eagle3-Q8_0.gguf"], "", "Big-eagle3-Q8_0.gguf"),  # its header is checked after the download
    ],
)
def test_files_of_other_kinds_are_not_chosen(repository, files, word, expected):
    name = f"{repository}:{word}" if word else repository
    if expected.endswith(".gguf"):
        assert _choose(name, files, word) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            _choose(name, files, word)


def test_split_model(tmp_path):
    parts = [tmp_path / f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        part.write_bytes(gguf())
    assert fetch_parts(ModelRef(tmp_path)) == fetch_parts(ModelRef(parts[1])) == tuple(parts)
    parts[2].unlink()
    with pytest.raises(ValueError, match="lacks big-00003-of-00003.gguf, one of 3 parts; fetch the missing parts"):
        fetch_parts(ModelRef(parts[0]))


@pytest.fixture
def ollama(tmp_path, monkeypatch):
    """Return a function that adds a model to a store of Ollama."""
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    digest = "a" * 64

    def add(path, media_type="application/vnd.ollama.image.model", digest="sha256:" + digest):
        manifest = tmp_path / "manifests" / path
        manifest.parent.mkdir(parents=True, exist_ok=True)
        layers = [{"mediaType": "application/vnd.ollama.image.template", "digest": "x"}]
        manifest.write_text(json.dumps({"layers": [*layers, {"mediaType": media_type, "digest": digest}]}))

    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / f"sha256-{digest}").write_bytes(gguf())
    return add


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("registry.ollama.ai/library/qwen3/1.7b", "ollama:qwen3:1.7b"),
        ("registry.ollama.ai/library/qwen3/latest", "ollama:qwen3"),
        ("registry.ollama.ai/someone/model/q8", "ollama:someone/model:q8"),
        ("hf.co/org/repo-GGUF/Q4_K_M", "ollama:hf.co/org/repo-GGUF:Q4_K_M"),
    ],
)
def test_model_of_ollama(ollama, path, name):
    ollama(path)
    (blob,) = fetch_parts(ModelRef(name))
    assert blob.name == "sha256-" + "a" * 64 and local_header(ModelRef(name)).quantisation == "Q4_K_M"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ollama:absent:1b", "ollama:absent:1b is not in .*; run: ollama pull absent:1b"),
        ("ollama:../../x", "is not in"),
        ("ollama:a b", "is not a name of Ollama"),
        ("ollama:cloud", "has no GGUF weights"),
        ("ollama:escape", "has no GGUF weights"),
    ],
)
def test_unusable_model_of_ollama_is_one_line(ollama, name, message):
    ollama("registry.ollama.ai/library/cloud/latest", media_type="application/vnd.ollama.image.tensor")
    ollama("registry.ollama.ai/library/escape/latest", digest="sha256:../../../etc/passwd")
    with pytest.raises(ValueError, match=message):
        fetch_parts(ModelRef(name))


REPOSITORY = {
    "README.md": b"x",
    "mmproj-F16.gguf": gguf(architecture="clip"),
    "model-Q8_0.gguf": gguf(7),
    "model-Q4_K_M.gguf": gguf(),
    "another-Q8_0.gguf": gguf(7, architecture="gemma4-assistant"),
    "BF16/model-BF16-00001-of-00002.gguf": gguf(32),
    "BF16/model-BF16-00002-of-00002.gguf": gguf(32),
    "model-Q2_K-00001-of-00002.gguf": gguf(10),
}


def test_quantisation_of_a_repository(monkeypatch, tmp_path):
    with serve({"org/m-GGUF": REPOSITORY}, monkeypatch, tmp_path) as hub:
        assert local_header(ModelRef("org/m-GGUF:q8_0")) is None
        (eight,) = fetch_parts(ModelRef("org/m-GGUF:q8_0"))
        assert eight.name == "model-Q8_0.gguf" and local_header(ModelRef("org/m-GGUF:Q8_0")).quantisation == "Q8_0"
        assert [path.name for path in fetch_parts(ModelRef("org/m-GGUF"))] == ["model-Q4_K_M.gguf"]
        (head,) = fetch_parts(ModelRef("org/m-GGUF:another-Q8_0"))  # the name does not tell
        assert fetch_parts(ModelRef("org/m-GGUF:another-Q8_0")) == (head,)  # its header does
        with pytest.raises(ValueError, match="another is an assistant head .*, not a language model"):
            check_files([head], "another")
        assert fetch_parts(ModelRef("org/m-GGUF:Q8_0")) == (eight,)
        assert [path.name[11:16] for path in fetch_parts(ModelRef("org/m-GGUF@v1:BF16"))] == ["00001", "00002"]
        assert "mmproj-F16.gguf" not in {file for file, _ in hub.requests}
        with pytest.raises(ValueError, match="org/m-GGUF has no Q6_K; choose one of model-Q8_0.gguf, "):
            fetch_parts(ModelRef("org/m-GGUF:Q6_K"))
        with pytest.raises(ValueError, match="org/m-GGUF lacks model-Q2_K-00002-of-00002.gguf"):
            fetch_parts(ModelRef("org/m-GGUF:Q2_K"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert fetch_parts(ModelRef("org/m-GGUF:Q8_0")) == (eight,)
        with pytest.raises(ValueError, match="has no Q5_K_M"):
            fetch_parts(ModelRef("org/m-GGUF:Q5_K_M"))


@pytest.mark.parametrize("variable", ["SPECDEMO_PUBLIC", "SPACE_ID"])
def test_public_pages_load_no_gguf_models(variable, monkeypatch, file):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match="a public page loads no GGUF models"):
        fetch_parts(ModelRef(file))


@pytest.mark.parametrize(
    ("file", "quantisation"),
    [
        ("Qwen3-8B-Q4_K_M.gguf", "Q4_K_M"),
        ("model-UD-Q4_K_XL.gguf", "Q4_K_XL"),
        ("ggml-model-f16.gguf", "F16"),
        ("qwen3.gguf", ""),
    ],
)
def test_quantisation_in_a_name(file, quantisation):
    assert quantisation_in(file) == quantisation


GB = 10**9
NEEDS = Needs("big with small", Footprint(4 * GB, 100_000), [Footprint(GB // 2, 20_000)], 4000, 2)


def test_context_that_the_drafter_displaces():
    words = "target 4.0 GB, drafter 0.5 GB, KV cache of 4,000 tokens 0.9 GB"
    displaced = "the drafter takes the memory of 5,800 tokens of context"
    assert NEEDS.describe() == f"{words}; {displaced}"
    assert NEEDS.verdict(6 * GB) == f"{words}; {displaced}; fits into the free 6.0 GB"
    assert NEEDS.verdict(5 * GB).endswith("; does not fit into the free 5.0 GB")
    unknown = replace(NEEDS, drafters=[Footprint(0, 0)])  # not on this machine, and no size in its name
    end = "; the size of a model is unknown until it is downloaded; may fit into the free 6.0 GB"
    assert unknown.verdict(6 * GB).endswith(end)
    recurrent = Needs("big", Footprint(GB, 0, GB // 5, GB // 10), [], 4000, 2)
    assert recurrent.describe() == "target 1.0 GB, recurrent state 200.0 MB, buffers 0.4 GB"
    assert not recurrent.fits(int(1.5 * GB)) and recurrent.fits(int(1.8 * GB))


def test_advice_is_a_context_if_the_weights_fit():
    NEEDS.check_llamacpp(6 * GB)
    with pytest.raises(ValueError, match="choose at most 2,066 tokens of prompt and output, or a smaller quantisation"):
        NEEDS.check_llamacpp(int(5.45 * GB))
    with pytest.raises(ValueError, match="needs 5.0 GB for weights and 1.0 GB .* free; choose a smaller quantisation"):
        NEEDS.check_llamacpp(3 * GB)


def test_buffers_of_every_lane_are_part_of_the_memory(tmp_path):
    (tmp_path / "model.gguf").write_bytes(gguf(tokens=[f"t{number}" for number in range(1000)]))
    footprint = gguf_footprint(ModelRef(tmp_path / "model.gguf"), LlamaCppSettings())
    assert footprint.per_text == 256 * 1000 * 4
    needs = Needs("big", Footprint(GB, 100_000, GB // 10), [Footprint(GB, 0, GB // 5)], 1000, 3)
    assert needs.buffers == GB // 2
    needs.check_llamacpp(int(3.1 * GB))
    with pytest.raises(ValueError, match="big needs 2.2 GB for weights and 0.8 GB for the KV cache and buffers"):
        needs.check_llamacpp(int(2.9 * GB))


def test_library_that_cannot_be_loaded_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken_llama.py").write_text("raise RuntimeError('Failed to load shared library: no\\nsuch file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(llamacpp, "PACKAGE", "broken_llama")
    message = r"llama.cpp cannot be loaded \(Failed to load shared library: no\); install it again with: pip install"
    with pytest.raises(ValueError, match=message):
        library.__wrapped__()
