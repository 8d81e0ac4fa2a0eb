"""Card of the Lab tab that watches a listed server. Each page asks for a reading every few seconds, so that a closed
page ends its watch. Nothing runs on the engine.
"""

import os

import gradio as gr

from specdemo.bench.plot import line
from specdemo.diagnosis.watch import Watch, read
from specdemo.servers.address import check_listed, host, listed
from specdemo.servers.client import connected
from specdemo.servers.lane import KEY
from specdemo.ui import assets
from specdemo.ui.job import QUIET, Values, opening, refusal, to_line

EVERY_S = 3.0  # time between readings
SHOWN = 40  # rows of the table


def start(server: str, plain: float | None) -> Watch:
    """Return a watch without readings. Raises ValueError with one line."""
    if plain is not None and not 0.0 < plain < 1e9:
        raise ValueError("tokens/s without speculation must be more than 0; leave it empty if it is unknown")
    return Watch(check_listed(server), plain)


def log(watch: Watch, state: str) -> str:
    """Return the text of the view: one result with all readings."""
    rows = [*watch.rows]
    points = [(row["time"], row["tokens/s"]) for row in rows if row["tokens/s"] is not None]
    found = watch.diagnosis()
    result: Values = {
        "type": "result",
        "state": state,
        "recorded": False,
        "partial": False,
        "verdict": watch.sentence(),
        "where": [],
        "conditions": f"{watch.engine.title if watch.engine else 'server'} at {host(watch.server)}",
        "rows": rows[: -SHOWN - 1 : -1],
        "remarks": [*(found.recommendations if found else ()), *(found.notes if found else ())],
    }
    if len(points) > 1:
        title = "Tokens per second over time"
        lines = [line("tokens/s", 0, points, marks=False)]
        result["chart"] = {"title": title, "label": f"{title}. The numbers are in the table.", "lines": lines}
        result["chart"] |= {"unit": "seconds since the start", "digits": 0}
    return opening() + to_line(result)


async def tick(watch: Watch | None) -> tuple[object, object]:
    """Read the server once; return the text of the view, and whether to go on."""
    if watch is None:
        return gr.skip(), gr.update(active=False)
    try:
        async with connected(watch.server, os.environ.get(KEY)) as client:
            await read(watch, client)
    except ValueError as error:
        return refusal(error), gr.update(active=False)
    return log(watch, "Watching"), gr.skip()


def _begin(server: str, plain: float | None) -> tuple[object, ...]:
    """Return the watch, the text of the view, and the states of timer, Watch and Stop."""
    try:
        watch = start(server, plain)
    except ValueError as error:
        return None, refusal(error), gr.update(active=False), gr.update(), gr.update()
    return (
        watch,
        log(watch, "Watching"),
        gr.update(active=True),
        gr.update(interactive=False),
        gr.update(interactive=True),
    )


def _end(watch: Watch | None) -> tuple[object, ...]:
    shown = gr.skip() if watch is None else log(watch, "Stopped")
    return shown, gr.update(active=False), gr.update(interactive=True), gr.update(interactive=False)


def draw() -> None:
    """Create the card for the servers that the operator has listed."""
    assets.heading("lossless", assets.text("server-watch.md"), elem_id="server-watch-about")
    names = [(host(server), server) for server in listed()]
    with gr.Row(elem_id="server-watch-controls"):
        server = gr.Dropdown(names, value=names[-1][1], label="Server to watch", elem_id="watched", min_width=230)
        plain = gr.Number(
            None,
            label="Tokens/s without speculation",
            info="at the same load; empty if unknown",
            elem_id="plain-speed",
            min_width=230,
        )
        with gr.Column(scale=2, min_width=180):
            run = gr.Button("Watch", variant="primary", size="lg", elem_id="server-watch-run")
            stop = gr.Button("Stop", interactive=False, elem_id="server-watch-stop")
    view = assets.view(
        "result.html", "helpers.js", "chart.js", "sweep.js", elem_id="server-watch", later=True, name="watch"
    )
    watch, timer = gr.State(None), gr.Timer(EVERY_S, active=False)
    run.click(_begin, [server, plain], [watch, view, timer, run, stop], **QUIET).then(
        tick, watch, [view, timer], **QUIET
    )
    timer.tick(tick, watch, [view, timer], trigger_mode="once", **QUIET)
    stop.click(_end, watch, [view, timer, run, stop], **QUIET)
