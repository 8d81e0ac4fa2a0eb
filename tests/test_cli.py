"""The command line: its output, and one line for every error."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

import specdemo
from recipes.train import MAKERS, RECIPES
from specdemo.__main__ import app, main
from specdemo.bench.suites import suites
from specdemo.core.settings import settings
from specdemo.core.trace import from_json
from specdemo.methods import setting
from specdemo.methods.base import NoDraft
from specdemo.methods.recipes import HEAD_RECIPES
from specdemo.presets.files import load_presets
from specdemo.servers.address import LISTED, listed
from tests.processes import run

ROOT = Path(__file__).parents[1]
SHORT = ("--max-new-tokens", "16")
SAMPLES = ROOT / "tests" / "analysis" / "samples"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    assert main(["run", "embedded-three-lanes", *SHORT, "--k", "3", "--out", str(path)]) == 0
    return path


def refusal(capsys, *arguments):
    """Return the single line on stderr of a rejected command; stdout must be empty."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err.removeprefix("specdemo: ").removesuffix("\n")


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
    assert "[Baseline, Draft 1.3M, stories-draft-wide, Draft 1.3M, stories-draft-deep]" in out
    table = {line[:35].strip(): line[35:].split() for line in out.splitlines() if line.startswith(("Base", "Draft"))}
    for lane in trace.lanes:
        tokens, speed, *_ = table[lane.name]
        assert (tokens, speed) == ("16", f"{lane.summary['tokens_per_s']:.1f}")
    assert table["Draft 1.3M, stories-draft-deep"][-1] == "identical"
    assert "embedded-three-lanes | target stories | float32 | " in out
    assert out.count(": a step takes as long as ") == 2


def test_settings_reach_the_run(tmp_path, capsys):
    path, prompt = tmp_path / "t.json", tmp_path / "prompt.txt"
    prompt.write_text("The cat sat. The cat sat. The cat\n", encoding="utf-8")
    options = ["--method", "ngram", "--option", "max_n=2", "--k", "5", "--seed", "3", "--schedule", "sequential"]
    sampling = ["--dtype", "float32", "--temperature", "0.7", "--top-p", "0.9", "--top-k", "50", "--min-p", "0.01"]
    files = ["--prompt-file", str(prompt), "--out", str(path)]
    assert main(["run", "embedded-draft", *SHORT, *options, *sampling, *files]) == 0
    trace = from_json(path.read_bytes())
    assert (trace.prompt, trace.schedule) == ("The cat sat. The cat sat. The cat", "sequential")
    assert (trace.lanes[1].method, trace.lanes[1].options) == (
        "ngram",
        {"corpus": "", "max_n": 2, "min_n": 1, "k": 5, "acceptance": "coupled"},
    )
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 3, "max_new_tokens": 16}
    assert {name: trace.config[name] for name in expected} == expected
    assert "Output: identical" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "embeded-draft"], "unknown preset 'embeded-draft'; did you mean 'embedded-draft'?"),
        (["run", "embedded-ngram", "--option", "max_n"], "--option takes name=value, not 'max_n'"),
        (
            ["run", "embedded-ngram", "--option", "corpus=" + "a" * 200_001],
            "the corpus has 200,001 characters, the limit",
        ),
        (["run", "embedded-draft", "--k", "five"], "Invalid value for '--k': Input should be a valid integer"),
        (["run", "embedded-draft", "--device", "cuda:99"], "this machine has no device 'cuda:99'; use device 'auto'"),
        (["run", "embedded-draft", "--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file exclude each"),
        (["run", "embedded-draft", "--prompt-file", "none.txt"], "cannot read none.txt: No such file or directory;"),
        (["run", "embedded-draft", "--promt", "x"], "No such option: --promt"),
        (["run", "smollm2"], "smollm2 is a model, not a preset; name it as the target (--target)"),
        (["rum"], "No such command 'rum'."),
        (["ui", "--port", "99999"], "argument --port: '99999' is not from 1 to 65535; see --help"),
        (["run", "embedded-draft", "--model=--port"], "the model must not begin with -; name a model or its folder"),
        (["ui", "--prt", "1"], "unrecognized arguments: --prt 1; see --help"),
        (["why", "none.log"], "cannot read none.log: No such file or directory; choose the output of an engine"),
        (["replay", "none.json"], "cannot read none.json: No such file or directory; record a trace with"),
        (["bench", "k", "--k", "8-1"], "--k takes a draft length from 1 to 16, or a range like 1-8, not '8-1'"),
        (
            ["bench", "k", "--target", "x"],
            "bench k measures presets (--preset); `python -m specdemo tune x` finds what pays for any model",
        ),
        (["profile", "--name", "My Card"], "the name of a profile must have only lower-case letters, digits, - and "),
        (
            ["train", "stories-bytes", "--weights", "dpace"],
            "--loss and --weights are for heads; choose one of ",
        ),
        (["train", "stories-target", "--corpus", "none"], "no corpus folder none: name a folder of *.txt files"),
        (["train", "medusa", "--target", "x.gguf"], "x.gguf is a GGUF file, which cannot be trained on; name the "),
    ],
)
def test_bad_input_is_one_line_with_the_fix(capsys, arguments, line):
    assert refusal(capsys, *arguments).startswith(line)


