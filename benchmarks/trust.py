"""Tests of the confidence intervals: simulations with a known true value, runs next to other programs, chunked
servers.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import exp, sqrt
from random import Random
from statistics import median
from typing import Any

from specdemo.bench.base import Report
from specdemo.bench.measure import Tick, repeated
from specdemo.bench.result import Result
from specdemo.core.estimate import RunTiming, speedup
from specdemo.core.files import json_text
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.session import Session, environment, session
from specdemo.presets.files import preset
from specdemo.servers.address import allow

PLAIN_MS = 3.0
DRAFTED_MS = 0.85  # cost of a draft token, including its verification
STEP_MS = 0.3  # cost of drafting per step
ACCEPTANCE = 0.7  # acceptance rate of tokens whose predecessors were accepted
WANDER, MEMORY = 0.06, exp(-1.0 / 30.0)
LENGTHS = (64, 128, 256, 512)
SCHEDULES = ("race", "sequential")


class Machine:
    """Simulated slow-down of a machine per millisecond: wandering with a correlation time of 30 ms, bursts, drift and
    noise.
    """

    def __init__(
        self, rng: Random, work_ms: float, wander: float = 0.06, burst: float = 1.6, drift: float = 0.1
    ) -> None:
        self._rng = rng
        self._work_ms = work_ms
        self._drift = rng.uniform(-drift, drift)
        self._slow: list[float] = []
        self._at, self._left = rng.gauss(0.0, WANDER), 0.0

    def takes(self, begin: float, work_ms: float) -> float:
        """Return the duration of work that starts at a given time of the run."""
        work, now = work_ms * exp(self._rng.gauss(0.0, 0.03)), begin
        while True:
            while len(self._slow) <= now:
                self._next()
            slow = self._slow[int(now)] * (1.0 + self._drift * now / self._work_ms)
            room = (int(now) + 1 - now) / slow
            if work <= room:
                return now + work * slow - begin
            work, now = work - room, int(now) + 1.0

    def _next(self) -> None:
        """Advance the simulation by one millisecond."""
        self._at = MEMORY * self._at + self._rng.gauss(0.0, WANDER * sqrt(1.0 - MEMORY**2))
        if self._left <= 0.0 and self._rng.random() < 1.0 / 150.0:
            self._left = self._rng.expovariate(1.0 / 12.0)
        self._slow.append(exp(self._at) * (1.6 if self._left > 0.0 else 1.0))
        self._left -= 1.0


def simulated(rng: Random, tokens: int, schedule: str) -> tuple[list[RunTiming], float]:
    """Return the two lanes of a simulated run and the true speed-up."""
    drafts: list[list[int]] = [[0] * (tokens - 1), []]
    left = tokens - 1
    while left:
        deep = min(4, left - 1)
        accepted = next((n for n in range(deep) if rng.random() >= ACCEPTANCE), deep)
        drafts[1].append(deep)
        left -= accepted + 1
    works = [[PLAIN_MS + (STEP_MS + DRAFTED_MS * n if n else 0.0) for n in lane] for lane in drafts]
    machine = Machine(rng, sum(map(sum, works)))
    clocks, taken = [0.0, 0.0], [list[float](), list[float]()]
    while unfinished := [lane for lane in (0, 1) if len(taken[lane]) < len(works[lane])]:
        lane = min(unfinished, key=clocks.__getitem__) if schedule == "race" else unfinished[0]
        taken[lane].append(machine.takes(sum(clocks), works[lane][len(taken[lane])]))
        clocks[lane] += taken[lane][-1]
    lanes = [RunTiming([*zip(drafts[lane], taken[lane], strict=True)], tokens - 1) for lane in (0, 1)]
    return lanes, sum(works[0]) / sum(works[1])


def covered(
    runs: int, tokens: int, schedule: str, tick: Callable[[float], None] = lambda share: None
) -> tuple[float, float]:
    """Return the share of intervals that contain the true value, and half the median width."""
    rng = Random(f"{schedule} {tokens}")
    hits, widths = 0, []
    for run in range(runs):
        tick(run / runs)
        (plain, lane), truth = simulated(rng, tokens, schedule)
        seen = speedup([plain], [lane], shared=schedule == "race")
        assert seen and seen.low and seen.high and seen.width
        hits += seen.low <= truth <= seen.high
        widths.append(seen.width)
    return hits / runs, median(widths)


def coverage(repeats: int, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Measure how often the 95 % interval contains the true value in simulated runs."""

    def once(number: int, tick: Tick) -> dict[str, Any]:
        tokens, schedule = LENGTHS[number // 2], SCHEDULES[number % 2]
        share, width = covered(repeats, tokens, schedule, tick)
        return {"schedule": schedule, "tokens": tokens, "intervals that hold the truth": share, "half a width": width}

    rows, remarks = repeated(2 * len(LENGTHS), report, cancelled, once, "case")
    return Result("coverage", repeats, {"runs": repeats}, environment(None), rows, remarks)


def alone_and_loaded(repeats: int, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Run the default preset alternately alone and next to two busy loops."""
    spec = preset("embedded-draft").validated()

    def once(_repeat: int, tick: Tick) -> list[dict[str, Any]]:
        found = []
        for loops in (0, 2):
            tick(loops / 4)
            with _busy(loops):
                found.append(session().run(spec, cancelled))
        return [{**trace.comparison[0], **_waited(trace.lanes)} for trace in found]

    session().run(spec)  # warm-up, and loads the models for all runs
    done, remarks = repeated(repeats, report, cancelled, once)
    quiet = [alone for alone, _ in done]
    middle = median(row["speedup"] for row in quiet)
    rows = [
        _summary(name, runs, middle) for name, runs in (("alone", quiet), ("beside two loops", [b for _, b in done]))
    ]
    config = {"target": spec.target, "preset": spec.id, "new_tokens": spec.max_new_tokens}
    return Result("noise", len(done), config, environment(session().target()), rows, remarks)


def _waited(lanes: Any) -> dict[str, float]:
    return {"waited": max(lane.summary["waited_share"] or 0.0 for lane in lanes)}


def _summary(name: str, runs: list[dict[str, Any]], middle: float) -> dict[str, Any]:
    speeds = [row["speedup"] for row in runs]
    off = [row for row in runs if abs(row["speedup"] / middle - 1.0) > 0.1]
    return {
        "runs": name,
        "median": median(speeds),
        "from": min(speeds),
        "to": max(speeds),
        "intervals without the quiet median": sum(not r["speedup_low"] <= middle <= r["speedup_high"] for r in runs),
        "off by over 10 %": len(off),
        "of them unmarked": sum(not row["noisy"] for row in off),
        "marked noisy": sum(row["noisy"] for row in runs),
        "waited": median(row["waited"] for row in runs),
    }


@contextmanager
def _busy(loops: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


TOKENS = 120
FIRST_S, TOKEN_S = 0.05, 0.004
BASELINE_TIMES = 1.8  # time of the baseline relative to the lanes


def paces(repeats: int, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Measure one text sent token by token, in chunks of ten and all at once, against a slower baseline."""
    ways = {"token by token": 1, "in bunches of ten": 10, "all at once": TOKENS}

    def once(_repeat: int, tick: Tick) -> list[dict[str, Any]]:
        rows = []
        with _server(1, BASELINE_TIMES) as plain:
            for number, (name, bunch) in enumerate(ways.items()):
                tick(number / len(ways))
                with _server(bunch) as server:
                    allow([plain, server])
                    lane = Lane(method="draft_model", model="m", server=server, name=name)
                    settings = {"id": "paces", "target": "m", "prompt": "-", "max_new_tokens": TOKENS, "chat": False}
                    spec = Comparison.build({**settings, "lanes": [lane], "server": plain})
                    rows.append(Session().run(spec).comparison[0])
        return rows

    done, remarks = repeated(repeats, report, cancelled, once)
    rows = [
        {
            "sent": name,
            "speed-up": median(found[number]["speedup"] for found in done),
            "said": "; ".join(done[-1][number]["reasons"]) or None,
        }
        for number, name in enumerate(ways)
    ]
    return Result("paces", len(done), {"tokens": TOKENS}, environment(None), rows, remarks)


@contextmanager
def _server(bunch: int, times: float = 1.0) -> Iterator[str]:
    """Serve a token every TOKEN_S seconds in chunks of the given size."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            known = self.path == "/v1/models"
            self._head(200 if known else 404, json_text({"data": [{"id": "m"}]}).encode() if known else b"")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            buffered, begin, limit = b"", time.perf_counter(), body["max_tokens"]
            for number in range(1, limit + 1):
                due = times * (FIRST_S + TOKEN_S * (number - 1))
                time.sleep(max(begin + due - time.perf_counter(), 0.0))
                end = "length" if number == limit else None
                choice = {"index": 0, "text": " a", "finish_reason": end, "token_ids": [7]}
                buffered += (
                    b"data: %s\n\n" % json_text({"choices": [choice], "usage": {"completion_tokens": number}}).encode()
                )
                if number % bunch == 0 or end:
                    self.wfile.write(buffered)
                    buffered = b""
            self.wfile.write(b"data: [DONE]\n\n")

        def _head(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
