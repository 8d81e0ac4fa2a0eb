"""Exports of stored runs: the numbers are those of the trace, and other tools can read them."""

import json
from copy import deepcopy

import pytest

from specdemo.__main__ import main
from specdemo.core.tally import summarise
from specdemo.diagnosis.export import aiperf_records, prometheus_text
from specdemo.presets.recorded import load_trace, recorded
from specdemo.servers.counters import draft_counters, draft_names, parse


@pytest.fixture
def trace():
    return deepcopy(recorded("embedded-draft"))


def test_records_of_aiperf_hold_the_numbers_of_each_lane(trace):
    plain, drafting = map(json.loads, aiperf_records(trace).splitlines())
    assert "spec_decode_acceptance" not in plain and plain["error"] is None
    numbers, found = summarise(trace.lanes[1]), drafting["spec_decode_acceptance"]
    assert found["mean_acceptance_length"] == numbers["tokens_per_step"] and found["num_spec_tokens"] == 4
    steps = sum(found["acceptance_histogram"].values())
    accepted = sum(int(n) * count for n, count in found["acceptance_histogram"].items())
    assert (steps, accepted) == (found["num_spec_steps"], found["num_accepted_draft_tokens"])
    metrics = {name: entry["value"] for name, entry in drafting["metrics"].items()}
    assert metrics["output_sequence_length"] == len(trace.lanes[1].token_ids)
    decode_ms = metrics["inter_token_latency"] * (metrics["output_sequence_length"] - 1)
    assert metrics["request_latency"] == pytest.approx(metrics["time_to_first_token"] + decode_ms)
    assert metrics["output_token_throughput_per_user"] == numbers["tokens_per_s"]


def test_prometheus_text_gives_the_acceptance_of_the_lane(trace):
    text = prometheus_text(trace)
    prefix = "specdemo:spec_decode_num_"
    stats = draft_counters({}, parse(text, draft_names(prefix)), prefix, "specdemo")
    numbers = summarise(trace.lanes[1])
    assert {name: stats.counters[name] for name in ("steps", "drafted", "accepted")} == {
        name: numbers[name] for name in ("steps", "drafted", "accepted")
    }
    assert sum(stats.accept_by_position) == pytest.approx(numbers["accepted"] / numbers["steps"], abs=0.001)
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len({*families}) == 8


def test_label_values_are_escaped(trace):
    trace.lanes[0].name = 'a"b\\c\nd'
    assert 'lane="a\\"b\\\\c\\nd"' in prometheus_text(trace)


def test_the_command_prints_either_format(capsys, tmp_path):
    path = tmp_path / "trace.json"
    assert main(["run", "embedded-ngram", "--max-new-tokens", "8", "--out", str(path)]) == 0
    capsys.readouterr()
    assert main(["export", str(path), "--to", "aiperf"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(load_trace(path).lanes)
    assert main(["export", str(path), "--to", "prometheus"]) == 0
    assert capsys.readouterr().out.startswith("# HELP specdemo:generation_tokens ")
    assert main(["export", str(path), "--to", "promethius"]) == 2
    assert "did you mean" in capsys.readouterr().err
