"""Preset -> controls -> preset. A method's options are drawn from its `knobs`; nothing here names a method.

The controls are one flat list, `Controls.inputs`; `to_values` and `from_values` convert between it and a Preset. Lanes
that are not shown keep their place in the list. Drawing the page needs no torch: what only a method's code knows (its
title, its options) is filled in by the first events of a visitor.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import gradio as gr

from specdemo.methods import BASELINE, METHODS, Knob, knobs, method, reader
from specdemo.presets.runnable import nearest_runnable, why_not
from specdemo.presets.schema import DEFAULT, EMBEDDED, LIMITS, LaneConfig, Preset, allowed_models, load_presets, preset
from specdemo.servers.address import host, listed
from specdemo.ui import assets, heavy, space

LANES = LIMITS.lanes - 1
PROMPT = ("target", "prompt", "chat", "system")
WHOLE = (*PROMPT, "temperature", "top_p", "top_k", "min_p", "seed", "max_new_tokens", "schedule")
LANE = ("method", "model", "k", "acceptance", "options", "server")
HERE = ("this machine", "")
FOLDED = ("chat", "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "schedule")  # named where it is folded
COUNTS = ("top_k", "seed", "max_new_tokens")  # whole numbers, which a browser may send as 4.0
CHAT, TEXT = "chat", "text"
ACCEPTANCE = [("lossless", "lossless"), ("typical (lossy)", "typical")]
DRAFTING = [name for name in METHODS if name != BASELINE]
TRAINED: list[str] = []  # folders of the heads that this process's visitors trained on the page
ENGINE: dict[str, Any] = {"concurrency_id": "engine", "concurrency_limit": 1}  # one user of it at a time in a process
QUIET: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


@dataclass(frozen=True)
class LaneControls:
    block: gr.Column
    method: gr.Dropdown
    model: gr.Dropdown
    k: gr.Slider
    acceptance: gr.Dropdown
    options: gr.State  # knob -> value, of the knobs that are not at their default
    server: gr.Dropdown  # where it runs; unseen unless the operator listed servers
    drawn: gr.Number  # counts up when the option controls have to be drawn anew; unseen

    @property
    def inputs(self) -> list[Any]:
        return [self.method, self.model, self.k, self.acceptance, self.options, self.server]


@dataclass(frozen=True)
class Controls:
    preset: gr.State  # the id of what is chosen in either of the next two
    chips: gr.Radio  # the comparisons to start with
    more: gr.Dropdown  # all others
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
    def edits(self) -> list[Any]:
        """The events of a visitor who changes the comparison. Options are drawn later and have none here."""
        seen: list[Any] = [self.chips, self.more, *self.whole.values()]
        seen += [c for lane in self.lanes for c in (lane.method, lane.model, lane.k, lane.acceptance, lane.server)]
        return [*(control.input for control in seen), self.add.click, self.remove.click]

    @property
    def drawn(self) -> list[gr.Number]:
        return [lane.drawn for lane in self.lanes]

    @property
    def outputs(self) -> list[Any]:
        """What `fill` writes."""
        rest = [self.chips, self.more, self.about, self.add, self.remove]
        return [*self.inputs, *rest, *(lane.block for lane in self.lanes), *self.drawn]

    def wire(self, page: gr.Blocks) -> None:
        """Presets fill the rest, lanes come and go, each shows the controls of its method."""
        for choice in (self.chips, self.more):
            choice.input(_choose, [choice, *self.drawn], self.outputs, **QUIET)
        target, chat = self.whole["target"], [self.whole["chat"], self.whole["system"]]
        assert isinstance(target, gr.Dropdown)
        target.input(lambda name: _chat_updates(name, None), target, chat, **QUIET)
        count = [self.count, self.add, self.remove, *(lane.block for lane in self.lanes)]
        self.add.click(lambda n: _shown(n + 1), self.count, count, **QUIET)
        self.remove.click(lambda n: _shown(n - 1), self.count, count, **QUIET)
        page.load(None, js=assets.text("names.js"), **QUIET)
        page.load(titles, None, [lane.method for lane in self.lanes], **QUIET)
        for number, lane in enumerate(self.lanes, start=1):
            chosen, changes = [self.whole["target"], lane.method, lane.drawn], [lane.model, lane.options, lane.drawn]
            lane.method.input(_switch, chosen, changes, **QUIET)
            with lane.block:
                _draw_options(page, self.whole["target"], lane, number)


def address(query: str) -> str:
    """`?query`, or on a Space the public address, which a browser inside its frame cannot know."""
    space = os.environ.get("SPACE_ID")
    return f"https://huggingface.co/spaces/{space}?{query}" if space else f"?{query}"


def wire_share(button: gr.Button, share: Callable[..., str], inputs: list[Any], link: gr.Textbox) -> None:
    """The button shows and copies the link; where `share` raises ValueError its place says why there is none."""

    def shown(*values: Any) -> Any:
        try:
            return gr.update(value=share(*values), label=link.label, visible=True)
        except ValueError as error:
            return gr.update(value=str(error), label="No link", visible=True)

    button.click(shown, inputs, link, **QUIET).then(None, link, link, js=assets.text("share.js"), **QUIET)


def visitor(request: gr.Request) -> str:
    """Names an open page."""
    return str(request.session_hash)


def fill(chosen: Preset, drawn: Sequence[int]) -> list[Any]:
    """Updates of `Controls.outputs` that show this comparison."""
    values = [gr.update(value=value) for value in to_values(chosen)]
    for index, lane in enumerate(chosen.lanes):
        value = _model(lane, chosen.target)
        update = gr.update(visible=lane.model is not None, value=value, choices=_model_choices(value))
        values[_place(index, "model")] = update
        values[_place(index, "server")] = gr.update(value=lane.server or "", choices=_servers(lane.server))
    place = 2 + WHOLE.index("chat")
    values[place : place + 2] = _chat_updates(chosen.target, chosen.chat, chosen.system)
    blocks = _shown(len(chosen.lanes))[1:]
    return [*values, *_picked(chosen), about(load_presets()[chosen.id]), *blocks, *(n + 1 for n in drawn)]


def fill_untouched(chosen: Preset, start: Preset, now: Sequence[Any], drawn: Sequence[int]) -> list[Any]:
    """`fill`, but what a visitor has changed since the page showed `start` stays; a lane is changed as a whole.

    now: the values of `Controls.inputs`.
    """
    updates = fill(chosen, drawn)
    touched = [ours != theirs for ours, theirs in zip(now, to_values(start), strict=True)]
    if touched[0]:
        return [gr.skip()] * len(updates)
    for index in range(LANES):
        lane = slice(_place(index, LANE[0]), _place(index + 1, LANE[0]))
        if any(touched[lane]):
            touched[lane] = [True] * len(LANE)
            updates[index - LANES] = gr.skip()  # its options stay as they are drawn
    if touched[1]:
        updates[-LANES - LANES - 2 : -LANES] = [gr.skip()] * (LANES + 2)  # as many lanes as now, and the two buttons
    return [gr.skip() if old else new for old, new in zip_longest(touched, updates, fillvalue=False)]


def _choose(preset_id: str | None, *drawn: int) -> list[Any]:
    return fill(space.fit(preset(preset_id or DEFAULT)), drawn)


def about(chosen: Preset) -> str:
    """What a preset is for, what it takes, and what there is instead where this machine cannot run it."""
    words = [f"**{chosen.title}.** {chosen.description}"]
    if chosen.memory_gb is not None:
        login = "gated: needs a login, " if chosen.gated else ""
        words.append(f"Downloaded from the Hugging Face hub; about {chosen.memory_gb:g} GB, {login}{chosen.licence}.")
    reason = why_not(chosen)
    if reason:
        words.append(f"**This machine cannot run it: {reason}.** The nearest it can: {nearest_runnable(chosen).title}.")
    return " ".join(words)


def titles() -> list[Any]:
    """The methods' own words, in every lane."""
    heavy.live()
    return [gr.update(choices=[(method(name).title, name) for name in DRAFTING])] * LANES


