"""A load on servers that say what they are told to: counted, compared, and turned into a schedule."""

from contextlib import ExitStack

import pytest

from specdemo.__main__ import main
from specdemo.bench.load import Answer, Fleet, Point, bunched, schedule_of
from specdemo.bench.plot import figure
from specdemo.bench.result import Spread, read_result
from specdemo.bench.suites import suite
from specdemo.core.estimate import Estimate
from specdemo.engine.loop import never
from specdemo.presets.files import preset
from specdemo.presets.serve import Program
from specdemo.servers.counters import Told
from specdemo.servers.started import Installed
from tests.completion_server import completion_server, piece

WORDS = ["Once", " upon", " a", " time"]
SHORT = {"repeats": 2, "concurrency": (1, 3), "new_tokens": 4, "prompts": ["Tom", "Anna"]}


def says(*words):
    return [piece(w, total=n, finish="length" if n == len(words) else None) for n, w in enumerate(words, 1)]


def metrics(readings):
    """/metrics of a server that drafts 4 tokens a pass and keeps 3: each reading one pass later."""
    name = "vllm:spec_decode_num_"
    counts = [{"drafts": n, "draft_tokens": 4 * n, "accepted_tokens": 3 * n} for n in range(readings)]
    return ["".join(f"{name}{what}_total {n}\n" for what, n in of.items()) for of in counts]


@pytest.fixture
def servers():
    """Plain and drafting, which write the same."""
    with ExitStack() as running:
        plain = running.enter_context(completion_server(says(*WORDS), models=("stories",)))
        drafting = running.enter_context(completion_server(says(*WORDS), metrics(40), models=("stories",)))
        yield plain, drafting


def measured(servers, **options):
    asked = {"servers": [server.address for server in servers], "ks": (0, 4), **SHORT, **options}
    told = []
    result = suite("load", **asked).run(lambda share, what: told.append((share, what)), never)
    assert all(0.0 <= share <= 1.0 for share, _ in told) and [share for share, _ in told] == sorted(s for s, _ in told)
    return result


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
    asked = [body["prompt"] for path, body, _ in servers[1].asked if path == "/v1/completions"]
    # a greeting, a warm-up of 1 and of 3, and twice 8 requests alone and 12 by three
    assert len(asked) == 2 + 4 + 2 * (8 + 12)
    assert "Schedule [[1, " in " ".join(result.remarks) or "serve without speculation" in " ".join(result.remarks)
    assert result.environment["device"] == ", ".join(server.address[7:] for server in servers)


def test_chance_brings_as_many_requests_a_second(servers):
    result = measured(servers, rates=(500.0,), requests=5, repeats=1)
    assert [row["rate"] for row in result.rows] == [500.0, 500.0] and result.axis == "rate"
    assert len(servers[0].asked) == 2 + 8 + 5
    assert not any("Schedule" in remark for remark in result.remarks)  # of batch sizes nothing is known


def test_a_text_that_is_another_is_counted(servers):
    with completion_server(says("Once", " upon", " the", " time"), models=("stories",)) as wrong:
        result = measured([servers[0], wrong], repeats=1)
    assert [row["output"] for row in result.rows] == ["identical", "8 of 8 differ", "identical", "12 of 12 differ"]


def test_the_command_writes_numbers_and_a_page(servers, tmp_path, capsys):
    named = [part for server in servers for part in ("--server", server.address)]
    asked = ["--k", "0,4", "--concurrency", "1,2", "--repeats", "1", "--new-tokens", "4", "--slo-ttft", "0.0001"]
    files = ["--out", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    assert main(["bench", "load", *named, *asked, *files]) == 0
    assert "good requests/s" in capsys.readouterr().out
    stored = read_result(tmp_path / "r.json")
    assert all(row["good requests/s"] == Estimate(0.0) for row in stored.rows)  # none is as quick as that
    drawn = figure(stored)
    assert [curve.name for curve in drawn.data] == ["Baseline", "k = 4"] and drawn.data[0].text == ("1", "2")
    assert "plotly" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_goodput_counts_what_keeps_both_bounds():
    answers = [Answer(0, "", 5, ttft, [gap] * 4) for ttft, gap in ((10.0, 1.0), (30.0, 1.0), (10.0, 9.0))]
    point = Point(answers, 2.0, Told())
    assert point.throughput == 7.5
    assert [answer.per_token for answer in answers] == [2.8, 6.8, 9.2]
    assert [point.goodput(*b) for b in ((None, None), (20.0, None), (None, 7.0), (20.0, 7.0))] == [1.5, 1.0, 1.0, 0.5]


def row(at, lane, k, good, speed=1.0):
    spread = {"good requests/s": Spread(good, good, good), "tokens/s": Spread(speed, speed, speed)}
    return {"lane": lane, "k": k, "concurrency": at, **spread}


def test_the_schedule_takes_the_best_k_of_every_load():
    best = {1: (1, 2, 3), 4: (1, 2, 3), 8: (1, 2, 1), 16: (2, 1, 2)}
    rows = [
        row(at, f"k = {k}", k, good) for at, goods in best.items() for k, good in zip((0, 3, 5), goods, strict=True)
    ]
    assert schedule_of(rows) == [[1, 7, 5], [8, 15, 3], [16, 16, 0]]
    assert schedule_of([row(2, "Baseline", 0, 0.0, 5.0), row(2, "k = 3", 3, 0.0, 6.0)]) == [[1, 2, 3]]


@pytest.mark.parametrize(("gpus", "together"), [(0, True), (1, False), (5, False), (6, True)])
def test_servers_take_turns_unless_they_would_share_gpus(gpus, together):
    fleet = Fleet(preset("embedded-draft"), "vllm", Program("vllm", 2, Installed("0.32.0", [], gpus)), {})
    assert fleet.together(3) == together


def test_a_server_that_bunches_its_text_is_named():
    lanes = {"Baseline": 2.0, "k = 4": 0.02}
    rows = [{"lane": lane, "ITL p50": gap, "ms/token": Spread(1.5, 1.4, 1.6)} for lane, gap in lanes.items()]
    assert bunched(rows) == ["Text arrived in bunches (k = 4): TTFT and ITL say little, ms/token holds."]
    assert bunched(rows[:1]) == []


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (["--k", "0"], "draft lengths go from 1 to 16, not [0]"),
        (["--concurrency", "0"], "a load is above 0 and at most 1024, not [0]"),
        (["--concurrency", "two"], "a load is a number, or several like 1,2,4, not 'two'"),
        (["--rate", "nan"], "a load is above 0 and at most 1024, not [nan]"),
        (["--server", "http://127.0.0.1:9", "--k", "4"], "1 servers for k = 0, 4; name one for each"),
        (["--server", "http://127.0.0.1:9", "--engine", "vllm"], "leave --engine, --command and --schedule out"),
        (["--schedule", "--rate", "2"], "a schedule is vLLM's and by concurrency"),
        (["--command", "/nowhere/vllm"], "/nowhere/vllm is not here"),
    ],
)
def test_bad_input_is_told_in_one_line(asked, reason, capsys):
    assert main(["bench", "load", *asked]) == 2
    assert reason in capsys.readouterr().err


def test_a_server_that_refuses_under_load_is_quoted(servers):
    plain, drafting = servers
    drafting.refusal = lambda path, body: (503, {"error": "too busy"}) if body.get("prompt") == "Anna" else (200, None)
    with pytest.raises(ValueError, match="failed under load: Error code: 503 .*too busy"):
        measured((plain, drafting))
