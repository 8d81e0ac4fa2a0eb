"""Faulty servers: the lane reports the reason in one line, or leaves false values unknown; other lanes are not
affected, and the trace can be opened again.
"""

import gzip
import json
import tracemalloc
from dataclasses import dataclass, field
from itertools import repeat
from threading import Event

import pytest

from specdemo.core.trace import MAX_DEPTH, from_json, to_json
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.session import Session
from specdemo.servers import address, client, lane, stream
from specdemo.servers.counters import ServerStats
from specdemo.servers.engines import stats_between
from tests.completion_server import Broken, completion_server, events, head, piece, record_pauses

TOKENS = 4
GOOD = [piece("Once", total=1), piece(" upon", total=2), piece(" a time.", total=3, finish="stop")]
DONE = b"data: [DONE]\n\n"
QUICK = {"silence": 0.3}
SOON = {"silence": 1.0, "token": 0.01}  # limits: 1.04 s for the lane in total, 1 s of silence
NUL = b"\0" * 1000
SHARP = b"data: " + json.dumps(piece("Ünïcödé 🙂", finish="stop"), ensure_ascii=False).encode() + b"\r\n\r\n" + DONE
BOMB = gzip.compress(bytes(50_000_000))


@dataclass(frozen=True)
class Kind:
    """A fault of a server. parts: the raw response. why: the start of the lane's note; None: the lane finishes, with
    the values in `known`.
    """

    stage: str
    name: str
    parts: object
    why: str | None = None
    limits: dict = field(default_factory=dict)
    known: dict = field(default_factory=dict)
    text: str = "Once upon a time."


def drip(start, each):
    """Yield bytes without a long pause and without end."""
    yield start
    while True:
        Event().wait(0.02)
        yield each


def models(name, body, why, **headers):
    return Kind("models", name, [head("application/json", **headers), body], why)


def faulty_chunk(name, chunk, why, **more):
    """Return a fault that sends a good first chunk and then this one."""
    return Kind("answer", name, [head(), events(GOOD[0], chunk), DONE], why, **more)


def slow_limits(name, *chunks, text="Once upon a time.", **known):
    return Kind("answer", name, [head(), events(*chunks), DONE], known=known, text=text)


def ended(**changes):
    """Return the last chunk with changed fields."""
    return piece(" upon a time.", finish="stop") | changes


def choice(**changes):
    return {"choices": [{"index": 0, "text": "x", "finish_reason": None} | changes]}


def readings(name, body):
    return Kind("metrics", name, [head("text/plain"), body])


def drafted(drafts, tokens, accepted, *positions):
    names = {"drafts": drafts, "draft_tokens": tokens, "accepted_tokens": accepted}
    names |= {f'accepted_tokens_per_pos{{position="{i}"}}': value for i, value in enumerate(positions)}
    return "".join(f"vllm:spec_decode_num_{name} {value}\n" for name, value in names.items())


def in_chunks_of_one(body):
    yield head(Transfer_Encoding="chunked")
    for byte in body:
        yield b"1\r\n%c\r\n" % byte
    yield b"0\r\n\r\n"


