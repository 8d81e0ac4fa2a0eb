"""The Sweep tab: a benchmark suite run from the page, its curves, its file, its link.

A sweep is work of the engine: races, trainings and sweeps wait for each other in one queue. Stored results open without
any model. A visitor names presets alone, so no model that the page does not offer. The Lab shows its own suite with the
same parts.
"""

import json
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from specdemo.bench.plot import figure
from specdemo.bench.result import SCHEMA, Result, read_result
from specdemo.bench.suites import Sweep, swept, takes
from specdemo.presets.schema import (
    DEFAULT,
    LIMITS,
    is_sweep,
    load_presets,
    preset,
)
from specdemo.ui import assets, space
from specdemo.ui.controls import ENGINE, QUIET, address, visitor, whole_number, wire_share
from specdemo.ui.heavy import live
from specdemo.ui.lines import to_line
from specdemo.ui.views import view

if TYPE_CHECKING:
    from specdemo.models.load import LoadProgress

IF_LINKED = f"() => {{ if (new URLSearchParams(location.search).has('sweep')) ({assets.to_tab('sweep')})(); }}"
STOPPING_S = 30.0  # how long Stop waits for the finished repeats
OFF = (
    "this Space borrows a GPU for seconds and a sweep needs minutes; open a stored result, "
    "or start the page at home with `python app.py`"
)

Outputs = tuple[Any, Any]  # the text of the view and an update of the chart
Measure = Callable[["LoadProgress", Callable[[], bool]], Result]  # given where to report and whether it is to stop


class Sweeping:
    """One sweep: its engine and the append-only text the tab shows. `result` is there once it has ended."""

    def __init__(self, name: str, measure: Measure) -> None:
        """Raises ValueError with one line where no sweep can run."""
        runs = live()
        if runs.ELSEWHERE:
            raise ValueError(OFF)

        def work(cancelled: Callable[[], bool], report: Any) -> Iterator[Result]:
            with runs.session().lock:
                yield measure(report, cancelled)

        self.engine = runs.Engine(work)
        self.result: Result | None = None
        self._told: tuple[int, str] | None = None
        self._stopping = False
        self._unread = threading.Event()  # nobody reads `batches` any more
        self.text = opening() + to_line({"type": "start", "name": name})

    def batches(self) -> Iterator[str]:
        """The text so far, as long as the sweep runs, 15 times a second. Closing the iterator stops it."""
        batches = self.engine.batches()
        try:
            yield self.text
            for batch in batches:
                yield self.add(batch)
        finally:
            batches.close()
            self._unread.set()

    def ask_to_stop(self) -> str:
        """The text, which ends with what happens now; `stop` waits for that."""
        self._stopping = True
        self.text += to_line({"type": "stopping"})
        return self.text

    def stop(self) -> str:
        """End the sweep and the text: with the numbers of the finished repeats, if there are any."""
        self._unread.wait(STOPPING_S)  # two readers would each get a part
        self.add(self.engine.finish(STOPPING_S))
        self.text += to_line({"type": "stopped"})
        return self.text

    def add(self, messages: Iterable[Any]) -> str:
        for message in messages:
            if isinstance(message, Result):
                self.result = message
                self.text += result_line(message, recorded=False)
            else:
                self._say(view(message))
        return self.text

    def _say(self, line: dict[str, Any]) -> None:
        """Of the progress what a reader can see; of an end that was asked for nothing."""
        told = (int(100 * line["share"]), line["text"]) if line["type"] == "loading" else None
        if (told and told == self._told) or (self._stopping and line["type"] == "error"):
            return
        self._told = told
        self.text += to_line(line)


def opening() -> str:
    return to_line({"type": "run", "run": secrets.token_hex(6)})


def result_line(result: Result, recorded: bool) -> str:
    """What the view shows; of what no one checked, such as a stranger's config, words alone."""
    told = {"axis": result.axis, "rows": asdict(result)["rows"], "remarks": result.remarks}
    where = [str(result.environment[name]) for name in ("device", "date") if result.environment.get(name)]
    words = {"where": where, "conditions": conditions(result)}
    return to_line({"type": "result", "recorded": recorded, **told, **words})


def conditions(result: Result) -> str:
    """`suite k · 3 repeats · target stories · ...`"""
    repeats = f"{result.repeats} repeat{'s' * (result.repeats != 1)}"
    chosen = {name: v for name, v in result.config.items() if isinstance(v, str | int | float) and v != "auto"}
    config = [f"{name.replace('_', ' ')} {value}" for name, value in chosen.items()]
    return " · ".join([f"suite {result.suite}", repeats, *config])


