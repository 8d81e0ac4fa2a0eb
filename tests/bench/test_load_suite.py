"""The load suite on scripted servers: counts, comparisons and the resulting schedule."""

import json
import math
import re
from contextlib import ExitStack
from dataclasses import asdict

import pytest

from specdemo.__main__ import main
from specdemo.bench.load_here import Here
from specdemo.bench.load_points import Answer, Journal, Point
from specdemo.bench.load_servers import Fleet
from specdemo.bench.load_suite import _advice, bunched, schedule_of
from specdemo.bench.plot import chart
from specdemo.bench.result import read_result
from specdemo.bench.suites import suite
from specdemo.core.estimate import Estimate
from specdemo.engine.loop import never_cancelled
from specdemo.presets.files import preset
from specdemo.presets.serve import Program
from specdemo.servers.counters import ServerStats
from specdemo.servers.engines.base import Installed
from specdemo.servers.engines.vllm import VLLM
from tests.completion_server import completion_server, piece

WORDS = ["Once", " upon", " a", " time"]
SHORT = {"repeats": 2, "concurrency": (1, 3), "new_tokens": 4, "prompts": ["Tom", "Anna"]}


def metrics_text(*words):
    return [piece(w, total=n, finish="length" if n == len(words) else None) for n, w in enumerate(words, 1)]


def metrics(readings):
    """Return successive /metrics texts of a server that drafts 4 tokens per pass and accepts 3, one pass per text."""
    name = "vllm:spec_decode_num_"
    counts = [{"drafts": n, "draft_tokens": 4 * n, "accepted_tokens": 3 * n} for n in range(readings)]
    return ["".join(f"{name}{what}_total {n}\n" for what, n in of.items()) for of in counts]


@pytest.fixture
def servers():
    """Run a plain and a drafting server that return the same text."""
    with ExitStack() as running:
        plain = running.enter_context(completion_server(metrics_text(*WORDS), models=("stories",)))
        drafting = running.enter_context(completion_server(metrics_text(*WORDS), metrics(40), models=("stories",)))
        yield plain, drafting


def measured(servers, **options):
    options_given = {"servers": [server.address for server in servers], "ks": (0, 4), **SHORT, **options}
    printed, parts = [], []

    def report(share, what, so_far=None):
        printed.append((share, what))
        parts.extend([so_far().rows] if so_far else [])

    result = suite("load", **options_given).run(report, never_cancelled)
    assert [len(rows) for rows in parts[:2]] == ([2] if "rates" in options else [2, 4]) and parts[-1] == result.rows[
        : len(parts[-1])
    ]
    assert all(0.0 <= share <= 1.0 for share, _ in printed) and [share for share, _ in printed] == sorted(
        s for s, _ in printed
    )
    return result


def test_a_gain_with_a_wide_interval_is_marked(servers, monkeypatch):
    monkeypatch.setattr("specdemo.bench.load_suite._gain", lambda own, plain: Estimate(2.0, 1.5, 2.5))
    assert measured(servers).rows[1]["speed-up"].reasons == ("wide interval, 1.50 to 2.50",)


def test_every_k_at_every_load(servers):
    result = measured(servers)
    assert [(row["lane"], row["k"], row["concurrency"]) for row in result.rows] == [
        ("Baseline", 0, 1), ("k = 4", 4, 1), ("Baseline", 0, 3), ("k = 4", 4, 3)
    ]  # fmt: skip
    for plain, drafting in (result.rows[:2], result.rows[2:]):
        assert plain["speed-up"] == Estimate(1.0) and plain["accepted"] is None
        assert (drafting["accepted"], drafting["tokens/pass"]) == (0.75, 4.0)
        assert drafting["output"] == "identical" and drafting["tokens/s"].value > 0
        assert 0 < drafting["TTFT p50"] <= drafting["TTFT p99"]
    options_given = [body["prompt"] for path, body, _ in servers[1].requests if path == "/v1/completions"]
    # the first contact, warm-ups of 1 and 3, then twice 8 requests at concurrency 1 and 12 at concurrency 3
    assert len(options_given) == 2 + 4 + 2 * (8 + 12)
    assert "target" not in result.config and "preset" not in result.config  # the servers' models are not known
    hosts = [server.address[7:] for server in servers]
    assert result.environment["device"] == ", ".join(f"stories at {host}" for host in hosts)
    assert result.environment["served_models"] == dict.fromkeys(hosts, "stories")