HEAVY = {"endless", "a-bomb", "a-line-without-end", "a-piece-of-900-kb", "100000-ids"}
UNUSABLE, REPORTED = "sent an invalid response: ", "reports an error: "
MORE = f"{UNUSABLE}it sent more than the {TOKENS} requested tokens"
UNKNOWN = {"acceptance_rate": None}
UNCOUNTED = {"tokens": None, "tokens_per_s": None}
KINDS = [
    models("no-json", b"<html>", UNUSABLE),
    models("a-dict-of-models", b'{"data": {"a": 1}}', "data: Input should be a valid array"),
    models("a-huge-name", json.dumps({"data": [{"id": "m" * 900}]}).encode(), "at most 500 characters"),
    models("a-bomb", BOMB, "it sent a compressed response", Content_Encoding="gzip"),
    Kind("models", "endless", lambda: (head(), *repeat(NUL, 5000)), "it sent more than 1,000,000 bytes"),
    Kind("models", "reset", [Broken("reset")], "closed the connection after 0 pieces"),
    Kind("models", "silent", [Broken("quiet")], "sent nothing for 0.3 seconds", QUICK),
    Kind("models", "a-byte-at-a-time", lambda: drip(head(), b" "), "took longer than 1.04 seconds", SOON),
    Kind("models", "elsewhere", [head(status=302, Location="http://127.0.0.1:9/v1/models")]),
    Kind("warm-up", "reset", [Broken("reset")], "closed the connection after 0 pieces"),
    Kind(
        "warm-up",
        "a-flood-of-headers",
        [b"HTTP/1.1 200 X\r\n", b"A: a\r\n" * 50_000],
        "closed the connection after 0 pieces",
    ),
    Kind("warm-up", "elsewhere", [head(status=307, Location="http://127.0.0.1:9")], "answered Error code: 307"),
    Kind("warm-up", "a-refusal-with-escapes", [head(status=400), b"\x1b]0;\xff\n\x1b[2J"], "answered Error code: 400"),
    Kind("answer", "a-page", [head("text/html"), b"<html>"], f"{UNUSABLE}it sent text/html instead of an event stream"),
    Kind("answer", "empty", [head()], "closed the connection after 0 pieces"),
    Kind(
        "answer",
        "reset-in-a-piece",
        [head(), events(GOOD[0]), b"data: {", Broken("reset")],
        "closed the connection after",
    ),
    Kind("answer", "silent", [head(), events(GOOD[0]), Broken("quiet")], "sent nothing for 0.3 seconds", QUICK),
    Kind("answer", "silent-at-its-end", [head(), events(*GOOD), Broken("quiet")], limits={"end": 0.05}),
    Kind("answer", "cut-off-at-its-end", [head(Content_Length=9999), events(*GOOD), Broken("close")]),
    Kind("answer", "comments-without-end", lambda: drip(head(), b": ping\n\n"), "took longer than", SOON),
    Kind("answer", "a-flood-of-comments", lambda: (head(), *repeat(b": ping\n\n" * 500, 900)), "2,016,000 bytes"),
    Kind("answer", "a-line-without-end", lambda: (head(), *repeat(NUL, 5000)), "a line of more than 1,000,000 bytes"),
    Kind("answer", "many-tiny-pieces", [head(), events(*repeat(piece("."), 5000))], MORE),
    faulty_chunk("not-utf-8", b'{"choices": "\xff\xfe"}', "'utf-8' codec can't decode"),
    faulty_chunk("a-list", [1, 2], "an event: Input should be a valid dictionary"),
    faulty_chunk("an-error", {"error": {"message": "\x1b[2Jout of\nmemory\ud800"}}, f"{REPORTED}[2Jout of memory"),
    faulty_chunk(
        "an-error-without-a-field", {"object": "error", "message": "out of memory"}, f"{REPORTED}out of memory"
    ),
    faulty_chunk("an-error-of-another-shape", {"error": [["x"]]}, f"{REPORTED}[['x']]"),
    faulty_chunk("a-dict-of-choices", {"choices": {"0": 1}}, "choices: Input should be a valid list"),
    faulty_chunk("two-choices", {"choices": choice()["choices"] * 2}, "choices: List should have at most 1 item"),
    faulty_chunk("a-number-for-text", choice(text=3), "choices.0.text: Input should be a valid string"),
    faulty_chunk("a-reason-of-an-incomplete-text", choice(finish_reason="abort"), "it ended the text early: abort"),
    faulty_chunk("a-piece-of-900-kb", choice(text="x" * 900_000), f"it sent more text than fits into {TOKENS} tokens"),
    faulty_chunk("a-billion-tokens", choice() | {"usage": {"completion_tokens": 10**9}}, MORE),
    faulty_chunk("100000-ids", choice(token_ids=[5] * 100_000), MORE),
    Kind(
        "answer", "an-error-line", [head(), b'error: {"code":400,"message":"context exceeded"}\n\n'], "context exceeded"
    ),
    Kind(
        "answer", "an-error-line-without-json", [head(), b"error: context exceeded\n\n"], f"{REPORTED}context exceeded"
    ),
    slow_limits("empty-events", piece("Once"), b"null", b"", ended()),
    slow_limits("usage-a-text", piece("Once"), ended(usage="3"), **UNCOUNTED),
    slow_limits("usage-a-truth", piece("Once"), ended(usage={"completion_tokens": True}), **UNCOUNTED),
    slow_limits("usage-that-shrinks", piece("Once", total=2), piece("", total=1), ended(), **UNCOUNTED),
    slow_limits(
        "ids-of-texts", piece("Once"), ended() | choice(text=" upon a time.", finish_reason="stop", token_ids=["5"])
    ),
    slow_limits("ids-beyond-reason", piece("Once", ids=[2**70]), piece(" upon a time.", ids={"a": 1}, finish="stop")),
    slow_limits("half-a-character", piece("\ud83d"), piece("!", finish="stop"), text="?!"),
    slow_limits(
        "timings-texts", piece("Once"), ended(timings={"draft_n": float("nan"), "draft_n_accepted": 1}), **UNKNOWN
    ),
    slow_limits("steps-a-list", piece("Once"), ended(metrics={"speculative_decoding": [1, 2]}), **UNKNOWN),
    Kind("answer", "chunks-of-one-byte", lambda: in_chunks_of_one(SHARP), text="Ünïcödé 🙂"),
    Kind("answer", "talks-on-after-its-end", lambda: drip(head() + events(*GOOD) + DONE, b"x"), known=UNKNOWN),
    Kind("metrics", "endless", lambda: (head(), *repeat(NUL, 9000))),
    Kind("metrics", "a-byte-at-a-time", lambda: drip(head(), b"a"), limits={"metrics": 0.2}),
    Kind("metrics", "reset", [head(), b"vllm:", Broken("reset")]),
    readings("not-utf-8", b"\xff\xfe" * 1000),
    readings("braces", b"vllm:spec_decode_num_drafts" + b"{}} " * 500_000),
]


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    monkeypatch.setenv(address.LISTED, "")
    monkeypatch.delenv(lane.KEY, raising=False)
    record_pauses(monkeypatch)


