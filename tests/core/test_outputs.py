"""Output paths: what specdemo wrote may be overwritten, anything else needs force."""

import json

import pytest

from specdemo.__main__ import main
from specdemo.bench.plot import write_page
from specdemo.bench.result import Result, write_result
from specdemo.core.outputs import MARKER, check_output, check_output_folder, make_folder
from specdemo.costs.profiles import profile, write_profile
from specdemo.presets.recorded import save_trace
from specdemo.training.fit import TrainHistory, write_provenance
from tests.traces import hostile_trace

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
    assert main(command) == 0  # now it is a trace


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


@pytest.mark.parametrize(
    "command", [["train", "medusa"], ["train", "code-target"], ["bench", "gpu", "--device", "cpu"]]
)
def test_commands_refuse_folders_with_other_files_before_they_work(tmp_path, capsys, command):
    (tmp_path / "report.md").write_text("precious")
    assert main([*command, "--out", str(tmp_path)]) == 2
    assert "is not empty and was not made by specdemo" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]
