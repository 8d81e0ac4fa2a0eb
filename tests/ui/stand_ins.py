"""Stand-ins for the slow parts of the page."""

import asyncio
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from specdemo.bench.result import THOROUGH, Result
from specdemo.core.estimate import Estimate
from specdemo.core.tally import summarise
from specdemo.core.trace import Remote, RunTrace, StepEvent, compare
from specdemo.ui.job import refusal
from tests.traces import HOSTILE, hostile_trace

VISITOR = SimpleNamespace(session_hash="a", request=None)


def lines(text):
    """Return the messages of a log."""
    return [json.loads(line) for line in text.splitlines()]


def sync(results):
    """Yield the results of an async generator. Closing the iterator closes the generator.

    They are computed in a thread, because the loop of a browser test may run in this one.
    """
    loop = asyncio.new_event_loop()

    def finish():
        loop.run_until_complete(results.aclose())
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    with ThreadPoolExecutor(1) as thread:
        try:
            with suppress(StopAsyncIteration):
                while True:
                    yield thread.submit(lambda: loop.run_until_complete(anext(results))).result()
        finally:
            thread.submit(finish).result()


def played(jobs, start, visitor, values):
    """Yield the updates of a job that a visitor starts, as its page gets them."""
    try:
        jobs.keep(visitor, start(values, jobs.last(visitor)))
    except ValueError as error:
        yield {"view": refusal(error)}
        return
    yield from sync(jobs.follow(visitor))


class Trainer:
    """A stand-in for training: four steps without work. With `endless`, the last step lasts until it is cancelled."""

    def __init__(self):
        self.endless = self.fails = self.started = self.stopped = False
        self.minutes = 0.0

    def recipes(self):
        return {"medusa": "Medusa, 4 heads", "eagle-3": "EAGLE-3"}

    def head_recipe(self, name):
        if name not in self.recipes():
            raise ValueError(f"unknown recipe {name!r}")
        return SimpleNamespace(method="draft_model")

    def train_live(self, name, minutes, out, cancelled, target="stories"):
        self.started, self.minutes = True, minutes
        if self.fails:
            raise ValueError("no text to learn from")
        yield {"type": "note", "text": "stories is writing the text that the head will learn from"}
        of = 60.0 * minutes
        for step in range(4):
            measured = {"agree_1": 0.1 * step, "agree_2": 0.05 * step, "loss": 3.0 / step if step else math.nan}
            at = {"seconds": of * step / 3, "of_seconds": of, "step": step, "tokens": 512 * step}
            yield {"type": "tick"} | at | measured
        while self.endless and not cancelled():
            threading.Event().wait(0.01)
        self.stopped = self.endless
        yield {"type": "done", "folder": str(out)}


ENVIRONMENT = {
    "device": "Test CPU <b>",
    "threads": 1,
    "dtype": "float32",
    "commit": "0123456789abcdef",
    "date": "2026-11-21",
}


def swept(axis="k", places=(1, 2, 4, 8), repeats=3):
    """Return a hand-made sweep: plain decoding and two lanes, of which the second is predicted and slower at the
    end.
    """

    def estimate(value, low, high):
        return Estimate(value, low, high) if repeats >= THOROUGH else Estimate(value)

    rows = [
        {"lane": "Baseline", axis: None, "tokens/s": estimate(100.0, 99.0, 101.0), "speed-up": estimate(1.0, 1.0, 1.0)}
    ]
    for lane, gain in (("wide", 0.4), ("<i>deep</i> & co", 0.2)):
        for i, place in enumerate(places):
            speed = round(1.0 + gain * i * (2.5 - i) / 2, 4) if i < 4 else 0.5
            row = {"lane": lane, axis: place, "tokens/s": estimate(100 * speed, 98 * speed, 102 * speed)}
            row |= {
                "speed-up": estimate(speed, round(speed - 0.05, 4), round(speed + 0.1, 4)),
                "accepted": 0.5,
                "output": "identical",
            }
            rows.append(row if lane == "wide" else row | {"predicted": speed + 0.02})
    config = {"target": "stories", "prompts": 8, "new_tokens": 96}
    return Result("batch" if axis == "batch" else "k", repeats, config, ENVIRONMENT, rows, ["a remark <b>"], axis)


