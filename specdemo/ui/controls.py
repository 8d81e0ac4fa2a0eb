"""Controls of a comparison, created from a preset and converted back to one. The options of a method are drawn from its
`knobs`; no method is named here.

Controls and their values have names; `to_values` and `from_values` convert between the values and a Preset. Hidden
lanes have values too. Drawing the page needs no torch: what only the code of a method knows (its title and options) is
filled in by the first events of a visitor.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from specdemo.core.atomic_io import json_text
from specdemo.core.options import Knob
from specdemo.engine.comparison import Comparison, Lane, Settings, as_knob, brief, linked, settings, type_of
from specdemo.methods import BASELINE, METHODS, knobs, method, model_method, usable
from specdemo.models.gguf_files import is_gguf
from specdemo.models.shipped import embedded_folder
from specdemo.presets import limits
from specdemo.presets.drafters import HEADER, all_published, published_drafters
from specdemo.presets.files import EMBEDDED, Preset, allowed_models, known_drafters, load_presets, preset
from specdemo.presets.limits import LIMITS
from specdemo.presets.link import to_query
from specdemo.presets.runnable import nearest_runnable, why_not
from specdemo.servers.address import host, listed, startable
from specdemo.servers.engines import ENGINES
from specdemo.ui import assets, lazy_imports
from specdemo.ui.job import QUIET, Parts, Values, named

if TYPE_CHECKING:
    from specdemo.methods.pairs import DrafterFit
    from specdemo.models.local_models import LocalModel

LANES = LIMITS.lanes - 1
NUMBERS = range(1, LANES + 1)
OF_GGUF = [name for name, setting in settings(Comparison).items() if setting.label and not setting.link]
COMPARISON_FIELDS = (*linked(Comparison), *OF_GGUF)
LANE = tuple(name for name in linked(Lane) if name != "name")
NAMES = ("preset", "count", *COMPARISON_FIELDS, *(f"{name}-{n}" for n in NUMBERS for name in LANE))
DRAWN = tuple(f"drawn-{n}" for n in NUMBERS)
HERE = ("this machine", "")
SAMPLING = [name for name, setting in settings(Comparison).items() if setting.label and setting.link]
CHAT, TEXT = "chat", "text"
HALF_TYPED = {**QUIET, "preprocess": False}  # do not reject a number that is still being typed
DRAFTING = [name for name in METHODS if name != BASELINE]
TRAINED: list[str] = []  # folders of heads that visitors of this process have trained


@dataclass(frozen=True)
class Controls:
    """All controls of a comparison by name. Names of a lane's controls end in its number: "k-2".

    preset: id of the selected preset. setup: the row of setup.js. run, stop: its buttons. count: number of lanes shown.
    options: knob -> value for knobs that differ from their default. server: where a lane runs; hidden unless the
    operator listed servers or allowed engines. drawn: incremented when a lane's option controls must be drawn again;
    hidden.
    """

    parts: Parts

    @property
    def inputs(self) -> dict[str, object]:
        """Return the controls that `from_values` reads."""
        return {name: self.parts[name] for name in NAMES}

    @property
    def drawn(self) -> dict[str, object]:
        """Return the components that are updated when settings change."""
        return {name: self.parts[name] for name in DRAWN}

    @property
    def edits(self) -> list[object]:
        """Return the events of a visitor who changes the comparison. Options are drawn later and have none here."""
        seen = [name for name in self.inputs if name.partition("-")[0] not in ("preset", "count", "options")]
        buttons = [self.parts[name].click for name in ("add", "remove")]
        return [self.parts["setup"].submit, *(self.parts[name].input for name in seen), *buttons]

    def wire(self, page: gr.Blocks) -> None:
        """Connect the events: lanes are added and removed, and each lane shows the controls of its method."""
        parts = self.parts
        chat = {name: parts[name] for name in ("chat", "system", "gguf")}
        target, count = {"target": parts["target"]}, {"count": parts["count"]}
        retargeted = parts["target"].input
        named(retargeted, lambda _, values: _updates(_chat_looks(values["target"], None)), target, chat, **QUIET)
        lanes = {f"{name}-{n}": parts[f"{name}-{n}"] for n in NUMBERS for name in ("method", "options")}
        redrawn = {f"{name}-{n}": parts[f"{name}-{n}"] for n in NUMBERS for name in ("model", "train")}
        shown = redrawn | {"unfit": parts["unfit"]}
        named(retargeted, _refit, target | lanes, shown, **QUIET)
        for n in NUMBERS:
            parts[f"train-{n}"].click(None, None, None, js=assets.to_tab("lab"), **QUIET)
        for name, more in (("add", 1), ("remove", -1)):
            self.describe(named(parts[name].click, partial(_count_on, more), count, parts, **QUIET).then)
        page.load(None, js=assets.text("accessibility.js"), **QUIET)
        page.load(None, js=f"() => {{ {assets.text('page_title.js')} }}", **QUIET)
        self.describe(named(page.load, titles, {}, parts, **QUIET).then)
        self.describe(partial(gr.on, [parts[name].change for name in NAMES if not isinstance(parts[name], gr.State)]))
        for n in NUMBERS:
            given = target | {name: parts[f"{name}-{n}"] for name in ("method", "drawn")}
            named(parts[f"method-{n}"].input, _switch, given, self._of_lane(n), **QUIET)
            with parts[f"lane-{n}"]:
                self._draw_options(page, n)

    def offer(self, after: Callable[..., object]) -> None:
        """Connect an event to the lists of models."""
        lanes = {f"{name}-{n}": self.parts[f"{name}-{n}"] for n in NUMBERS for name in ("method", "options", "model")}
        shown = {f"model-{n}": self.parts[f"model-{n}"] for n in NUMBERS}
        given = {"target": self.parts["target"], **lanes}
        named(after, lambda _, values: offer_models(values), given, shown, **HALF_TYPED)

    def describe(self, event: Callable[..., object]) -> None:
        """Connect an event to the description of the setup."""
        shown = {name: self.parts[name] for name in ("setup", "about")}
        named(event, setup_line, self.inputs, shown, trigger_mode="always_last", **HALF_TYPED)

    def _of_lane(self, n: int) -> Parts:
        return {name: self.parts[f"{name}-{n}"] for name in ("method", "model", "train", "options", "drawn")}

    def _draw_options(self, page: gr.Blocks, n: int) -> None:
        """Create the row of controls that follows the lane's method."""
        lane = self._of_lane(n)

        def draw_knobs(name: str, options: dict[str, object]) -> None:
            lazy_imports.live()
            with gr.Row(elem_classes="options"):
                for knob in knobs(name):
                    words = {"label": knob.name, "info": knob.help, "elem_id": f"option-{knob.name}-{n}"}
                    value = options.get(knob.name, knob.default)
                    control = _draw_knob(knob, value, {}, gr.Dropdown, **words, interactive=True)
                    # not `model`: while a preset fills the controls, its value is not yet among the choices
                    given = {"target": self.parts["target"], "method": lane["method"], "options": lane["options"]}
                    given |= {"knob": gr.State(knob.name), "value": control}
                    self.describe(named(control.change, _set, given, lane, **QUIET).then)

        follow = [page.load, lane["drawn"].change]
        gr.render([lane["method"], lane["options"]], triggers=follow, queue=False, show_progress="hidden")(draw_knobs)


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


