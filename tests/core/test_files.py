"""Files that are written: complete or not at all, also when a signal arrives, and over those of others only with
force."""

import ast
import json
import signal
import stat
import threading
from pathlib import Path

import pytest

import specdemo
from specdemo.__main__ import main
from specdemo.bench.plot import write_page
from specdemo.bench.result import Result, write_result
from specdemo.core.atomic_io import (
    MARKER,
    atomic_folder,
    atomic_path,
    check_output,
    check_output_folder,
    check_writable,
    finite,
    json_text,
    make_folder,
    write_text,
)
from specdemo.core.signals import defer_signals, sigterm_as_exit
from specdemo.costs.profiles import profile, write_profile
from specdemo.presets.files import save_trace
from specdemo.training.fit import TrainHistory, write_provenance
from tests.processes import full_disk
from tests.traces import hostile_trace


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_the_old_one_until_it_is_the_new_one(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "old")
    with atomic_path(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and names(tmp_path) == ["a.json"]


def test_a_full_disk_leaves_the_old_file_and_one_line_that_names_it(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "old")
    with full_disk(100), pytest.raises(ValueError) as error:
        write_text(path, "new" * 100)
    assert str(error.value) == f"cannot write {path}: File too large; free disk space or choose another path"
    assert path.read_text() == "old" and names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_writer_leaves_the_old_file(tmp_path, end):
    path = tmp_path / "a.json"
    write_text(path, "old")
    with pytest.raises(end), atomic_path(path) as part:
        part.write_text("half")
        raise end
    assert path.read_text() == "old" and names(tmp_path) == ["a.json"]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path):
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    link.symlink_to(path)
    write_text(link, "text")
    assert link.is_symlink() and path.read_text() == "text"
    write_text("/dev/null", "text")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def fill(folder, word, *shards):
    with atomic_folder(folder, "model*.safetensors*", "config.json") as staging:
        (staging / "config.json").write_text(word)
        for shard in shards:
            (staging / shard).write_text(word)


def test_a_folder_gets_all_new_files_and_loses_old_shards_alone(tmp_path):
    fill(tmp_path, "old", "model-1.safetensors", "model-2.safetensors")
    write_text(tmp_path / "checkpoint.pt", "kept")
    fill(tmp_path, "new", "model.safetensors")
    assert names(tmp_path) == ["checkpoint.pt", "config.json", "model.safetensors"]
    assert (tmp_path / "config.json").read_text() == (tmp_path / "model.safetensors").read_text() == "new"


def test_a_full_disk_leaves_the_old_folder_and_names_it(tmp_path):
    fill(tmp_path, "old", "model.safetensors")
    with full_disk(100), pytest.raises(ValueError, match=f"cannot write {tmp_path}: File too large;"):
        fill(tmp_path, "new" * 100, "model.safetensors")
    assert names(tmp_path) == ["config.json", "model.safetensors"]
    assert (tmp_path / "model.safetensors").read_text() == "old"


@pytest.mark.parametrize("killed_at", range(4))
def test_old_and_new_shards_are_never_taken_for_one_model(tmp_path, monkeypatch, killed_at):
    """If saving is killed before any rename, the folder is the complete old one or has no config."""
    fill(tmp_path, "old", "model-1.safetensors", "model-2.safetensors")
    moved, replace = [], Path.replace

    class Killed(BaseException):
        pass

    def dying(path, target):
        if len(moved) == killed_at:
            raise Killed
        moved.append(target)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", dying)
    if killed_at < 3:
        with pytest.raises(Killed):
            fill(tmp_path, "new", "model-1.safetensors", "model-2.safetensors")
        assert not (tmp_path / "config.json").exists()
    else:
        fill(tmp_path, "new", "model-1.safetensors", "model-2.safetensors")
        assert {(tmp_path / name).read_text() for name in names(tmp_path)} == {"new"}


def test_ctrl_c_waits_until_the_files_have_changed_places(tmp_path, monkeypatch):
    fill(tmp_path, "old", "model.safetensors")
    replace = Path.replace

    def interrupted(path, target):
        if path.name != "config.json":
            signal.raise_signal(signal.SIGINT)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path, "new", "model.safetensors")
    assert {(tmp_path / name).read_text() for name in names(tmp_path)} == {"new"}


