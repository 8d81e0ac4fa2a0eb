"""Settings of a race as named values of controls: from a preset, back to one, and described in words.

Names of a lane's values end in its number: "k-2". Hidden lanes have values too. Nothing here needs torch before a
visitor's first event, so that the page is drawn without it.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from html import escape

import gradio as gr

from specdemo.bench.report import sentence
from specdemo.core.atomic_io import json_text
from specdemo.core.rules import rule_options
from specdemo.core.settings import Setting, linked, settings
from specdemo.engine.comparison import AUTO, Comparison, Lane
from specdemo.methods import facts_of, method, method_options, model_method
from specdemo.models import packaged
from specdemo.models.ref import ModelRef
from specdemo.presets import limits
from specdemo.presets.files import Preset, load_presets, preset
from specdemo.presets.limits import LIMITS
from specdemo.presets.link import to_query
from specdemo.presets.runnable import nearest_runnable, why_not
from specdemo.ui import space
from specdemo.ui.job import Values
from specdemo.ui.model_menus import DRAFTING, cannot_run, check_models, not_offered

LANES = LIMITS.lanes - 1
NUMBERS = range(1, LANES + 1)
OF_GGUF = [name for name, setting in settings(Comparison).items() if setting.label and not setting.link]
SAMPLING = [name for name, setting in settings(Comparison).items() if setting.label and setting.link]
COMPARISON_FIELDS = (*linked(Comparison), *OF_GGUF)
LANE = tuple(name for name in linked(Lane) if name != "name")
NAMES = ("preset", "count", *COMPARISON_FIELDS, *(f"{name}-{n}" for n in NUMBERS for name in LANE))
CHAT, TEXT = "chat", "text"


def menus() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return labels and ids of the examples, those of a real model that is here first, and of all other presets."""
    presets = limits.at_hand() if limits.public() else load_presets().values()
    ordered = sorted(presets, key=lambda p: p.embedded or not p.here)
    first = [(p.chip, p.id) for p in ordered if p.chip and p.here]
    others = sorted((p for p in ordered if (p.chip, p.id) not in first), key=lambda p: p.group is not None)
    return first, [(f"{p.title} · {_needs(p)}" if p.group else p.title, p.id) for p in others]


def _needs(comparison: Preset) -> str:
    return f"needs {'' if 'RAM' in (comparison.group or '') else 'a GPU with '}{comparison.group}"


def to_values(comparison: Preset) -> Values:
    """Return the values of `Controls.inputs`."""
    values: Values = {"preset": comparison.id, "count": len(comparison.lanes)}
    values |= {name: getattr(comparison, name) for name in COMPARISON_FIELDS}
    values["chat"] = prompt_format(comparison.target, comparison.chat)
    last = comparison.lanes[-1]  # whose method an added lane has where no draft model fits
    for n, lane in zip(NUMBERS, padded(comparison), strict=True):
        shown = lane or Lane(method=last.method, model=last.model, options=last.options)
        values |= {f"{name}-{n}": getattr(shown, name) for name in LANE}
        values[f"model-{n}"] = shown.model
        values |= {f"server-{n}": shown.server or "", f"options-{n}": dict(shown.options)}
        values[f"acceptance_options-{n}"] = dict(shown.acceptance_options)
    return values


def from_values(values: Values, allow_any_model: bool = False) -> Preset:
    """Return the comparison that the controls describe. Raises ValueError with one line."""
    base = preset(values["preset"])
    changes = {name: values[name] for name in COMPARISON_FIELDS}
    usual = base.chat if changes["target"] == base.target else None
    chat = changes["chat"]
    changes["chat"] = usual if chat == prompt_format(ModelRef(changes["target"]), usual) else chat == CHAT
    lanes = [{name: values[f"{name}-{n}"] for name in LANE} for n in NUMBERS[: values["count"]]]
    changes["lanes"] = [_lane_config(lane, base.lanes[i : i + 1]) for i, lane in enumerate(lanes)]
    return limits.admit(check_models(base.with_changes(**changes), allow_any_model, typed=True))


