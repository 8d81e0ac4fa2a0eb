"""A fourth serving engine: one class and one entry of the registry are enough for commands, help, page, counters and
lanes.
"""

import json
import shlex
import subprocess
import sys

import pytest

from specdemo.__main__ import main
from specdemo.bench.load_servers import Fleet
from specdemo.bench.suites import suite
from specdemo.engine.session import Session
from specdemo.methods.lookahead import Lookahead
from specdemo.presets.files import preset
from specdemo.presets.serve import serve_commands
from specdemo.servers import address
from specdemo.servers.counters import ServerStats
from specdemo.servers.engines import ENGINES, acceptance, stats_between
from specdemo.ui import controls
from tests.completion_server import completion_server, piece
from tests.servers.echo import DRAFTS, Echo
from tests.servers.stand_in import gone, make, started


@pytest.fixture
def echo(monkeypatch):
    monkeypatch.setitem(ENGINES, "echo", Echo())
    monkeypatch.setattr(address, "_added", {})
    monkeypatch.delenv(address.LISTED, raising=False)


def metrics(drafts, drafted, accepted):
    names = zip(("drafts", "draft_tokens", "accepted_tokens"), (drafts, drafted, accepted), strict=True)
    return "\n".join(f'{DRAFTS}{name}_total{{engine="0"}} {value}' for name, value in names)


def test_commands(echo, capsys):
    assert main(["serve-command", "embedded-ngram", "--for", "echo", "--gpus", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert shlex.split(lines[2])[:3] == ["echo-server", "--serve", "stories"] and lines[2].endswith("--gpus 2")
    assert lines[4].endswith("--port 8001 --gpus 2 --drafts 8 --longest 8")
    assert serve_commands(preset("embedded-draft"), "echo")[3].endswith("not served, Echo does not support this method")


HELP = """
from specdemo.servers.engines import ENGINES
from tests.servers.echo import Echo
ENGINES["echo"] = Echo()
from specdemo.__main__ import main
for command in ["run"], ["serve"], ["serve-command"], ["ui"], ["bench", "load"]:
    main([*command, "--help"])
"""


def test_help_lists_it():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    assert " ".join(done.stdout.split()).count("vllm, sglang, llamacpp or echo") == 5


def test_an_engine_that_is_not_installed_is_named_with_its_install_command(echo, capsys):
    assert main(["run", "embedded-ngram", "--engine", "echo"]) == 2
    assert capsys.readouterr().err == "specdemo: Echo is not installed; run: pip install echo-server\n"
    assert main(["run", "embedded-ngram", "--engine", "ecco"]) == 2
    assert capsys.readouterr().err == "specdemo: unknown engine 'ecco'; did you mean 'echo'?\n"


def test_the_page_offers_an_engine_that_it_may_start(echo, monkeypatch):
    monkeypatch.setattr(address, "startable", {})
    monkeypatch.setattr("specdemo.ui.app.startable", address.startable)
    monkeypatch.setattr("specdemo.ui.controls.startable", address.startable)
    monkeypatch.setattr("specdemo.ui.page.serve", lambda *given, **named: None)
    assert main(["ui", "--engines", f"echo={sys.executable}"]) == 0
    assert address.startable == {"echo": sys.executable}
    assert controls._servers(None) == [("this machine", ""), ("Echo", "echo")]
    assert address.check_listed("echo") == "echo"


def test_counters_and_chunks(echo):
    stats = stats_between(metrics(2, 8, 5), metrics(4, 16, 11))
    assert stats.counters == {
        "steps": 2,
        "drafted": 8,
        "accepted": 6,
        "acceptance_rate": 0.75,
        "tokens_per_step": 4.0,
    }
    assert stats.source.startswith("Echo's counters over the run")
    assert acceptance({"echo_rate": 0.5}).counters == {"acceptance_rate": 0.5} and acceptance({}) == ServerStats()
    del ENGINES["echo"]
    assert stats_between(metrics(2, 8, 5), metrics(4, 16, 11)) == ServerStats()


def test_a_run_starts_its_servers(echo, tmp_path):
    program, out = make(tmp_path), tmp_path / "trace.json"
    assert main(["run", "embedded-ngram", "--engine", "echo", "--command", str(program), "--out", str(out)]) == 0
    plain, drafting = started(program)
    assert plain["args"][:2] == ["--serve", "stories"] and "--drafts" not in plain["args"]
    assert drafting["args"][-4:] == ["--drafts", "8", "--longest", "8"]
    assert [lane["text"] for lane in json.loads(out.read_text(encoding="utf-8"))["lanes"]] == ["Once upon a time"] * 2
    assert gone(program)


def test_a_lane_has_the_statistics_of_its_stream(echo):
    pieces = [piece("a"), piece("b", finish="stop") | {"echo_rate": 0.25}]
    with completion_server(pieces) as server:
        address.allow([server.address])
        trace = Session().run(preset("embedded-ngram").on_servers([server.address] * 2))
    lane = trace.lanes[1]
    assert lane.summary["acceptance_rate"] == 0.25 and lane.remote.source == "Echo's rate"


def test_load_tests_start_it_and_print_no_schedule_for_it(echo):
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    fleet = Fleet.of(suite("load", servers=urls, ks=(4,), preset="embedded-ngram"), (0, 4))
    assert [hint.partition(":")[0] for hint in fleet.paste([[1, 3, 4]])] == ["For vLLM", "For SGLang"]
    with pytest.raises(ValueError, match="--schedule needs vLLM and --concurrency"):
        suite("load", engine="echo", schedule=True)
    with pytest.raises(ValueError, match="Echo is not installed"):
        Fleet.of(suite("load", engine="echo"), (0, 4))


def test_a_method_of_another_package_declares_its_flags(monkeypatch):
    chosen = preset("embedded-ngram").with_changes(lanes=[{"method": "lookahead", "k": 3}])
    assert serve_commands(chosen, "sglang")[3].endswith("not served, SGLang does not support this method")
    monkeypatch.setattr(Lookahead, "serves", {"sglang": lambda model, k, options: ["--lookahead", str(k)]})
    assert serve_commands(chosen, "sglang")[4].endswith("--lookahead 3")
    assert serve_commands(chosen, "vllm")[3].endswith("not served, vLLM does not support this method")
