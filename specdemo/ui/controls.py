"""Controls of a comparison. The options of a method are drawn from its `method_options`; no method is named here.

Controls and their values have names (setup.py). Drawing the page needs no torch: what only the code of a method knows
(its title and options) is filled in by the first events of a visitor.
"""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import gradio as gr

from specdemo.bench.report import sentence
from specdemo.core.deployment import offers_files
from specdemo.core.rules import rule_options
from specdemo.core.settings import Setting, Settings, settings
from specdemo.engine.comparison import Comparison, Lane
from specdemo.methods import facts_of, method_options
from specdemo.models.ref import ModelRef
from specdemo.presets import limits
from specdemo.presets.files import Preset, load_presets, preset
from specdemo.presets.pair import TASKS, prompt_for, task
from specdemo.servers.address import host, listed
from specdemo.ui import assets, setup
from specdemo.ui.job import QUIET, Parts, Values, named
from specdemo.ui.model_menus import (
    DRAFTING,
    START_WITH,
    fitting_models,
    method_choices,
    model_choices,
    not_offered,
    published,
    target_choices,
    unfit,
)
from specdemo.ui.setup import (
    CHAT,
    LANES,
    NAMES,
    NUMBERS,
    OF_GGUF,
    SAMPLING,
    TEXT,
    model_reader,
    needs_model,
    padded,
    prompt_format,
    to_values,
)

DRAWN = tuple(f"drawn-{n}" for n in NUMBERS)
LAST = ("last-method", "last-acceptance")
HERE = ("this machine", "")
# Gradio adds the events of drawn options to a dict, which it iterates when it draws others at the same time
ONE_AT_A_TIME: Values = {"concurrency_id": "options", "concurrency_limit": 1}
BASIC = ("max_new_tokens", "temperature")  # settings of the comparison that are not under Advanced
UNFOLD = """() => {
  const open = document.getElementById("ID").classList.toggle("open");
  document.getElementById("ID-toggle").setAttribute("aria-expanded", String(open));
}"""


