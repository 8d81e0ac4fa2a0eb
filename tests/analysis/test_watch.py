"""Watching a server: rows between readings, the observation over all of them, and the command."""

import json
from itertools import count

import pytest

from specdemo.__main__ import main
from specdemo.analysis import watch as module
from specdemo.analysis.watch import Watch
from tests.completion_server import completion_server, head, record_pauses

VLLM = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}
"""


def vllm(steps, running=2.0):
    """Return the metrics after some steps of k = 2, of which two thirds accept the first token and one third both."""
    first, second = 2 * steps // 3, steps // 3
    counts = {"drafts": steps, "drafted": 2 * steps, "accepted": first + second, "first": first, "second": second}
    return VLLM.format(running=running, tokens=2 * steps, **counts)


def test_rows_are_differences_and_the_observation_covers_all_readings():
    watch = Watch("http://a:1", plain_tokens_per_s=100.0)
    for at, steps in ((10.0, 300), (15.0, 600), (20.0, 600), (25.0, 1200)):
        watch.add(at, vllm(steps, running=2.0 if steps > 300 else 0.0))
    assert [row["time"] for row in watch.rows] == [5.0, 10.0, 15.0]
    assert [row["tokens/s"] for row in watch.rows] == [120.0, 0.0, 240.0]
    assert [row["accepted"] for row in watch.rows] == [0.5, None, 0.5]  # nothing was drafted in between
    assert (watch.rows[0]["tokens/pass"], watch.rows[0]["accepted at 1"]) == (2.0, 0.6667)
    found = watch.observation()
    assert (found.engine, found.steps, found.accepted_length, found.drafted_per_step) == ("vllm", 900, 2.0, 2.0)
    assert found.by_position == (0.6667, 0.3333) and found.batch_size == 2.0
    assert found.tokens_per_s == 180.0  # over the ten seconds in which the server generated
    assert watch.diagnosis().observation.speedup.value == pytest.approx(1.8)
    assert watch.sentence() == watch.diagnosis().sentence


def test_a_drafter_that_stops_between_two_readings_is_named():
    watch = Watch("http://a:1", plain_tokens_per_s=100.0)
    for reading in range(7):
        works, counts = min(reading, 3), dict.fromkeys(("drafts", "drafted", "accepted", "first", "second"), 0)
        counts |= {"drafts": 300 * reading, "drafted": 600 * reading, "accepted": 300 * works}
        counts |= {"first": 200 * works, "second": 100 * works}
        watch.add(5.0 * reading, VLLM.format(running=1, tokens=300 * reading + 300 * works, **counts))
    found = watch.diagnosis()
    assert found.cause.title == "since reading 4 of 6, almost no draft token is accepted"
    assert "0 of 1,800 draft tokens" in found.cause.evidence and "(slower, 0.60x) there" in found.cause.evidence
    watch.add(50.0, vllm(3))  # a new server has none of the readings
    watch.add(55.0, vllm(300))
    assert watch.observation().contrast is None


def test_speculation_that_never_drafts_is_named():
    watch = Watch("http://a:1")
    for at in (0.0, 5.0):
        counts = dict.fromkeys(("drafts", "drafted", "accepted", "first", "second"), 0)
        watch.add(at, VLLM.format(running=1, tokens=100 + 60 * at, **counts))
    assert watch.sentence().startswith("Speculation is on and never drafted")


@pytest.mark.parametrize(
    ("text", "engine", "row"),
    [
        (
            "sglang:generation_tokens_total {n}\nsglang:num_running_reqs 3\nsglang:spec_accept_length 2.5\n",
            "sglang",
            2.5,
        ),
        ("llamacpp:tokens_predicted_total {n}\nllamacpp:requests_processing 1\n", "llama-server", None),
    ],
)
def test_every_engine_is_known_by_its_counter_of_tokens(text, engine, row):
    watch = Watch("http://a:1")
    for at, tokens in ((0.0, 100), (2.0, 300)):
        watch.add(at, text.format(n=tokens))
    assert watch.engine.name == engine and watch.rows[0]["tokens/s"] == 100.0
    assert watch.rows[0]["tokens/pass"] == row
    if row is None:
        assert watch.sentence().endswith("the metrics contain no draft tokens.")


def test_a_restarted_server_starts_again():
    watch = Watch("http://a:1")
    for at, steps in ((0.0, 900), (5.0, 30), (10.0, 330)):
        watch.add(at, vllm(steps))
    assert [row["tokens/s"] for row in watch.rows] == [120.0]
    assert watch.observation().steps == 300


def test_only_the_last_readings_are_stored(monkeypatch):
    watch = Watch("http://a:1")
    for at in range(module.MAX_READINGS + 3):
        watch.add(float(at), vllm(3 * at))
    assert len(watch.rows) == module.MAX_READINGS and watch.rows[-1]["time"] == module.MAX_READINGS + 2


@pytest.mark.parametrize("bad", ["NaN", "-5", "1e400", "none", "9" * 400])
def test_hostile_counters_are_left_out(bad):
    watch = Watch("http://a:1")
    watch.add(0.0, vllm(300))
    watch.add(5.0, vllm(600).replace('drafts_total{engine="0"} 600', f'drafts_total{{engine="0"}} {bad}'))
    assert watch.rows[0]["tokens/pass"] is None and watch.rows[0]["tokens/s"] == 120.0
    assert watch.diagnosis().causes == ()


def readings_of(monkeypatch, *texts):
    """Let a second pass between two readings of a scripted server."""
    seconds = map(float, count())
    monkeypatch.setattr(module, "monotonic", lambda: next(seconds))
    return completion_server([], texts, models=("m",))


def test_the_command_prints_a_line_per_reading_and_the_diagnosis(monkeypatch, capsys):
    with readings_of(monkeypatch, vllm(300), vllm(600)) as server:
        assert main(["watch", server.address, "--every", "0.2", "--readings", "2", "--without", "500"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert "acceptance rate: 50 %, mean accepted length: 2.00, accepted at 1: 67 %, accepted at 2: 33 %" in first
    assert rest[0].startswith("Slower (") and "likely main cause: " in rest[0]
    assert rest[1] == "Causes, by the speed-up without each:" and rest[2].startswith("1. ")


def test_the_command_prints_json(monkeypatch, capsys):
    with readings_of(monkeypatch, vllm(300), vllm(600)) as server:
        assert main(["watch", server.address, "--every", "0.2", "--readings", "2", "--json"]) == 0
    row, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["accepted"] == 0.5 and end["diagnosis"]["observation"]["engine"] == "vllm"


def test_a_server_that_loads_its_model_is_read_once_it_is_ready(monkeypatch, capsys):
    pauses = record_pauses(monkeypatch)
    loading, *ready = [head(status=503)], *([head("text/plain"), vllm(n).encode()] for n in (300, 300, 600))
    answers = iter([loading, loading, *ready])
    with completion_server([], faults={"metrics": lambda: next(answers)}) as server:
        assert main(["watch", server.address, "--every", "0.2", "--readings", "2"]) == 0
    assert "mean accepted length: 2.00" in capsys.readouterr().out and pauses == [1.0]
    with completion_server([], faults={"metrics": lambda: [head(status=503)]}) as server:
        assert main(["watch", server.address, "--readings", "1"]) == 2
    assert capsys.readouterr().err.endswith("is not ready (status 503); try again later\n")


def test_a_server_without_metrics_is_one_line(capsys):
    with completion_server([], models=("m",)) as server:
        assert main(["watch", server.address, "--readings", "1"]) == 2
    assert capsys.readouterr().err.rstrip().endswith("; llama-server needs --metrics and SGLang --enable-metrics")
    with completion_server([], ["up 1\n"], models=("m",)) as server:
        assert main(["watch", server.address, "--readings", "1"]) == 2
    assert "has no metrics of vLLM, SGLang, llama-server;" in capsys.readouterr().err