def component_props(chosen: Preset) -> dict[str, Values]:
    """Return the properties of every control of `Controls.parts` for a comparison."""
    shown: dict[str, Values] = {name: {"value": value} for name, value in to_values(chosen).items()}
    for n, lane in zip(NUMBERS, _padded(chosen), strict=True):
        model = shown[f"model-{n}"]
        model["choices"] = _model_choices([model["value"]])  # `offer_models` adds the others, which needs torch
        model["visible"] = lane is None or lane.model is not None
        shown[f"train-{n}"] = {"visible": False}
        shown[f"server-{n}"]["choices"] = _servers(lane.server if lane else None)
    shown |= {"about": {"value": about(load_presets()[chosen.id])}, "unfit": {"value": published(chosen.target)}}
    return shown | _chat_looks(chosen.target, chosen.chat, chosen.system) | _lane_looks(len(chosen.lanes))


def _updates(shown: Mapping[str, Values]) -> Values:
    return {name: gr.update(**look) for name, look in shown.items()}


def fill(chosen: Preset, drawn: Mapping[str, int]) -> Values:
    """Return updates of `Controls.parts` that show this comparison."""
    updates = _updates(component_props(chosen)) | {name: drawn[name] + 1 for name in DRAWN}
    for name, menu in offer_models(to_values(chosen)).items():
        updates[name] |= menu
    return updates