def test_random_arrivals_have_the_requested_rate(servers):
    result = measured(servers, rates=(500.0,), requests=5, repeats=1)
    assert [row["rate"] for row in result.rows] == [500.0, 500.0] and result.axis == "rate"
    assert len(servers[0].requests) == 2 + 8 + 5
    assert not any("Schedule" in remark for remark in result.remarks)  # the batch sizes are not known


def test_different_output_is_counted(servers):
    with completion_server(metrics_text("Once", " upon", " the", " time"), models=("stories",)) as wrong:
        result = measured([servers[0], wrong], repeats=1)
    assert [row["output"] for row in result.rows] == ["identical", "8 of 8 differ", "identical", "12 of 12 differ"]


def test_the_command_writes_numbers_and_a_page(servers, tmp_path, capsys):
    named = [part for server in servers for part in ("--server", server.address)]
    options_given = [
        "--k",
        "0,4",
        "--concurrency",
        "1,2",
        "--repeats",
        "1",
        "--new-tokens",
        "4",
        "--slo-ttft",
        "0.0001",
    ]
    files = ["--out", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    assert main(["bench", "load", *named, *options_given, *files]) == 0
    assert "good requests/s" in capsys.readouterr().out
    stored = read_result(tmp_path / "r.json")
    assert all(row["good requests/s"] == Estimate(0.0) for row in stored.rows)  # no request meets the limit
    plain, drafting = chart(stored)["lines"]
    assert (plain["name"], drafting["name"]) == ("Baseline", "k = 4") and plain["texts"] == ["1", "2"]
    assert "Throughput (tokens/s) over latency" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_goodput_counts_requests_within_both_limits():
    answers = [Answer(0, "", 5, ttft, [gap] * 4) for ttft, gap in ((10.0, 1.0), (30.0, 1.0), (10.0, 9.0))]
    point = Point(answers, 2.0, ServerStats())
    assert point.throughput == 7.5
    assert [answer.per_token for answer in answers] == [2.8, 6.8, 9.2]
    assert [point.goodput(*b) for b in ((None, None), (20.0, None), (None, 7.0), (20.0, 7.0))] == [1.5, 1.0, 1.0, 0.5]


def row(at, k, good, speed=1.0, width=0.1, speedup=None):
    """Return a row of a load result whose intervals extend by the fraction `width` on each side."""
    goodput = Estimate(good, good * (1 - width), good * (1 + width)) if good and width else Estimate(good)
    return {
        "lane": f"k = {k}",
        "k": k,
        "concurrency": at,
        "good requests/s": goodput,
        "tokens/s": Estimate(speed),
        "speed-up": speedup or Estimate(1.0),
    }


def test_the_schedule_takes_the_best_k_of_every_load():
    best = {1: (1, 2, 3), 4: (1, 2, 3), 8: (1, 2, 1), 16: (2, 1, 2)}
    rows = [row(at, k, good) for at, goods in best.items() for k, good in zip((0, 3, 5), goods, strict=True)]
    assert schedule_of(rows) == [[1, 7, 5], [8, 15, 3], [16, 16, 0]]
    assert schedule_of([row(2, 0, 0.0, 5.0), row(2, 3, 0.0, 6.0, speedup=Estimate(1.2, 1.1, 1.3))]) == [[1, 2, 3]]


def test_a_gain_without_an_interval_or_within_noise_makes_no_schedule():
    assert schedule_of([row(2, 0, 1.0, width=0.0), row(2, 3, 2.0, width=0.0)]) == [[1, 2, 0]]
    assert schedule_of([row(2, 0, 1.0, width=0.3), row(2, 3, 1.2, width=0.3)]) == [[1, 2, 0]]
    paired = Estimate(1.2, 1.1, 1.3)  # interleaved repeats share their noise
    assert schedule_of([row(2, 0, 1.0, width=0.3), row(2, 3, 1.2, width=0.3, speedup=paired)]) == [[1, 2, 3]]


def test_one_k_serves_all_loads_where_no_other_is_clearly_better():
    goods = {1: (1.0, 2.0, 2.1), 4: (1.0, 2.0, 1.9)}
    rows = [row(at, k, good) for at, some in goods.items() for k, good in zip((0, 3, 5), some, strict=True)]
    assert schedule_of(rows) == [[1, 4, 3]]


def fast(at):
    return [row(at, 0, 1.0), row(at, 4, 2.0, speedup=Estimate(2.0, 1.9, 2.1))]


@pytest.mark.parametrize(
    ("named", "rows", "line"),
    [
        ({}, fast(1), "No recommendation: without --preset the drafter of these servers is unknown."),
        (
            {"preset": "embedded-draft"},
            [row(1, 0, 1.0), row(1, 4, 1.05)],
            "at any of these loads: serve without speculation",
        ),
        ({}, [row(1, 0, 1.0), row(1, 4, 1.05)], "No k is clearly faster than plain decoding"),
    ],
)
def test_without_a_preset_or_a_gain_one_line_explains_the_missing_recommendation(named, rows, line):
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    fleet = Fleet.of(suite("load", servers=urls, ks=(4,), **named), (0, 4))
    (advice,) = _advice(rows, schedule_of(rows), fleet)
    assert line in advice


def test_a_preset_and_a_gain_make_a_configuration_with_one_k():
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    fleet = Fleet.of(suite("load", servers=urls, ks=(4,), preset="embedded-eagle-1"), (0, 4))
    gain, vllm, sglang = _advice(fast(2), schedule_of(fast(2)), fleet)
    assert gain.startswith("Schedule [[1, 2, 4]]: goodput at concurrency 2 is 2.00x that of Baseline")
    assert '"num_speculative_tokens":4}' in vllm and "per_batch_size" not in vllm
    assert "--speculative-num-steps 4" in sglang and "adaptive" not in sglang


@pytest.mark.parametrize(("gpus", "together"), [(0, True), (1, False), (5, False), (6, True)])
def test_servers_take_turns_unless_they_would_share_gpus(gpus, together):
    program = Program(VLLM(), 2, Installed("0.32.0", [], gpus))
    fleet = Fleet(suite("load", engine="vllm"), preset("embedded-draft"), VLLM(), program, {})
    assert fleet.together(3) == together


def test_a_server_that_bunches_its_text_is_named():
    lanes = {"Baseline": 2.0, "k = 4": 0.02}
    rows = [{"lane": lane, "ITL p50": gap, "ms/token": Estimate(1.5)} for lane, gap in lanes.items()]
    assert bunched(rows) == ["Text arrived in bunches (k = 4): TTFT and ITL are not meaningful; ms/token is."]
    assert bunched(rows[:1]) == []


@pytest.mark.parametrize(
    ("options_given", "reason"),
    [
        (["--k", "0"], "draft lengths must be from 1 to 16, not [0]"),
        (["--concurrency", "0"], "loads must be above 0 and at most 1024, not [0]"),
        (["--concurrency", "two"], "a load must be a number, or several like 1,2,4, not 'two'"),
        (["--rate", "nan"], "rates must be a finite number, not nan"),
        (["--server", "http://127.0.0.1:9", "--k", "4"], "1 servers for k = 0, 4; give one --server per k"),
        (["--server", "http://127.0.0.1:9", "--engine", "vllm"], "omit --engine, --command and --schedule"),
        (["--schedule", "--rate", "2"], "--schedule needs vLLM and --concurrency"),
        (["--command", "/nowhere/vllm"], "there is no program /nowhere/vllm"),
        (["--engine", "here", "--rate", "2"], "need servers; add --server URL or --engine vllm"),
        (["--engine", "vllm", "--device", "cpu"], "--device needs --engine here"),
    ],
)
def test_bad_input_is_one_line(options_given, reason, capsys):
    assert main(["bench", "load", *options_given]) == 2
    assert reason in capsys.readouterr().err


def test_a_server_that_refuses_under_load_is_quoted(servers):
    plain, drafting = servers
    drafting.refusal = lambda path, body: (503, {"error": "too busy"}) if body.get("prompt") == "Anna" else (200, None)
    with pytest.raises(ValueError, match="failed under load: Error code: 503 .*too busy"):
        measured((plain, drafting))


def test_local_engine_under_the_same_load():
    options_given = {"engine": "here", "preset": "embedded-ngram", "ks": (0, 3), "concurrency": (1, 3), "new_tokens": 6}
    result = suite("load", repeats=1, requests=6, dtype="float32", **options_given).run(
        lambda *_: None, never_cancelled
    )
    assert [(row["lane"], row["concurrency"]) for row in result.rows] == [
        ("Baseline", 1), ("k = 3", 1), ("Baseline", 3), ("k = 3", 3)
    ]  # fmt: skip
    assert [row["tokens/pass"] for row in result.rows[::2]] == [1.0, 1.0]
    assert all(row["output"] == "identical" and row["tokens/s"].value > 0 for row in result.rows)
    assert all(row["good requests/s"].value * 6 == pytest.approx(row["tokens/s"].value, 1e-3) for row in result.rows)
    assert result.environment["device"] != "servers" and chart(result)["lines"][0]["texts"] == ["1", "3"]


def test_here_the_prompts_of_a_batch_are_of_one_length_and_batches_of_several():
    load = Here.of(suite("load", engine="here", preset="embedded-ngram"))
    batches = load._batches(4)
    assert [ids.shape[0] for _, ids in batches] == [4] * 4
    assert len({ids.shape[1] for _, ids in batches}) == 3 and batches[0][1].shape == batches[3][1].shape
    assert [options_given for options_given, _ in batches] == [
        [0, 3, 6, 9],
        [1, 4, 7, 10],
        [2, 5, 8, 11],
        [12, 15, 18, 21],
    ]


def test_killed_run_is_resumed(servers, tmp_path):
    plain, drafting = servers
    journal = tmp_path / "load.json.rounds"
    left = iter(range(40))  # the second repeat reaches its last load
    drafting.refusal = lambda path, body: (200, None) if next(left, None) is not None else (503, {"error": "killed"})
    with pytest.raises(ValueError, match="killed"):
        measured(servers, journal=journal)
    drafting.refusal = lambda path, body: (200, None)
    with journal.open("a", encoding="utf-8") as file:
        file.write('["first: Baseline, k = 4 at 3, rep')  # as if killed while writing
    before = len(plain.requests)
    assert measured(servers, journal=journal).repeats == 2
    # the first contact, a warm-up, and the missing load
    assert len(plain.requests) - before == 2 + 3 + 12
    before = len(plain.requests)
    assert measured(servers, journal=journal).repeats == 2 and len(plain.requests) == before
    with pytest.raises(
        ValueError, match="contains a run with other options; use those options, remove the file, or choose another"
    ):
        measured(servers, journal=journal, new_tokens=5)


def set_in(point, path, value):
    for key in path[:-1]:
        point = point[key]
    point[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (["seconds"], 0, "1.Baseline.seconds: Input should be greater than or equal to"),
        (["seconds"], -1.0, "1.Baseline.seconds: Input should be greater than or equal to"),
        (["seconds"], math.nan, "1.Baseline.seconds: Input should be a finite number"),
        (["answers"], [], "1.Baseline.answers: Value should have at least 1 item"),
        (["answers", 0, "tokens"], math.inf, "1.Baseline.answers.0.tokens: Input should be a finite number"),
        (["answers", 0, "tokens"], -4, "1.Baseline.answers.0.tokens: Input should be greater than or equal to 1"),
        (["answers", 0, "gaps"], [math.nan], "1.Baseline.answers.0.gaps.0: Input should be a finite number"),
        (["told", "counters"], {"acceptance_rate": -1}, "1.Baseline.told.counters.acceptance_rate"),
    ],
)
def test_a_damaged_round_is_refused_by_file_and_line(tmp_path, path, value, reason):
    journal = tmp_path / "load.json.rounds"
    point = {"answers": [asdict(Answer(0, "a", 3, 1.0, [1.0]))], "seconds": 1.0, "told": asdict(ServerStats())}
    Journal(journal, {}).put("first", {"Baseline": Point([Answer(0, "a", 3, 1.0, [1.0])], 1.0, ServerStats())})
    set_in(point, path, value)
    with journal.open("a", encoding="utf-8") as file:
        file.write(json.dumps(["second", {"Baseline": point}]).replace("Infinity", "1e400") + "\n")
    before = journal.read_bytes()
    with pytest.raises(ValueError, match=re.escape(f"{journal}, line 3: {reason}")):
        Journal(journal, {})
    assert journal.read_bytes() == before


