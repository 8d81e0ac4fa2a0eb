"""The Lab: train a head for the shipped target, watch it learn, race it; compare drafts; test losslessness.

`trainer` gives what trains: specdemo.methods.recipes, or a stand-in. Its `train_live` yields dicts with seconds,
of_seconds, step, tokens, loss and agree_1, agree_2, ... as they become known, or with a note, and at last one with done
and folder. Training is work of the engine: races and it wait for each other in one queue.
"""

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import gradio as gr

from specdemo.presets.schema import DEFAULT, LaneConfig, preset
from specdemo.ui import assets, losslessness, space
from specdemo.ui.controls import ENGINE, QUIET, TRAINED, Controls, fill, visitor
from specdemo.ui.heavy import live
from specdemo.ui.lines import to_line
from specdemo.ui.log import refusal
from specdemo.ui.views import view

MINUTES = (0.5, 30.0)
RUNS = Path("runs")
POINTS = 500  # of a curve, evaluations apart: steps come by the thousand
SAVING_S = 30.0  # how long Stop waits until the head is written
OFF = (
    "Training is off on this public page: it would keep the shared machine busy for minutes. "
    "At home it is on: start the page with `python app.py`."
)


class Trainer(Protocol):
    def recipes(self) -> dict[str, str]: ...

    def head_recipe(self, name: str) -> Any: ...  # has `method`; ValueError for an unknown name

    def train_live(
        self, name: str, minutes: float, out: Path, cancelled: Callable[[], bool]
    ) -> Iterator[dict[str, Any]]: ...


def trainer() -> Trainer:
    """What trains; brings torch along."""
    live()
    from specdemo.methods import recipes

    return recipes


def allowed() -> bool:
    """False on a public machine."""
    return not space.public()


class Training:
    """One training: its engine and the append-only text the Lab shows. `folder` is there once the head is written."""

    def __init__(self, recipe: str, minutes: float) -> None:
        trains = trainer()
        self.method: str = trains.head_recipe(recipe).method
        minutes = min(max(minutes, MINUTES[0]), MINUTES[1])
        out = RUNS / f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
        runs = live()

        def work(cancelled: Callable[[], bool], _: Any) -> Iterator[dict[str, Any]]:
            with runs.session().lock:
                yield from trains.train_live(recipe, minutes, out, cancelled)

        self.engine = runs.Engine(work, math.inf)
        self.folder: str | None = None
        self._due = 0.0  # seconds of training at which the next point of the curve is worth a line
        self.text = to_line({"type": "run", "run": secrets.token_hex(6), "recipe": recipe})

    def batches(self) -> Iterator[str]:
        """The text so far, as long as the training runs, 15 times a second. Closing the iterator stops it."""
        batches = self.engine.batches()
        try:
            for batch in batches:
                yield self.add(batch)
        finally:
            batches.close()

    def ask_to_stop(self) -> str:
        """The text, which ends with what happens now; `stop` waits for that."""
        self.add(self.engine.finish(grace_s=0.0))
        return self.add([{"note": "Stopping; the head is written as far as it is trained."}])

    def stop(self) -> str:
        """End the training and the text: with the head as far as it was trained, if it is written in time."""
        self.add(self.engine.finish(SAVING_S))
        self.text += to_line({"type": "stopped"})
        return self.text

    def add(self, messages: Iterable[Any]) -> str:
        for message in messages:
            if not isinstance(message, dict):
                self.text += to_line(view(message))
            elif message.get("done"):
                self.folder = message["folder"]
                TRAINED.append(self.folder)
                self.text += to_line({"type": "done", "folder": self.folder})
            elif "note" in message:
                self.text += to_line({"type": "note", "text": message["note"]})
            elif "agree_1" in message or message["seconds"] >= self._due:
                self._due = message["seconds"] + message["of_seconds"] / POINTS
                self.text += to_line({"type": "tick", **message})
        return self.text


