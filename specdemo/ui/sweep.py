"""Sweeps: a benchmark suite run from the page, with its chart, file and link.

Sweeps run on the engine: races, trainings and sweeps wait for each other in one queue. Stored results open without any
model. A visitor chooses presets only, so that no other models are loaded. The losslessness test shows
its own suite with the same components.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import gradio as gr

from specdemo.bench.base import Report, SoFar, Stop
from specdemo.bench.candidates import commands, shareable
from specdemo.bench.plot import BARS, chart
from specdemo.bench.result import Result, Row, best, is_baseline, noisy, read_result, recorded_suite, to_json
from specdemo.bench.suites import Sweep, swept
from specdemo.bench.tune import YOURS
from specdemo.core.atomic_io import finite
from specdemo.core.estimate import Estimate
from specdemo.core.suggest import counted
from specdemo.engine.comparison import lane_names
from specdemo.models.ref import ModelRef
from specdemo.presets import limits
from specdemo.presets.files import Preset, load_presets, preset
from specdemo.presets.link import changed_by_query, is_sweep
from specdemo.ui import assets, space
from specdemo.ui.controls import Controls, address, look, wire_save, wire_share
from specdemo.ui.job import (
    LOST_S,
    QUIET,
    UPLOADED,
    Job,
    Jobs,
    Parts,
    Start,
    Store,
    Values,
    named,
    opening,
    refusal,
    to_line,
    wire,
    with_engine_lock,
)
from specdemo.ui.setup import from_values
from specdemo.ui.views import Loading, view

USUAL = ("auto", "here", "", 0.0, 1.0)  # values of options that need no mention
CONDITIONS = {"new_tokens": "max new tokens", "draws": "continuations"}
# Gradio gives the page a base address without the settings, in which a fragment alone would lead elsewhere
IF_LINKED = """() => {
  if (new URLSearchParams(location.search).has("sweep")) location.replace(location.href.split("#")[0] + "#sweep");
}"""
OFF = f"this Space gets a GPU only for seconds, and a sweep takes minutes; {limits.HOME}"

RACE, OF_RACE = "race", "race-"  # in the menu of presets; before the names of its controls
RACED = ("The race: its target, lane 1 and prompt", RACE)
PARTIAL = 0.04  # share of a sweep between two results so far


class Sweeping(Job):
    """One sweep, or a result from a file. `file` is the visible result; until this sweep ends, it is that of the job
    `before`.
    """

    stands_in = False  # a recorded result, shown until the visitor has one
    models: Sequence[ModelRef] = ()  # named without their folders
    unread_s = LOST_S
    file: tuple[str, str] | None = None
    _last_progress: tuple[int, str] | None = None

    @classmethod
    def measuring(cls, name: str, measure: Callable[[Report, Stop], Result], before: Self | None = None) -> Self:
        """Raises ValueError with one line if no sweep can run."""
        if space.zero_gpu():
            raise ValueError(OFF)

        def work(cancelled: Stop, report: Callable[..., None]) -> Iterator[Result]:
            yield measure(every_few_percent(report), cancelled)

        sweeping = cls(opening() + to_line({"type": "start", "name": name}), with_engine_lock(work))
        sweeping.file = before.file if before else None
        return sweeping

    @property
    def size(self) -> int:
        return super().size + (len(self.file[1]) if self.file else 0)

    def add(self, messages: Iterable[Any]) -> str:
        for message in messages:
            if isinstance(message, Result):
                self.conclude(self._shared(message), recorded=False)
                continue
            self._emit(view(message))
            if isinstance(message, Loading) and isinstance(message.so_far, Result):
                self.text += result_line(readable(self._shared(message.so_far)), recorded=False, partial=True)
        return self.text

    def _shared(self, result: Result) -> Result:
        return shareable(result, self.models) if self.models else result

    def conclude(self, result: Result, recorded: bool) -> None:
        """Show the result and offer it as a file."""
        self.file = f"specdemo-{result.suite}.json", to_json(result)
        self.text += result_line(readable(result), recorded)

    def _emit(self, line: Values) -> None:
        """Emit visible progress. Nothing is emitted at the end of a stopped sweep."""
        progress = (int(100 * line["share"]), line["text"]) if line["type"] == "loading" else None
        if (progress and progress == self._last_progress) or (self.stopped and line["type"] == "error"):
            return
        self._last_progress = progress
        self.text += to_line(line)


def readable(result: Result) -> Result:
    """Return the result as the page shows it: lanes by method and model instead of preset, lanes without a swept
    setting sorted by speed-up, no remark twice.
    """
    rows: list[Row] = result.rows
    if result.axis == BARS and all(isinstance(row.get("speed-up"), Estimate) for row in rows):
        rows = sorted(rows, key=lambda row: (not is_baseline(row["speed-up"]), -row["speed-up"].value))
    an_id = re.compile("|".join(rf"(?<![\w-]){re.escape(id)}(?![\w-])" for id in load_presets()))
    names = _lane_names(id for row in rows for id in an_id.findall(str(row.get("lane", ""))))

    def renamed(text: str) -> str:
        return an_id.sub(lambda found: names.get(found[0], found[0]), text)

    rows = [row | {"lane": renamed(row["lane"])} if isinstance(row.get("lane"), str) else row for row in rows]
    remarks = [renamed(remark) for remark in dict.fromkeys(result.remarks)]
    return replace(result, rows=rows, remarks=remarks)


def _lane_names(ids: Iterable[str]) -> dict[str, str]:
    """Return the name of each preset's lane; a number tells two equal ones apart."""
    presets = [*dict.fromkeys(ids)]
    names = lane_names([load_presets()[id].lanes[0] for id in presets])
    times = [names[:place].count(name) for place, name in enumerate(names)]
    return {id: f"{name} #{n + 1}" if n else name for id, name, n in zip(presets, names, times, strict=True)}