@dataclass(frozen=True)
class Controls:
    """All controls of a comparison by name. Names of a lane's controls end in its number: "k-2".

    preset: id of the selected preset. setup: the row of setup.js. run, stop: its buttons. count: number of lanes shown.
    options: name -> value for those that differ from their default. server: where a lane runs; hidden unless the
    operator listed servers or allowed engines. drawn: incremented when a lane's option controls must be drawn again;
    hidden. last-MENU: the choice that the other controls were fitted to, because a menu reports an input also when it
    is left without a choice.
    """

    parts: Parts
    allow_any_model: bool = False

    @property
    def inputs(self) -> Parts:
        """Return the controls that `from_values` reads."""
        return {name: self.parts[name] for name in NAMES}

    @property
    def drawn(self) -> dict[str, object]:
        """Return the components that are updated when settings change."""
        return {name: self.parts[name] for name in DRAWN}

    @property
    def changes(self) -> list[Any]:
        """Return the events of a changed comparison. Options are drawn later and have none here."""
        return [part.change for part in self.inputs.values() if not isinstance(part, gr.State)]

    def wire(self, page: gr.Blocks) -> None:
        """Connect the events: lanes are added and removed, and each lane shows the controls of its method."""
        parts = self.parts
        target, count = {"target": parts["target"]}, {"count": parts["count"]}
        given = {name: parts[name] for name in ("target", "last-target", "preset", "prompt")} | self._of_lanes(
            "method", "options"
        )
        refit = partial(_refit, allow_any_model=self.allow_any_model)
        self.offer(named(parts["target"].input, refit, given, parts, **QUIET).then)
        for name in TASKS:
            given, shown_task = {"chat": parts["chat"]}, {"prompt": parts["prompt"]}
            named(parts[f"task-{name}"].click, partial(_task, name), given, shown_task, **QUIET)
        for name, more in (("add", 1), ("remove", -1)):
            pressed = partial(parts[name].click, trigger_mode="always_last")  # a second click follows the first
            self.describe(named(pressed, partial(_count_on, more), target | count | self.drawn, parts, **QUIET).then)
        page.load(None, js=assets.text("accessibility.js"), **QUIET)
        page.load(None, js=assets.text("drop.js"), **QUIET)
        page.load(None, js=f"() => {{ {assets.text('page_title.js')} }}", **QUIET)
        self.describe(partial(gr.on, self.changes))
        for n in NUMBERS:
            lane = self._of_lane(n)
            named(parts[f"method-{n}"].input, _switch, target | lane, lane, **QUIET)
            named(parts[f"acceptance-{n}"].input, _switch_rule, lane, lane, **QUIET)
            with parts[f"lane-{n}"]:
                self._draw_options(page, n)

    def offer(self, after: Callable[..., object]) -> None:
        """Connect an event to the lists of methods and models.

        It is not part of `fill`: with new choices a method's new value would reach the browser after `drawn`, and the
        options of the old method would be drawn.
        """
        given = {"target": self.parts["target"], **self._of_lanes("method", "options", "model")}
        shown = self._of_lanes("method", "model")
        named(after, partial(offer, allow_any_model=self.allow_any_model), given, shown, **QUIET)

    def describe(self, event: Callable[..., object]) -> None:
        """Connect an event to the description of the setup."""
        shown = {name: self.parts[name] for name in ("setup", "about")}
        show = partial(setup.show_setup, allow_any_model=self.allow_any_model)
        named(event, show, self.inputs, shown, trigger_mode="always_last", **QUIET)

    def _of_lanes(self, *names: str) -> Parts:
        return {f"{name}-{n}": self.parts[f"{name}-{n}"] for n in NUMBERS for name in names}

    def _of_lane(self, n: int) -> Parts:
        names = ("method", "model", "options", "acceptance", "acceptance_options", "drawn", *LAST)
        return {name: self.parts[f"{name}-{n}"] for name in names}

    def _draw_options(self, page: gr.Blocks, n: int) -> None:
        """Create the row of controls that follows the lane's method."""
        lane = self._of_lane(n)

        def draw_options(count: int, name: str, options: Values, rule: str, of_rule: Values) -> None:
            if n > count:
                return  # drawn when the lane is added
            with gr.Row(elem_classes="options"):
                for option in method_options(name):
                    self._draw_option(n, option, options, "option", lane["options"])
                for option in rule_options(rule):
                    self._draw_option(n, option, of_rule, "rule", lane["acceptance_options"])

        follow = [page.load, lane["drawn"].change]
        names = ("method", "options", "acceptance", "acceptance_options")
        inputs = [self.parts["count"], *(lane[name] for name in names)]
        gr.render(inputs, triggers=follow, show_progress="hidden", **ONE_AT_A_TIME)(draw_options)

    def _draw_option(self, n: int, option: Setting, values: Mapping[str, object], of: str, stored: object) -> None:
        """Create the control of one option of the method or rule, and its event. stored: has all values."""
        words = {"label": option.name, "info": option.help, "elem_id": f"{of}-{option.name}-{n}"}
        value = values.get(option.name, option.default)
        control = _draw_control(option, value, gr.Dropdown, **words, interactive=True)
        method = self.parts[f"method-{n}"]
        given = {"target": self.parts["target"], "method": method, "options": stored, "value": control}
        shown = {"options": stored, "model": self.parts[f"model-{n}"]}
        self.describe(named(control.change, partial(_set, option), given, shown, **QUIET).then)


def address(query: str) -> str:
    """Return `?query`. On a Space, return the public address, which the page cannot know inside its frame."""
    space = os.environ.get("SPACE_ID")
    return f"https://huggingface.co/spaces/{space}?{query}" if space else f"?{query}"


def wire_share(button: gr.Button, share: Callable[[Values], str], inputs: dict[str, object], link: gr.Textbox) -> None:
    """Let the button show and copy the link. If `share` raises ValueError, show its message instead."""

    def shown(_: gr.Request, values: Values) -> Values:
        try:
            return {"link": gr.update(value=share(values), label=link.label, visible=True)}
        except ValueError as error:
            return {"link": gr.update(value=str(error), label="No link", visible=True)}

    shared = named(button.click, shown, inputs, {"link": link}, **QUIET)
    shared.then(None, link, link, js=assets.text("share.js"), **QUIET)


