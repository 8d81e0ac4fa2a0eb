"""Models that the page offers: targets, the drafters that fit a target, and heads trained on the page."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape
from pathlib import Path

from specdemo.core.suggest import counted
from specdemo.methods import BASELINE, CAPABILITY_USES, METHODS, method, usable
from specdemo.models.gguf_files import CAPABILITIES
from specdemo.models.local_models import DrafterFit, LocalModel, local_models
from specdemo.models.ref import ModelRef
from specdemo.presets import limits
from specdemo.presets.drafters import HEADER, all_published, drafters_of, published_drafters
from specdemo.presets.files import DEFAULT, Preset, allowed_models, load_presets, preset
from specdemo.presets.link import OWN

DRAFTING = [name for name in METHODS if name != BASELINE]
GREY = " — not here: "  # before the reason of an entry that style.css greys
MAX_NAME = 200  # characters of a model's name in a message
TRAINED: list[ModelRef] = []  # folders of heads that visitors of this process have trained


def page_preset() -> Preset:
    """Return the comparison of the models that the page was started with, or else the first preset."""
    return load_presets().get(OWN) or preset(DEFAULT)


def check_models(chosen: Preset, allow_any_model: bool) -> Preset:
    """Return the preset. Raises ValueError if it names a model that the page does not offer."""
    check_names(chosen.models, allow_any_model)
    return chosen


def check_names(names: Iterable[str], allow_any_model: bool) -> None:
    """Raise ValueError for a model that is not embedded, in a preset, published, on this machine or trained on this
    page.
    """
    if reason := not_offered(names, allow_any_model):
        raise ValueError(reason)


def not_offered(names: Iterable[str], allow_any_model: bool) -> str:
    """Return why the page does not accept one of these models; empty if it accepts all."""
    allowed = {*allowed_models(load_presets()), *TRAINED, *on_this_machine(), *_published()}
    foreign = [] if allow_any_model else [name for name in names if name not in allowed]
    if not foreign:
        return ""
    how = "start the page with --target and its name, or with --allow-any-model"
    return f"model {foreign[0][:MAX_NAME]!r} is not on this page's list; {limits.HOME if limits.public() else how}"


def pairs(target: ModelRef) -> tuple[DrafterFit, ...]:
    """Return the drafters that are known to fit a target or not, including the heads that visitors have trained."""
    return _pairs(target, tuple(TRAINED))


def _published() -> set[ModelRef]:
    """Return the published drafters that specdemo reads; none on a public page."""
    return set() if limits.public() else {entry.drafter for entry in all_published() if entry.method}


def published(target: ModelRef) -> str:
    """Return the published drafters of a target as a fold; empty if there are none."""
    entries = [entry.row() for entry in published_drafters(target) if entry.source.startswith("https://")]
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in entry.values())}</tr>" for entry in entries)
    names = "".join(f"<th>{name}</th>" for name in HEADER)
    head = f"{counted(len(entries), 'published drafter')} for {escape(target.label)}"
    return f"<details><summary>{head}</summary><table><tr>{names}</tr>{rows}</table></details>" if entries else ""


@lru_cache
def _pairs(target: ModelRef, trained: tuple[ModelRef, ...]) -> tuple[DrafterFit, ...]:
    return tuple(drafters_of(target, trained=trained))


def fitting_models(target: ModelRef, reads: str) -> list[ModelRef]:
    """Return the models that this method can use with the target; those that a preset pairs with it come first."""
    fitting = [pair.drafter for pair in pairs(target) if pair.method == reads and pair.fits is not False]
    return sorted(fitting, key=lambda name: name != default_draft(target))


def unfit(target: ModelRef) -> str:
    """Return the drafters that are not offered for a target, with reasons, as a fold."""
    reasons = {pair.drafter: pair.reason for pair in pairs(target) if pair.fits is False}
    items = "".join(f"<li><b>{escape(name.label)}</b> {escape(reason)}</li>" for name, reason in reasons.items())
    head = f"{counted(len(reasons), 'incompatible drafter')} for {escape(target.label)}"
    fold = f"<details><summary>{head}</summary><ul>{items}</ul></details>" if reasons else ""
    return fold + published(target)


def cannot_run(name: str, target: ModelRef) -> str:
    """Return why a method cannot run on a GGUF target; empty if it can, or if the target is of another kind."""
    lacking = sorted(method(name).requires - CAPABILITIES) if target.gguf else []
    return f"{method(name).title} {CAPABILITY_USES[lacking[0]]}, which GGUF files do not support" if lacking else ""


def method_choices(target: ModelRef) -> list[tuple[str, str]]:
    """Return labels and names of the methods, last those that cannot run on the target, which are grey."""
    marks = {name: GREY + cannot_run(name, target) if cannot_run(name, target) else "" for name in usable()}
    names = sorted((name for name in marks if name != BASELINE), key=lambda name: bool(marks[name]))
    return [(f"{method(name).title}{marks[name]}", name) for name in names]


def default_draft(target: ModelRef) -> ModelRef:
    """Return the draft model that a preset pairs with this target, or else another drafter of it, or else the first."""
    lanes = [(p.target, lane.method, lane.model) for p in load_presets().values() for lane in p.lanes if lane.model]
    return min(lanes, key=lambda lane: (lane[0] != target, lane[1] != DRAFTING[0]))[2]


def model_choices(names: Sequence[str], target: ModelRef | None = None) -> list[tuple[str, str]]:
    """Return labels and values of the models to choose from. target: of drafters on this machine, whose labels then
    state how much smaller they are."""
    local = on_this_machine() if target else {}
    known = pairs(target) if target and target in local else ()
    sizes = {pair.drafter: f", {pair.reason}" for pair in known if pair.fits}
    return [
        (_model_label(name) + (sizes.get(name, "") if name in local else ""), name)
        for name in dict.fromkeys(map(ModelRef, names))
    ]


def _model_label(name: ModelRef) -> str:
    """Return the name without folders; of a model on this machine also the size."""
    local = on_this_machine().get(name)
    short = Path(name).name if name in TRAINED else name.label
    return f"On this machine: {short}, {local.bytes / 1e9:.1f} GB" if local else short


def on_this_machine() -> "dict[ModelRef, LocalModel]":
    """Return the models on this machine, by name, with those next to the page's own; none on a public page."""
    return {} if limits.public() else _stored_models(page_preset().target)


@lru_cache(maxsize=1)
def _stored_models(target: ModelRef) -> "dict[ModelRef, LocalModel]":

    return {model.name: model for model in local_models(target)}


def targets() -> list[ModelRef]:
    """Return the targets of all presets."""
    return list(dict.fromkeys(p.target for p in load_presets().values()))