def to_values(chosen: Preset) -> list[Any]:
    """The values of `Controls.inputs`, in its order."""
    whole = [_prompt_as(chosen.target, chosen.chat) if n == "chat" else getattr(chosen, n) for n in WHOLE]
    lanes = [lane or new_lane(chosen.target) for lane in _padded(chosen)]
    of_lanes = [value for lane in lanes for value in _lane_values(lane, chosen.target)]
    return [chosen.id, len(chosen.lanes), *whole, *of_lanes]


def from_values(values: Sequence[Any], allow_any_model: bool = False) -> Preset:
    """The comparison the controls describe. Raises ValueError with one line."""
    heavy.live()
    chosen, count, *rest = values
    base = preset(chosen)
    changes = dict(zip(WHOLE, rest, strict=False))
    changes |= {name: whole_number(name, changes[name]) for name in COUNTS}
    usual = base.chat if changes["target"] == base.target else None
    asked = changes["chat"]
    changes["chat"] = usual if asked == _prompt_as(changes["target"], usual) else asked == CHAT
    changes["lanes"] = [
        _lane_config(rest[_place(index, "method") - 2 :][: len(LANE)], base.lanes[index : index + 1])
        for index in range(int(count))
    ]
    return space.admit(check_models(base.with_changes(**changes), allow_any_model))