def wire_save(button: gr.Button, save: Callable[[gr.Request], dict[str, str]]) -> None:
    """Let the button save a file, of which `save` returns the name and the text."""
    file = gr.JSON(visible=False)
    button.click(save, None, file, **QUIET).success(None, file, None, js=assets.text("save.js"), **QUIET)


def component_props(race: Preset) -> dict[str, Values]:
    """Return the properties of every control of `Controls.parts` for a comparison."""
    values = to_values(race)
    values |= {f"last-{name}": values[name] for n in NUMBERS for name in ("target", f"method-{n}", f"acceptance-{n}")}
    shown: dict[str, Values] = {name: {"value": value} for name, value in values.items()}
    for n, lane in zip(NUMBERS, padded(race), strict=True):
        model = shown[f"model-{n}"]
        model["choices"] = model_choices(
            [model["value"]] if model["value"] else []
        )  # `offer` adds the others, which needs torch
        model["visible"] = lane is None or lane.model is not None
        shown[f"server-{n}"]["choices"] = _servers(lane.server if lane else None)
    shown["more"] = {"value": None}
    shown |= {"about": {"value": setup.about(load_presets()[race.id])}, "unfit": {"value": published(race.target)}}
    return shown | _chat_looks(race.target, race.chat, race.system) | _lane_looks(len(race.lanes))


def _updates(shown: Mapping[str, Values]) -> Values:
    return {name: gr.update(**look) for name, look in shown.items()}


def fill(race: Preset, drawn: Mapping[str, int]) -> Values:
    """Return updates of `Controls.parts` that show this comparison."""
    return _updates(component_props(race)) | {name: drawn[name] + 1 for name in DRAWN}


def offer(_: gr.Request | None, values: Values, allow_any_model: bool = False) -> Values:
    """Return the updates of every lane's lists: the methods, and the models that fit the lane's method and the target,
    with its own. Nothing changes for a target that the page does not offer.
    """
    if not_offered([values["target"]], allow_any_model, typed=True):
        return {}
    target = ModelRef(values["target"])
    updates, methods = {}, method_choices(target)
    for n in NUMBERS:
        reads = model_reader(values[f"method-{n}"], values[f"options-{n}"])
        models = [*fitting_models(target, reads), *filter(None, [values[f"model-{n}"]])]
        updates[f"method-{n}"] = gr.update(choices=methods)
        updates[f"model-{n}"] = gr.update(choices=model_choices(models, target))
    return updates


