"""A fourth serving engine: one class and one entry of the registry are enough for commands, help, page, counters and
lanes.
"""

import json
import shlex

import pytest

from specdemo.__main__ import main
from specdemo.engine.session import Session
from specdemo.methods.lookahead import Lookahead
from specdemo.presets.files import preset
from specdemo.presets.serve import serve_commands, served
from specdemo.servers import address
from specdemo.servers.counters import ServerStats
from specdemo.servers.engines import ENGINES, acceptance, stats_between
from specdemo.servers.engines.base import Installed
from tests.completion_server import completion_server, piece
from tests.servers.echo import DRAFTS, Echo


@pytest.fixture
def echo(monkeypatch):
    monkeypatch.setitem(ENGINES, "echo", Echo())
    monkeypatch.setenv(address.LISTED, "")


def metrics(drafts, drafted, accepted):
    names = zip(("drafts", "draft_tokens", "accepted_tokens"), (drafts, drafted, accepted), strict=True)
    return "\n".join(f'{DRAFTS}{name}_total{{engine="0"}} {value}' for name, value in names)


def test_commands(echo, capsys):
    assert main(["serve-command", "embedded-ngram", "--for", "echo", "--gpus", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert shlex.split(lines[2])[:3] == ["echo-server", "--serve", "stories"] and lines[2].endswith("--gpus 2")
    assert lines[4].endswith("--port 8001 --gpus 2 --drafts 8 --longest 8")
    assert serve_commands(preset("embedded-draft"), "echo")[3].endswith("not served, Echo does not support this method")


def test_an_unknown_engine_is_one_line(echo, capsys):
    assert main(["run", "embedded-ngram", "--engine", "ecco"]) == 2
    assert capsys.readouterr().err == "specdemo: unknown engine 'ecco'; did you mean 'echo'?\n"


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


def test_a_lane_has_the_statistics_of_its_stream(echo):
    pieces = [piece("a"), piece("b", finish="stop") | {"echo_rate": 0.25}]
    with completion_server(pieces) as server:
        address.allow([server.address])
        trace = Session().run(preset("embedded-ngram").on_servers([server.address] * 2))
    lane = trace.lanes[1]
    assert lane.summary["acceptance_rate"] == 0.25 and lane.remote.source == "Echo's rate"


def test_a_method_of_another_package_declares_its_flags(monkeypatch):
    chosen = preset("embedded-ngram").with_changes(lanes=[{"method": "lookahead", "k": 3}])
    assert serve_commands(chosen, "sglang")[4].endswith("not served, SGLang does not support this method")
    monkeypatch.setattr(Lookahead, "serves", {"sglang": lambda model, k, options: ["--lookahead", str(k)]})
    assert serve_commands(chosen, "sglang")[5].endswith("--lookahead 3")
    assert serve_commands(chosen, "vllm")[4].endswith("not served, vLLM does not support this method")


@pytest.mark.parametrize(
    ("version", "reports"), [("0.26.1", False), ("0.27.0", True), ("0.32.0+cpu", True), ("1.0", True)]
)
def test_vllm_is_started_with_counts_per_answer_if_it_has_them(version, reports):
    vllm, installed = ENGINES["vllm"], Installed(version, ["ngram"], 1)
    for lane, drafts in enumerate((False, True)):
        command = [*served(preset("embedded-ngram"), "vllm")][lane].command
        command, _ = vllm.fit(command, installed, lane, 2, 1)
        assert ("--per-request-spec-decode-metrics" in command) == (reports and drafts)


TOTALS = {"drafted": 129, "accepted": 10, "acceptance_rate": 0.0775}
# An answer of each engine as its source or documentation shows it.
REPORTS = {
    # vllm: docs/features/speculative_decoding, "Per-Request Acceptance Metrics"
    "vllm": (
        {
            "metrics": {
                "speculative_decoding": {
                    "mean_acceptance_length": 1.2325581395348837,
                    "draft_acceptance_rate": 0.07751937984496124,
                    "acceptance_histogram": [39, 1, 0, 3],
                    "num_spec_steps": 43,
                    "num_accepted_draft_tokens": 10,
                    "num_draft_tokens": 129,
                    "num_spec_tokens": 3,
                }
            }
        },
        TOTALS | {"steps": 43, "tokens_per_step": 1.2326},
        [39, 1, 0, 3],
    ),
    # sglang: srt/entrypoints/openai/protocol.py, SpecTokensDetails
    "sglang": (
        {
            "sglext": {
                "spec_tokens_details": {
                    "spec_accept_rate": 0.0775,
                    "spec_accept_length": 1.23,
                    "spec_num_correct_drafts": 10,
                    "spec_num_proposed_drafts": 129,
                    "spec_verify_ct": 43,
                    "spec_correct_drafts_histogram": [39, 1, 0, 3],
                }
            }
        },
        TOTALS | {"steps": 43, "tokens_per_step": 1.2326},
        [39, 1, 0, 3],
    ),
    "sglang without steps": (
        {"sglext": {"spec_tokens_details": {"spec_num_correct_drafts": 0, "spec_num_proposed_drafts": 5}}},
        {"drafted": 5, "accepted": 0, "acceptance_rate": 0.0},
        [],
    ),
    # of them, 13 steps verified one token and 30 verified three
    "sglang DSpark": (
        {
            "sglext": {
                "spec_tokens_details": {
                    "spec_num_correct_drafts": 10,
                    "spec_num_proposed_drafts": 129,
                    "spec_verify_ct": 43,
                    "spec_correct_drafts_histogram": [39, 1, 0, 3],
                    "spec_cap_lens_histogram": [0, 0, 13, 0, 30],
                }
            }
        },
        {"steps": 43, "tokens_per_step": 1.2326, "drafted": 103, "accepted": 10, "unverified": 26}
        | {"acceptance_rate": 0.0971},
        [39, 1, 0, 3],
    ),
    # llama.cpp: tools/server, result_timings::to_json
    "llama.cpp": ({"timings": {"predicted_n": 53, "draft_n": 129, "draft_n_accepted": 10}}, TOTALS, []),
    # mlx-vlm: mlx_vlm/server/generation.py
    "mlx-vlm": (
        {"timings": {"draft_kind": "eagle3", "draft_rounds": 43, "draft_n": 129, "draft_n_accepted": 10}},
        TOTALS | {"steps": 43, "tokens_per_step": 1.2326},
        [],
    ),
    # LM Studio: the log of 0.4.24, and the release notes of 0.3.10
    "LM Studio": (
        {
            "usage": {
                "total_draft_tokens_count": 129,
                "accepted_draft_tokens_count": 10,
                "rejected_draft_tokens_count": 119,
            }
        },
        TOTALS,
        [],
    ),
    "LM Studio 0.3": (
        {
            "usage": {"completion_tokens": 20},
            "stats": {"total_draft_tokens_count": 129, "accepted_draft_tokens_count": 10},
        },
        TOTALS,
        [],
    ),
    # OpenAI's API reference, "completion_tokens_details"
    "the server": (
        {"usage": {"completion_tokens_details": {"accepted_prediction_tokens": 10, "rejected_prediction_tokens": 119}}},
        TOTALS,
        [],
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_an_answer_is_recognised_by_its_fields(name):
    chunk, counters, histogram = REPORTS[name]
    stats = acceptance(chunk)
    assert stats.counters == counters and stats.accept_histogram == histogram
    assert name.split()[0].lower() in stats.source.lower() and "for this answer" in stats.source
    assert len(stats.accept_by_position) == max(len(histogram) - 1, 0)


def test_a_lane_whose_drafts_are_verified_in_part_says_so(monkeypatch):
    monkeypatch.setenv(address.LISTED, "")
    counts = {"num_spec_steps": 1, "num_accepted_draft_tokens": 0, "num_draft_tokens": 3}
    pieces = [piece("a"), piece("b", finish="stop") | {"metrics": {"speculative_decoding": counts}}]
    with completion_server(pieces) as server:
        address.allow([server.address])
        lanes = [{"method": "suffix"}, {"method": "adaptive", "options": {"drafter": "suffix"}}]
        chosen = preset("embedded-ngram").with_changes(lanes=lanes)
        trace = Session().run(chosen.on_servers([server.address] * 3))
    assert ["rejected or unverified" in (lane.note or "") for lane in trace.lanes] == [False, False, True]


@pytest.mark.parametrize(
    "chunk",
    [
        {"usage": {"completion_tokens": 20}},  # Ollama, mlx-lm and TGI
        {"usage": {"completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}}},
        {"metrics": {"speculative_decoding": None}},
        {"timings": {"prompt_n": 5}},
    ],
)
def test_an_answer_without_counts_is_unknown(chunk):
    assert not acceptance(chunk).counters


VALUES = [None, True, -1, 1.5, 10**9, 10**400, float("nan"), "5", [], {}, [[1]], [-1], ["x"], [10**9] * 3, [1] * 4000]


def leaves(value, path=()):
    """Yield the path of every field of a chunk, objects included."""
    if path:
        yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from leaves(part, (*path, key))


def changed(value, path, new):
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("name", REPORTS)
def test_wrong_values_of_a_field_are_unknown_or_consistent(name):
    chunk = REPORTS[name][0]
    for path in leaves(chunk):
        for value in VALUES:
            stats = acceptance(changed(chunk, path, value))
            json.dumps([stats.counters, stats.accept_by_position, stats.accept_histogram], allow_nan=False)
            rate = stats.counters.get("acceptance_rate")
            assert rate is None or 0 <= rate <= 1
            assert stats.counters.get("accepted", 0) <= stats.counters.get("drafted", 0)
            assert len(stats.accept_histogram) <= 1025


def test_steps_that_contradict_the_totals_are_left_out():
    steps = {"per_step_drafted": [3] * 43, "per_step_accepted": [0] * 39 + [1, 3, 3, 3]}
    chunk = {"metrics": {"speculative_decoding": REPORTS["vllm"][0]["metrics"]["speculative_decoding"] | steps}}
    assert acceptance(chunk).drafts[-1] == (3, 3) and len(acceptance(chunk).drafts) == 43
    for field, value in ("accepted", [0] * 43), ("accepted", [3] * 42), ("drafted", [1] * 43), ("drafted", None):
        path = ("metrics", "speculative_decoding", f"per_step_{field}")
        assert acceptance(changed(chunk, path, value)).drafts is None