def tuned(kinds=("chat", "<b>edit</b>")):
    """Return a hand-made result of `tune`: a row per kind and candidate, and one per drafter."""
    found = [("ngram", 7, 1.31), ("suffix", 3, 1.12), ("ngram", 3, 1.05), ("<i>head</i>", 3, 0.64)]
    rows = [
        {
            "category": kind,
            "lane": f"{name}, k={k}",
            "k": k,
            "speed-up": Estimate(speed, speed - 0.05, speed + 0.05),
            "place": place,
            "race": f"preset=embedded-ngram&method=ngram&k={k}",
        }
        for kind in kinds
        for place, (name, k, speed) in enumerate(found, start=1)
    ]
    states = ["", "left out after 2 races", "left out after 1 race", ""]
    for (name, k, speed), state, place in zip(found, states, (1, 2, 3, 4), strict=True):
        estimate, link = Estimate(speed, speed - 0.05, speed + 0.05), f"preset=embedded-ngram&method=ngram&k={k}"
        row = {"category": "mixed", "lane": f"{name}, k={k}", "speed-up": estimate, "place": place, "state": state}
        rows.append(row | {"race": link})
    rows += [
        {
            "category": "mixed",
            "lane": "<u>slow</u>",
            "speed-up": None,
            "place": 0,
            "state": "not raced: <i>too</i> slow",
        },
        {
            "category": "mixed",
            "lane": "plain decoding",
            "speed-up": Estimate(1.0, 1.0, 1.0),
            "place": 0,
            "state": "90 tokens/s",
        },
    ]
    remark = "For mixed work use ngram, k=7: 1.31x as fast as plain decoding."
    remarks = [remark, "Passes: known.", "Here: python -m specdemo run", "llama-server: llama-server --spec <b>"]
    stages = {"loading the model": 20.0, "measuring passes": 10.0, "loading drafters": 8.0, "racing": 90.4}
    environment = ENVIRONMENT | {"stages": stages, "pass_ms": {"1": 100.0, "2": 150.0, "4": 210.0, "8": 500.0}}
    return Result("tune", 3, {"target": "stories", "minutes": 5.0}, environment, rows, remarks)


class Bench:
    """A stand-in for `suite` of specdemo.bench.suites without measurements. With `endless`, the last repeat lasts until
    it is cancelled.
    """

    endless = False
    finished = 1  # repeats finished before the cancellation
    options = None

    def __call__(self, name, **arguments):
        self.options, repeats = (name, arguments), arguments["repeats"]
        return SimpleNamespace(run=partial(self.losslessness if name == "losslessness" else self.run, repeats))

    def run(self, repeats, report, cancelled):
        for repeat in range(repeats):
            report(repeat / repeats, f"repeat {repeat + 1} of {repeats}, k = 4")
        while self.endless and not cancelled():
            threading.Event().wait(0.01)
        if not cancelled():
            return swept(repeats=repeats)
        if not self.finished:
            raise ValueError("stopped before a repeat was done")
        remark = f"Stopped after {self.finished} of {repeats} repeats."
        return replace(swept(repeats=self.finished), remarks=[remark])

    def losslessness(self, repeats, report, cancelled):
        report(0.5, f"repeat 1 of {repeats}")
        return sampled(repeats)


def sampled(repeats=2):
    """Return a hand-made result of a losslessness test."""
    shares = [("<b>bold</b>", 0.75, 0.7), (" cat", 0.25, 0.3)]
    rows = [
        {"token": token, "place": place, "plain": p, "speculative": s} for place in (2, 3) for token, p, s in shares
    ]
    remarks = [f"No difference was found between {256 * repeats} continuations of each.", "Token 2: p = 0.5."]
    return Result("losslessness", repeats, {"draws": 256 * repeats}, ENVIRONMENT, rows, remarks, "token")