def draw(start: Preset, allow_any_model: bool) -> Controls:
    """Create all controls, inside the current Blocks, showing `start`."""
    shown = component_props(start)
    menus = (f"{name}-{n}" for name in LAST for n in NUMBERS)
    parts: Parts = {name: gr.State(**shown[name]) for name in ("preset", "count", "last-target", *menus)}
    scripts, most = ("helpers.js", "address.js", "setup.js"), limits.here()
    row: Values = {"value": setup.row_data(to_values(start)), "examples": setup.menus()[0], "lanes": most.lanes - 1}
    with gr.Row(elem_id="setup-row"):
        parts["setup"] = assets.view("setup.html", *scripts, elem_id="setup", **row)
        parts["run"] = gr.Button("Run", variant="primary", elem_id="run", min_width=70)
        # in the place of Run while it can be pressed (style.css)
        parts["stop"] = gr.Button("Stop", variant="stop", interactive=False, elem_id="stop", min_width=70)
    size: Values = {"lines": 2, "max_lines": 4, "max_length": most.prompt, "show_label": False}
    with gr.Row(elem_id="prompt-row"):
        parts["prompt"] = gr.Textbox(**shown["prompt"], **size, label="Prompt", elem_id="prompt")
        with gr.Row(visible=False, elem_id="follow-row") as parts["follow"]:
            hint: Values = {"placeholder": "Next message", "max_length": most.prompt, "show_label": False}
            parts["message"] = gr.Textbox(**hint, **look("Next message", "message", 5))
            parts["continue"] = gr.Button("Continue this chat", elem_id="continue", min_width=150)
        with gr.Row(**shown["tasks"], elem_id="tasks") as parts["tasks"]:
            parts |= {f"task-{name}": gr.Button(name, size="sm", elem_classes="task") for name in TASKS}
    with gr.Column(elem_id="drawer"):
        parts["about"] = gr.HTML(**shown["about"], elem_id="about")
        with gr.Row(elem_id="basics"):
            target = {**shown["target"], "choices": target_choices(start.target)}
            parts["target"] = _model_choice("Target model (all lanes)", target, "target", allow_any_model)
            parts |= _draw_method(1, shown, allow_any_model) | _draw_settings(shown, BASIC)
        words = "To use a file of your machine, start specdemo there"
        parts["start-with"] = gr.Textbox(label=words, visible=False, buttons=["copy"], elem_id="start-with")
        unfolding("Advanced", "advanced")
        with gr.Column(elem_id="advanced", elem_classes="unfolded"):
            more = [(title, f"preset={id}") for title, id in setup.menus()[1]]
            parts["more"] = gr.Dropdown(more, **shown["more"], label="More presets", elem_id="more", visible=bool(more))
            parts |= _draw_advanced(shown, allow_any_model)
    return Controls(parts, allow_any_model)


def look(label: str, elem_id: str, scale: int | None = None, min_width: int = 160) -> Values:
    """Return the label and the place of a control."""
    return {"label": label, "elem_id": elem_id, "scale": scale, "min_width": min_width}


def unfolding(words: str, elem_id: str) -> None:
    """Create a button that shows and hides a part of the page, whose controls work while it is hidden.

    Gradio creates the controls of an accordion as it opens, and sets their first values again a moment later: a choice
    in that moment is lost.
    """
    button = gr.Button(words, size="sm", elem_id=f"{elem_id}-toggle", elem_classes="unfolding")
    button.click(None, None, None, js=UNFOLD.replace("ID", elem_id), **QUIET)


def _draw_advanced(shown: Mapping[str, Values], allow_any_model: bool) -> Parts:
    """Create the controls of the prompt's format, of all lanes, of sampling and of GGUF files."""
    ways = [("chat template", CHAT), ("no chat template", TEXT)]
    system: Values = {"label": "System prompt", "max_length": limits.here().prompt, "elem_id": "system"}
    with gr.Row():
        parts: Parts = {
            "chat": gr.Radio(ways, **shown["chat"], label="Prompt format", elem_id="chat"),
            "system": gr.Textbox(**shown["system"], **system),
        }
    for n in NUMBERS:
        with gr.Column(**shown[f"lane-{n}"], elem_id=f"lane-{n}", elem_classes="lane") as parts[f"lane-{n}"], gr.Row():
            gr.HTML(f"Lane {n}", elem_classes="lane-title")
            if n > 1:
                parts |= _draw_method(n, shown, allow_any_model)
            parts |= _draw_lane(n, shown)
    parts["unfit"] = gr.HTML(**shown["unfit"], elem_id="unfit")
    with gr.Row(elem_id="lane-buttons"):
        for name, words in (("add", "Add a lane"), ("remove", "Remove the last lane")):
            parts[name] = gr.Button(words, **shown[name], size="sm", elem_id=f"{name}-lane")
    with gr.Row(elem_id="settings-row"):
        parts |= _draw_settings(shown, [name for name in SAMPLING if name not in BASIC])
    with gr.Row(**shown["gguf"], elem_id="gguf") as parts["gguf"]:
        parts |= _draw_settings(shown, OF_GGUF)
    return parts


def _draw_settings(shown: Mapping[str, Values], names: Sequence[str]) -> Parts:
    return {name: draw_setting(Comparison, name, **shown[name], elem_id=name) for name in names}