class Lab:
    """What the events of the tab do. Keeps the latest training of every open page."""

    def __init__(self) -> None:
        self._trainings: dict[str, Training] = {}

    def train(self, request: gr.Request, recipe: str, minutes: float) -> Iterator[str]:
        """The growing text of a training, or why there is none."""
        try:
            if not allowed():
                raise ValueError(OFF)
            training = Training(recipe, minutes)
        except ValueError as error:
            yield refusal(error).text
            return
        self._trainings[visitor(request)] = training
        yield training.text
        yield from training.batches()

    def ask_to_stop(self, request: gr.Request) -> list[Any]:
        """The text, and Stop as pressed."""
        training = self._trainings.get(visitor(request))
        return [training.ask_to_stop() if training else gr.skip(), gr.update(interactive=False)]

    def stop(self, request: gr.Request) -> list[Any]:
        training = self._trainings.get(visitor(request))
        return [training.stop() if training else gr.skip(), *self.idle(request)]

    def busy(self, request: gr.Request) -> list[Any]:
        """Start, Stop and Race while it trains or waits for the engine."""
        self.forget(request)
        return [gr.update(interactive=on) for on in (False, True, False)]

    def idle(self, request: gr.Request) -> list[Any]:
        training = self._trainings.get(visitor(request))
        ready = training is not None and training.folder is not None
        return [gr.update(interactive=on) for on in (True, False, ready)]

    def race_head(self, request: gr.Request, *drawn: int) -> list[Any]:
        """The controls of the Race with the new head in lane 1."""
        training = self._trainings[visitor(request)]
        assert training.folder is not None
        return race_with(training.method, training.folder, drawn)

    def forget(self, request: gr.Request) -> None:
        self._trainings.pop(visitor(request), None)


def race_with(method: str, folder: str, drawn: Sequence[int]) -> list[Any]:
    """Updates of `Controls.outputs`: the first preset, with this head as its only lane."""
    lane = LaneConfig(method=method, model=folder)
    return fill(preset(DEFAULT).with_changes(lanes=[lane.model_dump()]), drawn)


def draw(page: gr.Blocks, form: Controls, sweep: gr.Radio) -> None:
    """The tab, inside the current Blocks. sweep: what chooses the suite of the Sweep tab."""
    _draw_training(page, form)
    gr.Markdown(assets.text("depth_width.md"), elem_id="depth-width-about")
    compare = gr.Button("Open the sweep", elem_id="depth-width")
    opened = compare.click(lambda: "depth-width", None, sweep, **QUIET)
    opened.then(None, None, None, js=assets.to_tab("sweep"), **QUIET)
    losslessness.draw(page)


def _draw_training(page: gr.Blocks, form: Controls) -> None:
    lab = Lab()
    gr.Markdown(assets.text("lab.md") + ("" if allowed() else f"\n\n**{OFF}**"), elem_id="lab-about")
    with gr.Row(elem_id="lab-controls"):
        recipe = gr.Dropdown([], label="Head", elem_id="recipe", scale=3, min_width=240, interactive=allowed())
        minutes = gr.Slider(
            *MINUTES, 2, step=0.5, label="Minutes", elem_id="minutes", scale=3, min_width=240, interactive=allowed()
        )
        with gr.Column(scale=2, min_width=180):
            start = gr.Button("Train", variant="primary", size="lg", elem_id="train", interactive=allowed())
            stop = gr.Button("Stop and keep it", interactive=False, elem_id="stop-training")
    place = gr.HTML("", elem_classes="queue")
    view = assets.view("lab.html", "kit.js", "chart.js", "lab.js", elem_id="lab")
    race = gr.Button("Race the new head", interactive=False, elem_id="race-head")
    buttons = [start, stop, race]
    locked = start.click(lab.busy, None, buttons, trigger_mode="once", **QUIET)
    training = locked.then(
        lab.train,
        [recipe, minutes],
        view,
        show_progress="full",
        show_progress_on=place,
        api_visibility="private",
        **ENGINE,
    )
    training.then(lab.idle, None, buttons, **QUIET)
    stopping = stop.click(lab.ask_to_stop, None, [view, stop], cancels=[training], **QUIET)
    stopping.then(lab.stop, None, [view, *buttons], **QUIET)
    raced = race.click(lab.race_head, form.drawn, form.outputs, **QUIET)
    raced.then(None, None, None, js=assets.to_tab("race"), **QUIET)
    if allowed():
        page.load(_recipes, None, recipe, **QUIET)
    page.unload(lab.forget)


def _recipes() -> Any:
    """The recipes' own words."""
    choices = [(title, name) for name, title in trainer().recipes().items()]
    return gr.update(choices=choices, value=choices[0][1])