def fill_untouched(chosen: Preset, start: Preset, now: Values) -> Values:
    """Return the updates of `fill` without those of controls that the visitor has changed since the page showed
    `start`. A lane is updated as a whole.

    now: the values of `Controls.inputs` and `Controls.drawn`.
    """
    touched = {name for name, value in to_values(start).items() if now[name] != value}
    if "preset" in touched:
        return {}
    for n in NUMBERS:
        lane = {f"{name}-{n}" for name in LANE}
        if lane & touched:
            touched |= lane | {f"drawn-{n}"}  # do not replace its options
    if "count" in touched:
        touched |= {*_lane_looks(1)}
    return {name: update for name, update in fill(chosen, now).items() if name not in touched}


def about(chosen: Preset) -> str:
    """Return the description and requirements of a preset as HTML."""
    words = [chosen.description]
    if chosen.memory_gb is not None:
        login = "gated: needs a login, " if chosen.gated else ""
        words.append(f"Downloaded from the Hugging Face hub; about {chosen.memory_gb:g} GB, {login}{chosen.licence}.")
    return f"<b>{escape(chosen.title)}.</b> {escape(' '.join(words))}"


def offer_models(values: Values) -> Values:
    """Return the updates of every lane's list of models: those that fit its method and the target, and its own."""
    lazy_imports.live()
    updates: Values = {}
    for n in NUMBERS:
        name, options = values[f"method-{n}"], values[f"options-{n}"]
        fitting = fitting_models(values["target"], model_method(name, _known(name, options)))
        updates[f"model-{n}"] = gr.update(choices=_model_choices([*fitting, values[f"model-{n}"]]))
    return updates


def titles(_: gr.Request, __: Values) -> Values:
    """Return the updates that set the methods' titles in every lane."""
    lazy_imports.live()
    choices = [(method(name).title, name) for name in usable() if name != BASELINE]
    return {f"method-{n}": gr.update(choices=choices) for n in NUMBERS}


def key(values: Values) -> str:
    """Return a key that is equal for equal comparisons, independent of the preset they came from."""
    count = int(values["count"])
    fields = [name for name in NAMES if name not in ("preset", "count")]
    relevant = {name: values[name] for name in fields if int(name.partition("-")[2] or 0) <= count}
    plain = {k: float(v) if isinstance(v, int | float) else v or None for k, v in relevant.items()}
    return sha256(json_text(plain, sort_keys=True, default=str).encode()).hexdigest()[:16]


def setup(values: Values, summary: str, query: str | None = None) -> str:
    """Return the data of setup.js: the preset, whether its settings were changed, a summary, the key of all settings,
    the reason why this machine cannot run them with the most similar preset that it can, and the query of a link.
    """
    chosen = preset(values["preset"])
    obstacle = why_not(chosen) if values["target"] == chosen.target else ""
    instead = nearest_runnable(chosen) if obstacle else None
    data = {"preset": chosen.id, "custom": _is_custom(values), "summary": summary, "key": key(values), "query": query}
    return json_text(data | {"obstacle": obstacle, "instead": instead and [instead.id, instead.chip or instead.title]})


def setup_line(_: gr.Request, values: Values) -> Values:
    """Return the row of the setup and the description of the settings."""
    lazy_imports.live()
    lanes = []
    for n in NUMBERS[: int(values["count"])]:
        name = values[f"method-{n}"]
        model = values[f"model-{n}"] if needs_model(name, values[f"options-{n}"]) else None
        lanes.append(_lane_words(name, str(method(name).title), model))
    line = summary(values, lanes)
    return {"setup": setup(values, line, _query(values)), "about": described(values, line)}


