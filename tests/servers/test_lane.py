"""Lanes on servers: `transformers serve`, and scripted servers for faults."""

import subprocess
from itertools import count

import pytest

from specdemo.bench.report import race_report
from specdemo.core.safe_io import PUBLIC_FILE_BYTES
from specdemo.core.tally import summarise
from specdemo.core.trace import MAX_TEXT, LaneTrace, Remote, compare, from_json, output_outcomes, to_json
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.messages import LaneDone, Restarted, StepRow, replay
from specdemo.engine.session import Session
from specdemo.models.ref import ModelRef
from specdemo.servers import lane as remote
from specdemo.servers.address import LISTED, address, allow, listed
from specdemo.servers.engines import stats_between
from specdemo.servers.process import free_port
from specdemo.servers.stream import StreamParser
from tests.completion_server import Broken, completion_server, events, head, piece, record_pauses
from tests.processes import start

WORDS = ["Once", " upon", " a time", "."]
GOOD = [piece(word, total=i + 1) for i, word in enumerate(WORDS[:-1])] + [piece(".", total=4, finish="length")]
DEAD = "http://127.0.0.1:9"

VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="a,}}b\\"c"}} {drafts}
vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 0.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {first}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {second}
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.7e+09
"""
BEFORE = VLLM.format(drafts=100.0, drafted=200.0, accepted=90.0, first=60.0, second=30.0)
AFTER = VLLM.format(drafts=110.0, drafted=220.0, accepted=104.0, first=69.0, second=35.0)
TIMED = """vllm:time_to_first_token_seconds_count {0}
vllm:time_to_first_token_seconds_sum {1}
vllm:request_decode_time_seconds_count {0}
vllm:request_decode_time_seconds_sum {2}
"""
SGLANG = """# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{model_name="m",tp_rank="0"}} {length}
sglang:spec_accept_rate{{model_name="m",tp_rank="0"}} {rate}
sglang:generation_tokens_total{{model_name="m"}} {tokens}
"""


def spec(*servers, **changes):
    """Return a comparison with the baseline on the first server and a lane on each other one; None: in this process."""
    first, *rest = servers
    lanes = [Lane(method="ngram", k=2, server=server, name=f"Lane {i}") for i, server in enumerate(rest, start=1)]
    settings = {"id": "test", "target": "stories", "prompt": "Say it", "max_new_tokens": 16}
    return Comparison(lanes=lanes, server=first, **{**settings, **changes})


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    return record_pauses(monkeypatch)


@pytest.fixture(autouse=True)
def unlisted(monkeypatch):
    monkeypatch.setenv(LISTED, "")
    monkeypatch.delenv(remote.KEY, raising=False)


@pytest.fixture(scope="module")
def good():
    with completion_server(GOOD) as server:
        yield server


@pytest.fixture(scope="module")
def real():
    """Start `transformers serve` with the embedded model, as a user would."""
    port, serve = free_port(), "from transformers.cli.transformers import main; main()"
    options = f"--host 127.0.0.1 --port {port} --device cpu --dtype float32".split()
    with start(
        "-c", serve, "serve", str(ModelRef("stories").path), *options, stderr=subprocess.PIPE, text=True
    ) as server:
        assert any("Uvicorn running" in line for line in server.stderr), "transformers serve did not start"
        yield f"http://127.0.0.1:{port}", server
        server.kill()


def run(given, *servers):
    allow(filter(None, servers))
    return Session().run(given)


def test_the_text_of_a_real_server_is_the_baselines(real):
    given = spec(None, real[0], prompt="Once upon a time, a dog", max_new_tokens=40)
    given = given.changed(lanes=[given.lanes[0].changed(served_model=str(ModelRef("stories").path))])
    trace = run(given, real[0])
    baseline, lane = trace.lanes
    assert lane.text == baseline.text and lane.finish == baseline.finish == "length"
    assert trace.comparison[0]["verdict"] == "same text" and trace.comparison[0]["identical"] is True
    assert lane.summary["tokens"] == 40 and lane.summary["tokens_per_s"] > 0 and lane.summary["ttft_ms"] > 0
    assert lane.summary["acceptance_rate"] is None and {k for e in lane.events for k in output_outcomes(e)} == {
        "unknown"
    }
    assert lane.remote.endpoint == "/v1/completions" and "accepts only standard settings" in lane.note
    assert "its software differs from the baseline's" in lane.note and baseline.note is None
    assert from_json(to_json(trace)) == trace


def test_two_deployments_and_their_counters(good):
    ids = [[5], [6, 7], [8, 9], [0]]
    pieces = [
        piece(w, ids=i, finish="stop" if i == [0] else None) for w, i in zip(["A", " b", " c", ""], ids, strict=True)
    ]
    with completion_server(pieces, metrics=[BEFORE, AFTER]) as drafting:
        trace = run(spec(good.address, drafting.address), good.address, drafting.address)
    plain, lane = trace.lanes
    assert (plain.text, plain.finish, plain.token_ids) == ("Once upon a time.", "length", [-1] * 4)
    assert plain.summary["tokens"] == 4 and plain.remote.counted and plain.remote.counters == {}
    assert (lane.token_ids, lane.text, lane.finish) == ([5, 6, 7, 8, 9, 0], "A b c", "stop")
    assert lane.pieces == ["A", "", " b", "", " c", ""]
    numbers = lane.summary
    assert (numbers["steps"], numbers["drafted"], numbers["accepted"]) == (10, 20, 14)
    assert (numbers["acceptance_rate"], numbers["tokens_per_step"]) == (0.7, 2.4)
    assert numbers["accept_by_position"] == [0.9, 0.5]
    assert "requests of other users are included" in lane.remote.source
    assert trace.comparison[0]["verdict"] == "text differs" and trace.comparison[0]["first_divergence"] is None
    assert trace.environment["device"] == "servers"
    report = race_report(from_json(to_json(trace)))
    assert "70%" in report and "2.40" in report and "requests of other users are included" in report
    assert {m.lane for m in replay(trace) if isinstance(m, LaneDone)} == {0, 1}


def test_the_model_that_a_server_reports_is_shown(good):
    with completion_server(GOOD, models=("org/other-model",)) as other:
        trace = run(spec(good.address, other.address, target="some/target"), good.address, other.address)
    plain, drafting = good.address[7:], other.address[7:]
    assert trace.environment["served_models"] == {plain: "m", drafting: "org/other-model"}
    first, second, *_ = race_report(trace).splitlines()
    assert first.startswith("test | target m and org/other-model | ")
    assert second == f"served models | Baseline: m at {plain} | Lane 1: org/other-model at {drafting}"
    assert from_json(to_json(trace)) == trace


def test_request_sets_every_sampling_parameter(good):
    good.requests.clear()  # the model is not available locally, so it is unknown whether it has a chat template
    run(
        spec(good.address, good.address, target="some/model", temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3),
        good.address,
    )
    path, body, _ = good.requests[-1]
    assert path == "/v1/chat/completions" and body["messages"] == [{"role": "user", "content": "Say it"}]
    expected = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "max_tokens": 16}
    assert expected.items() <= body.items() and body["repetition_penalty"] == 1.0


def lane_with_arrivals(arrivals, server_times=()):
    """Return a lane of 120 tokens that arrived at these times in s after the request, on a fake clock."""
    trace = LaneTrace("lane", "draft_model", {}, True, [])
    events = []
    listener = StreamParser(lambda updates: events.append(updates[0]), 120)
    listener.begin()
    for number, seconds in enumerate(arrivals, start=1):
        end = "length" if number == 120 else None
        listener.feed(piece(" a", ids=[7], total=number, finish=end), listener.started_at + seconds)
    trace.events, trace.token_ids = events, [7] * 120
    trace.remote = Remote("a:1", "m", "/v1/completions", 120, True, times=dict(server_times))
    trace.summary = summarise(trace)
    return trace


TRUE_PACE = [0.05 + 0.004 * i for i in range(120)]


@pytest.mark.parametrize("bunch", [1, 10, 120])
def test_a_speed_up_does_not_depend_on_how_a_server_sends_its_text(bunch):
    """The server sends token by token, ten tokens at a time, or all at once."""
    baseline = lane_with_arrivals([1.8 * seconds for seconds in TRUE_PACE])
    lane = lane_with_arrivals([TRUE_PACE[i - i % bunch + bunch - 1] for i in range(120)])
    row = compare(baseline, lane, greedy=True)
    assert row["speedup"] == pytest.approx(1.8, rel=0.05)
    assert any("arrived in bunches" in reason for reason in row["reasons"]) == (bunch > 1) == row["noisy"]


def test_server_times_and_their_deviation_are_reported():
    times = {"ttft_ms": 50.0, "decode_ms": 476.0}
    baseline, agrees = (lane_with_arrivals(TRUE_PACE, server_times) for server_times in ({}, times))
    late = lane_with_arrivals([seconds + 1.0 for seconds in TRUE_PACE], times)
    assert not compare(baseline, agrees, greedy=True)["noisy"]
    assert (
        "the server of this lane reports 0.53 s, the client measured 1.53 s"
        in compare(baseline, late, greedy=True)["reasons"]
    )
    with completion_server(GOOD, metrics=[TIMED.format(0, 0.0, 0.0), TIMED.format(1, 0.25, 0.75)]) as server:
        trace = run(spec(server.address, server.address), server.address)
    assert trace.lanes[0].remote.times == {"ttft_ms": 250.0, "decode_ms": 750.0}
    assert "The server of Baseline reports 250 ms to the first token and 750 ms of decoding." in race_report(trace)
    assert from_json(to_json(trace)) == trace
    timings = {"prompt_ms": 20.0, "predicted_ms": 80.0}
    with completion_server([piece("a"), piece("b", finish="stop", timings=timings)]) as server:
        assert run(spec(server.address, server.address), server.address).lanes[1].remote.times["decode_ms"] == 80.0


@pytest.mark.parametrize(("others", "tokens_a_pass"), [(0, 3.5), (4, None)])
def test_llamacpp_counters_of_one_answer_are_reported(others, tokens_a_pass):
    name = "llamacpp:spec_decode_num_"
    counted = f"{name}drafts_total 2\n{name}draft_tokens_total {8 + others}\n{name}accepted_tokens_total 5\n"
    timings = {"draft_n": 8, "draft_n_accepted": 5}
    pieces = [piece("a"), piece("b", finish="stop", timings=timings)]
    with completion_server(pieces, metrics=[""] * 3 + [counted]) as server:
        remote = run(spec(server.address, server.address), server.address).lanes[1].remote
    assert remote.counters["drafted"] == 8 and remote.counters.get("tokens_per_step") == tokens_a_pass
    assert remote.source.startswith("llama.cpp's count")


USAGE = {"total_draft_tokens_count": 4, "accepted_draft_tokens_count": 3}
ONE_DRAFT = {
    "num_spec_steps": 1,
    "num_draft_tokens": 4,
    "num_accepted_draft_tokens": 3,
    "acceptance_histogram": [0, 0, 0, 1, 0],
}


@pytest.mark.parametrize(
    ("stats", "histogram"),
    [
        ({"metrics": {"speculative_decoding": ONE_DRAFT}}, [7, 0, 0, 1, 0]),
        ({"usage": USAGE | {"completion_tokens": 12}}, []),
        ({"timings": {"draft_n": 4, "draft_n_accepted": 3}}, []),
    ],
    ids=["vllm", "lmstudio", "llamacpp"],
)
def test_passes_without_a_draft_count(stats, histogram):
    """Of 12 tokens, the first is of the prefill and 3 are accepted; so the target made 8 passes, one with a draft."""
    pieces = [piece("aaa", total=5), piece("b", total=12, finish="length", **stats)]
    with completion_server(pieces) as server:
        remote = run(spec(server.address, server.address), server.address).lanes[1].remote
    assert (remote.counters["steps"], remote.counters["tokens_per_step"]) == (8, 1.375)
    assert remote.accept_histogram == histogram and "with those that had no draft" in remote.source


MLX_VLM = {"draft_kind": "dflash", "draft_rounds": 1, "draft_n": 7, "draft_n_accepted": 6}  # pull request 2324
SUMMARY = {"num_spec_steps": 4, "num_draft_tokens": 60, "num_accepted_draft_tokens": 30}


@pytest.mark.parametrize(
    ("tokens", "stats", "past_end", "accepted", "rate", "steps", "tokens_a_pass"),
    [
        (4, {"timings": {"draft_n": 8, "draft_n_accepted": 2}}, 0, 2, 0.25, 1, 3.0),
        (4, {"timings": {"draft_n": 48, "draft_n_accepted": 48}}, 45, 3, 0.0625, None, None),
        (4, {"timings": {"draft_n": 70, "draft_n_accepted": 66}}, 63, 3, 0.0429, None, None),
        (4, {"timings": {"draft_n": 900, "draft_n_accepted": 700}}, 0, None, None, None, None),
        (2, {"timings": MLX_VLM}, 5, 1, 0.1429, 1, 1.0),  # (predicted_n - 1) / draft_rounds
        (16, {"metrics": {"speculative_decoding": SUMMARY}}, 18, 12, 0.2, 4, 3.75),
    ],
)
def test_accepted_tokens_past_the_end_of_the_text_do_not_count(
    tokens, stats, past_end, accepted, rate, steps, tokens_a_pass
):
    pieces = [*[piece("a", [7], total=at) for at in range(1, tokens)], piece("b", [8], tokens, "stop", **stats)]
    with completion_server(pieces) as server:
        lane = run(spec(server.address, server.address), server.address).lanes[1]
    names = ("accepted", "acceptance_rate", "steps", "tokens_per_step")
    assert [lane.summary[name] for name in names] == [accepted, rate, steps, tokens_a_pass]
    assert (f"counted {past_end} accepted draft tokens past the end of its text" in (lane.note or "")) == (past_end > 0)
    assert ("more than its text can hold" in (lane.note or "")) == (accepted is None)


NO_REASON = "its server gave no reason for the end of the text"


@pytest.mark.parametrize(
    ("reasons", "finish", "note"),
    [
        (("", "", "stop"), "stop", None),  # Ollama
        (("", "", ""), "stop", NO_REASON),  # GenieX
        ((None, None, None), "stop", NO_REASON),
        (("", "", "", ""), "length", NO_REASON),
        (("null", "null", "length"), "length", None),  # koboldcpp
        ((None, None, "eos_token"), "stop", None),  # TGI
        ((None, None, "stop_sequence"), "stop", None),
        ((None, None, "EOS"), "stop", None),
        ((None, None, "end_turn"), "stop", None),
        ((None, None, "max_tokens"), "length", None),
        (("busy", "busy", "repetition hush"), "stop", "for an unknown reason: repetition ***"),
        (("busy", "busy", "stop"), "stop", None),
    ],
)
def test_what_ends_an_answer(monkeypatch, reasons, finish, note):
    monkeypatch.setenv(remote.KEY, "hush")
    words = [*WORDS[: len(reasons) - 1], "."]
    chunks = [piece(word, finish=reason) for word, reason in zip(words, reasons, strict=True)]
    raw = [head(), events(*chunks, b"[DONE]")]
    with completion_server([], faults={"warm-up": lambda: raw, "answer": lambda: raw}) as server:
        lane = run(spec(server.address, server.address, max_new_tokens=4), server.address).lanes[1]
    assert (lane.text, lane.finish) == ("".join(words), finish)
    assert lane.note is note is None or note in lane.note


def test_thinking_is_an_argument_of_the_servers_template(good):
    good.requests.clear()
    trace = run(spec(good.address, good.address, target="some/model", thinking="off"), good.address)
    path, body, _ = good.requests[-1]
    assert path == "/v1/chat/completions" and trace.lanes[1].finish == "length"
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    run(spec(good.address, good.address, target="some/model"), good.address)
    assert "chat_template_kwargs" not in good.requests[-1][1]

    def refusal(path, body):
        return (422, {"detail": "unexpected"}) if "chat_template_kwargs" in body else (200, None)

    with completion_server(GOOD, refusal=refusal) as strict:
        lane = run(spec(good.address, strict.address, target="some/model", thinking="on"), strict.address).lanes[1]
    assert lane.finish == "error" and "422" in lane.note  # a requested mode is never dropped


def test_tokens_reported_only_as_a_total():
    with completion_server([piece("a b c"), piece(" d"), piece("", total=9, finish="length")]) as server:
        lane = run(spec(server.address, server.address), server.address).lanes[1]
    assert not lane.remote.counted and lane.summary["tokens"] == 9 and lane.summary["itl_ms_p50"] is None
    seconds = sum(sum(e.ms.values()) for e in lane.events) / 1000
    assert lane.summary["tokens_per_s"] == pytest.approx(9 / seconds, rel=0.01)  # measured from the request


def test_a_text_that_no_trace_can_hold_is_cut_off():
    with completion_server([piece("x" * 30_000), piece("\0" * 30_000), piece("y", finish="stop")]) as server:
        trace = run(spec(server.address, server.address, max_new_tokens=1000), server.address)
    lane = trace.lanes[1]
    assert len(lane.text) == MAX_TEXT and lane.finish == "length" and "cut off at 50,000 characters" in lane.note
    text = to_json(trace, limits=PUBLIC_FILE_BYTES)
    assert from_json(text, PUBLIC_FILE_BYTES) == trace


@pytest.mark.parametrize("status", [422, 500])  # llama-cpp-python's server answers 500
def test_a_server_with_one_interface_and_standard_settings_alone(pauses, status):
    def refusal(path, body):
        if path != "/v1/completions":
            return 404, {"error": {"message": "no such page"}}
        return (status, {"detail": "unexpected fields"}) if "top_k" in body else (200, None)

    with completion_server(GOOD, refusal=refusal) as server:
        lane = run(spec(server.address, server.address, target="some/model"), server.address).lanes[1]
        assert lane.text == "Once upon a time." and "only at /v1/completions" in lane.note
        picky = spec(server.address, server.address, target="some/model", temperature=0.7, top_k=5)
        picky = run(picky, server.address).lanes[1]
    assert picky.finish == "error" and "404" in picky.note  # requested settings are never dropped


@pytest.mark.parametrize("status", [401, 404, 500])
def test_error_does_not_contain_the_key(good, monkeypatch, status):
    monkeypatch.setenv(remote.KEY, "hush-hush")
    refusal = lambda path, body: (status, {"error": {"message": "wrong key hush-hush"}})  # noqa: E731
    with completion_server(GOOD, refusal=refusal) as bad:
        trace = run(spec(good.address, bad.address), good.address, bad.address)
        assert bad.requests[0][2]["Authorization"] == "Bearer hush-hush"
    assert trace.lanes[1].finish == "error" and f"answered Error code: {status}" in trace.lanes[1].note
    assert "hush" not in to_json(trace)


def not_ready(status, requests, headers=None):
    """Return the refusal of a server that refuses these requests, which are numbered from 0."""
    numbers = count()
    return lambda path, body: (status, {}, headers or {}) if next(numbers) in requests else (200, None)


@pytest.mark.parametrize(
    ("status", "requests", "headers", "seconds"),
    [
        *((status, (0, 1), {}, [1.0, 2.0]) for status in (408, 425, 429, 500, 502, 503, 504)),
        (503, range(6), {}, [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]),
        (429, (0,), {"Retry-After": "7"}, [7.0]),
        (429, (0,), {"Retry-After": "0"}, [1.0]),
        (429, (0,), {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, [1.0]),
        (429, (0, 2), {}, [1.0, 1.0]),  # also of the request that is measured
    ],
)
def test_a_server_that_is_not_ready_is_asked_again_in_the_same_form(good, pauses, status, requests, headers, seconds):
    with completion_server(GOOD, refusal=not_ready(status, requests, headers)) as server:
        lane = run(spec(good.address, server.address, chat=False), good.address, server.address).lanes[1]
        assert {path for path, _, _ in server.requests} == {"/v1/completions"}
        assert all("top_k" in body for _, body, _ in server.requests)
    assert (lane.text, lane.finish, pauses) == ("Once upon a time.", "length", seconds)
    assert f"its server was not ready for {sum(seconds):g} s (status {status})" in lane.note
    assert "only" not in lane.note


@pytest.mark.parametrize(
    ("status", "headers", "waited_s", "end"),
    [
        (503, {}, 55, "Error code: 503 - {}; try again later"),
        (500, {}, 3, "Error code: 500 - {}; try again later"),
        (429, {"Retry-After": "3600"}, 0, "Error code: 429 - {}; try again in 3600 seconds"),
        (501, {"Retry-After": "1"}, 0, "Error code: 501 - {}"),
    ],
)
def test_a_server_that_does_not_become_ready_ends_its_lane(good, pauses, status, headers, waited_s, end):
    with completion_server(GOOD, refusal=lambda path, body: (status, {}, headers)) as server:
        lane = run(spec(good.address, server.address), good.address, server.address).lanes[1]
        assert ({path for path, _, _ in server.requests} == {"/v1/completions"}) == (status not in (500, 501))
    assert lane.finish == "error" and lane.note.endswith(end) and sum(pauses) == waited_s


def test_a_server_that_is_not_there_or_not_known(good):
    trace = run(spec(good.address, DEAD), good.address, DEAD)
    assert trace.lanes[1].note == "127.0.0.1:9 cannot be reached; start the server or correct its address"
    assert race_report(trace).count("1.00x") == 1 and "1.00x" not in race_report(run(spec(DEAD, DEAD), DEAD))
    with completion_server(GOOD, models=("a", "b")) as several:
        note = run(spec(good.address, several.address), good.address, several.address).lanes[1].note
    assert "it serves a, b; choose one with served_model" in note


def test_stop_reaches_a_silent_server(good):
    seen = []
    with completion_server([GOOD[0], Broken("quiet")]) as quiet:
        allow([good.address, quiet.address])
        for message in Session().stream(spec(good.address, quiet.address), cancelled=lambda: len(seen) > 4):
            if isinstance(message, StepRow):
                seen.append(message)
        assert quiet.left.wait(20)
    assert message.trace.lanes[1].finish == "cancelled" and message.trace.lanes[1].text == "Once"


def test_only_listed_servers_are_contacted(good, monkeypatch):
    with pytest.raises(ValueError, match=f"server {good.address} is not allowed; the operator can allow it"):
        Session().load(spec(good.address, None))
    monkeypatch.setenv(LISTED, f" {good.address.removeprefix('http://')}/v1 ,https://gpu-box")
    assert listed() == (good.address, "https://gpu-box")
    Session().load(spec(good.address, good.address))
    with pytest.raises(ValueError, match="http://gpu-box is not allowed"):  # the key would travel in the clear
        Session().load(spec(good.address, "http://gpu-box"))


@pytest.mark.parametrize("text", ["", "ftp://a", "http://", "http://a:b", "http://a b", "http://a?x=1"])
def test_invalid_addresses(text):
    with pytest.raises(ValueError, match="must have the form http://host:port"):
        address(text)


def test_a_key_in_an_address_is_refused_and_not_repeated():
    with pytest.raises(ValueError, match="SPECDEMO_API_KEY") as refusal:
        allow(["http://me:secret@host"])
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("before", "after", "numbers"),
    [
        ("", AFTER, {"drafted": 220, "accepted": 104}),
        (BEFORE, BEFORE, {}),
        ("", "<html>", {}),
        (SGLANG.format(length=0, rate=0, tokens=10), SGLANG.format(length=0.0, rate=0.0, tokens=50), {}),
        (
            SGLANG.format(length=0, rate=0, tokens=10),
            SGLANG.format(length=2.5, rate=0.5, tokens=50),
            {"acceptance_rate": 0.5, "tokens_per_step": 2.5},
        ),
        (
            SGLANG.format(length=9, rate=0.5, tokens=10) + "sglang:spec_verify_calls_total 5",
            SGLANG.format(length=9, rate=0.5, tokens=50) + "sglang:spec_verify_calls_total 25",
            {"acceptance_rate": 0.5, "tokens_per_step": 2.0},
        ),
    ],
)
def test_counters(before, after, numbers):
    counts = stats_between(before, after)
    assert numbers.items() <= counts.counters.items() and bool(counts.counters) == bool(numbers) == bool(counts.source)


@pytest.mark.parametrize("path", ["[[0,1]]", "[[1]]", "[[0],[0]]"])
def test_steps_of_a_server_are_checked(good, path):
    trace = run(spec(good.address, good.address), good.address)
    forged = to_json(trace).replace('"path":[[]]', f'"path":{path}', 1)
    with pytest.raises(ValueError, match="is inconsistent"):
        from_json(forged)


@pytest.fixture(scope="module")
def drafting():
    """Return a local lane with a draft model, as the record of what a server would do."""
    lane = Lane(method="draft_model", model="stories-draft-wide", k=4)
    local = Comparison(id="test", target="stories", prompt="Once upon a time", max_new_tokens=24, lanes=[lane])
    return Session().run(local).lanes[1]


def accepted_of(event):
    return len(event.path[0]) - 1


def as_vllm(lane):
    """Return the stream of a vLLM server: one piece per step, and the counts of all steps at its end."""
    pieces, start = [], 0
    for event in lane.events:
        end = start + len(event.emitted[0])
        pieces.append(piece("".join(lane.pieces[start:end]), ids=event.emitted[0], total=end))
        start = end
    pieces[-1]["choices"][0]["finish_reason"] = lane.finish
    drafts = [(len(event.drafted[0]), accepted_of(event)) for event in lane.events if event.drafted[0]]
    counts = {
        "num_spec_steps": len(drafts),
        "num_draft_tokens": sum(drafted for drafted, _ in drafts),
        "num_accepted_draft_tokens": sum(accepted for _, accepted in drafts),
        "acceptance_histogram": [[a for _, a in drafts].count(n) for n in range(5)],
        "per_step_drafted": [drafted for drafted, _ in drafts],
        "per_step_accepted": [accepted for _, accepted in drafts],
    }
    return [*pieces, {"choices": [], "usage": None, "metrics": {"speculative_decoding": counts}}]


def as_llamacpp(lane):
    """Return the stream of a llama.cpp server: one piece per token, with the counts so far."""
    pieces, texts, drafted, accepted = [], iter(lane.pieces), 0, 0
    for event in lane.events:
        drafted, accepted = drafted + len(event.drafted[0]), accepted + accepted_of(event)
        counts = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
        pieces += [piece(next(texts), timings=counts) for _ in event.emitted[0]]
    pieces[-1]["choices"][0]["finish_reason"] = lane.finish
    return [*pieces, piece("", total=len(lane.token_ids), timings=counts)]


def served(lane, stream, **changes):
    with completion_server(stream(lane)) as server:
        given = spec(server.address, server.address, prompt="Once upon a time", max_new_tokens=24, **changes)
        return run(given, server.address)


@pytest.mark.parametrize("stream", [as_vllm, as_llamacpp])
def test_reported_steps_are_shown_like_those_of_a_local_lane(drafting, stream):
    trace = served(drafting, stream)
    lane = trace.lanes[1]
    assert (lane.text, lane.pieces) == (drafting.text, drafting.pieces) and lane.note is None
    assert [output_outcomes(e) for e in lane.events] == [output_outcomes(e) for e in drafting.events]
    assert [len(e.drafted[0]) for e in lane.events] == [len(e.drafted[0]) for e in drafting.events]
    same = "steps drafted accepted acceptance_rate tokens_per_step accept_histogram accept_by_position tokens".split()
    assert {name: lane.summary[name] for name in same} == {name: drafting.summary[name] for name in same}
    assert lane.summary["ms_verify"] is None and lane.summary == summarise(lane)
    assert from_json(to_json(trace)) == trace and "?" in trace.vocabulary.values()
    replayed = [m for m in replay(trace) if isinstance(m, StepRow) and m.lane == 1]
    assert replayed[-1].so_far["accept_histogram"] == drafting.summary["accept_histogram"]


def test_the_steps_replace_the_pieces_that_were_shown(drafting):
    with completion_server(as_vllm(drafting)) as server:
        allow([server.address])
        given = spec(None, server.address, prompt="Once upon a time", max_new_tokens=24)
        messages = [m for m in Session().stream(given) if getattr(m, "lane", None) == 1]
    at = messages.index(Restarted(1))
    pieces, steps = messages[:at], [m for m in messages[at:] if isinstance(m, StepRow)]
    assert {k for m in pieces for k in m.output_outcomes} == {"unknown"} and isinstance(messages[-1], LaneDone)
    assert "".join(t for m in steps for t in m.text) == "".join(t for m in pieces for t in m.text) == drafting.text
    assert pieces[-1].so_far["steps"] is None and steps[-1].so_far["steps"] == drafting.summary["steps"]


def test_counts_that_do_not_fit_the_text_are_shown_as_totals(drafting):
    def wrong(lane):
        *pieces, last = as_vllm(lane)
        counts = last["metrics"]["speculative_decoding"]
        counts["per_step_accepted"] = sorted(counts["per_step_accepted"])
        return [*pieces, last]

    lane = served(drafting, wrong).lanes[1]
    assert {k for e in lane.events for k in output_outcomes(e)} == {"unknown"} and "do not fit its text" in lane.note
    assert lane.summary["acceptance_rate"] == drafting.summary["acceptance_rate"]
    assert sum(lane.summary["accept_histogram"]) == lane.summary["steps"] == drafting.summary["steps"]
    assert "vLLM's count" in lane.remote.source


def test_without_the_targets_tokenizer_steps_of_several_tokens_are_grey(drafting):
    lane = served(drafting, as_vllm, target="some/model").lanes[1]
    assert {k for e in lane.events for k in output_outcomes(e) if len(e.emitted[0]) > 1} == {"unknown"}
    assert "grey tokens" in lane.note and lane.summary["accepted"] == drafting.summary["accepted"]
    assert not lane.steps_known and any(e.path[0] for e in lane.events)


def test_two_lanes_on_one_server_differ_by_their_requests(good):
    good.requests.clear()
    lane = Lane(method="draft_model", model="org/draft", k=3, server=good.address)
    given = spec(good.address, good.address, target="some/model").changed(lanes=[lane], repeats=2)
    trace = run(given, good.address)
    drafts = [(body.get("draft_model"), body.get("num_draft_tokens")) for _, body, _ in good.requests]
    assert drafts == [(None, None)] * 2 + [("org/draft", 3)] * 2 + [(None, None)] * 2 + [("org/draft", 3)] * 2
    assert trace.lanes[1].note.startswith("drafts by its request (draft_model, num_draft_tokens)")
    with completion_server(GOOD) as other:
        run(given.changed(server=other.address), other.address, good.address)
        assert all("draft_model" not in body for _, body, _ in [*other.requests, *good.requests[8:]])
