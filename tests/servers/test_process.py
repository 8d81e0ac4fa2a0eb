"""Engines started for a preset, with a stand-in for vLLM that is found and answers like the real one."""

import json
import signal
import sys
from contextlib import nullcontext
from subprocess import PIPE

import psutil
import pytest

from specdemo.__main__ import main
from specdemo.servers.engines import serving_engine
from specdemo.servers.process import EPHEMERAL, free_port
from tests.processes import start
from tests.servers.stand_in import gone, make, started

SERVE = ("-m", "specdemo", "serve", "embedded-draft", "--command")


@pytest.fixture
def engine(tmp_path):
    return make(tmp_path)


def speculation(entry):
    """Return the speculative config of a started engine."""
    return json.loads(entry["args"][entry["args"].index("--speculative-config") + 1])


def test_a_race_on_engines_that_are_started_for_it(engine, tmp_path):
    out = tmp_path / "trace.json"
    assert main(["run", "embedded-draft", "--engine", "vllm", "--command", str(engine), "--out", str(out)]) == 0
    plain, drafting = started(engine)
    assert "--no-enable-prefix-caching" in plain["args"] and "--speculative-config" not in plain["args"]
    assert speculation(drafting)["method"] == "draft_model"
    lanes = json.loads(out.read_text(encoding="utf-8"))["lanes"]
    ports = [entry["args"][entry["args"].index("--port") + 1] for entry in (plain, drafting)]
    assert [lane["remote"]["server"] for lane in lanes] == [f"127.0.0.1:{port}" for port in ports]
    assert lanes[1]["name"] == f"Draft 1.3M, k = 4 on 127.0.0.1:{ports[1]}"
    # Plain text is sent without a chat template.
    assert lanes[1]["text"] == "Once upon a time" and lanes[1]["note"] is None
    assert gone(engine)


def test_no_outgoing_connection_takes_the_port_of_a_server():
    """A connection could otherwise take it while the server starts."""
    assert all(1024 <= free_port() < EPHEMERAL for _ in range(20))


def test_missing_feature_is_rejected_before_start(engine, capsys):
    command = ["run", "--engine", "vllm", "--command", str(engine)]
    assert main([*command, "embedded-ngram"]) == 2
    assert "vLLM 9.9 has no method 'ngram'" in capsys.readouterr().err
    assert main([*command, "embedded-mlp-speculator"]) == 2
    assert "lane 1: mlp_speculator is not served: vLLM 0.32 and later no longer have it" in capsys.readouterr().err
    assert not (engine.parent / "started").exists()


def test_cpu_has_one_attention_backend(engine):
    assert main(["run", "embedded-dflash", "--engine", "vllm", "--command", str(engine)]) == 0
    assert "--attention-backend" not in started(engine)[1]["args"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            ["--engine", "vllm", "--command", "/nowhere/vllm"],
            "there is no program /nowhere/vllm; install it or pass its path",
        ),
        (["--engine", "vllm", "--server", "http://127.0.0.1:1"], "give one of them"),
    ],
)
def test_bad_input_is_one_line(arguments, reason, capsys):
    assert main(["run", "embedded-draft", *arguments]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "line"),
    [
        ("vllm", "vLLM is not installed; run: python3 -m venv vllm && vllm/bin/pip install vllm ("),
        ("sglang", "SGLang is not installed; run: python3 -m venv sglang && sglang/bin/pip install sglang ("),
        ("llama-server", "llama-server is not installed; run: brew install llama.cpp (or see "),
    ],
)
def test_an_engine_that_is_not_installed_is_named_with_its_install_command(engine, line, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    for command in ("run", "serve"):
        assert main([command, "embedded-draft", "--engine", engine]) == 2
        assert capsys.readouterr().err.startswith(f"specdemo: {line}")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize("code", [0, 1])
def test_sglang_is_looked_up_in_the_python_on_the_path(code, monkeypatch, tmp_path):
    (tmp_path / "python").write_text(f"#!/bin/sh\nexit {code}\n", encoding="utf-8")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="SGLang is not installed; run: ") if code else nullcontext():
        assert serving_engine("sglang").find() == str(tmp_path / "python")


def test_an_engine_that_does_not_start_is_quoted(engine, monkeypatch, capsys):
    monkeypatch.setenv("BROKEN", "1")
    assert main(["run", "embedded-draft", "--engine", "vllm", "--command", str(engine)]) == 2
    assert capsys.readouterr().err.endswith("exited; the end of its log: no such architecture\n")


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_server_outlives_the_command_that_started_it(engine, number):
    with start(*SERVE, engine, stdout=PIPE, text=True) as serving:
        assert serving.stdout.readline().startswith("python -m specdemo run embedded-draft --server http://127.0.0.1:")
        assert len(started(engine)) == 2 and all(psutil.pid_exists(entry["pid"]) for entry in started(engine))
        serving.send_signal(number)
        serving.wait(60)
    assert gone(engine)


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_serve_ends_all_servers_when_one_of_them_ends(engine):
    with start(*SERVE, engine, stdout=PIPE, stderr=PIPE, text=True) as serving:
        assert serving.stdout.readline().startswith("python -m specdemo run embedded-draft")
        psutil.Process(started(engine)[1]["pid"]).kill()
        assert serving.wait(60) == 2
        assert f"{engine} at 127.0.0.1:" in serving.stderr.read()
    assert gone(engine)


@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_ctrl_c_waits_until_the_servers_have_ended(engine, monkeypatch):
    monkeypatch.setenv("SLOW", "1")
    with start(*SERVE, engine, stdout=PIPE, text=True) as serving:
        serving.stdout.readline()
        serving.send_signal(signal.SIGINT)
        assert serving.wait(60) == 130
        assert not any(psutil.pid_exists(entry["pid"]) for entry in started(engine))