def refusal(error: Exception) -> str:
    """A text that says why there is no sweep."""
    return opening() + to_line({"type": "error", "text": str(error)})


def curves(result: Result) -> Any:
    """An update of the chart."""
    try:
        return gr.update(value=figure(result), visible=True)
    except ValueError:  # a suite without speed-ups: the table says all
        return gr.update(visible=False)


def begin(*values: Any) -> Sweeping:
    """The sweep the controls describe. Raises ValueError with one line."""
    asked = admit(from_values(*values))
    on = asked.preset if takes(asked.sweep, "preset") else None
    return Sweeping(", ".join(filter(None, (swept()[asked.sweep].title, on))), asked.suite().run)


class Sweeps:
    """What the events of a tab do. Keeps the latest sweep and the result on show of every open page."""

    def __init__(self, begin: Callable[..., Sweeping]) -> None:
        """begin: from the values of the controls, or ValueError with one line."""
        self._begin = begin
        self._running: dict[str, Sweeping] = {}
        self._results: dict[str, Result] = {}

    def run(self, request: gr.Request, *values: Any) -> Iterator[Outputs]:
        """The growing text of a sweep, or why there is none; at its end the curves."""
        try:
            sweeping = self._begin(*values)
        except ValueError as error:
            yield refusal(error), gr.skip()
            return
        self._running[visitor(request)] = sweeping
        for text in sweeping.batches():
            yield text, self._show(request, sweeping.result) if sweeping.result else gr.skip()

    def ask_to_stop(self, request: gr.Request) -> list[Any]:
        """The text, and Stop as pressed."""
        sweeping = self._running.get(visitor(request))
        return [sweeping.ask_to_stop() if sweeping else gr.skip(), gr.update(interactive=False)]

    def stop(self, request: gr.Request) -> list[Any]:
        sweeping = self._running.get(visitor(request))
        if sweeping is None:
            return [gr.skip(), gr.skip(), *idle()]
        text, result = sweeping.stop(), sweeping.result
        return [text, self._show(request, result) if result else gr.skip(), *idle()]

    def busy(self, request: gr.Request) -> list[Any]:
        """Run, Stop and Open while it runs or waits for the engine."""
        self._running.pop(visitor(request), None)
        return [gr.update(interactive=on) for on in (False, True, False)]

    def open(self, request: gr.Request, path: str) -> Outputs:
        """A stored result, or why the file is none."""
        try:
            result = read_result(Path(path), space.bounds())
        except ValueError as error:
            return refusal(error), gr.skip()
        return opening() + result_line(result, recorded=True), self._show(request, result)

    def save(self, request: gr.Request) -> dict[str, str]:
        """The result on show as a file's name and text."""
        result = self._results.get(visitor(request))
        if result is None:
            raise gr.Error("there is no result to save yet; press Run first", print_exception=False)
        text = json.dumps({"schema": SCHEMA, **asdict(result)}, indent=1) + "\n"
        return {"name": f"specdemo-{result.suite}.json", "text": text}

    def forget(self, request: gr.Request) -> None:
        self._running.pop(visitor(request), None)
        self._results.pop(visitor(request), None)

    def _show(self, request: gr.Request, result: Result) -> Any:
        """An update of the chart; the result is kept."""
        self._results[visitor(request)] = result
        return curves(result)


def idle() -> list[Any]:
    return [gr.update(interactive=on) for on in (True, False, True)]


def from_values(sweep: str, preset: str, repeats: Any, new_tokens: Any) -> Sweep:
    """The sweep the controls describe. Raises ValueError with one line."""
    numbers = {"repeats": whole_number("repeats", repeats), "new_tokens": whole_number("new_tokens", new_tokens)}
    return Sweep().with_changes(sweep=sweep, preset=preset, **numbers)


def admit(asked: Sweep) -> Sweep:
    """The sweep again. Raises ValueError on a public page for one that is too large for it."""
    space.admit(space.fit(preset(asked.preset)).with_changes(max_new_tokens=asked.new_tokens))
    most = space.limits().sweep_repeats
    if asked.repeats > most:
        raise ValueError(f"this public page repeats a sweep {most} times at most, not {asked.repeats}; {space.HOME}")
    return asked


def share(*values: Any) -> str:
    """The link. Raises ValueError with one line."""
    return address(from_values(*values).to_query())


