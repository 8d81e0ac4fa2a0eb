import os
import shutil

import pytest

from specdemo.models.checkpoints import open_checkpoint
from specdemo.models.load import load_model
from specdemo.models.shipped import SUMS, check_embedded, embedded_folder


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