def summary(values: Values, lanes: Sequence[str]) -> str:
    """Return the settings in one line: target, lanes, draft lengths, sampling."""
    ks = dict.fromkeys(str(values[f"k-{n}"]).removesuffix(".0") for n in NUMBERS[: len(lanes)])
    chat = "chat template" if values["chat"] == CHAT else ""
    sampling = [brief(Comparison, name, values[name]) for name in SAMPLING]
    models = f"{_short(values['target'])} + {', '.join(lanes)}"
    return " · ".join(filter(None, (models, f"k {', '.join(ks)}", chat, *sampling)))


def _lane_words(name: str, title: str, model: str | None) -> str:
    """Return a lane in the summary: its method, or the size or name of a draft model."""
    if model is None or name != DRAFTING[0]:
        return title
    layers = _layers(model)
    return f"{layers}-layer draft" if layers else f"{_short(model)} draft"


@lru_cache
def _layers(model: str) -> int | None:
    """Return the number of layers of an embedded model."""
    file = embedded_folder() / model / "config.json"
    config = json.loads(file.read_bytes()) if model in EMBEDDED and file.is_file() else {}
    layers: int | None = config.get("num_hidden_layers")
    return layers


def _short(model: str) -> str:
    return model.partition("@")[0].rpartition("/")[2]


def _query(values: Values) -> str | None:
    """Return the query of a link to the settings; None if they are not valid, for instance half typed."""
    try:
        chosen = from_values(values, allow_any_model=True)
        return to_query(chosen, limits.fit(preset(chosen.id)))
    except (TypeError, ValueError):
        return None


def _is_custom(values: Values) -> bool:
    return key(values) != key(to_values(limits.fit(preset(values["preset"]))))


def described(values: Values, line: str) -> str:
    """Return the description of the preset, or a description of the settings if they differ from the preset's."""
    chosen = preset(values["preset"])
    return f"<b>Custom (from {escape(chosen.title)}).</b> {escape(line)}" if _is_custom(values) else about(chosen)


def to_values(chosen: Preset) -> Values:
    """Return the values of `Controls.inputs`."""
    values = {
        "preset": chosen.id,
        "count": len(chosen.lanes),
        **{name: getattr(chosen, name) for name in COMPARISON_FIELDS},
    }
    values["chat"] = _prompt_as(chosen.target, chosen.chat)
    for n, lane in zip(NUMBERS, _padded(chosen), strict=True):
        shown = lane or Lane(method=DRAFTING[0], model=default_draft(chosen.target))  # the default of an added lane
        values |= {f"{name}-{n}": getattr(shown, name) for name in LANE}
        values[f"model-{n}"] = shown.model or default_draft(chosen.target)
        values |= {f"server-{n}": shown.server or "", f"options-{n}": dict(shown.options)}
    return values


def from_values(values: Values, allow_any_model: bool = False) -> Preset:
    """Return the comparison that the controls describe. Raises ValueError with one line."""
    lazy_imports.live()
    base = preset(values["preset"])
    changes = _counts(Comparison, {name: values[name] for name in COMPARISON_FIELDS})
    usual = base.chat if changes["target"] == base.target else None
    chat = changes["chat"]
    changes["chat"] = usual if chat == _prompt_as(changes["target"], usual) else chat == CHAT
    lanes = [{name: values[f"{name}-{n}"] for name in LANE} for n in NUMBERS[: int(values["count"])]]
    changes["lanes"] = [_lane_config(lane, base.lanes[i : i + 1]) for i, lane in enumerate(lanes)]
    return limits.admit(check_models(base.with_changes(**changes), allow_any_model))


def changed(preset_id: str, overrides: dict[str, object] | None, allow_any_model: bool) -> Preset:
    """Return a preset with other settings, as requested by an API call. Raises ValueError with one line."""
    lazy_imports.live()
    if not isinstance(overrides or {}, Mapping):
        raise ValueError(f"overrides must be an object of settings, not {overrides!r:.40}")
    return limits.admit(check_models(limits.fit(preset(preset_id)).with_changes(**(overrides or {})), allow_any_model))


