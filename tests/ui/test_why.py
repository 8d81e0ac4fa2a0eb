"""The card of the What if tab that diagnoses the output of an engine."""

import json
from pathlib import Path

import pytest

from specdemo.ui.whatif import diagnose_output

SAMPLES = Path(__file__).parents[1] / "analysis" / "samples"


def shown(**values):
    empty = {"output": "", "file": None, "plain": None, "k": None}
    return json.loads(diagnose_output(None, empty | values)["view"])


def test_pasted_output_is_diagnosed():
    found = shown(output=(SAMPLES / "llamacpp-long.log").read_text(encoding="utf-8"), plain=222.8)
    assert found["sentence"].startswith("Slower (") and found["tone"] == "bad"
    assert any("--spec-draft-n-max" in line for line in found["changes"])
    assert ["acceptance rate", "14 %", "break-even 36 %"] in found["numbers"]


def test_a_fast_run_needs_no_change_and_a_diagnosis_is_needed_to_know():
    fast = (SAMPLES / "llamacpp-good.log").read_text(encoding="utf-8")
    assert shown(output=fast, plain=150)["changes"] == ["Nothing has to change."]
    impossible = shown(output=fast, plain=60)
    assert ["acceptance rate", "56 %", ""] in impossible["numbers"] and impossible["tone"] == ""
    assert shown(file=str(SAMPLES / "sglang.log"))["changes"] == []


def test_dropped_file_is_read_and_numbers_fill_gaps():
    found = shown(file=str(SAMPLES / "sglang.log"), k=3, plain=160)
    assert found["sentence"].startswith("Faster (1.11x)") and "draft length k" not in found["missing"]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({}, "no output given"),
        ({"output": "hello"}, "of no known kind"),
        ({"output": "x" * 3_000_000}, "2 MB at most"),
        ({"output": "Decode batch gen throughput (token/s): 3", "k": 2.5}, "whole number"),
    ],
)
def test_mistakes_are_one_line(values, line):
    found = shown(**values)
    assert line in found["error"] and "\n" not in found["error"]


def test_the_folder_of_an_upload_is_not_shown(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    assert shown(file=str(tmp_path / "notes.txt"))["error"].startswith("notes.txt: this output is of no known kind")
