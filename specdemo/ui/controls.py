"""Preset -> controls -> preset. A method's options are drawn from its `knobs`; nothing here names a method.

The controls are one flat list, `Controls.inputs`; `to_values` and `from_values` convert between it and a Preset. Lanes
that are not shown keep their place in the list. Drawing the page needs no torch: what only a method's code knows (its
title, its options) is filled in by the first events of a visitor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from specdemo.methods import BASELINE, METHODS, Knob, knobs, method
from specdemo.presets.schema import LIMITS, LaneConfig, Preset, allowed_models, load_presets, preset
from specdemo.ui import heavy

LANES = LIMITS.lanes - 1
WHOLE = ("target", "prompt", "temperature", "top_p", "top_k", "min_p", "seed", "max_new_tokens", "schedule")
LANE = ("method", "model", "k", "acceptance", "options")
COUNTS = ("top_k", "seed", "max_new_tokens")  # whole numbers, which a browser may send as 4.0
ACCEPTANCE = [("lossless", "lossless"), ("typical (lossy)", "typical")]
DRAFTING = [name for name in METHODS if name != BASELINE]
QUIET: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


@dataclass(frozen=True)
class LaneControls:
    block: gr.Column
    method: gr.Dropdown
    model: gr.Dropdown
    k: gr.Slider
    acceptance: gr.Dropdown
    options: gr.State  # knob -> value, of the knobs that are not at their default
    drawn: gr.State  # counts up when the option controls have to be drawn anew

    @property
    def inputs(self) -> list[Any]:
        return [self.method, self.model, self.k, self.acceptance, self.options]


@dataclass(frozen=True)
class Controls:
    preset: gr.Radio
    about: gr.Markdown
    whole: dict[str, gr.components.Component]
    lanes: list[LaneControls]
    count: gr.State  # how many lanes are shown
    add: gr.Button
    remove: gr.Button

    @property
    def inputs(self) -> list[Any]:
        """What `from_values` reads."""
        whole = [self.whole[name] for name in WHOLE]
        return [self.preset, self.count, *whole, *(control for lane in self.lanes for control in lane.inputs)]

    @property
    def drawn(self) -> list[gr.State]:
        return [lane.drawn for lane in self.lanes]

    @property
    def outputs(self) -> list[Any]:
        """What `fill` writes."""
        return [*self.inputs, self.about, self.add, self.remove, *(lane.block for lane in self.lanes), *self.drawn]

    def wire(self, page: gr.Blocks) -> None:
        """Lanes come and go; each shows the controls of its method."""
        count = [self.count, self.add, self.remove, *(lane.block for lane in self.lanes)]
        self.add.click(lambda n: _shown(n + 1), self.count, count, **QUIET)
        self.remove.click(lambda n: _shown(n - 1), self.count, count, **QUIET)
        page.load(titles, None, [lane.method for lane in self.lanes], **QUIET)
        for number, lane in enumerate(self.lanes, start=1):
            lane.method.input(_needs_model, lane.method, lane.model, **QUIET)
            with lane.block:
                _draw_options(page, lane, number)


def fill(chosen: Preset, drawn: Sequence[int]) -> list[Any]:
    """Updates of `Controls.outputs` that show this comparison."""
    values = [gr.update(value=value) for value in to_values(chosen)]
    for index, lane in enumerate(chosen.lanes):
        values[_place(index, "model")] = gr.update(visible=lane.model is not None, value=_model(lane, chosen.target))
    blocks = _shown(len(chosen.lanes))[1:]
    return [*values, about(load_presets()[chosen.id]), *blocks, *(n + 1 for n in drawn)]


def about(chosen: Preset) -> str:
    """What a preset is for."""
    return f"**{chosen.title}.** {chosen.description}"


def titles() -> list[Any]:
    """The methods' own words, in every lane."""
    heavy.live()
    return [gr.update(choices=[(method(name).title, name) for name in DRAFTING])] * LANES


def to_values(chosen: Preset) -> list[Any]:
    """The values of `Controls.inputs`, in its order."""
    whole = [getattr(chosen, name) for name in WHOLE]
    lanes = [lane or new_lane(chosen.target) for lane in _padded(chosen)]
    of_lanes = [value for lane in lanes for value in _lane_values(lane, chosen.target)]
    return [chosen.id, len(chosen.lanes), *whole, *of_lanes]