def check_models(chosen: Preset, allow_any_model: bool) -> Preset:
    """Return the preset. Raises ValueError if it names a model that is not embedded, in a preset, or trained on this
    page.
    """
    allowed = {*allowed_models(load_presets()), *TRAINED, *on_this_machine(), *_published()}
    foreign = [] if allow_any_model else [name for name in chosen.models if name not in allowed]
    if foreign:
        raise ValueError(f"model {foreign[0][:80]!r} is not on this page's list; start the page with --allow-any-model")
    return chosen


def needs_model(name: str, options: Mapping[str, object]) -> bool:
    """Return whether a lane must name a model. Unknown `options` are ignored."""
    return bool(method(model_method(name, _known(name, options))).needs_model)


def pairs(target: str) -> "tuple[DrafterFit, ...]":
    """Return the drafters that are known to fit a target or not, including the heads that visitors have trained.

    Drafters of a preset's target on the hub are those that presets pair with it: nothing is downloaded to list them.
    """
    return _pairs(target, tuple(TRAINED))


@lru_cache
def _pairs(target: str, trained: tuple[str, ...]) -> "tuple[DrafterFit, ...]":
    from specdemo.methods.pairs import DrafterFit, check_pairs
    from specdemo.models.load import load_meta_target
    from specdemo.models.local_models import matching_drafts

    known, paired = known_drafters(target), {*_paired(target)}
    candidates = [*known, *((entry.about.method, entry.drafter) for entry in published_drafters(target))]
    paired |= _published()
    listed = tuple(DrafterFit(model, name, None, "") for name, model in dict.fromkeys(candidates) if model in paired)
    local = on_this_machine()
    if target in local and is_gguf(target):
        matching = (model.name for model, _ in matching_drafts(local[target], local.values()))
        return (*listed, *(DrafterFit(name, "draft_model", True, "same vocabulary") for name in matching))
    if target in _targets() and target not in EMBEDDED:
        return listed
    try:
        return tuple(check_pairs(load_meta_target(target), [*known, *((None, folder) for folder in trained)]))
    except ValueError:
        return listed


def _published() -> set[str]:
    """Return the published drafters that specdemo reads; none on a public page."""
    return set() if limits.public() else {entry.drafter for entry in all_published() if entry.about.method}


def fitting_models(target: str, reads: str) -> list[str]:
    """Return the models that this method can use with the target; those that a preset pairs with it come first."""
    fitting = [pair.drafter for pair in pairs(target) if pair.method == reads and pair.fits is not False]
    return sorted(fitting, key=lambda name: name != default_draft(target))


def unfit(target: str) -> str:
    """Return the drafters that are not offered for a target, with reasons, as a fold."""
    reasons = {pair.drafter: pair.reason for pair in pairs(target) if pair.fits is False}
    items = "".join(f"<li><b>{escape(name)}</b> {escape(reason)}</li>" for name, reason in reasons.items())
    head = f"{len(reasons)} drafter{'s are' if len(reasons) > 1 else ' is'} incompatible with {escape(target)}"
    fold = f"<details><summary>{head}</summary><ul>{items}</ul></details>" if reasons else ""
    return fold + published(target)


def published(target: str) -> str:
    """Return the published drafters of a target as a fold; empty if there are none."""
    entries = [entry.row() for entry in published_drafters(target) if entry.source.startswith("https://")]
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in entry.values())}</tr>" for entry in entries)
    names = "".join(f"<th>{name}</th>" for name in HEADER)
    head = f"{len(entries)} published drafter{'s' if len(entries) > 1 else ''} for {escape(target)}"
    return f"<details><summary>{head}</summary><table><tr>{names}</tr>{rows}</table></details>" if entries else ""


def default_draft(target: str) -> str:
    """Return the draft model that a preset pairs with this target, or else another drafter of it, or else the first."""
    lanes = [(p.target, lane) for p in load_presets().values() for lane in p.lanes if lane.model]
    best = min(lanes, key=lambda pair: (pair[0] != target, pair[1].method != DRAFTING[0]))
    return str(best[1].model)