def every_few_percent(report: Callable[..., None]) -> Report:
    """Return a callback that passes on the progress, and a result so far each time that another PARTIAL is done,
    something else begins, or loading the models has added to it."""
    due, last, doing = 0.0, None, ""

    def watched(share: float, what: str, so_far: SoFar | None = None, /) -> None:
        nonlocal due, last, doing
        before, doing = doing, what.partition(",")[0]
        now = so_far() if so_far and (share >= due or not share or doing != before) else None
        due = share + PARTIAL if now else due
        stages = now and sum(map(bool, now.environment.get("stages", {}).values()))  # the page counts their seconds
        seen = now and (now.rows, now.remarks, now.repeats, stages)
        shown, last = (now if seen != last else None), seen or last
        report(share, what, shown)

    return watched


def result_line(result: Result, recorded: bool, partial: bool = False) -> str:
    """Return the data of the view. Unchecked parts, such as a foreign config, are reduced to text."""
    rows = [{name: _cell(value) for name, value in row.items()} for row in result.rows]
    verdict, *others = [*filter(None, [best(result)]), *result.remarks] or ["this suite measures no speed-up."]
    remarks = [*others, *filter(None, [noisy(result)])]
    verdict = verdict.replace(YOURS, "its prompt") if recorded else verdict
    payload: dict[str, object] = {"axis": result.axis, "rows": rows, "remarks": remarks, "verdict": verdict}
    payload |= {"stages": result.environment.get("stages", {}), "commands": commands(result.remarks)}
    where = [str(result.environment[name]) for name in ("device", "date") if result.environment.get(name)]
    payload["target"] = str(result.config.get("target", ""))
    payload |= {"where": where, "conditions": " · ".join(_conditions(result))}
    with suppress(ValueError):  # a suite without speed-ups has only its table
        payload["chart"] = finite(chart(result))
    return to_line({"type": "result", "recorded": recorded, "partial": partial, **payload})


def _conditions(result: Result) -> list[str]:
    """Return the repeats and the options of a result that tell results apart."""
    options = {name: value for name, value in result.config.items() if isinstance(value, str | int | float)}
    chosen = {name: value for name, value in options.items() if not isinstance(value, bool) and value not in USUAL}
    known = load_presets().get(str(chosen.pop("preset", "")))
    words = [f"{CONDITIONS.get(name, name.replace('_', ' '))} {value}" for name, value in chosen.items()]
    return [counted(result.repeats, "repeat"), *([f"preset {known.title}"] if known else []), *words]


