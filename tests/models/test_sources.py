"""Models from a hub on the loopback interface: downloaded files, progress messages and failures."""

import re
import threading

import pytest
import torch

from specdemo.methods import METHODS, detect_head
from specdemo.methods.pairs import load_target
from specdemo.models import sources
from specdemo.models.errors import Cancelled
from specdemo.models.load import load_meta_target, load_model
from specdemo.models.packaged import embedded_folder, embedded_heads, embedded_models
from specdemo.models.ref import ModelRef
from specdemo.models.sources import PICKLED, fetch_config, fetch_folder, locate, model_info, no_progress, select_files
from tests.models.fake_hub import SHA, serve
from tests.models.test_load import refused
from tests.models.test_text import byte_level
from tests.models.tiny import build, fresh, texts


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a model as stored on the hub: in three shards, next to copies in other formats."""
    folder = tmp_path_factory.mktemp("saved")
    build("llama").save_pretrained(folder, max_shard_size="30KB")
    byte_level().save_pretrained(folder)
    contents = {file.name: file.read_bytes() for file in folder.iterdir()}
    others = ("consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin", "modeling_tiny.py")
    return contents | dict.fromkeys((*others, "README.md", "training_args.bin"), b"not to be fetched")


@pytest.fixture
def repositories(files):
    return {"org/tiny": dict(files)}


@pytest.fixture
def server(repositories, monkeypatch, tmp_path):
    with serve(repositories, monkeypatch, tmp_path / "cache") as served:
        yield served


def weights(files):
    return sorted(f for f in files if re.fullmatch(r"model-.*\.safetensors", f))


def test_only_needed_files_are_fetched(server, files):
    assert len(weights(files)) > 2
    messages = []
    loaded = load_model("org/tiny@v1", progress=lambda share, what: messages.append((share, what)))
    assert loaded.name == "org/tiny@v1" and loaded.tokenizer is not None
    prompt = texts(1, 9)
    torch.testing.assert_close(fresh(loaded.model, prompt[0].tolist()), fresh(build("llama"), prompt[0].tolist()))
    fetched = {file for file, _ in server.requests}
    assert {*weights(files), "config.json", "tokenizer.json", "model.safetensors.index.json"} <= fetched
    assert not fetched & {"consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin", "README.md"}
    shares = [share for share, _ in messages]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert any(re.match(r"downloading org/tiny@v1: [\d.]+ MB of [\d.]+ MB", what) for _, what in messages)


def test_cached_model_needs_no_network(server, monkeypatch):
    load_model("org/tiny")
    before = len(server.requests)
    load_model("org/tiny")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    load_model("org/tiny")
    assert len(server.requests) == before
    assert "'org/none' is not on this machine and HF_HUB_OFFLINE is set" in refused("org/none")


def test_cut_download_is_resumed(server, files):
    shard = weights(files)[0]
    server.cuts[shard] = 5000
    load_model("org/tiny")
    ranges = [byte_range for file, byte_range in server.requests if file == shard]
    assert len(ranges) == 2 and re.match(r"bytes=(\d+)-", ranges[1])
    assert 0 < int(ranges[1].removeprefix("bytes=").rstrip("-")) <= 5000


def test_stopping_keeps_what_is_complete(server, files):
    server.hold = threading.Event()

    def stop(share, what):
        if "downloading" in what and len([f for f, _ in server.requests if f in weights(files)]) >= 2:
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        load_model("org/tiny", progress=stop)
    server.hold.set()
    server.hold = None
    assert load_model("org/tiny").name == "org/tiny"
    assert sum(file == "config.json" for file, _ in server.requests) == 1


def test_progress_reports_bytes_and_time_left(monkeypatch):
    download = sources.Download(ModelRef("org/big"), 2_000_000_000)
    assert download.line() == "downloading org/big: 0.0 MB of 2.0 GB"
    bar = download.bar()(total=0, unit="B", name="huggingface_hub.snapshot_download")
    monkeypatch.setattr(sources.time, "monotonic", lambda: download._begin + 10)
    bar.update(500_000_000)
    assert download.line() == "downloading org/big: 0.5 GB of 2.0 GB, 50.0 MB/s, 30 s left"
    assert download.share() == 0.25


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("org/none", "unknown model 'org/none'; choose one of .*, or give a folder or a Hugging Face id"),
        ("org/tiny@v2", "org/tiny has no revision 'v2'; use a branch, a tag or a commit, or omit @v2"),
        ("org/gated", "org/gated is gated; accept its licence on huggingface.co/org/gated and log in with: hf auth"),
        ("org/pickled", "org/pickled has no .safetensors weights; choose a model that has them"),
        (
            "org/gguf",
            "org/gguf contains only GGUF, which can only decode; name one file as the target or the draft model",
        ),
        ("org/empty", "org/empty has no config.json; it is not a transformers model"),
        ("org/tiny@v 2", "'org/tiny@v 2' is neither a folder nor a Hugging Face id"),
    ],
)
def test_unavailable_model_is_one_line(server, repositories, name, line):
    config = repositories["org/tiny"]["config.json"]
    repositories |= {"org/gated": {}, "org/empty": {}, "org/pickled": {"config.json": config, "pytorch_model.bin": b""}}
    repositories["org/gguf"] = {"config.json": config, "model-Q4_K_M.gguf": b"", "model-Q8_0.gguf": b""}
    server.gated.add("org/gated")
    assert re.match(line, refused(name))
    assert not [file for file, _ in server.requests if not file.endswith(".json")]


def test_similar_models_and_heads_are_suggested_but_no_others(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refused("Qwen/Qwen3-0.6B").endswith("unset it, or name a file, a folder or a model that was downloaded")
    assert "stories-draft-wide" in embedded_models() and "stories-medusa" in embedded_heads()
    assert refused("stories-medsua").endswith("did you mean the head 'stories-medusa'?")
    assert refused("storys").endswith("did you mean 'stories'?")


def test_a_head_in_the_cache_is_named(server, repositories):
    folder = embedded_folder() / "stories-eagle-1"
    repositories["org/head"] = {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")}
    with pytest.raises(
        ValueError, match="^org/head is a head for method 'eagle'; choose a complete model as the target"
    ):
        load_target("org/head")


def test_no_network_is_one_line(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "'org/tiny' is not on this machine and http://127.0.0.1:9 cannot be reached" in refused("org/tiny")


def test_oversized_model_is_rejected_before_the_download(server, monkeypatch):
    server.numbers["org/tiny"] = 10**13
    assert re.match(
        r"org/tiny needs about 44000\.0 GB in float32, this machine has [\d.]+ GB free on cpu; choose quantization "
        "4bit or a smaller model",
        refused("org/tiny"),
    )
    server.numbers.clear()
    monkeypatch.setattr(sources.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**6}))
    assert re.match(
        r"org/tiny: the download needs 0\.\d MB and 1\.0 MB of disk space are free; free some", refused("org/tiny")
    )
    assert not [file for file, _ in server.requests if file.endswith(".safetensors")]


def test_an_index_may_name_a_file_that_is_gone(server, repositories, files):
    del repositories["org/tiny"][weights(files)[1]]
    assert (
        refused("org/tiny")
        == f"org/tiny lacks {weights(files)[1]}, one of {len(weights(files))} files of weights; fetch it again"
    )


def test_only_a_head_without_safetensors_may_be_pickled(server, repositories):
    repositories["org/head"] = {"config.json": b"{}", "medusa_lm_head.pt": b"x", "optimizer.pt": b"x"}
    folder = fetch_folder(locate(ModelRef("org/head"), PICKLED), no_progress)
    assert {file.name for file in folder.iterdir()} == {"config.json", "medusa_lm_head.pt"}
    repositories["org/head"]["model.safetensors"] = b"x"
    assert select_files(ModelRef("org/head"), model_info(ModelRef("org/head")), PICKLED).weights == [
        "model.safetensors"
    ]


def test_the_embedding_of_a_mask_token_comes_with_the_description(server, repositories):
    repositories["org/head"] = {"config.json": b"{}", "model.safetensors": b"x", "mask_embedding.pt": b"x"}
    found = select_files(ModelRef("org/head"), model_info(ModelRef("org/head")), PICKLED)
    assert found.weights == ["model.safetensors"]
    assert {file.name for file in fetch_config(found).iterdir()} == {"config.json", "mask_embedding.pt"}


def test_meta_model_needs_no_weights(server):
    target = load_meta_target("org/tiny")
    assert (target.hidden_size, target.num_layers, target.device.type) == (32, 3, "meta")
    assert target.tokenizer is not None
    assert not [file for file, _ in server.requests if file.endswith(".safetensors")]


def test_revisions_may_be_commits(server):
    named = ModelRef(f"org/tiny@{SHA}")
    assert (named.repository, named.revision) == ("org/tiny", SHA)
    assert load_model(f"org/tiny@{SHA}").name == f"org/tiny@{SHA}"


def test_embedded_models_and_heads_are_distinguished_as_methods_do():
    assert [detect_head(ModelRef(name)) for name in embedded_models()] == [None] * len(embedded_models())
    assert {detect_head(ModelRef(name)) for name in embedded_heads()} <= {*METHODS}