def restore(request: gr.Request) -> Any:
    """The controls a link to a sweep asks for and a text of what was refused. It runs nothing."""
    if not is_sweep(request.query_params):
        return gr.skip()
    asked, refused = Sweep().from_query(request.query_params)
    notes = opening() + "".join(to_line({"type": "note", "text": text}) for text in refused)
    return [*asked.model_dump().values(), notes]


def draw(page: gr.Blocks) -> gr.Radio:
    """The tab, inside the current Blocks -> what chooses its suite."""
    start = Sweep()
    gr.Markdown(assets.text("sweep.md"), elem_id="sweep-about")
    names = [(suite.title, id) for id, suite in swept().items()]
    presets = [(p.title, p.id) for p in load_presets().values()]
    chosen = gr.Radio(
        names, value=start.sweep, label="What to sweep", elem_id="suite", elem_classes="chips", container=False
    )
    question = gr.Markdown(swept()[start.sweep].question, elem_id="question")
    with gr.Row(elem_id="sweep-controls"):
        on = gr.Dropdown(
            presets, value=DEFAULT, label="Preset: target and lane", elem_id="sweep-preset", scale=6, min_width=300
        )
        inputs = [
            chosen,
            on,
            gr.Slider(
                1,
                LIMITS.sweep_repeats,
                start.repeats,
                step=1,
                label="Repeats",
                elem_id="repeats",
                scale=3,
                min_width=170,
            ),
            gr.Slider(
                8,
                LIMITS.max_new_tokens,
                start.new_tokens,
                step=1,
                label="New tokens",
                elem_id="new-tokens",
                scale=3,
                min_width=170,
            ),
        ]
        with gr.Column(scale=2, min_width=180):
            run = gr.Button("Run", variant="primary", size="lg", elem_id="sweep-run")
            with gr.Row():
                stop = gr.Button("Stop", interactive=False, elem_id="sweep-stop", min_width=70)
                shared = gr.Button("Share", elem_id="sweep-share", min_width=70)
    link = gr.Textbox(label="Link to this sweep", visible=False, buttons=["copy"], elem_id="sweep-link")
    view = draw_result(page, Sweeps(begin), inputs, run, stop, "sweep")
    chosen.change(_describe, chosen, [question, on], **QUIET)
    wire_share(shared, share, inputs, link)
    page.load(restore, None, [*inputs, view], **QUIET)
    page.load(None, None, None, js=IF_LINKED, **QUIET)
    return chosen


def draw_result(
    page: gr.Blocks, sweeps: Sweeps, inputs: list[Any], run: gr.Button, stop: gr.Button, name: str
) -> gr.HTML:
    """The view of a result below its controls, and what the two buttons do. name: of the skeleton, and what ids begin
    with."""
    place = gr.HTML("", elem_classes="queue")
    view = assets.view(f"{name}.html", "kit.js", "sweep.js", elem_id=name)
    with view:
        chart = gr.Plot(
            visible=False, show_label=False, container=False, elem_id=f"{name}-chart", elem_classes="swept-chart"
        )
    with gr.Row(elem_id=f"{name}-exports", elem_classes="swept-exports"):
        save = gr.Button("Save the result (JSON)", size="sm", elem_id=f"{name}-save")
        opened = gr.UploadButton("Open a result", file_types=[".json"], size="sm", elem_id=f"{name}-open")
    buttons = [run, stop, opened]
    locked = run.click(sweeps.busy, None, buttons, trigger_mode="once", **QUIET)
    running = locked.then(
        sweeps.run,
        inputs,
        [view, chart],
        show_progress="full",
        show_progress_on=place,
        api_visibility="private",
        **ENGINE,
    )
    running.then(idle, None, buttons, **QUIET)
    stopping = stop.click(sweeps.ask_to_stop, None, [view, stop], cancels=[running], **QUIET)
    stopping.then(sweeps.stop, None, [view, chart, *buttons], **QUIET)
    opened.upload(sweeps.open, opened, [view, chart], **QUIET)
    file = gr.JSON(visible=False)
    save.click(sweeps.save, None, file, **QUIET).success(None, file, None, js=assets.text("save.js"), **QUIET)
    page.unload(sweeps.forget)
    return view


def _describe(suite: str) -> tuple[str, Any]:
    """A suite's question, and the preset where it takes one."""
    return swept()[suite].question, gr.update(visible=takes(suite, "preset"))