def changed(preset_id: str, overrides: dict[str, Any] | None, allow_any_model: bool) -> Preset:
    """A preset with other settings, as API callers ask for it. Raises ValueError with one line."""
    heavy.live()
    if not isinstance(overrides or {}, Mapping):
        raise ValueError(f"overrides must be an object of settings, not {overrides!r:.40}")
    return space.admit(check_models(space.fit(preset(preset_id)).with_changes(**(overrides or {})), allow_any_model))


def check_models(chosen: Preset, allow_any_model: bool) -> Preset:
    """The preset again. Raises ValueError when it names a model that is neither embedded, nor in a preset, nor trained
    on this page."""
    allowed = {*allowed_models(load_presets()), *TRAINED}
    foreign = [] if allow_any_model else [name for name in chosen.models if name not in allowed]
    if foreign:
        raise ValueError(f"model {foreign[0][:80]!r} is not on this page's list; start it with --allow-any-model")
    return chosen


def needs_model(name: str, options: Mapping[str, Any]) -> bool:
    """Whether a lane has to name a model; of `options` only those that the method knows count."""
    return bool(method(reader(name, _known(name, options))).needs_model)


def fitting_model(target: str, reads: str) -> str:
    """What a preset lets this method read on this target, or else the draft model for the target."""
    lanes = [lane for p in load_presets().values() if p.target == target for lane in p.lanes if lane.model]
    fitting = [str(lane.model) for lane in lanes if reader(lane.method, lane.options) == reads]
    return fitting[0] if fitting else default_draft(target)


def default_draft(target: str) -> str:
    """The draft model that a preset pairs with this target, or else the first of all."""
    pairs = [(p.target, lane.model) for p in load_presets().values() for lane in p.lanes if lane.model]
    return next((model for name, model in pairs if name == target), pairs[0][1])


def new_lane(target: str) -> LaneConfig:
    """What a lane that is added starts as."""
    return LaneConfig(method=DRAFTING[0], model=default_draft(target))


