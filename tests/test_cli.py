"""The command line as a user meets it: what it prints, and one line for everything that can be wrong."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.train import RECIPES
from specdemo.__main__ import main
from specdemo.core.trace import from_json
from specdemo.presets.files import load_presets

SHORT = ("--max-new-tokens", "16")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    assert main(["run", "embedded-three-lanes", *SHORT, "--k", "3", "--out", str(path)]) == 0
    return path


def refusal(capsys, *arguments):
    """The one line on stderr; nothing on stdout."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err.removeprefix("specdemo: ").removesuffix("\n")


def on_linux(line, *arguments):
    return pytest.param([*arguments], line, marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux's words"))


def test_run_prints_a_row_per_lane_and_writes_the_trace(stored, capsys):
    trace = from_json(stored.read_bytes())
    assert [lane.method for lane in trace.lanes] == ["none", "draft_model", "draft_model"]
    assert [lane.options["k"] for lane in trace.lanes[1:]] == [3, 3]
    assert [row["verdict"] for row in trace.comparison] == ["identical", "identical"]
    assert len(trace.lanes[0].token_ids) == 16


def test_replay_prints_the_same_numbers_without_a_model(stored, capsys, monkeypatch):
    monkeypatch.setenv("SPECDEMO_MODELS", "/nowhere")
    assert main(["replay", str(stored)]) == 0
    out = capsys.readouterr().out
    trace = from_json(stored.read_bytes())
    assert trace.prompt + trace.lanes[0].text in out
    assert "[Baseline, Draft model (stories-draft-wide), Draft model (stories-draft-deep)]" in out
    table = {line[:35].strip(): line[35:].split() for line in out.splitlines() if line.startswith(("Base", "Draft"))}
    for lane in trace.lanes:
        tokens, speed, *_ = table[lane.name]
        assert (tokens, speed) == ("16", f"{lane.summary['tokens_per_s']:.1f}")
    assert table["Draft model (stories-draft-deep)"][-1] == "identical"
    assert "embedded-three-lanes | target stories | float32 | " in out
    assert out.count(": a step costs ") == 2


def test_settings_reach_the_run(tmp_path, capsys):
    path, prompt = tmp_path / "t.json", tmp_path / "prompt.txt"
    prompt.write_text("The cat sat. The cat sat. The cat\n", encoding="utf-8")
    options = ["--method", "ngram", "--option", "max_n=2", "--k", "5", "--seed", "3", "--schedule", "sequential"]
    sampling = ["--temperature", "0.7", "--top-p", "0.9", "--top-k", "50", "--min-p", "0.01"]
    files = ["--prompt-file", str(prompt), "--out", str(path)]
    assert main(["run", "embedded-draft", *SHORT, *options, *sampling, *files]) == 0
    trace = from_json(path.read_bytes())
    assert (trace.prompt, trace.schedule) == ("The cat sat. The cat sat. The cat", "sequential")
    assert (trace.lanes[1].method, trace.lanes[1].options) == ("ngram", {"max_n": 2, "min_n": 1, "k": 5})
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 3, "max_new_tokens": 16}
    assert {name: trace.config[name] for name in expected} == expected
    assert "same distribution" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "embeded-draft"], "unknown preset 'embeded-draft'; did you mean 'embedded-draft'?"),
        (["run", "embedded-draft", "--method", "ngrm"], "unknown method 'ngrm'; did you mean 'ngram'?"),
        (
            ["run", "embedded-ngram", "--option", "max=3"],
            "unknown option 'max' of method 'ngram'; did you mean 'max_n'?",
        ),
        (["run", "embedded-ngram", "--option", "max_n"], "--option takes name=value, not 'max_n'"),
        (["run", "embedded-ngram", "--option", "max_n=x"], "option 'max_n' must be a number, not 'x'"),
        (["run", "embedded-draft", "--k", "0"], "k must be 1 or more, not 0"),
        (["run", "embedded-draft", "--k", "five"], "Invalid value for '--k': Input should be a valid integer"),
        (["run", "embedded-draft", "--temperature", "-1"], "temperature must be 0.0 or more, not -1.0"),
        (["run", "embedded-draft", "--temperature", "nan"], "temperature must be a finite number, not nan"),
        (["run", "embedded-draft", "--max-new-tokens", "0"], "max_new_tokens must be 1 or more, not 0"),
        (["run", "embedded-draft", "--schedule", "x"], "schedule must be 'race' or 'sequential', not 'x'"),
        (["run", "embedded-draft", "--prompt", ""], "the prompt is empty; write at least one word"),
        (["run", "embedded-draft", "--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file exclude each"),
        (["run", "embedded-draft", "--prompt-file", "none.txt"], "cannot read none.txt: No such file or directory;"),
        (["run", "embedded-draft", "--out", "none/x.json"], "there is no folder none; make it first"),
        on_linux(
            "cannot write /proc/x.json: No such file or directory;", "run", "embedded-draft", "--out", "/proc/x.json"
        ),
        (["run", "embedded-draft", "--prompt", "word " * 600], "the prompt has "),
        (["run", "embedded-draft", "--promt", "x"], "No such option: --promt"),
        (["run"], "Missing argument 'PRESET'."),
        (["rum"], "No such command 'rum'."),
        (["ui", "--port", "99999"], "argument --port: '99999' is not from 1 to 65535; see --help"),
        (["ui", "--engines", "vlm"], "unknown engine 'vlm'; did you mean 'vllm'?"),
        (["ui", "--engines", "vllm=/nowhere/vllm"], "/nowhere/vllm is not here; install it, or name its path"),
        (["run", "embedded-draft", "--model=--port"], "the model must not begin with -; name a model or its folder"),
        (["ui", "--prt", "1"], "unrecognized arguments: --prt 1; see --help"),
        (["replay", "none.json"], "cannot read none.json: No such file or directory; record a trace with"),
        on_linux("cannot read /: Is a directory; record a trace with", "replay", "/"),
        (["bench", "embeded"], "unknown suite 'embeded'; did you mean 'embedded'?"),
        (["bench", "embedded", "--repeats", "0"], "repeats must be 1 or more, not 0"),
        (["bench", "embedded", "--k", "8-1"], "--k takes a draft length from 1 to 16, or a range like 1-8, not '8-1'"),
        (["bench", "race-fairness", "--k", "3"], "suite 'race-fairness' has no draft length to choose; leave --k out"),
        (["bench", "k", "--minutes", "3"], "suite 'k' has no time to choose; leave --minutes out"),
        (["bench", "gpu", "--minutes", "-1"], "minutes must be 0 to 600, not -1; 0 writes the report of what is there"),
        (["bench", "gpu", "--device", "xpu"], "there is no device 'xpu' here; use device 'auto'"),
        (["profile", "--name", "My Card"], "a profile's name has small letters, digits, - and ., not 'My Card'"),
        (["bench", "k", "--preset", "embeded-draft"], "unknown preset 'embeded-draft'; did you mean 'embedded-draft'?"),
        (["bench", "peers", "--pair", "98mm"], "unknown pair '98mm'; did you mean '98m'?"),
        (["bench", "peers", "--pair", "8m", "--dtype", "fp8"], "unknown dtype 'fp8'; "),
        (["bench", "embedded", "--questions", "none.jsonl"], "cannot read none.jsonl: No such file or directory;"),
        (["bench", "embedded", "--prompt", "a", "--questions", "b"], "prompts and a question file exclude each other;"),
        (["bench", "embedded", "--html", "none/x.html"], "there is no folder none; make it first"),
        (["train", "nothing", "--corpus", "none"], "unknown recipe 'nothing'; choose one of medusa, "),
        (["train", "medusa", "--minutes", "inf"], "minutes must be positive, not inf"),
        (["train", "stories-target", "--corpus", "none"], "no corpus folder none: name a folder of *.txt files"),
    ],
)
def test_bad_input_is_one_line_that_names_the_cure(capsys, arguments, line):
    assert refusal(capsys, *arguments).startswith(line)