def changed(preset_id: str, overrides: dict[str, object] | None, allow_any_model: bool) -> Preset:
    """Return a preset with other settings, as requested by an API call. Raises ValueError with one line."""
    if not isinstance(overrides or {}, Mapping):
        raise ValueError(f"overrides must be an object of settings, not {overrides!r:.40}")
    return limits.admit(check_models(limits.fit(preset(preset_id)).with_changes(**(overrides or {})), allow_any_model))


def model_reader(name: str, options: Mapping[str, object]) -> str:
    """Return the method that reads the lane's model. Unknown `options` are ignored."""
    return model_method(name, known_options(method_options(name), options))


def needs_model(name: str, options: Mapping[str, object]) -> bool:
    """Return whether a lane must name a model. Unknown `options` are ignored."""
    return bool(method(model_reader(name, options)).needs_model)


def known_options(known: Iterable[Setting], options: Mapping[str, object]) -> dict[str, object]:
    """Return the options that a method or an acceptance rule has."""
    return {one.name: options[one.name] for one in known if one.name in options}


def padded(comparison: Preset) -> list[Lane | None]:
    """Return the lanes of a preset, with None for each unused place of the form."""
    return [*comparison.lanes, *[None] * (LANES - len(comparison.lanes))]


def _lane_config(lane: Values, named: Sequence[Lane]) -> Values:
    """Return one lane's controls as data. The lane keeps its name from the preset while method and model stay the
    same.
    """
    name, server = str(lane["method"]), lane["server"]
    options = known_options(method_options(name), lane["options"])
    model = (lane["model"] or None) if needs_model(name, options) else None
    return lane | {
        "model": model,
        "options": options,
        "acceptance_options": known_options(rule_options(lane["acceptance"]), lane["acceptance_options"]),
        "name": next((lane.name for lane in named if (lane.method, lane.model) == (name, model)), ""),
        "server": server or None,
        "served_model": next((lane.served_model for lane in named if lane.server == server), None),
    }


def prompt_format(target: ModelRef, chat: bool | None) -> str:
    """Return the value shown for a preset's `chat`. Hub models are assumed to have a chat template."""
    return CHAT if (not target.embedded if chat is None else chat) else TEXT


def key(values: Values) -> str:
    """Return a key that is equal for equal comparisons, independent of the preset they came from."""
    count = values["count"]
    fields = [name for name in NAMES if name not in ("preset", "count")]
    relevant = {name: values[name] for name in fields if int(name.partition("-")[2] or 0) <= count}
    plain = {k: float(v) if isinstance(v, int | float) else v or None for k, v in relevant.items()}
    return sha256(json_text(plain, sort_keys=True, default=str).encode()).hexdigest()[:16]


def show_setup(_: gr.Request | None, values: Values, allow_any_model: bool = True) -> Values:
    """Return the row of the setup and the description of the settings."""
    obstacle = _lane_obstacle(values, allow_any_model)
    about = " ".join(filter(None, (described(values), _gpu_time(values), _memory(values))))
    told = bool(not_offered([ModelRef(values["target"])], allow_any_model, typed=True))
    return {"setup": row_data(values, _query(values), obstacle, told), "about": about}


def _gpu_time(values: Values) -> str:
    """Return how much of a visitor's GPU time the run may take; empty for settings that are not valid."""
    with suppress(TypeError, ValueError):
        return space.gpu_time(from_values(values)) if space.zero_gpu() else ""
    return ""


def _memory(values: Values) -> str:
    """Return what the models need and whether it fits; empty on a public page and for settings that are not valid."""
    from specdemo.engine.session import session  # imports torch

    with suppress(TypeError, ValueError, OSError):  # a file may be gone
        if not (limits.public() or space.zero_gpu()):
            return f"Memory: {escape(session().memory(from_values(values)))}."
    return ""


