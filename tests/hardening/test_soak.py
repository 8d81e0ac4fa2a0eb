"""Memory after hundreds of runs, rejected calls and visitors, which must not grow."""

import gc
import os
import secrets
from pathlib import Path

import psutil
import pytest

from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.session import Session
from tests.hardening.public import visitors
from tests.processes import served

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's count of memory")

RUNS, REFUSED, SETTLED = 200, 1_000, 20
LANES = (
    Lane(method="draft_model", model="stories-draft-wide", k=3),
    Lane(method="ngram", k=2),
    Lane(method="medusa", model="stories-medusa", k=3),
    Lane(method="online", model="stories-draft-deep", k=2, options={"every": 2}),
)


def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def spec(number):
    """Return a comparison with other lanes, another prompt and another length for each number."""
    prompt = "Once upon a time, " + "a dog saw a cat and " * (number % 13)
    lanes = [*LANES[number % 4 :][:2]]
    return Comparison(id="test", target="stories", prompt=prompt, lanes=lanes, max_new_tokens=4 + number % 9)


@pytest.mark.release
def test_runs_and_refused_calls_leave_memory_where_it_was():
    session = Session()
    wrong = (
        {"prompt": " "},
        {"prompt": "word " * 600},
        {"target": "storeys"},
        {"lanes": (Lane(method="ngram", options={"max_m": 2}),)},
        {"lanes": (Lane(method="online", model="stories-draft-deep", options={"lr": 99.0}),)},
    )
    seen = []
    for number in range(RUNS):
        session.run(spec(number))
        for call in range(REFUSED // RUNS):
            with pytest.raises(ValueError):
                session.run(spec(number).model_copy(update=wrong[call % len(wrong)]))
        seen.append(resident())
    settled, last = seen[SETTLED - 1], seen[-1]
    assert last < 1.05 * settled, f"{settled:.0f} MB after {SETTLED} runs, {last:.0f} MB after {RUNS}"


RECORDED = sorted(Path("presets/recorded").glob("*.json"))


def refused(caller):
    assert caller.call(caller.fn("race"), ["embeded-draft", None])[-2]["success"] is False


def visit_run(caller):
    fn = caller.after(caller.fn("click", "visit_run"))
    assert caller.call(fn, caller.values(fn, max_new_tokens=8))[-2]["success"]


def visit_opened(caller, trace):
    shown = caller.now(caller.fn("upload", "open-trace"), [caller.upload("t.json", trace)]).json()["data"][0]
    assert '"type":"end"' in shown


@pytest.mark.release
def test_memory_stays_where_it_was_after_the_first_visitors():
    trace = max(RECORDED, key=lambda path: path.stat().st_size).read_bytes()
    with served(SPECDEMO_PUBLIC="1", SPECDEMO_BEHIND_PROXY="127.0.0.1") as (server, page), visitors(page) as visit:
        caller, memory = visit(), psutil.Process(server.pid).memory_info

        def send_requests(refusals, runs, traces):
            for times, act in (
                (refusals, refused),
                (runs, visit_run),
                (traces, lambda caller: visit_opened(caller, trace)),
            ):
                for _ in range(times):
                    caller.session = secrets.token_hex(6)
                    # Few files per visitor.
                    caller.client.headers["X-Forwarded-For"] = f"8.8.8.{secrets.randbelow(250)}"
                    act(caller)
                print(times, act.__name__, memory().rss // 1_000_000, "MB", flush=True)

        send_requests(20, 20, 20)
        before = memory().rss
        send_requests(1000, 200, 100)
        assert memory().rss < 1.05 * before