@pytest.mark.parametrize("name, kind", [("stories-medusa", "medusa"), ("stories-eagle-1", "eagle")])
def test_a_head_in_the_place_of_a_model_is_named(capsys, name, kind):
    line = f"{name} is a checkpoint for method {kind!r}, not 'draft_model'; choose that method"
    assert refusal(capsys, "run", "embedded-draft", "--model", name) == line
    line = f"{name} holds a head for method {kind!r}; choose a whole model as the target"
    assert refusal(capsys, "run", "embedded-draft", "--target", name) == line


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema": 2}', b'{"lanes": [{"x": 1}]}'])
def test_a_malformed_trace_is_one_line(capsys, tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    line = refusal(capsys, "replay", str(path))
    assert line.startswith(f"{path}: ") and line.endswith(f"record it again with specdemo run PRESET --out {path}")


def test_a_trace_without_lanes_is_one_line(capsys, tmp_path):
    path = tmp_path / "empty.json"
    run = {"preset": "x", "config": {}, "environment": {}, "schedule": "race", "lanes": []}
    path.write_text(json.dumps(run), encoding="utf-8")
    assert refusal(capsys, "replay", str(path)).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["--k", "0"], "k must be 1 or more, not 0"),
        (["--prompt", "word " * 600], "the prompt has 1202 tokens, there is room for 352; shorten it or ask for fewer"),
        (["--model", "stories-eagle-1"], "stories-eagle-1 is a checkpoint for method 'eagle', not 'draft_model'; "),
    ],
)
def test_the_process_itself_exits_with_2_and_one_line(arguments, line):
    """In a process of its own: libraries write to the terminal's stderr past what a test can capture."""
    command = [sys.executable, "-m", "specdemo", "run", "embedded-draft", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"specdemo: {line}") and done.stderr.count("\n") == 1