def from_values(values: Sequence[Any], allow_any_model: bool = False) -> Preset:
    """The comparison the controls describe. Raises ValueError with one line."""
    heavy.live()
    chosen, count, *rest = values
    base = preset(chosen)
    changes = dict(zip(WHOLE, rest, strict=False))
    changes |= {name: _count(name, changes[name]) for name in COUNTS}
    changes["lanes"] = [
        _lane_config(rest[_place(index, "method") - 2 :][: len(LANE)], base.lanes[index : index + 1])
        for index in range(int(count))
    ]
    return check_models(base.with_changes(**changes), allow_any_model)


def changed(preset_id: str, overrides: dict[str, Any] | None, allow_any_model: bool) -> Preset:
    """A preset with other settings, as API callers ask for it. Raises ValueError with one line."""
    heavy.live()
    return check_models(preset(preset_id).with_changes(**(overrides or {})), allow_any_model)


def check_models(chosen: Preset, allow_any_model: bool) -> Preset:
    """The preset again. Raises ValueError when it names a model that is neither embedded nor in a preset."""
    allowed = allowed_models(load_presets())
    foreign = [] if allow_any_model else [name for name in chosen.models if name not in allowed]
    if foreign:
        raise ValueError(f"model {foreign[0][:80]!r} is not on this page's list; start it with --allow-any-model")
    return chosen


def default_draft(target: str) -> str:
    """The draft model that a preset pairs with this target, or else the first of all."""
    pairs = [(p.target, lane.model) for p in load_presets().values() for lane in p.lanes if lane.model]
    return next((model for name, model in pairs if name == target), pairs[0][1])


def new_lane(target: str) -> LaneConfig:
    """What a lane that is added starts as."""
    return LaneConfig(method=DRAFTING[0], model=default_draft(target))


def draw(start: Preset, allow_any_model: bool) -> Controls:
    """Every control but prompt and sampling, inside the current Blocks, showing `start`."""
    chips = gr.Radio(
        list(load_presets()), value=start.id, label="Preset", elem_id="presets", elem_classes="chips", container=False
    )
    described = gr.Markdown(about(start), elem_id="about")
    lanes = []
    with gr.Group(elem_classes="lane-controls"):
        for index, lane in enumerate(_padded(start)):
            block = gr.Column(visible=lane is not None, elem_id=f"lane-{index + 1}", elem_classes="lane")
            with block, gr.Row(elem_classes="lane-row"):
                if index:
                    gr.Markdown(f"Lane {index + 1}", elem_classes="lane-title")
                else:
                    target = _model_choice("Target model, in every lane", start.target, "target", allow_any_model)
                lanes.append(_draw_lane(block, index + 1, lane or new_lane(start.target), start, allow_any_model))
    with gr.Row(elem_id="lane-buttons"):
        add = gr.Button("Add a lane", size="sm", elem_id="add-lane", visible=len(start.lanes) < LANES)
        remove = gr.Button("Remove the last lane", size="sm", elem_id="remove-lane", visible=len(start.lanes) > 1)
    return Controls(chips, described, {"target": target}, lanes, gr.State(len(start.lanes)), add, remove)


def draw_prompt(start: Preset) -> gr.Textbox:
    return gr.Textbox(
        start.prompt, label="Prompt", lines=3, max_lines=10, max_length=LIMITS.prompt, elem_id="prompt", scale=5
    )


def draw_sampling(start: Preset) -> dict[str, gr.components.Component]:
    """The controls of the accordion, by the names of WHOLE."""
    shown: dict[str, gr.components.Component] = {}
    with gr.Row():
        for name, label, low, high, step, info in (
            ("temperature", "Temperature", 0, LIMITS.temperature, 0.05, "0: greedy"),
            ("top_p", "Top-p", 0.01, 1, 0.01, "1: off"),
            ("top_k", "Top-k", 0, LIMITS.top_k, 1, "0: off"),
            ("min_p", "Min-p", 0, 0.99, 0.01, "0: off"),
        ):
            value = getattr(start, name)
            shown[name] = gr.Slider(low, high, value, step=step, label=label, info=info, elem_id=name, min_width=150)
    with gr.Row():
        shown["seed"] = gr.Number(start.seed, precision=0, label="Seed", info="the same in every lane", elem_id="seed")
        shown["max_new_tokens"] = gr.Slider(
            1,
            LIMITS.max_new_tokens,
            start.max_new_tokens,
            step=1,
            label="New tokens",
            info="at most",
            elem_id="max_new_tokens",
        )
        shown["schedule"] = gr.Radio(
            [("race: step by step in turn", "race"), ("sequential: one after the other", "sequential")],
            value=start.schedule,
            label="Schedule",
            info="in both, a lane's clock counts its own device time alone",
            elem_id="schedule",
        )
    return shown