def test_a_round_without_a_lane_is_refused_by_file_and_line(tmp_path):
    journal = tmp_path / "load.json.rounds"
    Journal(journal, {}).put("first", {"Baseline": Point([Answer(0, "a", 3, 1.0, [1.0])], 1.0, ServerStats())})
    again = Journal(journal, {})
    assert again.get("first", ["Baseline"]).keys() == {"Baseline"} and again.get("second", ["Baseline"]) is None
    with pytest.raises(ValueError, match=re.escape(f"{journal}, line 2: lanes Baseline instead of Baseline, k = 3;")):
        again.get("first", ["Baseline", "k = 3"])


def test_a_journal_that_is_no_text_is_refused_by_its_name(tmp_path):
    journal = tmp_path / "load.json.rounds"
    journal.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=re.escape(f"{journal} is not UTF-8 text")):
        Journal(journal, {})


def test_command_removes_its_journal(servers, tmp_path):
    named = [part for server in servers for part in ("--server", server.address)]
    options_given = ["--k", "0,4", "--concurrency", "1", "--repeats", "1", "--new-tokens", "4", "--requests", "1"]
    assert main(["bench", "load", *named, *options_given, "--out", str(tmp_path / "r.json")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("chosen", "printed"),
    [
        ("embedded-eagle-1", '"1": {"candidate_steps": [4]}, "4": {"candidate_steps": [0]}}'),
        ("embedded-draft", "For SGLang, whose STANDALONE has one k for all batch sizes: --speculative-algorithm STAND"),
    ],
)
def test_schedule_uses_the_sglang_format(chosen, printed):
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    vllm, sglang = Fleet.of(suite("load", preset=chosen, servers=urls, ks=(4,)), (0, 4)).paste([[1, 3, 4], [4, 8, 0]])
    assert '"num_speculative_tokens_per_batch_size":[[1,3,4],[4,8,0]]' in vllm and printed in sglang


def test_lengths_of_a_file_start_vllm_with_synthetic_acceptance(tmp_path, monkeypatch):
    path = tmp_path / "golden.yaml"
    path.write_text("m: {thinking_on: {1: 1.8, 4: 3.1}}", encoding="utf-8")
    monkeypatch.setattr(Program, "find", lambda engine, command, gpus: Program(VLLM(), gpus, None, command))
    chosen = {"preset": "qwen3-8b-heads", "engine": "vllm", "lengths": str(path)}
    fleet = Fleet.of(suite("load", ks=(0, 1, 4), **chosen), (0, 1, 4))
    assert "--speculative-config" not in fleet.lane(0).command
    for k, length in ((1, 1.8), (4, 3.1)):
        command = fleet.lane(k).command
        config = json.loads(command[command.index("--speculative-config") + 1])
        assert (config["rejection_sample_method"], config["synthetic_acceptance_length"]) == ("synthetic", length)
        assert config["num_speculative_tokens"] == k
    assert fleet.suite.config("x")["lengths"] == "m, thinking on"
    with pytest.raises(ValueError, match="m, thinking on has no length for k = 3; choose one of 1, 4"):
        suite("load", ks=(0, 3), **chosen)
    with pytest.raises(ValueError, match="--lengths needs servers that specdemo starts; add --engine vllm"):
        suite("load", ks=(0, 1), lengths=str(path))