def test_asking_whether_a_file_can_be_written_changes_nothing(tmp_path):
    path = tmp_path / "a.json"
    check_writable(path)
    assert names(tmp_path) == []
    write_text(path, "old")
    before = path.stat()
    check_writable(path)
    assert path.stat() == before and names(tmp_path) == ["a.json"]
    check_writable("/dev/null")
    for odd, line in (
        (tmp_path, "is a folder"),
        (tmp_path / "x" / "y", "does not exist; create it first"),
        ("/proc/x", "cannot wr"),
    ):
        with pytest.raises(ValueError, match=line):
            check_writable(odd)


def test_nothing_else_writes_files():
    package = Path(specdemo.__file__).parent
    writes = (".write_text(", ".write_bytes(", '.open("w', '.open("a', "json.dump(", ", 'w", ', "w"')
    for path in package.rglob("*.py"):
        if path != package / "core" / "atomic_io.py":
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
            lines = [line for line in lines if not line.startswith(("part.", "with part.", '"def '))]
            assert not [line for line in lines for call in writes if call in line], path


@pytest.mark.parametrize("value", [float("nan"), [1.0, {"a": float("inf")}], {"a": object()}])
def test_json_text_refuses_values_outside_json_in_one_line(value):
    with pytest.raises(ValueError, match="^cannot write this as JSON: [^\n]*$"):
        json_text(value)


def test_a_measured_value_that_is_not_finite_becomes_null():
    measured = {"a": float("nan"), "b": [1.5, float("-inf"), "x"], "c": (float("inf"), True, None)}
    assert json_text(finite(measured)) == '{"a": null, "b": [1.5, null, "x"], "c": [null, true, null]}'


