"""Cost of the open page: `python benchmarks/page_cost.py [REPEATS]`.

The same race runs alternately without a browser (through the endpoint `/compare`) and in a real Chromium that streams
and draws it. Prints how much slower a lane's device time per token is with the page, and the delay from the engine to
the token's element in the page. The server records when it emits a step; both processes read the machine's clock.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gradio_client import Client
from playwright.sync_api import Playwright, expect, sync_playwright

from specdemo.bench.report import table
from specdemo.core.estimate import over_repeats
from specdemo.servers.process import free_port

FLAGS = ["--no-sandbox", "--disable-gpu"]
PRESET, NEW_TOKENS, REPEATS = "embedded-draft", 448, 7
PATIENCE_MS = 60_000
WATCH = """() => {
  window.drawn = [];
  const watcher = new MutationObserver((changes) => {
    const now = Date.now();
    for (const change of changes) for (const node of change.addedNodes) {
      const lane = change.target.closest?.(".sd-text");
      if (lane && node.dataset?.step && node.dataset.kind !== "rejected")
        window.drawn.push([Number(lane.dataset.lane), Number(node.dataset.step), now]);
    }
  });
  watcher.observe(document.querySelector("#view"), { childList: true, subtree: true });
}"""

expect.set_options(timeout=PATIENCE_MS)

Race = dict[str, Any]  # recorded by the server: emitted, ms per token, environment


def serve_noting(port: int, results: Connection) -> None:
    """Serve the page of app.py with a session that records when each race emitted its steps."""
    from specdemo.engine.messages import Finished, LaneStep, Message
    from specdemo.engine.session import Session
    from specdemo.ui.page import serve

    stream = Session.stream

    def noting(session: Session, *given: Any) -> Iterator[Message]:
        emitted = []
        for message in stream(session, *given):
            if isinstance(message, LaneStep):
                emitted.append((message.lane, message.event.index, time.time()))
            elif isinstance(message, Finished):
                lanes = message.trace.lanes
                times = {lane.name: 1000.0 / float(str(lane.summary["tokens_per_s"])) for lane in lanes}
                results.send({"emitted": emitted, "ms": times, "environment": message.trace.environment})
            yield message

    Session.stream = noting  # type: ignore[assignment, method-assign]
    server = serve(PRESET, port=port, block=False)
    results.send("up")
    server.block_thread()


def in_the_page(playwright: Playwright, address: str, results: Connection) -> tuple[Race, list[float]]:
    """Run a race as a visitor; return the server's records and the delay of each token in ms."""
    path = os.environ.get("SPECDEMO_CHROMIUM", "/usr/bin/chromium")
    browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"{address}?preset={PRESET}&max_new_tokens={NEW_TOKENS}")
    page.locator("#sampling button").first.click()
    expect(page.locator("#max_new_tokens input[type=number]")).to_have_value(
        str(NEW_TOKENS)
    )  # the page has read the link
    page.evaluate(WATCH)
    page.locator('[name=sd-pace][value="1"]').check(force=True)  # full speed, not slowed down for display
    page.locator("#run").click()
    page.locator("#view .sd-status", has_text="Finished").wait_for()
    drawn = page.evaluate("window.drawn")
    browser.close()
    race = results.recv()
    emitted = {(lane, step): 1000.0 * at for lane, step, at in race["emitted"]}
    return race, [at - emitted[lane, step] for lane, step, at in drawn]


def main(repeats: int) -> None:
    spawn = multiprocessing.get_context("spawn")
    results, sender = spawn.Pipe(duplex=False)
    port = free_port()
    server = spawn.Process(target=serve_noting, args=(port, sender), daemon=True)
    server.start()
    assert results.recv() == "up"
    address = f"http://127.0.0.1:{port}/"
    client = Client(address, verbose=False)

    def alone() -> Race:
        client.predict(PRESET, {"max_new_tokens": NEW_TOKENS}, api_name="/compare")
        race: Race = results.recv()
        return race

    pairs, delays = [], []
    with sync_playwright() as playwright:
        for repeat in range(repeats + 1):
            if repeat % 2:
                without, (with_page, waited) = alone(), in_the_page(playwright, address, results)
            else:
                (with_page, waited), without = in_the_page(playwright, address, results), alone()
            if repeat:  # the first is the warm-up
                pairs.append((without, with_page))
                delays += waited
    server.terminate()
    server.join()
    report(pairs, delays)


def report(pairs: list[tuple[Race, Race]], delays: list[float]) -> None:
    environment = pairs[0][0]["environment"]
    cores = len(os.sched_getaffinity(0))
    threads = f"engine on {environment['threads']} thread"
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{environment['device']} | {cores} cores, shared by engine, server and browser | {threads}")
    print(f"commit {environment['commit']} | {PRESET}, {NEW_TOKENS} new tokens at most | load {load}")
    print(f"{len(pairs)} repeats of both in turn, mean and 95 % interval\n")
    rows = []
    for lane in pairs[0][0]["ms"]:
        alone, with_page = ([race["ms"][lane] for race in races] for races in zip(*pairs, strict=True))
        ratios = [b / a for a, b in zip(alone, with_page, strict=True)]
        rows.append((lane, *map(_spread, (alone, with_page, ratios))))
    print(table(("lane", "ms/token, no browser", "ms/token, page open", "page / none"), rows))
    cuts = quantiles(delays, n=20)
    shown = f"p50 {cuts[9]:.0f} ms, p95 {cuts[18]:.0f} ms, max {max(delays):.0f} ms"
    print(f"\nemitted to in the page, {len(delays)} tokens: {shown}")


def _spread(values: list[float]) -> str:
    return over_repeats(values).format("", 3)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else REPEATS)
