"""Two cards: train a head for the target of the page, watch its loss, race it; and test losslessness.

The losslessness test is a suite with the visitor's sampling settings and is shown as a sweep is. `recipes.train_live`
yields lines of the log: `tick` with seconds, of_seconds, step, tokens, loss and agree_1, agree_2, ... as they become
known, `note`, and finally `done`. Training runs on the engine: races and trainings wait for each other in one queue.
"""

import json
import math
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import gradio as gr

from specdemo.bench.base import ROWS
from specdemo.bench.suites import suite
from specdemo.core.rules import DEFAULT_RULE
from specdemo.engine.comparison import Comparison, Lane
from specdemo.methods import recipes
from specdemo.models.packaged import embedded_folder
from specdemo.models.ref import ModelRef
from specdemo.presets import limits
from specdemo.presets.files import load_presets, preset
from specdemo.ui import assets
from specdemo.ui.controls import Controls, draw_setting, fill, look
from specdemo.ui.job import QUIET, Job, Jobs, Parts, Store, Values, named, opening, to_line, wire, with_engine_lock
from specdemo.ui.model_menus import TRAINED, page_preset
from specdemo.ui.sweep import Sweeping, Sweeps, draw_result, preset_menu
from specdemo.ui.views import view

MINUTES = (0.5, 30.0)
DRAWS = 1024  # maximum of a losslessness test
POINTS = 500  # maximum of a loss curve, without evaluations
OFF = f"Training is disabled on this public page, because it takes minutes; {limits.HOME}."


def off() -> str:
    """Return why no head can be trained on this page; empty if one can."""
    target = page_preset().target
    of_file = f"{target.label} is a GGUF file: to train, start the page with the folder that it was made from"
    return OFF if limits.public() else of_file if target.gguf else ""


class Training(Job):
    """One training. `folder` is set once the head is written."""

    STOPPING: ClassVar[Values] = {"type": "note", "text": "Stopping; the partly trained head will be saved."}

    def __init__(self, recipe: str, minutes: float) -> None:
        """Raises ValueError with one line if training is not possible."""
        if reason := off():
            raise ValueError(reason)
        target = page_preset().target
        self.method = recipes.head_recipe(recipe).method
        minutes = min(max(minutes, MINUTES[0]), MINUTES[1])
        out = Path("runs") / f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
        work = with_engine_lock(lambda cancelled, _: recipes.train_live(recipe, minutes, out, cancelled, target))
        super().__init__(opening(recipe=recipe), work, math.inf)
        self.folder: str | None = None
        self._due = 0.0  # time of the next point of the loss curve, in seconds of training

    def add(self, messages: Iterable[Any]) -> str:
        for message in messages:
            line: Values = message if isinstance(message, dict) else view(message)
            if line["type"] == "done":
                self.folder = line["folder"]
                TRAINED.append(ModelRef(self.folder))
            elif line["type"] == "tick":
                if line["seconds"] < self._due and "agree_1" not in line:
                    continue
                self._due = line["seconds"] + line["of_seconds"] / POINTS
            self.text += to_line(line)
        return self.text

    def extra_updates(self) -> Values:
        """Return the update of the button that races the head."""
        return {"race": gr.update(interactive=self.folder is not None)}


def shipped_training(recipe: str) -> str:
    """Return the training log of a recipe's shipped head; "" if none ships."""
    path = embedded_folder() / f"stories-{recipe}" / "provenance.json"
    if not path.is_file():
        return ""
    provenance = json.loads(path.read_text(encoding="utf-8"))
    where = [provenance["hardware"], f"{provenance['threads']} thread", f"commit {provenance['commit'][:7]}"]
    ticks = ({"type": "tick", "of_seconds": provenance["seconds"], **point} for point in provenance["evaluations"])
    return opening(recipe=recipe, recorded=True, where=where) + "".join(map(to_line, (*ticks, {"type": "done"})))


def train(values: Values, _: Training | None) -> Training:
    """Create the training that the visitor chose. Raises ValueError with one line."""
    return Training(values["recipe"], values["minutes"])


class Lab(Jobs[Training]):
    """Trainings of all visitors."""

    def recorded(self, request: gr.Request, values: Values) -> Values:
        """Show the training of the recipe's shipped head until the visitor trains one.

        The tab may be opened before the menu of recipes is there; then it shows the first one.
        """
        shown = shipped_training(values["recipe"] or next(iter(recipes.recipes())))
        return {} if self.last(request) else {"view": shown}

    def race_head(self, request: gr.Request, values: Values) -> Values:
        """Return the updates of the race controls, with the new head in lane 1."""
        training = self.last(request)
        if training is None or training.folder is None:
            raise gr.Error("no trained head yet; train one first")
        lane = Lane(method=training.method, model=ModelRef(training.folder))
        return fill(page_preset().with_changes(lanes=[lane.model_dump()]), values)