def integer(name: str, value: object) -> int:
    """Convert a slider's value, which a browser may send as 4.0, to an integer. Raises ValueError with one line."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    return int(value)


def _counts(of: type[Settings], values: Values) -> Values:
    """Return the values of a comparison or a lane, with integers as such."""
    return {name: integer(name, value) if type_of(of, name) is int else value for name, value in values.items()}


def draw(start: Preset, allow_any_model: bool) -> Controls:
    """Create all controls, inside the current Blocks, showing `start`."""
    shown = component_props(start)
    parts: Parts = {name: gr.State(**shown[name]) for name in ("preset", "count")}
    with gr.Row(elem_id="setup-row"):
        lanes = [_lane_words(lane.method, _plain(lane.method), lane.model) for lane in start.lanes]
        value = setup(to_values(start), summary(to_values(start), lanes))
        scripts = ("helpers.js", "address.js", "setup.js")
        parts["setup"] = assets.view("setup.html", *scripts, elem_id="setup", value=value, examples=examples())
        parts["run"] = gr.Button("Run", variant="primary", elem_id="run", min_width=70)
        parts["stop"] = gr.Button("Stop", interactive=False, elem_id="stop", min_width=70)
    with gr.Column(elem_id="drawer"):
        parts["about"] = gr.HTML(**shown["about"], elem_id="about")
        most = limits.here().prompt
        prompt: Values = {"label": "Prompt", "lines": 2, "max_lines": 10, "max_length": most, "elem_id": "prompt"}
        with gr.Row(elem_id="prompt-row"):
            parts["prompt"] = gr.Textbox(**shown["prompt"], **prompt)
            parts |= _draw_chat(shown)
        parts |= _draw_lanes(start, shown, allow_any_model)
        parts |= _draw_sampling(shown)
    return Controls(parts)


def _draw_lanes(start: Preset, shown: Mapping[str, Values], allow_any_model: bool) -> Parts:
    """Create the controls of all lanes, and the buttons that add and remove one."""
    parts: Parts = {}
    for n in NUMBERS:
        parts[f"lane-{n}"] = gr.Column(**shown[f"lane-{n}"], elem_id=f"lane-{n}", elem_classes="lane")
        with parts[f"lane-{n}"], gr.Row():
            if n > 1:
                gr.HTML(f"Lane {n}", elem_classes="lane-title")
            else:
                look = {**shown["target"], "choices": _model_choices([start.target, *_targets(), *on_this_machine()])}
                parts["target"] = _model_choice("Target model (all lanes)", look, "target", allow_any_model)
            parts |= _draw_lane(n, shown, allow_any_model)
    parts["unfit"] = gr.HTML(**shown["unfit"], elem_id="unfit")
    with gr.Row(elem_id="lane-buttons"):
        for name, words in (("add", "Add a lane"), ("remove", "Remove the last lane")):
            parts[name] = gr.Button(words, **shown[name], size="sm", elem_id=f"{name}-lane")
    return parts


def examples() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the presets by group, with labels and ids."""
    groups: dict[str, list[tuple[str, str]]] = {"Examples": [], "More examples": []}
    for p in limits.at_hand() if limits.public() else load_presets().values():
        group = "Examples" if p.chip else f"Needs a GPU with {p.group}" if p.group else "More examples"
        groups.setdefault(group, []).append((p.chip or p.title, p.id))
    return [(group, found) for group, found in groups.items() if found]


def _draw_chat(shown: Mapping[str, Values]) -> Parts:
    """Create the controls of the prompt format."""
    ways = [("chat template", CHAT), ("no chat template", TEXT)]
    system: Values = {"label": "System prompt", "max_length": limits.here().prompt, "elem_id": "system"}
    return {
        "chat": gr.Radio(ways, **shown["chat"], label="Prompt format", elem_id="chat"),
        "system": gr.Textbox(**shown["system"], **system),
    }


def _draw_sampling(shown: Mapping[str, Values]) -> Parts:
    """Create the controls of the settings."""
    with gr.Row(elem_id="settings-row"):
        parts: Parts = {name: draw_setting(Comparison, name, **shown[name], elem_id=name) for name in SAMPLING}
    with gr.Row(**shown["gguf"], elem_id="gguf") as parts["gguf"]:
        parts |= {name: draw_setting(Comparison, name, **shown[name], elem_id=name) for name in OF_GGUF}
    return parts