def _draw_method(n: int, shown: Mapping[str, Values], allow_any_model: bool) -> Parts:
    """Create the controls of a lane's method, model and draft length."""
    names = [(facts_of(name).title, name) for name in DRAFTING]
    return {
        f"method-{n}": gr.Dropdown(names, **shown[f"method-{n}"], **look("Method", f"method-{n}", min_width=150)),
        f"model-{n}": _model_choice("Drafter", shown[f"model-{n}"], f"model-{n}", allow_any_model),
        f"k-{n}": draw_setting(Lane, "k", **shown[f"k-{n}"], elem_id=f"k-{n}"),
    }


def _draw_lane(n: int, shown: Mapping[str, Values]) -> Parts:
    """Create the other controls of a lane."""
    server = look("Runs on", f"server-{n}", min_width=150)
    labelled = [name for name, setting in settings(Lane).items() if setting.label and name != "k"]
    return {
        **{f"{name}-{n}": draw_setting(Lane, name, **shown[f"{name}-{n}"], elem_id=f"{name}-{n}") for name in labelled},
        f"options-{n}": gr.State(**shown[f"options-{n}"]),
        f"acceptance_options-{n}": gr.State(**shown[f"acceptance_options-{n}"]),
        f"server-{n}": gr.Dropdown(**shown[f"server-{n}"], **server, visible=bool(listed())),
        # not gr.State: its change event would have to wait in the queue
        f"drawn-{n}": gr.Number(0, elem_classes="hidden-counter"),
    }


def _model_choice(label: str, shown: Values, elem_id: str, allow_any_model: bool) -> gr.Dropdown:
    info = _of_files(allow_any_model)
    place = look(label, elem_id, min_width=190)
    # without custom values a text that is not in the list stays on show, and Run races the choice before it
    return gr.Dropdown(**shown, **place, info=info, allow_custom_value=True)


def _of_files(allow_any_model: bool) -> str | None:
    hub = ", or a hub id" if allow_any_model else ""
    return f"or type the path of a file or folder{hub}" if offers_files() or allow_any_model else None


def _servers(server: str | None) -> list[tuple[str, str]]:
    return [HERE, *((f"server {host(at)}", at) for at in dict.fromkeys(at for at in (server, *listed()) if at))]


def draw_setting(of: type[Settings], name: str, value: object, **place: object) -> object:
    """Create the control for a field, within the limits of this page. place: elem_id, scale, min_width."""
    declared = settings(of)[name]
    declared = replace(declared, high=asdict(limits.here()).get(name, declared.high))
    help = sentence(declared.help.removeprefix("GGUF models: ").rstrip("."))
    choose, info = (gr.Radio, declared.info or help) if of is Comparison else (gr.Dropdown, None)
    return _draw_control(declared, value, choose, label=declared.label, info=info, **place)


def _draw_control(declared: Setting, value: Any, choose: Callable[..., object], **words: Any) -> Any:
    """Create the control for a setting. `choose` shows its choices."""
    if declared.type is bool:
        return gr.Checkbox(value, **words)
    if declared.choices:
        choices = [(declared.words.get(choice, choice), choice) for choice in declared.choices]
        return choose(choices, value=value, **words)
    if declared.type is int and declared.words:
        numbers = range(int(declared.low or 0), int(declared.high or 0) + 1)
        return choose([(declared.words.get(str(n), str(n)), n) for n in numbers], value=value, **words)
    if declared.step is not None and declared.low is not None and declared.high is not None:
        return gr.Slider(declared.low, declared.high, value, step=declared.step, **words)
    if declared.type in (int, float):
        return gr.Number(value, precision=0 if declared.type is int else None, **words)
    return gr.Textbox(value, **words)


def _task(name: str, _: gr.Request, values: Values) -> Values:
    """Return the prompt of a kind of work."""
    return {"prompt": task(name, values["chat"] == CHAT)}


def _set(option: Setting, _: gr.Request | None, values: Values) -> Values:
    """Return the options of the lane's method or rule with one of them changed, and the lane's model if that decides
    which method reads it.

    One at its default is left out: Gradio reports a change too when a control takes the place of another method's.
    """
    options = values["options"]
    changed = {name: value for name, value in options.items() if name != option.name}
    changed |= {} if values["value"] == option.default else {option.name: values["value"]}
    before, after = (model_reader(values["method"], given) for given in (options, changed))
    model = {} if before == after else {"model": _fit_model(ModelRef(values["target"]), values["method"], changed)}
    return {"options": changed, **model}


