"""Responsiveness of the page: `python benchmarks/page_feel.py [RACES]`.

Races of the default comparison at automatic speed in a real Chromium: data transferred before Run, frame times and long
tasks during a race, time from Run to the first token, and the elements and heap that these races leave in the page.
"""

import os
import sys
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from time import sleep

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from playwright.sync_api import CDPSession, Page, sync_playwright

from specdemo.bench.report import table
from specdemo.servers.process import free_port

FLAGS = ["--no-sandbox", "--disable-gpu"]
PRESET, PATIENCE_MS = "embedded-draft", 60_000
WARM = 2  # warm-up races
FRAMES = """() => {
  Object.assign(window, { frames: [], tasks: [], watching: true });
  let last = performance.now();
  const frame = (now) => {
    window.frames.push(now - last);
    last = now;
    if (window.watching) requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
  window.observer ??= new PerformanceObserver((list) => {
    window.tasks.push(...list.getEntries().map((task) => task.duration));
  });
  window.observer.observe({ type: "longtask" });
}"""
PRESS = """() => new Promise((resolve) => {
  const started = performance.now();
  const seen = new MutationObserver((changes) => {
    for (const change of changes) for (const node of change.addedNodes)
      if (change.target.closest?.(".sd-text") && node.dataset?.step) {
        seen.disconnect();
        return resolve(performance.now() - started);
      }
  });
  seen.observe(document.querySelector("#view"), { childList: true, subtree: true });
  document.querySelector("#run").click();
})"""


Race = tuple[float, list[float], list[float]]  # ms to the first token, ms of every frame, ms of every long task


def serve_page(port: int) -> None:
    """Serve the page of app.py."""
    from specdemo.ui.page import serve

    serve(PRESET, port=port)


def left(session: CDPSession) -> tuple[float, float]:
    """Return the number of elements and the heap in MB after garbage collection."""
    session.send("HeapProfiler.collectGarbage")
    metrics = {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}
    return metrics["Nodes"], metrics["JSHeapUsedSize"] / 1e6


def race(page: Page, watch: bool) -> Race:
    """Run one race to its end."""
    if watch:
        page.evaluate(FRAMES)
    first = page.evaluate(PRESS)
    page.locator("#view .sd-status", has_text="Finished").wait_for()
    page.evaluate("window.watching = false")
    return first, *(page.evaluate("[window.frames ?? [], window.tasks ?? []]") if watch else ([], []))


def main(races: int) -> None:
    port = free_port()
    server = get_context("spawn").Process(target=serve_page, args=(port,), daemon=True)
    server.start()
    with sync_playwright() as playwright:
        path = os.environ.get("SPECDEMO_CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(PATIENCE_MS)
        session = page.context.new_cdp_session(page)
        transferred: list[float] = []  # compressed bytes of each answer
        session.on("Network.loadingFinished", lambda answer: transferred.append(answer["encodedDataLength"]))
        session.send("Network.enable")
        arrive(page, f"http://127.0.0.1:{port}/")
        session.send("Network.disable")
        session.send("Performance.enable")
        for _ in range(WARM):
            race(page, False)
        remaining = [left(session)]
        seen = [race(page, True) for _ in range(races)]
        remaining.append(left(session))
        browser.close()
    server.terminate()
    report(seen, remaining, sum(transferred) / 1000.0)


def arrive(page: Page, address: str) -> None:
    """Wait for the server to start, without error pages of the browser, and open the page."""
    while True:
        with suppress(httpx.ConnectError):
            httpx.get(address)
            break
        sleep(0.2)
    page.goto(address)
    page.locator("#view .sd-status", has_text="Recorded").wait_for()  # the recorded race has played


def report(races: list[Race], remaining: list[tuple[float, float]], transferred_kb: float) -> None:
    first = [race[0] for race in races]
    frames = [frame for race in races for frame in race[1]]
    tasks = [task for race in races for task in race[2]]
    cuts = quantiles(frames, n=20)
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{len(os.sched_getaffinity(0))} cores, shared by engine, server and browser | load {load}")
    print(f"{PRESET}, {len(races)} races after {WARM}\n")
    (elements, heap), (elements_left, heap_left) = remaining
    rows = [
        ("transferred before Run, KB", f"{transferred_kb:.0f}", "compressed"),
        ("press of Run to first token, ms", f"{median(first):.0f}", f"{min(first):.0f} to {max(first):.0f}"),
        ("between frames, ms", f"{cuts[9]:.1f}", f"p95 {cuts[18]:.1f}, longest {max(frames):.0f}, of {len(frames)}"),
        ("tasks over 50 ms", f"{len(tasks)}", f"longest {max(tasks, default=0):.0f} ms"),
        ("elements in the page", f"{elements_left:.0f}", f"{elements_left / elements - 1:+.1%}"),
        ("heap, MB", f"{heap_left:.2f}", f"{heap_left / heap - 1:+.1%}"),
    ]
    print(table(("what", "median or number", "spread"), rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or ["10"]))