def _draw_lane(n: int, shown: Mapping[str, Values], allow_any_model: bool) -> Parts:
    """Create the controls of a lane, and `drawn`."""
    names = [(_plain(name), name) for name in DRAFTING]
    look = {name: shown[f"{name}-{n}"] for name in (*LANE, "train")}
    train: Values = {"size": "sm", "elem_id": f"train-{n}"}
    method: Values = {"label": "Method", "min_width": 150, "elem_id": f"method-{n}"}
    server: Values = {"label": "Runs on", "min_width": 150, "elem_id": f"server-{n}"}
    parts = {
        "method": gr.Dropdown(names, **look["method"], **method),
        "model": _model_choice("Drafter", look["model"], f"model-{n}", allow_any_model),
        "train": gr.Button("No trained head yet. Train one", **look["train"], **train),
        **{
            name: draw_setting(Lane, name, **look[name], elem_id=f"{name}-{n}")
            for name, setting in settings(Lane).items()
            if setting.label
        },
        "options": gr.State(**look["options"]),
        "server": gr.Dropdown(**look["server"], **server, visible=bool(listed() or startable)),
        # not gr.State: its change event would have to wait in the queue
        "drawn": gr.Number(0, elem_classes="hidden-counter"),
    }
    return {f"{name}-{n}": part for name, part in parts.items()}


def _plain(name: str) -> str:
    """Return a title for a method whose code is not loaded yet."""
    return name.replace("_", " ").capitalize()


def _model_choice(label: str, look: Values, elem_id: str, allow_any_model: bool) -> gr.Dropdown:
    return gr.Dropdown(**look, label=label, allow_custom_value=allow_any_model, min_width=190, elem_id=elem_id)