def test_all_json_is_written_without_nan():
    root = Path(specdemo.__file__).parents[1]
    for path in [file for folder in ("specdemo", "benchmarks", "recipes") for file in (root / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("json.dump", "json.dumps"):
                assert path.name == "atomic_io.py", f"{path}:{node.lineno}: use core.atomic_io.json_text"
                assert "allow_nan=False" in ast.unparse(node), f"{path}:{node.lineno}"


@pytest.fixture(autouse=True)
def handlers():
    """Check that the signal handlers after a test are those from before it."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_sigterm_exits_like_an_exception():
    closed = []
    with pytest.raises(SystemExit) as left, sigterm_as_exit():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            closed.append(True)
    assert left.value.code == 143 and closed


def test_ctrl_c_waits_for_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), defer_signals() as noted:
        signal.raise_signal(signal.SIGINT)
        done.append(list(noted))
    assert done == [[signal.SIGINT]]


def test_sigterm_waits_too():
    with pytest.raises(SystemExit) as left, sigterm_as_exit(), defer_signals() as noted:
        signal.raise_signal(signal.SIGTERM)
        assert noted
    assert left.value.code == 143


def test_the_second_ctrl_c_ends_it_at_once():
    with pytest.raises(KeyboardInterrupt), defer_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")


def test_error_during_deferral_is_raised_instead():
    with pytest.raises(ValueError, match="full"), defer_signals():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("full")


def test_an_ignored_signal_stays_ignored(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with defer_signals() as noted:
            signal.raise_signal(signal.SIGINT)
        assert not noted
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_changes_no_handlers():
    found = []

    def work():
        with sigterm_as_exit(), defer_signals() as noted:
            found.append(noted)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[]]


MACHINE = {"device": "a", "dtype": "float32", "threads": 1}
RESULT = Result("k", 1, {}, MACHINE, [{"lane": "a", "ms": 1.0}])
SPECDEMO_FILES = {
    "trace": lambda path: save_trace(hostile_trace(), path),
    "result": lambda path: write_result(RESULT, path),
    "profile": lambda path: write_profile(profile("l4"), path),
    "page": lambda path: write_page(RESULT, path),
    "empty": lambda path: path.touch(),
    "missing": lambda path: None,
}
OTHERS = {
    "text": b"# Precious\n",
    "binary": bytes(range(256)),
    "JSON": b'{"rows": [1], "suite": 2}',
    "a list": b'["preset", "schedule", "lanes"]',
    "cut off": b'{"preset": "a", "schedule": "race", "lanes": [',
    "deep": b'{"preset": "a", "schedule": "race", "lanes": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "too large": b'{"preset": "a", "schedule": "race", "lanes": [], "a": "' + b"x" * 16_000_000 + b'"}',
    "page": b"<!doctype html><title>Other</title>",
}


@pytest.mark.parametrize("kind", SPECDEMO_FILES)
def test_a_file_of_specdemo_may_be_overwritten(tmp_path, kind):
    SPECDEMO_FILES[kind](tmp_path / "a")
    check_output(tmp_path / "a")


@pytest.mark.parametrize("kind", OTHERS)
def test_any_other_file_needs_force(tmp_path, kind):
    path = tmp_path / "a.json"
    path.write_bytes(OTHERS[kind])
    with pytest.raises(ValueError) as refused:
        check_output(path)
    line = f"{path} exists and was not written by specdemo; name another file or add --force"
    assert str(refused.value) == line
    check_output(path, force=True)
    assert path.read_bytes() == OTHERS[kind]


COMMANDS = {
    "run": ["run", "embedded-ngram", "--max-new-tokens", "4", "--out"],
    "bench": ["bench", "k", "--repeats", "1", "--out"],
    "bench page": ["bench", "k", "--repeats", "1", "--html"],
    "profile": ["profile", "--out"],
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_every_command_refuses_to_overwrite_other_files_before_it_works(tmp_path, capsys, kind):
    path = tmp_path / "precious.txt"
    path.write_text("precious")
    assert main([*COMMANDS[kind], str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "add --force" in err
    assert path.read_text() == "precious" and [*tmp_path.iterdir()] == [path]


def test_force_overwrites(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    command = ["run", "embedded-ngram", "--max-new-tokens", "4", "--out", str(path)]
    assert main([*command, "--force"]) == 0
    assert json.loads(path.read_text())["preset"] == "embedded-ngram"
    check_output(path)  # now it is a trace


@pytest.mark.parametrize("command", [["replay"], ["predict", "stories", "--trace"]])
@pytest.mark.parametrize("content", [b"# Precious\n", None])
def test_an_unreadable_trace_is_never_suggested_as_output(tmp_path, capsys, command, content):
    path = tmp_path / "README.md"
    if content is not None:
        path.write_bytes(content)
    assert main([*command, str(path)]) == 2
    err = capsys.readouterr().err
    assert "run PRESET --out FILE" in err and f"--out {path}" not in err


def test_a_training_folder_continues_and_any_other_needs_force(tmp_path):
    own, finished, other = (tmp_path / name for name in ("own", "finished", "other"))
    check_output_folder(own)
    for folder in (own, finished, other):
        folder.mkdir()
        check_output_folder(folder)
    make_folder(own)
    (own / "tokenizer.json").write_text("{}")
    (own / "checkpoint.pt").write_bytes(b"")
    check_output_folder(own)
    make_folder(finished)
    write_provenance(finished, TrainHistory())
    assert not (finished / MARKER).exists()
    check_output_folder(finished)
    (other / "config.json").write_text("{}")
    (other / "provenance.json").write_text('{"author": "me"}')
    make_folder(other)
    with pytest.raises(ValueError, match="other is not empty and was not made by specdemo; name another with --out"):
        check_output_folder(other)
    check_output_folder(other, force=True)
    (other / "a file").touch()
    with pytest.raises(ValueError, match="cannot make the folder .*a file: Not a directory; name another with --out"):
        check_output_folder(other / "a file")


@pytest.mark.parametrize(
    "command", [["train", "medusa"], ["train", "code-target"], ["bench", "gpu", "--device", "cpu"]]
)
def test_commands_refuse_folders_with_other_files_before_they_work(tmp_path, capsys, command):
    (tmp_path / "report.md").write_text("precious")
    assert main([*command, "--out", str(tmp_path)]) == 2
    assert "is not empty and was not made by specdemo" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]
