import ast
import signal
import stat
from pathlib import Path

import pytest

import specdemo
from specdemo.core.atomic_io import atomic_folder, atomic_path, check_writable, finite, json_text, write_text
from tests.processes import full_disk


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