def _switch_rule(_: gr.Request | None, values: Values) -> Values:
    """Return the rule's options and `drawn` after the visitor has chosen another acceptance rule."""
    rule = values["acceptance"]
    other = {"acceptance_options": {}, "drawn": values["drawn"] + 1, "last-acceptance": rule}
    return {} if rule == values["last-acceptance"] else other


def _refit(_: gr.Request | None, values: Values, allow_any_model: bool = False) -> Values:
    """Return what follows another target: every lane's model, the controls of the prompt's format and, in place of the
    preset's own, a prompt of its kind. The field says why the page does not take a target, which it keeps, and how to
    start a page that does.
    """
    target = ModelRef(values["target"] or "")
    refusal = not_offered([target], allow_any_model, typed=True)
    command = gr.update(value=START_WITH.format(shlex.quote(target)), visible=bool(refusal) and not offers_files())
    field = {"target": gr.update(info=refusal or _of_files(allow_any_model)), "start-with": command}
    if refusal or target == values["last-target"]:
        return field
    prompt = {"prompt": prompt_for(target)} if values["prompt"] == preset(values["preset"]).prompt else {}
    models = {f"model-{n}": _fit_model(target, values[f"method-{n}"], values[f"options-{n}"]) for n in NUMBERS}
    return {
        "unfit": unfit(target),
        **field,
        **prompt,
        **models,
        **_updates(_chat_looks(target, None)),
        "last-target": target,
    }


def _switch(_: gr.Request, values: Values) -> Values:
    """Return a lane's model, options and `drawn` after the visitor has chosen another method."""
    name = values["method"]
    if name == values["last-method"]:
        return {}
    model = _fit_model(ModelRef(values["target"]), name, {})
    return {"model": model, "options": {}, "drawn": values["drawn"] + 1, "last-method": name}


def _fit_model(target: ModelRef, name: str, options: Mapping[str, object]) -> Any:
    """Return the update of a lane's drafters: those that fit, of which the first is selected; maybe none."""
    needed = needs_model(name, options)
    fitting = fitting_models(target, model_reader(name, options)) if needed else []
    return gr.update(visible=needed, value=next(iter(fitting), None), choices=model_choices(fitting, target))


def _chat_looks(target: ModelRef, chat: bool | None, system: str = "") -> dict[str, Values]:
    able = not target.embedded
    info = "A user message, or a text to continue" if able else "A text to continue; there is no chat template"
    return {
        "chat": {"value": prompt_format(target, chat), "interactive": able, "info": info},
        "system": {"value": system, "visible": able},
        "gguf": {"visible": target.gguf and not limits.public()},
        "tasks": {"visible": able},
    }


def _count_on(more: int, _: gr.Request, values: Values) -> Values:
    shown = _lane_looks(values["count"] + more)
    n = shown["count"]["value"]
    drafted = {f"drawn-{n}": values[f"drawn-{n}"] + 1}
    if more > 0 and (drafts := fitting_models(ModelRef(values["target"]), DRAFTING[0])):
        drafter = gr.update(value=drafts[0], choices=model_choices(drafts, ModelRef(values["target"])), visible=True)
        drafted |= {
            f"method-{n}": DRAFTING[0],
            f"last-method-{n}": DRAFTING[0],
            f"model-{n}": drafter,
            f"options-{n}": {},
        }
    return _updates(shown) | drafted


def _lane_looks(count: int) -> dict[str, Values]:
    """Return the properties of the lane count, the two buttons and the lane blocks."""
    count = min(max(count, 1), LANES)
    buttons = {"add": {"visible": count < limits.here().lanes - 1}, "remove": {"visible": count > 1}}
    return {"count": {"value": count}, **buttons, **{f"lane-{n}": {"visible": n <= count} for n in NUMBERS}}