def whole_number(name: str, value: Any) -> int:
    """What a slider means, which a browser may send as 4.0. Raises ValueError with one line."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    return int(value)


def draw(start: Preset, allow_any_model: bool) -> Controls:
    """Every control but prompt and sampling, inside the current Blocks, showing `start`."""
    chip, other = _picked(start)
    few, others = _offered()
    with gr.Row(elem_id="presets"):
        chips = gr.Radio(few, value=chip, label="Preset", elem_classes="chips", container=False)
        more = gr.Dropdown(
            [("more presets …", ""), *others], value=other, label="More presets", elem_id="more", container=False
        )
    with gr.Row(elem_id="about-row"):
        described = gr.Markdown(about(start), elem_id="about")
        add = gr.Button("Add a lane", size="sm", elem_id="add-lane", visible=len(start.lanes) < _most_lanes())
        remove = gr.Button("Remove the last lane", size="sm", elem_id="remove-lane", visible=len(start.lanes) > 1)
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
    count = gr.State(len(start.lanes))
    return Controls(gr.State(start.id), chips, more, described, {"target": target}, lanes, count, add, remove)


def draw_prompt(start: Preset) -> gr.Textbox:
    return gr.Textbox(
        start.prompt, label="Prompt", lines=2, max_lines=10, max_length=space.limits().prompt, elem_id="prompt", scale=5
    )


def in_force(
    chat: str, temperature: float, top_p: float, top_k: int, min_p: float, max_new_tokens: Any, schedule: str
) -> str:
    """The accordion's label: what holds while it is shut, by the controls of FOLDED."""
    cuts = ((top_p, 1, "top-p"), (top_k, 0, "top-k"), (min_p, 0, "min-p"))
    heat = [f"temperature {temperature}", *(f"{name} {value}" for value, off, name in cuts if value != off)]
    return "Settings: " + " · ".join(
        (
            "chat template" if chat == CHAT else "raw completion",
            *(heat if temperature else ["greedy"]),
            f"at most {max_new_tokens} token{'' if max_new_tokens == 1 else 's'}",
            "lanes in turn" if schedule == "race" else "one lane after the other",
        )
    )


def draw_chat(start: Preset) -> dict[str, gr.components.Component]:
    """How the prompt is given to the model, by the names of WHOLE."""
    words = _chat_words(start.target)
    with gr.Row():
        return {
            "chat": gr.Radio(
                [("chat template", CHAT), ("raw completion", TEXT)],
                value=_prompt_as(start.target, start.chat),
                label="Prompt as",
                elem_id="chat",
                min_width=260,
                **words,
            ),
            "system": gr.Textbox(
                start.system,
                label="System prompt",
                max_length=space.limits().prompt,
                visible=words["interactive"],
                elem_id="system",
                min_width=320,
                scale=2,
            ),
        }


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
            space.limits().max_new_tokens,
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
            "Drafter weights", _model(lane, start.target), f"model-{number}", allow_any_model, lane.model is not None
        ),
        gr.Slider(1, space.limits().k, lane.k, step=1, label="Draft length k", min_width=170, elem_id=f"k-{number}"),
        gr.Dropdown(
            ACCEPTANCE, value=lane.acceptance, label="Acceptance", min_width=140, elem_id=f"acceptance-{number}"
        ),
        gr.State(dict(lane.options)),
        gr.Dropdown(
            _servers(lane.server),
            value=lane.server or "",
            label="Runs on",
            visible=bool(listed()),
            min_width=150,
            elem_id=f"server-{number}",
        ),
        gr.Number(0, elem_classes="unseen"),  # no State: its change would not be noticed outside the queue
    )


def _model_choice(label: str, value: str, elem_id: str, allow_any_model: bool, visible: bool = True) -> gr.Dropdown:
    return gr.Dropdown(
        _model_choices(value),
        value=value,
        label=label,
        visible=visible,
        allow_custom_value=allow_any_model,
        min_width=190,
        elem_id=elem_id,
    )


def _model_choices(value: str) -> list[tuple[str, str]]:
    """Labels and values: what may be named, and what is."""
    names = dict.fromkeys([value, *allowed_models(load_presets()), *TRAINED])
    return [(Path(name).name if name in TRAINED else name, name) for name in names]


def _servers(chosen: str | None) -> list[tuple[str, str]]:
    """Labels and values of the places where a lane can run."""
    named = dict.fromkeys(name for name in (chosen, *listed()) if name)
    return [HERE, *((f"server {host(name)}", name) for name in named)]


def _draw_options(page: gr.Blocks, target: gr.components.Component, lane: LaneControls, number: int) -> None:
    """A row of controls that follows the lane's method."""

    def draw_knobs(name: str, options: dict[str, Any]) -> None:
        heavy.live()
        with gr.Row(elem_classes="options"):
            for knob in knobs(name):
                control = _draw_knob(knob, options.get(knob.name, knob.default), number)
                setting = gr.State(knob.name)
                given = [target, lane.method, lane.options, setting, control]
                control.change(_set, given, [lane.options, lane.model], **QUIET)

    follow = [page.load, lane.drawn.change]
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