@pytest.mark.parametrize("name, kind", [("stories-medusa", "medusa"), ("stories-eagle-1", "eagle")])
def test_head_given_as_target_is_named(capsys, name, kind):
    line = f"{name} is a head for method {kind!r}, not a draft model; choose method {kind!r}"
    assert refusal(capsys, "run", "embedded-draft", "--model", name) == line
    line = f"{name} is a head for method {kind!r}; choose a complete model as the target"
    assert refusal(capsys, "run", "embedded-draft", "--target", name) == line
    assert refusal(capsys, "doctor", name) == refusal(capsys, "doctor", name, "stories-draft-wide") == line
    assert refusal(capsys, "train", "medusa", "--target", name) == line


def test_full_model_given_as_head_is_named(capsys):
    line = "stories-draft-wide is a whole model, not a head for method 'medusa'; choose a head for it"
    assert refusal(capsys, "run", "embedded-medusa", "--model", "stories-draft-wide") == line


@pytest.mark.parametrize("content", [b"{", b'{"schema": 2}'])
def test_a_malformed_trace_is_one_line(capsys, tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    line = refusal(capsys, "replay", str(path))
    why = "this result has schema 2; this version reads schema 1" if b"schema" in content else "not a specdemo result"
    assert line.startswith(f"{path}: {why}")
    assert line.endswith("record it again with python -m specdemo run PRESET --out FILE")
    assert "a specdemo trace" in line or "this trace has schema" in line


def test_the_process_itself_exits_with_2_and_one_line():
    """Runs in a process, because libraries write directly to the terminal's stderr, which pytest does not capture."""
    done = run("-m", "specdemo", "run", "embedded-draft", "--prompt", "word " * 600)
    line = "specdemo: the prompt has 1202 tokens, the limit is 352; shorten it or reduce max_new_tokens\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_bench_prints_and_writes_its_numbers(capsys, tmp_path):
    options = ["--repeats", "1", "--k", "2", "--preset", "embedded-ngram", "--new-tokens", "6", "--prompt", "Once upon"]
    assert main(["bench", "k", *options, "--out", str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"embedded-ngram +2 ", out) and "| 1 repeat" in out and "[" not in out
    stored = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert (stored["suite"], stored["config"]["ks"], stored["config"]["preset"]) == ("k", [2], "embedded-ngram")
    assert stored["environment"]["versions"]["torch"]


def test_lists_and_help_import_nothing_slow():
    code = (
        "import sys; from specdemo.__main__ import main; [main(command.split()) for command in sys.argv[1:]]; "
        "print({'torch', 'transformers', 'gradio'} & set(sys.modules), file=sys.stderr)"
    )
    commands = ["presets --json", "--help", "bench k --help", "bench --help", "why - --k 3 --without 250"]
    refused = {
        "bench load": "bench load compares results; give --plain FILE and --speculative FILE",
        "check-server http://a http://b --prompt-file none": "cannot read none: No such file or directory; choose ",
        "check-server http://a": "one server is checked against the local engine, which needs the model; add --target",
    }
    command = [sys.executable, "-c", code, *commands, *refused]
    log = (SAMPLES / "sglang.log").read_text(encoding="utf-8")  # of `why -`
    done = subprocess.run(command, input=log, capture_output=True, text=True, check=True)
    assert '"id": "embedded-draft"' in done.stdout and done.stdout.count("Usage: ") == 3
    assert "\nSlower (0.71x)" in done.stdout
    *lines, loaded = done.stderr.splitlines()
    assert loaded == "set()" and len(lines) == len(refused)
    assert all(line.startswith(f"specdemo: {words}") for line, words in zip(lines, refused.values(), strict=True))


def test_presets_and_methods_as_text(capsys):
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    assert all(id in out for id in load_presets())
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    assert "    --option max_n=8  1 to 8  longest suffix to match" in out
    assert "medusa: Medusa (lossless, needs --model)" in out
    assert "With a lossy rule (--acceptance typical, fly, speculative_cascade) every method is lossy." in out


def test_presets_and_methods_as_json(capsys):
    listed = json.loads(output(capsys, "presets", "--json"))
    assert [entry["id"] for entry in listed] == list(load_presets())
    assert listed[0]["embedded"] and listed[0]["methods"] == ["draft_model"]
    listed = {entry["name"]: entry for entry in json.loads(output(capsys, "methods", "--json"))}
    assert listed["draft_model"]["needs_model"] and listed["ngram"]["title"] == "Prompt lookup"
    assert {name for name, entry in listed.items() if not entry["exact"]} == {"synthetic"}
    option = listed["ngram"]["options"][1]
    assert (option["name"], option["type"], option["default"]) == ("max_n", "int", 8) and option["help"]
    assert (option["low"], option["high"], option["step"], option["choices"]) == (1, 8, 1, [])


def test_doctor_lists_the_machine(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    lines = "torch|transformers|gradio|device|embedded models|embedded heads|cpu (auto)|passes|verification"
    for line in lines.split("|"):
        assert f"\n{line}" in out
    models, heads = (next(ln for ln in out.splitlines() if ln.startswith(f"embedded {kind}")) for kind in ("m", "h"))
    assert "stories-draft-wide, " in models and "stories-medusa" not in models and "eagle" not in models
    assert "stories-medusa (medusa), " in heads and "stories-mtp (mtp)" in heads and "stories-draft-wide" not in heads


def test_doctor_fails_when_models_are_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEMO_MODELS", str(tmp_path))
    assert main(["doctor"]) == 1
    assert "missing: stories, stories-draft-wide, stories-draft-deep" in capsys.readouterr().out


def test_no_command_is_help(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    for command in ("ui", "run", "bench", "profile", "train", "replay", "presets", "methods", "doctor"):
        assert f"\n  {command} " in out


def reach(hosts, proxies=(), share=False):
    return {"allow_hosts": hosts, "proxies": proxies, "share": share}


def test_ui_hands_its_options_to_the_page(monkeypatch):
    served = []
    monkeypatch.setattr("specdemo.ui.page.serve", lambda *given, **names: served.append((*given, names)))
    monkeypatch.setenv("GRADIO_SERVER_NAME", "0.0.0.0")
    monkeypatch.setenv("SPECDEMO_ALLOW_HOST", "a.example b.example")
    monkeypatch.setenv(LISTED, "")
    assert main(["ui", "--port", "7861", "--allow-any-model", "--server", "gpu:8000"]) == 0
    assert listed() == ("http://gpu:8000",)
    names = ["--allow-host", "c.example", "--allow-host", "d.example", "--behind-proxy", "10.0.0.1"]
    assert main(["ui", "--preset", "embedded-ngram", "--host", "::1", "--share", *names]) == 0
    assert served == [
        ("embedded-draft", "0.0.0.0", 7861, True, reach(["a.example", "b.example"])),
        ("embedded-ngram", "::1", 7860, False, reach(["c.example", "d.example"], ["10.0.0.1"], share=True)),
    ]


@pytest.mark.parametrize("recipe, target", [("code-draft", "code"), ("stories-draft-wide", "stories")])
def test_draft_learns_from_the_target_of_its_corpus(monkeypatch, tmp_path, recipe, target):
    jobs = []
    monkeypatch.setitem(MAKERS, RECIPES[recipe].make, jobs.append)
    (tmp_path / "train.txt").write_text("Once.", encoding="utf-8")
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
    monkeypatch.setenv("SPECDEMO_SERVERS", "")
    assert main(["run", "two-servers", *(part for server in named for part in ("--server", server))]) == 2
    error = capsys.readouterr().err
    assert error == f"specdemo: two-servers needs 2 servers, the baseline's first, then one per lane; {line}\n"


def output(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("suite", suites())
def test_help_of_a_suite_lists_its_own_options(capsys, suite):
    out = output(capsys, "bench", suite, "--help")
    assert out == output(capsys, "bench", suite, "-h")
    own = {one.flag or f"--{name.replace('_', '-')}" for name, one in settings(suites()[suite]).items()}
    common = {"--out", "--html", "--json", "--markdown", "--force"}
    assert set(re.findall(r"^  (--[a-z-]+)", out, re.MULTILINE)) == own | common
    meaning = " ".join(suites()[suite].__doc__.split())
    assert meaning in " ".join(out.split()) and meaning in " ".join(output(capsys, "bench", "-h").split())
    assert "--repeats" not in own or f"[default: {suites()[suite]().repeats}]" in out
    assert "[default: ]" not in out


def test_a_suite_may_come_after_its_options(capsys):
    line = "draft lengths must be from 1 to 16, not [0]; 0 is always measured"
    assert refusal(capsys, "bench", "--markdown", "--k", "0", "k") == line
    assert refusal(capsys, "bench", "--prompt=k", "--repeats", "0", "k") == "repeats must be 1 or more, not 0"
    assert refusal(capsys, "bench").startswith("no suite given; choose one of k, methods")


@pytest.mark.parametrize("command", [[], ["ui"], ["run"], ["bench"], ["doctor"], ["train"]])
def test_short_help_option_works_everywhere(capsys, command):
    out = output(capsys, *command, "-h")
    assert out == output(capsys, *command, "--help") and out.startswith("Usage: python -m specdemo")
    assert "list[" not in out and "..." not in out.partition("Commands:")[2]


def test_help_of_train_lists_the_recipes(capsys):
    out = output(capsys, "train", "--help")
    assert all(f"\n  {name} " in out for name in [*HEAD_RECIPES, *RECIPES])


def test_the_version_is_printed(capsys):
    assert output(capsys, "--version") == f"specdemo {specdemo.__version__}\n"


@dataclass(frozen=True, slots=True)
class EveryType:
    sure: bool = setting(False, "a bool")
    name: str = setting("x", "a text")
    depth: int = setting(3, "a number", low=1)
    share: float = setting(0.5, "any")
    most: float = setting(0.5, "bounded above", high=1.0)


def test_a_method_drafts_from_files(tmp_path, capsys, monkeypatch):
    for name, content in [("b.txt", b"two"), ("a/one.txt", b"one\r\n"), (".git/no", b"no"), ("no.bin", b"\xff")]:
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_bytes(content)
    race, trace = ["run", "embedded-ngram", "--max-new-tokens", "4", "--out"], tmp_path / "trace.json"
    assert main([*race, str(trace), "--option", f"corpus=@{tmp_path / 'src'}"]) == 0
    assert from_json(trace.read_bytes()).lanes[1].options["corpus"] == "one\n\ntwo"
    capsys.readouterr()
    message = refusal(capsys, *race, str(trace), "--option", "corpus=@none")
    assert message == "cannot read none: No such file or directory; name a text file or a folder after the @"
    (tmp_path / "empty").mkdir()
    message = refusal(capsys, *race, str(trace), "--option", f"corpus=@{tmp_path / 'empty'}")
    assert message == f"{tmp_path / 'empty'} has no text; name a text file or a folder after the @"
    assert "name a text file or a folder" in refusal(capsys, *race, str(trace), "--option", "corpus=@")
    monkeypatch.setattr("specdemo.__main__.FILE_BYTES", 6)
    message = refusal(capsys, *race, str(trace), "--option", f"corpus=@{tmp_path / 'src'}")
    assert message.endswith("src have more than 6 characters; name a smaller folder")


def test_options_are_listed_with_the_values_they_accept(capsys, monkeypatch):
    monkeypatch.setattr(NoDraft, "Options", EveryType)
    listed = re.findall("    --option (.*)", output(capsys, "methods").partition("draft_model:")[0])
    assert listed == [
        "sure=false  true or false  a bool",
        "name=x  text  a text",
        "depth=3  at least 1  a number",
        "share=0.5  any number  any",
        "most=0.5  at most 1.0  bounded above",
    ]
    for option, line in [("sure=2", "true or false, not '2'"), ("depth=0", "at least 1, not 0")]:
        given = ["run", "embedded-ngram", "--method", "none", "--option", option]
        assert refusal(capsys, *given) == f"option {option[:-2]!r} must be {line}"


def test_suggestions_name_the_program_that_was_started(tmp_path, capsys, monkeypatch):
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    for program, name in [
        ("/usr/bin/specdemo", "specdemo"),
        ("specdemo.exe", "specdemo"),
        ("app.py", "python -m specdemo"),
    ]:
        monkeypatch.setattr(sys, "argv", [program])
        assert f"with {name} run PRESET --out" in refusal(capsys, "replay", str(tmp_path / "bad.json"))
        assert output(capsys, "run", "-h").startswith(f"Usage: {name} run ")


COMPLETES = """
import os
import sys
from contextlib import suppress

words, sys.argv = sys.argv[1:], ["specdemo"]
from specdemo.__main__ import main

os.environ["_SPECDEMO_COMPLETE"] = "complete_bash"
for line in words:
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    with suppress(SystemExit):
        main()
del os.environ["_SPECDEMO_COMPLETE"]
main(["--help"])
"""


def test_a_shell_completes_commands_suites_and_presets():
    """Under the name of the installed program."""
    done = run("-c", COMPLETES, "specdemo ben", "specdemo bench los", "specdemo run embedded-cas")
    assert done.stdout.split()[:3] == ["bench", "losslessness", "embedded-cascade"], done.stderr
    assert "--install-completion" in done.stdout


def documented():
    """Yield the command lines of specdemo in the documentation, without comments."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        for command in re.findall(r"(?:python -m |`)specdemo ([a-z-][^`#;|\\\n]*)", text):
            yield pytest.param(shlex.split(command), id=f"{page.name}: {command.strip()}")


@pytest.mark.parametrize("arguments", list(documented()))
def test_documented_commands_exist_with_their_options(arguments):
    command, context = get_command(app), None
    while isinstance(command, TyperGroup) and arguments and not arguments[0].startswith("-"):
        context = command.make_context(command.name, list(arguments), parent=context, resilient_parsing=True)
        command, arguments = command.get_command(context, arguments[0]), arguments[1:]
        assert command is not None
    hidden = {flag for option in command.params if getattr(option, "hidden", False) for flag in option.opts}
    assert not hidden & {argument.partition("=")[0] for argument in arguments}
    try:
        command.make_context(command.name, list(arguments), parent=context)
    # The documentation may omit arguments but must not name unknown options.
    except (ValueError, TyperException) as error:
        assert "No such" not in str(getattr(error, "message", error))


def test_why_explains_an_output_and_its_baseline(capsys):
    log, plain = (str(SAMPLES / f"llamacpp-{name}.log") for name in ("long", "plain"))
    report = output(capsys, "why", log, "--baseline", plain)
    assert report.startswith("Slower (") and "main cause: k = 27 is too large" in report
    assert "--spec-draft-n-max" in report and "break-even" in report
    assert "Unknown, and would make this more certain: " in report


def test_why_changes_nothing_about_a_run_that_is_fast(capsys):
    report = output(capsys, "why", *"--k 4 --length 4.2 --without 100 --with 300".split())
    assert report.startswith("Faster (3.00x)") and "Nothing has to change." in report
    assert "What to change" not in report and "No diagnosis" not in report
    assert "Nothing has to change" not in output(capsys, "why", "--length", "2")


def test_why_takes_four_numbers_and_prints_json(capsys):
    numbers = "--k 4 --length 2.05 --without 100 --with 52 --engine vllm --json".split()
    found = json.loads(output(capsys, "why", *numbers))
    assert found["step_cost"] == pytest.approx(2.05 / 0.52)
    assert found["best_k"] == 0 and "--speculative-config" in found["recommendations"][0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "no output given; name a file"),
        (["no-such-file"], "cannot read no-such-file"),
        (["-", "--baseline", "-"], "standard input can be read once"),
        (["--k", "2", "--length", "5"], "outputs 1 to k + 1 tokens, not 5"),
        (["-", "--k", "4", "--engine=vlm"], "unknown engine 'vlm'; did you mean 'vllm'?"),
        (["-", "--k", "4", "--method=eagel"], "unknown drafting method 'eagel'; did you mean 'eagle'?"),
    ],
)
def test_why_refuses_in_one_line(capsys, arguments, line):
    assert line in refusal(capsys, "why", *arguments)