def row_data(values: Values, query: str | None = None, of_lane: str = "", told: bool = False) -> str:
    """Return the data of setup.js: the preset, whether its settings were changed, its chips, the key of all settings,
    the reason why they cannot run with the most similar preset that can, and the query of a link.

    of_lane: reason why a lane cannot run. told: the field of the target says it.
    """
    comparison = preset(values["preset"])
    here = why_not(comparison) if values["target"] == comparison.target else ""
    instead = nearest_runnable(comparison) if here else None
    obstacle = f"This machine cannot run it: {here}." if here else of_lane
    data = {"preset": comparison.id, "title": comparison.chip or comparison.title, "custom": _is_custom(values)}
    data |= {"chips": chips(values), "key": key(values), "query": query, "told": told}
    return json_text(data | {"obstacle": obstacle, "instead": instead and [instead.id, instead.chip or instead.title]})


def _lane_obstacle(values: Values, allow_any_model: bool) -> str:
    """Return which model the page does not accept, why a visible lane cannot run on the target, or which model it
    lacks; empty if all can run."""
    target = ModelRef(values["target"])
    shown = [n for n in NUMBERS[: values["count"]] if needs_model(values[f"method-{n}"], values[f"options-{n}"])]
    named = [target, *filter(None, (values[f"model-{n}"] for n in shown))]
    if reason := not_offered(named, allow_any_model, typed=True):
        return f"{sentence(reason)}."
    for n in NUMBERS[: values["count"]]:
        name, options = str(values[f"method-{n}"]), values[f"options-{n}"]
        if reason := cannot_run(name, target):
            return f"{reason}; choose another method."
        if needs_model(name, options) and not values[f"model-{n}"]:
            how = "name one under Drafter (a page started with --allow-any-model takes a file, folder or hub id)"
            how += "" if target.gguf or limits.public() else ", or train one (Training, at the foot of the page)"
            return f"{method(name).title} needs a drafter for {target.short_name}; {how}."
    return ""


def chips(values: Values) -> list[tuple[str, str]]:
    """Return the settings as pairs of a control's id and words: the target, each lane's drafter and draft length, and
    the prompt's format and sampling together.
    """
    found = [("target", ModelRef(values["target"]).short_name)]
    for n in NUMBERS[: values["count"]]:
        name, size = str(values[f"method-{n}"]), ModelRef(values[f"model-{n}"] or "").size
        drafter = f"{size} draft" if size and name == DRAFTING[0] else facts_of(name).title
        found += [(f"method-{n}", drafter), (f"k-{n}", f"k {values[f'k-{n}'] or AUTO}")]
    chat = "chat template" if values["chat"] == CHAT else ""
    sampling = [settings(Comparison)[name].summary(values[name]) for name in SAMPLING]
    return [*found, ("max_new_tokens", " · ".join(filter(None, (chat, *sampling))))]


def _query(values: Values) -> str | None:
    """Return the query of a link to the settings; None if they are not valid, for instance half typed."""
    try:
        comparison = from_values(values, allow_any_model=True)
        return to_query(comparison, limits.fit(preset(comparison.id)))
    except (TypeError, ValueError):
        return None


def _is_custom(values: Values) -> bool:
    return key(values) != key(to_values(limits.fit(preset(values["preset"]))))


def about(comparison: Preset) -> str:
    """Return the description and requirements of a preset as HTML."""
    words = [comparison.description]
    if comparison.memory_gb is not None:
        login = "gated: needs a login, " if comparison.gated else ""
        source = packaged.DOWNLOADS.get(comparison.target, "Downloaded from the Hugging Face hub")
        source = "On this machine" if comparison.here else source
        words.append(f"{source}; about {comparison.memory_gb:g} GB of memory, {login}{comparison.licence}.")
    return f"<b>{escape(comparison.title)}.</b> {escape(' '.join(words))}"


def described(values: Values) -> str:
    """Return the description of the preset, or a description of the settings if they differ from the preset's."""
    base = preset(values["preset"])
    line = " · ".join(words for _, words in chips(values))
    return f"<b>{escape(base.title)}, changed.</b> {escape(line)}" if _is_custom(values) else about(base)