def _set(target: str, method: str, options: dict[str, Any], option: str, value: Any) -> list[Any]:
    """A lane's options with one of them changed, and its model if that decides who reads it."""
    changed = {**options, option: value}
    before, after = (reader(method, _known(method, given)) for given in (options, changed))
    return [changed, gr.skip() if before == after else _fit_model(target, method, changed)]


def _switch(target: str, name: str, drawn: int) -> list[Any]:
    """A lane's model, options and `drawn` once the visitor has chosen another method."""
    heavy.live()
    return [_fit_model(target, name, {}), {}, drawn + 1]


def _fit_model(target: str, name: str, options: Mapping[str, Any]) -> Any:
    model = fitting_model(target, reader(name, _known(name, options)))
    return gr.update(visible=needs_model(name, options), value=model, choices=_model_choices(model))


def _prompt_as(target: str, chat: bool | None) -> str:
    """What the control shows for a preset's `chat`: a model of the hub is taken to have a template."""
    return CHAT if (target not in EMBEDDED if chat is None else chat) else TEXT


def _chat_words(target: str) -> dict[str, Any]:
    if target in EMBEDDED:
        return {"interactive": False, "info": f"{target} has no chat template: it goes on with the text"}
    return {"interactive": True, "info": "a message to the model, or a text it goes on with"}


def _chat_updates(target: str, chat: bool | None, system: str = "") -> list[Any]:
    words = _chat_words(target)
    return [
        gr.update(value=_prompt_as(target, chat), **words),
        gr.update(value=system, visible=words["interactive"]),
    ]


def _offered() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Labels and values of the chips and of the list beside them."""
    offered = space.at_hand() if space.public() else load_presets().values()
    few = [(p.chip, p.id) for p in offered if p.chip]
    return few, [(f"{p.group or ''} {p.title}".strip(), p.id) for p in offered if not p.chip]


def _picked(chosen: Preset) -> tuple[str | None, str]:
    """The values of the chips and of the list beside them: one of them names the preset."""
    return (chosen.id, "") if load_presets()[chosen.id].chip else (None, chosen.id)


def _most_lanes() -> int:
    return space.limits().lanes - 1


def _shown(count: int) -> list[Any]:
    """The count, the two buttons and the blocks for so many lanes."""
    count = min(max(count, 1), LANES)
    buttons = [gr.update(visible=count < _most_lanes()), gr.update(visible=count > 1)]
    return [count, *buttons, *(gr.update(visible=index < count) for index in range(LANES))]


def _padded(chosen: Preset) -> list[LaneConfig | None]:
    return [*chosen.lanes, *[None] * (LANES - len(chosen.lanes))]


def _place(index: int, name: str) -> int:
    """Where a control of a lane stands in `Controls.inputs`."""
    return 2 + len(WHOLE) + index * len(LANE) + LANE.index(name)


def _model(lane: LaneConfig, target: str) -> str:
    return lane.model or default_draft(target)


def _lane_values(lane: LaneConfig, target: str) -> Iterator[Any]:
    server = lane.server or ""
    return iter((lane.method, _model(lane, target), lane.k, lane.acceptance, dict(lane.options), server))


def _lane_config(values: Sequence[Any], named: Sequence[LaneConfig]) -> dict[str, Any]:
    """One lane's controls as data; it keeps the name the preset gave it as long as it is the same method and model."""
    name, model, k, acceptance, options, server = values
    options = _known(name, options)
    model = (model or None) if needs_model(name, options) else None
    return {
        "method": name,
        "model": model,
        "k": whole_number("k", k),
        "options": options,
        "acceptance": acceptance,
        "name": next((lane.name for lane in named if (lane.method, lane.model) == (name, model)), ""),
        "server": server or None,
        "served_model": next((lane.served_model for lane in named if lane.server == server), None),
    }


def _known(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Of the options those that the method has, whole numbers as such."""
    given = {k: options[k.name] for k in knobs(name) if k.name in options}
    return {k.name: whole_number(k.name, value) if k.type is int else value for k, value in given.items()}