def _draw_lane(block: gr.Column, number: int, lane: LaneConfig, start: Preset, allow_any_model: bool) -> LaneControls:
    named = [(name.replace("_", " ").capitalize(), name) for name in DRAFTING]  # until `titles` comes
    return LaneControls(
        block,
        gr.Dropdown(named, value=lane.method, label="Method", min_width=150, elem_id=f"method-{number}"),
        _model_choice(
            "Draft model", _model(lane, start.target), f"model-{number}", allow_any_model, lane.model is not None
        ),
        gr.Slider(1, LIMITS.k, lane.k, step=1, label="Draft length k", min_width=170, elem_id=f"k-{number}"),
        gr.Dropdown(
            ACCEPTANCE, value=lane.acceptance, label="Acceptance", min_width=140, elem_id=f"acceptance-{number}"
        ),
        gr.State(dict(lane.options)),
        gr.State(0),
    )


def _model_choice(label: str, value: str, elem_id: str, allow_any_model: bool, visible: bool = True) -> gr.Dropdown:
    choices = list(dict.fromkeys([value, *allowed_models(load_presets())]))
    return gr.Dropdown(
        choices,
        value=value,
        label=label,
        visible=visible,
        allow_custom_value=allow_any_model,
        min_width=190,
        elem_id=elem_id,
    )


def _draw_options(page: gr.Blocks, lane: LaneControls, number: int) -> None:
    """A row of controls that follows the lane's method."""

    def draw_knobs(name: str, options: dict[str, Any]) -> None:
        heavy.live()
        with gr.Row(elem_classes="options"):
            for knob in knobs(name):
                control = _draw_knob(knob, options.get(knob.name, knob.default), number)
                setting = gr.State(knob.name)
                control.change(_set, [lane.options, setting, control], lane.options, **QUIET)

    follow = [page.load, lane.method.change, lane.drawn.change]
    gr.render([lane.method, lane.options], triggers=follow, queue=False, show_progress="hidden")(draw_knobs)


def _draw_knob(knob: Knob, value: Any, number: int) -> Any:
    """The control that suits an option."""
    words: dict[str, Any] = {"label": knob.name, "info": knob.help, "interactive": True}
    words["elem_id"] = f"option-{knob.name}-{number}"
    if knob.type is bool:
        return gr.Checkbox(value, **words)
    if knob.choices:
        return gr.Dropdown(list(knob.choices), value=value, **words)
    if knob.low is not None and knob.high is not None:
        return gr.Slider(knob.low, knob.high, value, step=knob.step, **words)
    if knob.type in (int, float):
        return gr.Number(value, precision=0 if knob.type is int else None, **words)
    return gr.Textbox(value, **words)


def _set(options: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {**options, name: value}


def _needs_model(name: str) -> Any:
    heavy.live()
    return gr.update(visible=bool(method(name).needs_model))


def _shown(count: int) -> list[Any]:
    """The count, the two buttons and the blocks for so many lanes."""
    count = min(max(count, 1), LANES)
    buttons = [gr.update(visible=count < LANES), gr.update(visible=count > 1)]
    return [count, *buttons, *(gr.update(visible=index < count) for index in range(LANES))]


def _padded(chosen: Preset) -> list[LaneConfig | None]:
    return [*chosen.lanes, *[None] * (LANES - len(chosen.lanes))]


def _place(index: int, name: str) -> int:
    """Where a control of a lane stands in `Controls.inputs`."""
    return 2 + len(WHOLE) + index * len(LANE) + LANE.index(name)


def _model(lane: LaneConfig, target: str) -> str:
    return lane.model or default_draft(target)


def _lane_values(lane: LaneConfig, target: str) -> Iterator[Any]:
    return iter((lane.method, _model(lane, target), lane.k, lane.acceptance, dict(lane.options)))


def _lane_config(values: Sequence[Any], named: Sequence[LaneConfig]) -> dict[str, Any]:
    """One lane's controls as data; it keeps the name the preset gave it as long as it is the same method and model."""
    name, model, k, acceptance, options = values
    known = {k.name: k for k in knobs(name)}
    model = (model or None) if method(name).needs_model else None
    return {
        "method": name,
        "model": model,
        "k": _count("k", k),
        "options": {n: _typed(known[n], v) for n, v in options.items() if n in known},
        "acceptance": acceptance,
        "name": next((lane.name for lane in named if (lane.method, lane.model) == (name, model)), ""),
    }


def _typed(knob: Knob, value: Any) -> Any:
    return _count(knob.name, value) if knob.type is int else value


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    return int(value)