@pytest.fixture(scope="module")
def session():
    """Return one session for all tests, so that state left by a faulty server would affect the next."""
    return Session()


@pytest.fixture(scope="module")
def good():
    with completion_server(GOOD) as server:
        yield server


def serving(kind):
    make = kind.parts if callable(kind.parts) else lambda: kind.parts
    return completion_server(GOOD, faults={kind.stage: make})


def race(session, baseline, server):
    """Run plain decoding, on a server or in this process, against a lane on a server."""
    first, second = (each and each.address for each in (baseline, server))
    address.allow(filter(None, (first, second)))
    lanes = [Lane(method="ngram", k=2, server=second)]
    settings = {"target": "stories", "prompt": "Once upon a time", "max_new_tokens": TOKENS, "server": first}
    return session.run(Comparison(id="test", lanes=lanes, **settings))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.stage}-{kind.name}")
def test_faulty_server_fails_only_its_lane(kind, session, monkeypatch):
    for place, name in ((client, "silence"), (lane, "token"), (client, "metrics"), (stream, "end")):
        if name in kind.limits:
            monkeypatch.setattr(place, f"{name.upper()}_S", kind.limits[name])
    with serving(kind) as bad:
        trace = race(session, None, bad)
    here, there = trace.lanes
    assert here.finish == "length" and len(here.token_ids) == TOKENS and here.summary["tokens_per_s"]
    if kind.why is None:
        assert (there.finish, there.text) == ("stop", kind.text), there.note
        assert kind.known.items() <= there.summary.items() and not there.remote.counters
        assert set(there.token_ids) == {-1} and len(there.note or "") < 500
    else:
        assert there.finish == "error" and kind.why in there.note, there.note
        assert there.note.isprintable() and len(there.note) < 500
        assert trace.comparison[0]["verdict"] == "unknown"
    stored = to_json(trace)
    assert from_json(stored) == trace and len(stored) < 100_000


def test_a_good_server_is_raced_after_faulty_ones(session, good):
    assert race(session, good, good).lanes[1].text == "Once upon a time."


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name in HEAVY], ids=lambda k: f"{k.stage}-{k.name}")
def test_memory_stays_bounded(kind, session, good):
    with serving(kind) as bad:
        tracemalloc.start()
        race(session, good, bad)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 60e6


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (drafted(1, 2, 1), drafted("NaN", "NaN", "NaN")),
        (drafted(1, 2, 1), drafted(-1, -2, -1)),
        (drafted(1, 2, 1), drafted(1e300, 1e300, 1e300)),
        (drafted(1, 2, 1), drafted("many", "more", "most")),
        (drafted(9, 18, 9), drafted(1, 2, 1)),  # shrinks
        (drafted(1, 2, 1), drafted(9, 18, 99)),  # more accepted than drafted
        (drafted(1, 2, 1), drafted(9, 18, 9).replace("drafts", "drafts{engine")),
        ("", "sglang:spec_accept_rate NaN\nsglang:spec_accept_length -2\n"),
    ],
)
def test_invalid_counters_are_unknown(before, after):
    assert stats_between(before, after) == ServerStats()
    assert stats_between(drafted(1, 2, 1), drafted(9, 18, 9)).counters["accepted"] == 8


def test_failed_reading_is_not_zero():
    assert stats_between(None, drafted(9, 18, 9)) == ServerStats()


@pytest.mark.parametrize("entries", [4, 20_000])
def test_counts_that_the_text_cannot_hold_are_unknown(session, good, entries):
    counts = {"num_draft_tokens": 4 * entries, "num_accepted_draft_tokens": 4 * entries, "num_spec_steps": 10**9}
    counts |= {"per_step_drafted": [4] * entries, "per_step_accepted": [4] * entries}
    counts["acceptance_histogram"] = [10**9] * entries
    pieces = [*GOOD[:-1], GOOD[-1] | {"metrics": {"speculative_decoding": counts}}]
    with completion_server(pieces) as many:
        trace = race(session, good, many)
    lane = trace.lanes[1]
    assert lane.finish == "stop" and "more than its text can hold" in lane.note and not lane.steps_known
    assert lane.summary["acceptance_rate"] is None and not lane.summary["accept_histogram"]
    assert from_json(to_json(trace)) == trace


def test_positions_are_as_many_as_a_trace_holds(session, good):
    readings = [drafted(1, 2, 1, *[0] * 3000), drafted(9, 18, 9, *[4, 40] * 1500)]
    with completion_server(GOOD, metrics=readings) as many:
        trace = race(session, good, many)
    positions = trace.lanes[1].remote.accept_by_position
    assert len(positions) == MAX_DEPTH and positions[:2] == [0.5, None] and from_json(to_json(trace)) == trace
