"""CPU time of the page and its browser while lanes race, and the frame rate of a playback.

A stand-in for the session sends the steps of a recorded race, repeated to any length, after their own time, so only the
page's work is measured.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, takewhile
from statistics import fmean, median
from threading import Lock
from unittest.mock import patch

from specdemo.bench.base import Report, Tick
from specdemo.bench.measure import run_repeats
from specdemo.bench.result import Result
from specdemo.core.tally import summarise
from specdemo.core.trace import LaneTrace, RunTrace, StepEvent, compare, step_ms
from specdemo.engine.messages import RunMessage, StepRow, replay
from specdemo.engine.session import environment
from specdemo.presets.files import DEFAULT, recorded
from specdemo.servers.process import free_port

CASES = {  # ms of a plain step, lanes, tokens
    "race at 10 tokens/s": (100.0, 2, 2048),
    "race at 200 tokens/s": (5.0, 2, 2048),
    "playback of four lanes": (0.0, 4, 1024),  # 0: the run is over at once
}
BEFORE_S, SECONDS = 2.0, 6.0  # between the first token and a measurement; of the measurement
COLUMNS = "page process, % of a core", "main thread of the tab, %", "browser, % of a core", "frames/s"
FRAMES = """seconds => new Promise((done) => {
  const from = performance.now();
  let frames = 0;
  const frame = (now) => now < from + 1000 * seconds ? requestAnimationFrame(frame, frames++) : done(frames / seconds);
  requestAnimationFrame(frame);
})"""


def lengthened(trace: RunTrace, ms: float, lanes: int, tokens: int) -> RunTrace:
    """Return a race of more and longer lanes, in which a step of plain decoding takes about `ms`."""
    scale = (ms or 5.0) / fmean(map(step_ms, trace.lanes[0].events[1:]))
    longer = [_longer(lane, tokens, scale) for lane in (trace.lanes[0], *[trace.lanes[1]] * (lanes - 1))]
    rows = [compare(longer[0], lane, greedy=True) | {"verdict": "identical"} for lane in longer[1:]]
    return replace(trace, lanes=longer, comparison=rows, config=trace.config | {"max_new_tokens": tokens})


def _longer(lane: LaneTrace, tokens: int, scale: float) -> LaneTrace:
    events, ids, again = list[StepEvent](), list[int](), cycle(lane.events[1:])
    while len(ids) < tokens:
        event = next(again) if events else lane.events[0]
        events.append(replace(event, index=len(events), ms={name: ms * scale for name, ms in event.ms.items()}))
        ids += event.emitted[0]
    pieces = [piece for piece, _ in zip(cycle(lane.pieces), ids, strict=False)]
    text = "".join(pieces)
    longer = replace(lane, events=events, token_ids=ids, pieces=pieces, text=text, finish="length", summary={})
    return replace(longer, summary=summarise(longer))


class Simulation:
    """A session whose runs are a stored one."""

    trace: RunTrace
    live = True  # steps take their time

    def __init__(self) -> None:
        self.lock = Lock()

    def stream(self, _spec: object, cancelled: Callable[[], bool], _report: object) -> Iterator[RunMessage]:
        for message in takewhile(lambda _: not cancelled(), replay(self.trace)):
            if self.live and isinstance(message, StepRow):
                time.sleep(sum(message.ms.values()) / 1000.0)
            yield message


def page_cost(repeats: int, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Race at two speeds and play a long race back, in Chromium without a window."""
    from playwright.sync_api import sync_playwright

    from specdemo.ui import job, page, race

    engine, port, short = Simulation(), free_port(), recorded(DEFAULT)
    assert short is not None
    with ExitStack() as stack:
        for module in (job, page, race):
            stack.enter_context(patch.object(module, "session", lambda: engine))
        stack.callback(page.serve(port=port, block=False).close)
        browser = stack.enter_context(sync_playwright()).chromium.launch(executable_path=shutil.which("chromium"))
        system = browser.new_browser_cdp_session()

        def measure(ms: float, *size: int) -> list[float]:
            engine.trace, engine.live = lengthened(short, ms, *size), ms > 0.0
            with browser.new_page(viewport={"width": 1280, "height": 800}) as tab:
                devtools = tab.context.new_cdp_session(tab)
                devtools.send("Performance.enable")

                def used() -> tuple[float, ...]:
                    tasks = {one["name"]: one["value"] for one in devtools.send("Performance.getMetrics")["metrics"]}
                    processes = system.send("SystemInfo.getProcessInfo")["processInfo"]
                    return time.process_time(), tasks["TaskDuration"], sum(one["cpuTime"] for one in processes)

                tab.goto(f"http://127.0.0.1:{port}/?preset={DEFAULT}")
                tab.wait_for_function("/^Recorded/.test(document.querySelector('.sd-status')?.textContent)")
                tab.click("#run")
                tab.wait_for_function("/^(Run|Playing)/.test(document.querySelector('.sd-status').textContent)")
                tab.wait_for_timeout(1000.0 * BEFORE_S)
                start, before = time.monotonic(), used()
                frames = [] if ms else [float(tab.evaluate(FRAMES, SECONDS))]
                tab.wait_for_timeout(1000.0 * SECONDS if ms else 0.0)
                took = time.monotonic() - start
                return [*(100.0 * (now - then) / took for then, now in zip(before, used(), strict=True)), *frames]

        def once(_: int, tick: Tick) -> list[list[float]]:
            tick(0.0)
            return [measure(*case) for case in CASES.values()]

        done, remarks = run_repeats(repeats, report, cancelled, once)
    rows = [
        {
            "case": case,
            **dict.fromkeys(COLUMNS, ""),
            **dict(zip(COLUMNS, map(spread, zip(*runs, strict=True)), strict=False)),
        }
        for case, runs in zip(CASES, zip(*done, strict=True), strict=True)
    ]
    config = {"seconds": SECONDS, "browser": browser.version, "load": os.getloadavg()[0]}
    return Result(
        "page", len(done), config, environment(None), rows, ["Median (lowest to highest) of the repeats.", *remarks]
    )


def spread(values: Sequence[float]) -> str:
    """Return the median with the lowest and the highest value."""
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