def _cell(value: object) -> object:
    """Return the value of several runs with its interval in words."""
    if not isinstance(value, Estimate):
        return value
    words = value.interval(1 if value.value >= 10.0 else 2)
    return {"value": value.value, "low": value.low, "high": value.high, "interval": words}


def begin(values: Values, last: Sweeping | None, allow_any_model: bool = False) -> Sweeping:
    """Return the sweep that the controls describe: of a preset, or of the first lane of the race on its prompt. Raises
    ValueError with one line."""
    own = {name: value for name, value in values.items() if not name.startswith(OF_RACE)}
    if own["preset"] != RACE:
        sweep = admit(Sweep().changed(**own))
        return Sweeping.measuring(f"{swept()[sweep.sweep].title}, {sweep.preset}", sweep.suite().run, last)
    of_race = {name.removeprefix(OF_RACE): value for name, value in values.items() if name.startswith(OF_RACE)}
    race = from_values(of_race, allow_any_model)
    lane = race.lanes[0].model_copy(update={"name": race.lane_names[1]})
    sweep = admit(Sweep().changed(**own | {"preset": race.id}))
    prompts = {} if sweep.sweep == "context" else {"prompts": (race.prompt,)}  # which reads a long text
    measured = sweep.suite(preset=race.model_copy(update={"lanes": [lane]}), **prompts)
    sweeping = Sweeping.measuring(f"{swept()[sweep.sweep].title}, {race.target.short_name}", measured.run, last)
    sweeping.models = [race.target, *lane.models]
    return sweeping


Begin = Callable[[Values, Sweeping | None], Sweeping]


class Sweeps(Jobs[Sweeping]):
    """Events of the tab for all visitors."""

    def open(self, request: gr.Request, values: Values) -> Values:
        """Return a stored result, or the reason why the file cannot be read."""
        try:
            return self._show(request, read_result(Path(values["file"]), space.bounds()))
        except ValueError as error:
            return {"view": refusal(error, file=True)}

    def recorded(self, request: gr.Request, values: Values) -> Values:
        """Return the recorded result of a suite, if the visitor sees none; a link asks for a run."""
        result = recorded_suite(values["sweep"])  # may take a second; the visitor may start a sweep meanwhile
        last = self.last(request)
        if result is None or is_sweep(request.query_params) or not (last is None or last.stands_in):
            return {}
        return self._show(request, result, stands_in=True)

    def _show(self, request: gr.Request, result: Result, stands_in: bool = False) -> Values:
        shown = Sweeping(opening())
        shown.conclude(result, recorded=True)
        shown.stands_in = stands_in
        self.keep(request, shown)
        return shown.final_updates()

    def save(self, request: gr.Request) -> dict[str, str]:
        """Return the file name and the text of the visible result."""
        last = self.last(request)
        if last is None or last.file is None:
            raise gr.Error("no result to save yet; press Run first")
        name, text = last.file
        return {"name": name, "text": text}


def admit(sweep: Sweep) -> Sweep:
    """Return the sweep. Raises ValueError on a public page if it is too large."""
    chosen = limits.fit(preset(sweep.preset))
    limits.admit(chosen.with_changes(max_new_tokens=sweep.new_tokens, repeats=sweep.repeats))
    if limits.public() and (reason := space.no_gpu(chosen)):
        raise ValueError(f"{reason}; {limits.HOME}")
    return sweep


def share(values: Values) -> str:
    """Return the link to a sweep. Raises ValueError with one line."""
    if values["preset"] == RACE:
        raise ValueError("a link to a sweep names a preset; choose one in place of the race")
    return address(urlencode(Sweep().changed(**values).model_dump()))