def draw_training(page: gr.Blocks, form: Controls, tab: gr.Tab, store: Store) -> None:
    """Create the card of trainings, inside the current tab."""
    lab = Lab("training", store)
    able = not off()
    words = assets.text("lab.md").replace("@target", page_preset().target.label) + f"\n\n{off()}"
    assets.heading("train", words, elem_id="lab-about")
    with gr.Row(elem_id="lab-controls"):
        recipe = gr.Dropdown([], **look("Head", "recipe", 3, 240))
        minutes = gr.Slider(*MINUTES, 2, step=0.5, interactive=able, **look("Minutes", "minutes", 3, 240))
        with gr.Column(scale=2, min_width=180):
            start = gr.Button("Train", variant="primary", size="lg", elem_id="train", interactive=able)
            stop = gr.Button("Stop and save", interactive=False, elem_id="stop-training")
    view = assets.view("lab.html", "helpers.js", "chart.js", "lab.js", elem_id="lab", later=True)
    race = gr.Button("Race the new head", interactive=False, elem_id="race-head")
    given = {"recipe": recipe, "minutes": minutes}
    wire(lab, [([start.click], train, given)], {"view": view, "race": race}, stop, [start])
    raced = named(race.click, lab.race_head, form.drawn, form.parts, **QUIET)
    form.offer(raced.then)
    to_race = raced.then(None, None, None, js=assets.to_tab("race"), **QUIET)
    to_race.then(None, None, None, js="() => document.getElementById('run').click()", **QUIET)
    page.load(_recipes, None, recipe, **QUIET)
    for shown in (tab.select, recipe.change):
        named(shown, lab.recorded, {"recipe": recipe}, {"view": view}, **QUIET)


def _recipes() -> object:
    choices = [(title, name) for name, title in recipes.recipes().items()]
    return gr.update(choices=choices, value=choices[0][1])


def most_draws() -> int:
    """Return the maximum number of draws that this host allows."""
    return ROWS * limits.here().repeats


def begin(values: Values, last: Sweeping | None) -> Sweeping:
    """Return the test that the controls describe. Raises ValueError with one line."""
    base = limits.fit(preset(values["preset"]))
    if not base.embedded:
        raise ValueError(f"losslessness is tested only with the shipped models, not with {base.target[:80]}")
    chosen = limits.admit(base.with_changes(**{name: values[name] for name in ("acceptance", "temperature", "top_p")}))
    draws = values["draws"]
    if not (isinstance(draws, int) and ROWS <= draws <= most_draws()):
        raise ValueError(f"continuations must be {ROWS} to {most_draws()} on this page, not {draws}")
    test = suite("losslessness", preset=chosen, repeats=draws // ROWS)
    return Sweeping.measuring(f"Losslessness, {chosen.id}", test.run, last)


def draw_losslessness(tab: gr.Tab, store: Store) -> None:
    """Create the card of the test, inside the current tab."""
    assets.heading("lossless", assets.text("losslessness.md"), elem_id="losslessness-about")
    heat: Values = {"scale": 2, "min_width": 230}
    draws = look("Continuations", "continuations", 2, 230) | {"info": "per kind of decoding"}
    rule: Values = {"elem_id": "tested-acceptance", "scale": 2, "min_width": 190}
    tested, most = [p for p in load_presets().values() if p.embedded], most_draws()
    with gr.Row(elem_id="losslessness-controls") as row:
        inputs: Parts = {
            "preset": preset_menu(tested, "embedded-sampling", "tested", 3, 330),
            "acceptance": draw_setting(Lane, "acceptance", DEFAULT_RULE, **rule),
            "temperature": draw_setting(Comparison, "temperature", 0.8, **heat),
            "top_p": draw_setting(Comparison, "top_p", 1, **heat),
            "draws": gr.Slider(ROWS, most, min(DRAWS, most), step=ROWS, **draws),
        }
    tests = Sweeps("losslessness", store)
    parts, _ = draw_result(tests, row, "Test", begin, inputs)
    named(tab.select, lambda request, _: tests.recorded(request, {"sweep": tests.name}), {}, parts, **QUIET)