def test_bench_prints_and_writes_its_numbers(capsys, tmp_path):
    options = ["--repeats", "1", "--k", "2", "--preset", "embedded-ngram", "--new-tokens", "6", "--prompt", "Once upon"]
    assert main(["bench", "k", *options, "--out", str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"embedded-ngram +2 ", out) and "| 1 repeat" in out and "[" not in out
    stored = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert (stored["suite"], stored["config"]["ks"], stored["config"]["preset"]) == ("k", [2], "embedded-ngram")


def test_presets_are_listed_quickly():
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "specdemo", "presets", "--json"], capture_output=True, check=True)
    assert time.perf_counter() - start < 10  # a few times what it takes on a busy machine
    listed = json.loads(done.stdout)
    assert [entry["id"] for entry in listed] == list(load_presets())
    assert listed[0] == {
        "id": "embedded-draft",
        "title": load_presets()["embedded-draft"].title,
        "embedded": True,
        "methods": ["draft_model"],
    }


def test_presets_and_methods_as_text(capsys):
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    assert all(id in out for id in load_presets())
    assert main(["methods"]) == 0
    assert "    --option max_n=8  1 to 8  longest suffix to look for" in capsys.readouterr().out


def test_methods_name_their_options_with_range_and_help(capsys):
    assert main(["methods", "--json"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert set(listed) >= {"none", "draft_model", "ngram"}
    assert listed["draft_model"]["needs_model"]
    assert listed["ngram"]["title"] == "Prompt lookup"
    assert {name for name, entry in listed.items() if not entry["exact"]} == {"synthetic"}
    option = listed["ngram"]["options"][0]
    assert (option["name"], option["type"], option["default"]) == ("max_n", "int", 8)
    assert (option["low"], option["high"], option["step"], option["choices"]) == (1, 8, 1, [])
    assert option["help"]


def test_doctor_lists_the_machine(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for line in (
        "torch",
        "transformers",
        "gradio",
        "device",
        "chromium",
        "embedded models",
        "cpu (auto)",
        "verify cost",
    ):
        assert f"\n{line}" in out


def test_doctor_fails_when_models_are_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEMO_MODELS", str(tmp_path))
    assert main(["doctor"]) == 1
    assert "missing: stories, stories-draft-wide, stories-draft-deep" in capsys.readouterr().out


def test_no_command_is_help(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    for command in ("ui", "run", "bench", "profile", "train", "replay", "presets", "methods", "doctor"):
        assert f"\n  {command} " in out


def test_ui_hands_its_options_to_the_page(monkeypatch):
    served = []
    monkeypatch.setattr("specdemo.ui.page.serve", lambda *given: served.append(given))
    monkeypatch.setenv("GRADIO_SERVER_NAME", "0.0.0.0")
    assert main(["ui", "--port", "7861", "--allow-any-model"]) == 0
    assert main(["ui", "--preset", "embedded-ngram", "--host", "::1"]) == 0
    assert served == [("embedded-draft", "0.0.0.0", 7861, True), ("embedded-ngram", "::1", 7860, False)]


@pytest.mark.skipif(sys.platform != "linux", reason="nothing else has a folder that takes no files")
def test_a_file_that_cannot_be_written_is_one_line(capsys):
    assert refusal(capsys, "run", "embedded-draft", "--max-new-tokens", "2", "--out", "/proc/trace.json")


@pytest.mark.parametrize("recipe, target", [("code-draft", "code"), ("stories-draft-wide", "stories")])
def test_a_draft_learns_from_the_target_of_its_world(monkeypatch, tmp_path, recipe, target):
    jobs = []
    monkeypatch.setitem(RECIPES, recipe, replace(RECIPES[recipe], make=jobs.append))
    assert main(["train", recipe, "--corpus", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert [Path(job.target).name for job in jobs] == [target]


@pytest.mark.parametrize(
    ("named", "line"),
    [
        ([], "2 missing, give --server http://HOST:PORT --server http://HOST:PORT"),
        (["http://gpu-1:8000"], "1 missing, give --server http://gpu-1:8000 --server http://HOST:PORT"),
    ],
)
def test_two_servers_are_needed(named, line, capsys, monkeypatch):
    monkeypatch.setattr("specdemo.servers.address._added", {})
    monkeypatch.delenv("SPECDEMO_SERVERS", raising=False)
    assert main(["run", "two-servers", *(part for server in named for part in ("--server", server))]) == 2
    error = capsys.readouterr().err
    assert error == f"specdemo: two-servers needs 2 servers, first the baseline's, then each lane's; {line}\n"