def restore(request: gr.Request, _: Values) -> Values:
    """Return the controls of a link to a sweep, and a text with what was ignored. Nothing runs."""
    if not is_sweep(request.query_params):
        return {}
    sweep, refused = changed_by_query(Sweep(), request.query_params)
    notes = opening() + "".join(to_line({"type": "note", "text": text}) for text in refused)
    return {**sweep.model_dump(), "view": notes}


def draw(page: gr.Blocks, form: Controls, tab: gr.Tab, store: Store) -> None:
    """Create the tab, inside the current Blocks. form: controls of the race, which is swept unless the visitor chooses
    a preset."""
    start, most = Sweep(), limits.here()
    gr.Markdown(assets.text("sweep.md"), elem_id="sweep-about")
    chips: Values = {"label": "What to sweep", "elem_id": "suite", "elem_classes": "chips", "container": False}
    chosen = gr.Radio([(one.title, id) for id, one in swept().items()], value=start.sweep, **chips)
    question = gr.Markdown(swept()[start.sweep].question, elem_id="question")
    inputs: Parts = {"sweep": chosen}
    with gr.Row(elem_id="sweep-controls") as row:
        inputs["preset"] = preset_menu(load_presets().values(), RACE, "sweep-preset", 6, 300, RACED)
        inputs["repeats"] = gr.Slider(1, most.repeats, start.repeats, step=1, **look("Repeats", "repeats", 3, 170))
        length = look("Max new tokens", "new-tokens", 3, 170)
        inputs["new_tokens"] = gr.Slider(8, most.max_new_tokens, start.new_tokens, step=1, **length)
    sweeps = Sweeps("sweep", store)
    of_race = {OF_RACE + name: part for name, part in form.inputs.items()}
    begun = partial(begin, allow_any_model=form.allow_any_model)
    parts, exports = draw_result(sweeps, row, "Run", begun, inputs | of_race)
    with exports:
        shared = gr.Button("Share", size="sm", elem_id="sweep-share")
    link = gr.Textbox(label="Link to this sweep", visible=False, buttons=["copy"], elem_id="sweep-link")
    for shown in (tab.select, chosen.change):
        named(shown, sweeps.recorded, {"sweep": chosen}, parts, **QUIET)
    chosen.change(lambda suite: swept()[suite].question, chosen, question, **QUIET)
    wire_share(shared, share, inputs, link)
    named(page.load, restore, {}, {**inputs, "view": parts["view"]}, **QUIET)
    page.load(None, None, None, js=IF_LINKED, **QUIET)


def preset_menu(
    presets: Iterable[Preset], value: str, elem_id: str, scale: int, min_width: int, *more: tuple[str, str]
) -> gr.Dropdown:
    """Create a menu of presets. more: entries before them."""
    place = look("Preset: target and lane", elem_id, scale, min_width)
    return gr.Dropdown([*more, *((p.title, p.id) for p in presets)], value=value, **place)


def draw_result(
    sweeps: Sweeps, row: gr.Row, words: str, begin: Begin, inputs: Parts, *starts: Start, page: str = "result.html"
) -> tuple[Parts, gr.Row]:
    """Create Run and Stop in a row of controls, the `view` of the result, and the row of buttons to save and open one.

    words: of Run. starts: further ways to start. page: the skeleton of the view.
    """
    name = sweeps.name
    with row, gr.Column(scale=2, min_width=180):
        run = gr.Button(words, variant="primary", size="lg", elem_id=f"{name}-run")
        stop = gr.Button("Stop", interactive=False, elem_id=f"{name}-stop")
    view = assets.view(page, *assets.SWEEP, elem_id=name, later=True, name=name)
    with gr.Row(elem_id=f"{name}-exports", elem_classes="result-exports") as exports:
        save = gr.Button("Save result (JSON)", size="sm", elem_id=f"{name}-save")
        opened = gr.UploadButton("Open a result", file_types=[".json"], size="sm", elem_id=f"{name}-open")
    parts = {"view": view}
    wire(sweeps, [([run.click], begin, inputs), *starts], parts, stop, [run, opened])
    named(opened.upload, sweeps.open, {"file": opened}, parts, **UPLOADED)
    wire_save(save, sweeps.save)
    return parts, exports