def tree_trace(nodes=64):
    """Return a hand-made run whose drafter writes notes: a tree with three accepted nodes, then chains."""
    trace = hostile_trace()
    prefill, *rest = trace.lanes[0].events
    wrong = len(HOSTILE)
    drafted, parents = [wrong] * nodes, [(i + 1) // 2 for i in range(nodes)]
    parents[0] = 0
    path = [0, 1]
    while len(path) < 4:
        path.append(max(i + 1 for i, parent in enumerate(parents) if parent == path[-1]))
    for depth, slot in enumerate(path[1:], start=1):
        drafted[slot - 1] = depth
    totals = {
        "k": 4.0,
        "alpha": 0.75,
        "predicted": 1.5,
        "updates": 1.0,
        "train_ms": 4.0,
        "train_loss": 1.25,
        "accepted": 0.6,
    }
    probs = [[0.5] * nodes], [[0.25] * nodes]
    events = [prefill, StepEvent(1, [drafted], [parents], [path], [[1, 2, 3, 4]], *probs, rest[0].ms, totals)]
    at = 5
    while at < len(HOSTILE):
        end = min(at + 3, len(HOSTILE) - 1)
        size = end - at
        chain = [[*range(at, end)]], [[*range(size)]], [[*range(size + 1)]], [[*range(at, end + 1)]]
        totals = totals | {"k": 2.0, "updates": totals["updates"] + 1.0}
        events.append(StepEvent(len(events), *chain, [[0.5] * size], [[0.25] * size], rest[0].ms, totals))
        at = end + 1
    lane = replace(trace.lanes[1], name="Tree", options={"k": 4, "nodes": nodes}, events=events)
    lane.summary = summarise(lane)
    trace.lanes[1] = lane
    return trace


def chat_trace():
    """Return a hand-made second turn of a chat.

    Lane 0 writes both tags of its thoughts, the first tag in two tokens. In lane 1 the template wrote the first tag.
    """
    trace = hostile_trace()
    messages = [
        ("system", "Be <b>brief</b>."),
        ("user", "A riddle?"),
        ("assistant", "What has keys?"),
        ("user", "A piano!"),
    ]
    for lane, tags in zip(trace.lanes, ({1: "<th", 2: "ink>", 6: "</think>"}, {6: "</think>"}), strict=True):
        lane.messages = [{"role": role, "content": content} for role, content in messages]
        lane.pieces = [tags.get(i, piece) for i, piece in enumerate(lane.pieces)]
        lane.text = "".join(lane.pieces)
    return trace


def remote_trace(hostile="<b>host</b>:8000") -> RunTrace:
    """Return a hand-made run with a lane on a server: two tokens per chunk, and counters of the whole server."""
    trace = hostile_trace()
    baseline, lane = trace.lanes
    pairs = [[-1]] + [[-1, -1][: len(HOSTILE) - i] for i in range(1, len(HOSTILE), 2)]
    events = [
        StepEvent(i, [[]], [[]], [[]], [ids], [[]], [[]], {"stream" if i else "prefill": 5.0})
        for i, ids in enumerate(pairs)
    ]
    trace.lanes[1] = replace(
        lane, name="Far away", events=events, token_ids=[-1] * len(HOSTILE), options={}, prompt_ids=[]
    )
    totals = {"steps": 6, "drafted": 20, "accepted": 9, "acceptance_rate": 0.45, "tokens_per_step": 2.5}
    source = "accepted / drafted tokens; requests of other users are included"
    trace.lanes[1].remote = Remote(hostile, "m", "/v1/completions", len(HOSTILE), True, totals, [0.9, 0.6], source)
    trace.lanes[1].summary = summarise(trace.lanes[1])
    trace.comparison = [{**compare(baseline, trace.lanes[1], greedy=True), "verdict": "same text"}]
    return trace
