"""Crashes of llama.cpp, in stand-ins for its library and with the real one, end no process but that of the trial."""

import os
import re
import struct
import sys
from pathlib import Path

import pytest

from specdemo.__main__ import main
from specdemo.models import llamacpp_trial
from specdemo.models.errors import Cancelled
from specdemo.models.llamacpp_trial import REBUILD, Trial, check_llamacpp, trials_folder
from specdemo.models.load import load_model
from tests.gguf_export import GGUFVocab, write_gguf

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="stand-ins die of signals")
STAND_IN = """
import os, pathlib, signal
pathlib.Path(os.environ["CALLS"]).open("a").write("x")
def llama_backend_init(): {start}
def llama_model_default_params(): return type("Parameters", (), {{}})
def llama_model_load_from_file(path, parameters): {load}
"""


def die(name):
    return f"os.kill(os.getpid(), signal.{name})"


@pytest.fixture(autouse=True)
def empty_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(llamacpp_trial, "_ends", {})


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Return a function that installs a library, and one that counts its starts."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(b"x")

    def install(load="pass", start="pass"):
        (tmp_path / "other_llama.py").write_text(STAND_IN.format(load=load, start=start))
        return Trial("other_llama", str(tmp_path / "model.gguf"), (0,)), [tmp_path / "model.gguf"]

    return install


def starts():
    return Path(os.environ["CALLS"]).stat().st_size


@pytest.mark.parametrize(
    ("name", "cpu", "cause"),
    [
        ("SIGSEGV", "flags : avx2", "the library was probably built for another CPU, or the file is broken"),
        ("SIGSEGV", "flags : avx2 amx_tile", "this CPU has AMX, for which gcc 12 compiles _tile_loadconfig wrongly"),
        ("SIGBUS", "flags : avx2", "the library was probably built for another CPU, or the file is broken"),
        ("SIGILL", "flags : avx2", "the library was probably built for another CPU"),
        ("SIGABRT", "flags : avx2", "the file is probably broken, or needs a newer llama.cpp"),
    ],
)
def test_crash_is_one_line_with_the_flags_that_help(name, cpu, cause, stand_in, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(cpu)
    monkeypatch.setattr(llamacpp_trial, "CPU", tmp_path / "cpuinfo")
    trial, parts = stand_in(load=die(name))
    message = (
        f"llama.cpp, tried with model.gguf, ended with {name}; {cause}; build the library for every CPU: {REBUILD}"
    )
    for _ in range(2):
        with pytest.raises(ValueError) as raised:
            check_llamacpp(trial, parts)
        assert str(raised.value) == message
    assert starts() == 1


def test_library_that_crashes_at_its_start(stand_in):
    stand_in(start=die("SIGILL"))
    with pytest.raises(
        ValueError, match="^llama.cpp ended with SIGILL; the library was probably built for another CPU"
    ):
        check_llamacpp(Trial("other_llama"))
    check_llamacpp(Trial("absent_llama"))


def test_survival_is_remembered_per_library_and_file(stand_in, tmp_path, monkeypatch):
    trial, parts = stand_in()
    for count in (1, 1):
        check_llamacpp(trial, parts)
        monkeypatch.setattr(llamacpp_trial, "_ends", {})  # as in the next process
        assert starts() == count
    parts[0].write_bytes(b"longer")
    check_llamacpp(trial, parts)
    assert starts() == 2 and {file.read_text() for file in trials_folder("").glob("*/*")} == {starts_with(parts[0])}
    (tmp_path / "broken.gguf").write_bytes(b"x")
    broken = trial._replace(file=str(tmp_path / "broken.gguf"))
    stand_in(load=die("SIGABRT"))
    with pytest.raises(ValueError, match="SIGABRT; the file is probably broken"):  # another build
        check_llamacpp(broken, [tmp_path / "broken.gguf"])
    stand_in(load=f"path.endswith(b'broken.gguf') and {die('SIGSEGV')}")
    check_llamacpp(trial, parts)
    with pytest.raises(ValueError, match="SIGSEGV; the same library runs other files, so this one is probably broken"):
        check_llamacpp(broken, [tmp_path / "broken.gguf"])


def starts_with(file):
    return f"{file.stat().st_size} {file.stat().st_mtime_ns}"


@pytest.mark.parametrize("folder", ["/dev/null", "/proc/self"])
def test_folder_that_cannot_be_written(folder, stand_in, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    trial, parts = stand_in()
    check_llamacpp(trial, parts)
    check_llamacpp(trial, parts)
    assert starts() == 1


@pytest.mark.parametrize("content", [b"", b"1 2", b"\xff"])
def test_damaged_memory_is_ignored(content, stand_in, monkeypatch):
    trial, parts = stand_in()
    check_llamacpp(trial, parts)
    monkeypatch.setattr(llamacpp_trial, "_ends", {})
    for file in trials_folder("").glob("*/*"):
        file.write_bytes(content)
    check_llamacpp(trial, parts)
    assert starts() == 2


def test_killed_trial_is_tried_again(stand_in):
    trial, parts = stand_in(load=die("SIGKILL"))
    for count in (1, 2):
        with pytest.raises(ValueError, match="ended with SIGKILL; memory was probably too small"):
            check_llamacpp(trial, parts)
        assert starts() == count


def test_trial_can_be_stopped(stand_in):
    def stop(share, what):
        raise Cancelled(what)

    with pytest.raises(Cancelled, match="trying llama.cpp with model.gguf in another process, for the first time"):
        check_llamacpp(*stand_in(load="signal.pause()"), stop)


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: pip install llama-cpp-python gguf")
    path = tmp_path_factory.mktemp("gguf") / "stories.gguf"
    loaded = load_model("stories", "float32", "cpu", kernels="transformers")
    write_gguf(loaded.model, GGUFVocab.of(loaded.tokenizer, int(loaded.model.config.vocab_size)), path)
    return path


def with_number(content, key, number):
    """Return a file with another number of four bytes."""
    place = content.index(key) + len(key) + 4
    return content[:place] + number + content[place + 4 :]


@pytest.mark.parametrize(
    ("key", "number"),
    [
        (b"llama.block_count", struct.pack("<I", 0)),
        pytest.param(b"llama.attention.layer_norm_rms_epsilon", struct.pack("<f", -1.0), marks=pytest.mark.release),
    ],
)
def test_files_on_which_llamacpp_aborts(key, number, stories, tmp_path, capsys, monkeypatch):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(with_number(stories.read_bytes(), key, number))
    assert load_model(str(stories)).weights
    for command in (["run", "embedded-ngram", "--target", str(broken)], ["doctor", str(broken)]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "broken.gguf, ended with SIGABRT: GGML_ASSERT" in error
        assert "the same library runs other files, so this one is probably broken" in error
    monkeypatch.setattr(llamacpp_trial, "follow", None)
    assert main(["doctor", str(stories)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\nnone +ngram +fits +needs no drafter\n", out)
    assert re.search(r"\n\nengine +llama.cpp.*\ncpu threads +\d+\nweights +F32\nlogits +passes .* round", out)
    passes = r"\npasses +1 token [\d.]+ ms, .*4 tokens \d\.\d\d×, .*\nverification +checking 4 tokens costs"
    assert re.search(passes, out)