def _model_choices(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return labels and values of the models to choose from."""
    return [(_model_label(name), name) for name in dict.fromkeys(names)]


def _model_label(name: str) -> str:
    """Return the name; of a trained head its folder's, of a model on this machine also the size."""
    local = on_this_machine().get(name)
    short = Path(name).name if name in TRAINED or name.lower().endswith(".gguf") else name
    return f"On this machine: {short}, {local.bytes / 1e9:.1f} GB" if local else short


def on_this_machine() -> "dict[str, LocalModel]":
    """Return the models in the stores of other programs, by name; none on a public page."""
    return {} if limits.public() else _stored_models()


@lru_cache(maxsize=1)
def _stored_models() -> "dict[str, LocalModel]":
    from specdemo.models.local_models import local_models

    return {model.name: model for model in local_models()}


def _paired(target: str) -> list[str]:
    """Return the drafters that presets pair with a target."""
    lanes = [lane for p in load_presets().values() if p.target == target for lane in p.lanes]
    return list(dict.fromkeys(str(lane.model) for lane in lanes if lane.model))


def _targets() -> list[str]:
    return list(dict.fromkeys(p.target for p in load_presets().values()))


def _servers(chosen: str | None) -> list[tuple[str, str]]:
    """Return labels and values of the places where a lane can run."""
    named = dict.fromkeys(name for name in (chosen, *startable, *listed()) if name)
    return [HERE, *((ENGINES[name].title if name in ENGINES else f"server {host(name)}", name) for name in named)]


def draw_setting(of: type[Settings], name: str, value: object, **place: object) -> Any:
    """Create the control for a field, within the limits of this page. place: elem_id, scale, min_width."""
    setting, found, of_comparison = settings(of)[name], as_knob(of, name), of is Comparison
    found = replace(found, high=asdict(limits.here()).get(name, found.high))
    info = (setting.info or setting.help.rstrip(".")) if of_comparison else None
    choose = gr.Radio if of_comparison else gr.Dropdown
    return _draw_knob(found, value, setting.words, choose, label=setting.label, info=info, **place)


def _draw_knob(knob: Knob, value: Any, named: Mapping[str, str], choose: Callable[..., object], **words: Any) -> Any:
    """Create the control for an option. `choose` shows its choices, some with labels of their own."""
    if knob.type is bool:
        return gr.Checkbox(value, **words)
    if knob.choices:
        return choose([(named.get(choice, choice), choice) for choice in knob.choices], value=value, **words)
    if knob.low is not None and knob.high is not None:
        return gr.Slider(knob.low, knob.high, value, step=knob.step, **words)
    if knob.type in (int, float):
        return gr.Number(value, precision=0 if knob.type is int else None, **words)
    return gr.Textbox(value, **words)


def _set(_: gr.Request, values: Values) -> Values:
    """Return the lane's options with one of them changed, and its model if that decides which method reads it."""
    options = values["options"]
    changed = {**options, values["knob"]: values["value"]}
    before, after = (model_method(values["method"], _known(values["method"], given)) for given in (options, changed))
    fitted = {} if before == after else _fit_model(values["target"], values["method"], changed)
    return {"options": changed, **fitted}


def _refit(_: gr.Request, values: Values) -> Values:
    """Return every lane's model after the visitor has chosen another target."""
    lazy_imports.live()
    updates: Values = {"unfit": unfit(values["target"])}
    for n in NUMBERS:
        fitted = _fit_model(values["target"], values[f"method-{n}"], values[f"options-{n}"])
        updates |= {f"{name}-{n}": update for name, update in fitted.items()}
    return updates


def _switch(_: gr.Request, values: Values) -> Values:
    """Return a lane's model, options and `drawn` after the visitor has chosen another method."""
    lazy_imports.live()
    return {**_fit_model(values["target"], values["method"], {}), "options": {}, "drawn": values["drawn"] + 1}


def _fit_model(target: str, name: str, options: Mapping[str, object]) -> Values:
    """Return the drafters that fit, with the first one selected. If there is none, show how to train one."""
    needed = needs_model(name, options)
    fitting = fitting_models(target, model_method(name, _known(name, options))) if needed else []
    none = needed and not fitting
    value = fitting[0] if fitting else None if none else default_draft(target)
    choices = _model_choices([value, *fitting]) if value else []
    return {
        "model": gr.update(visible=needed and not none, value=value, choices=choices),
        "train": gr.update(visible=none),
    }


def _prompt_as(target: str, chat: bool | None) -> str:
    """Return the value shown for a preset's `chat`. Hub models are assumed to have a chat template."""
    return CHAT if (target not in EMBEDDED if chat is None else chat) else TEXT


def _chat_looks(target: str, chat: bool | None, system: str = "") -> dict[str, Values]:
    """Return the properties of the prompt-format controls."""
    able = target not in EMBEDDED
    info = "A user message, or a text to continue"
    info = info if able else "This model has no chat template; it continues your text"
    return {
        "chat": {"value": _prompt_as(target, chat), "interactive": able, "info": info},
        "system": {"value": system, "visible": able},
        "gguf": {"visible": is_gguf(target) and not limits.public()},
    }


def _count_on(more: int, _: gr.Request, values: Values) -> Values:
    return _updates(_lane_looks(values["count"] + more))


def _lane_looks(count: int) -> dict[str, Values]:
    """Return the properties of the lane count, the two buttons and the lane blocks."""
    count = min(max(count, 1), LANES)
    buttons = {"add": {"visible": count < limits.here().lanes - 1}, "remove": {"visible": count > 1}}
    return {"count": {"value": count}, **buttons, **{f"lane-{n}": {"visible": n <= count} for n in NUMBERS}}


def _padded(chosen: Preset) -> list[Lane | None]:
    return [*chosen.lanes, *[None] * (LANES - len(chosen.lanes))]


def _lane_config(lane: Values, named: Sequence[Lane]) -> Values:
    """Return one lane's controls as data. The lane keeps its name from the preset while method and model stay the
    same.
    """
    name, server = lane["method"], lane["server"]
    options = _known(name, lane["options"])
    model = (lane["model"] or None) if needs_model(name, options) else None
    return _counts(Lane, lane) | {
        "model": model,
        "options": options,
        "name": next((lane.name for lane in named if (lane.method, lane.model) == (name, model)), ""),
        "server": server or None,
        "served_model": next((lane.served_model for lane in named if lane.server == server), None),
    }


def _known(name: str, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options that the method has, with integers as such."""
    given = {k: options[k.name] for k in knobs(name) if k.name in options}
    return {k.name: integer(k.name, value) if k.type is int else value for k, value in given.items()}
