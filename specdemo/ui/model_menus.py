"""Models that the page offers: targets, the drafters that fit a target, heads trained on the page, and the card of a
target."""

import os
import shlex
from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape
from pathlib import Path

from specdemo.bench.tune import last_found
from specdemo.core.deployment import offers_files
from specdemo.core.suggest import counted
from specdemo.core.trace import RunTrace, whole_requests
from specdemo.costs.passes import curve_of, pass_ratio
from specdemo.methods import BASELINE, CAPABILITY_USES, METHODS, method, usable
from specdemo.models.gguf_files import CAPABILITIES
from specdemo.models.local_models import DrafterFit, LocalModel, local_models
from specdemo.models.pass_cost import read_gb_per_s
from specdemo.models.ref import ModelRef
from specdemo.models.sources import size_text
from specdemo.presets import limits
from specdemo.presets.drafters import (
    HEADER,
    RULES,
    SHIPPED,
    UNKNOWN,
    all_published,
    drafters_of,
    drafts_for,
    published_drafters,
)
from specdemo.presets.files import DEFAULT, Preset, allowed_models, load_presets, preset
from specdemo.presets.link import OWN
from specdemo.presets.pair import drafter_method
from specdemo.presets.runnable import this_machine, why_not

DRAFTING = [name for name in METHODS if name != BASELINE]
GREY = " — not here: "  # before the reason of an entry that style.css greys
MAX_NAME, MAX_REASON = 200, 300  # characters of a model's name in a message, and of a reason
START_WITH = "python app.py --target {}"
OF_FILE = f"to use this file, start with `{START_WITH}`"
ANY_MODEL = "start the page with --target and its name, or with --allow-any-model"
APPLICATIONS = ("LM Studio", "Ollama", "llama.cpp")  # stores that other programs keep
PASS_TOKENS = 5  # width of the pass whose cost the card of a target names
CARD_MODELS = 3  # models that it lists
TRAINED: list[ModelRef] = []  # folders of heads that visitors of this process have trained


def page_preset() -> Preset:
    """Return the comparison of the models that the page was started with, or else the first preset."""
    return load_presets().get(OWN) or preset(DEFAULT)


def check_models(comparison: Preset, allow_any_model: bool, typed: bool = False) -> Preset:
    """Return the preset. Raises ValueError if it names a model that the page does not offer. typed: as `not_offered`
    has it."""
    if reason := not_offered(comparison.models, allow_any_model, typed):
        raise ValueError(reason)
    return comparison


def check_names(names: Iterable[str], allow_any_model: bool) -> None:
    """Raise ValueError for a model that is not embedded, in a preset, published, on this machine or trained on this
    page.
    """
    if reason := not_offered(names, allow_any_model):
        raise ValueError(reason)


def not_offered(names: Iterable[str], allow_any_model: bool, typed: bool = False) -> str:
    """Return why the page does not accept one of these models, of which the first is the target; empty if it accepts
    all. typed: into a field, where a page that only this machine reaches accepts files and folders that are models and
    fit."""
    allowed = {*allowed_models(load_presets()), *TRAINED, *on_this_machine(), *_published()}
    models = [*map(ModelRef, names)]
    for name in models:
        file = name.is_path or name.is_gguf_file
        if name in allowed:
            continue
        if typed and file and offers_files():
            if reason := _no_model(models[0], None if name == models[0] else name):
                return reason
        elif not allow_any_model:
            how = limits.HOME if limits.public() else OF_FILE.format(shlex.quote(name)) if file else ANY_MODEL
            return f"model {name[:MAX_NAME]!r} is not on this page's list; {how}"
    return ""


def _no_model(target: ModelRef, draft: ModelRef | None) -> str:
    """Return why a file or folder is no model, or does not fit as a drafter; empty if it is one. Reads headers and
    configs, of each version of a file once."""
    path = Path(draft or target).expanduser()
    try:
        if not path.exists():
            raise ValueError(f"{path} does not exist")
        if path.is_file() and not (draft or target).is_gguf_file:
            raise ValueError(f"{path} is not a GGUF file")
        _check_model(target, draft, path.stat().st_mtime_ns)
    except (ValueError, OSError) as error:
        return f"{str(error)[:MAX_REASON]}; type the path of a GGUF file or of a model's folder"
    return ""


@lru_cache(maxsize=64)
def _check_model(target: ModelRef, draft: ModelRef | None, changed_ns: int) -> None:
    """Raise ValueError, one line. changed_ns: a cache key."""
    drafter_method(target, draft)


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
    """Return the models that this method can use with the target, the best first."""
    return [pair.drafter for pair in pairs(target) if pair.method == reads and pair.fits is not False]


def unfit(target: ModelRef) -> str:
    """Return the drafters that are not offered for a target, with reasons, as a fold."""
    reasons = {pair.drafter: pair.reason for pair in pairs(target) if pair.fits is False}
    named = ((f"<b title='{escape(name.label)}'>{escape(name.short_name)}</b>", why) for name, why in reasons.items())
    items = "".join(f"<li>{name} {escape(why)}</li>" for name, why in named)
    head = f"{counted(len(reasons), 'incompatible drafter')} for {escape(target.short_name)}"
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


def model_choices(names: Sequence[str], target: ModelRef | None = None) -> list[tuple[str, str]]:
    """Return labels and values of the models to choose from. target: of drafters, whose labels then state how much
    smaller they are, or what they download."""
    known = {fit.drafter: fit.reason for fit in pairs(target) if fit.fits and fit.place != SHIPPED} if target else {}
    return [(_label(name, known.get(name, "")), name) for name in dict.fromkeys(map(ModelRef, names))]


def _label(name: ModelRef, about: str = "") -> str:
    """Return the short name, what is known of the model and, of one on this machine, place and size."""
    local = on_this_machine().get(name)
    place = f"on this machine, {size_text(local.bytes)}" if local else ""
    place = place.replace("on this machine", f"in {local.store}") if local and local.store in APPLICATIONS else place
    short = Path(name).name if name in TRAINED else name.short_name
    return " — ".join(filter(None, (short, ", ".join(filter(None, (about, place))))))


def target_choices(start: ModelRef) -> list[tuple[str, str]]:
    """Return labels and values of targets: the page's, those on this machine, those that fit this machine with about
    their download and their speed, and grey ones that need more."""
    presets = {p.target: p for p in reversed([*(limits.at_hand() if limits.public() else load_presets().values())])}
    here = [start, *on_this_machine(), *(name for name in presets if name.embedded)]
    absent = [preset for name, preset in reversed(presets.items()) if name not in here]
    lacking = {preset.target: why_not(preset) for preset in absent}
    fitting = [(f"{name.short_name} — {_download(name)}", name) for name, reason in lacking.items() if not reason]
    needs = {name: reason.removeprefix("it ").partition(", and this")[0] for name, reason in lacking.items() if reason}
    return [
        *model_choices(here),
        *fitting,
        *((f"{name.short_name}{GREY}{reason}", name) for name, reason in needs.items()),
    ]


def _download(name: ModelRef) -> str:
    """Return about the size of a model on the hub and, on a CPU, the tokens/s that its bandwidth allows."""
    size, read = name.estimated_bytes
    speed = read_gb_per_s(os.cpu_count() or 1) * 1e9 / read if read and not this_machine().gpu_gb else 0.0
    words = f"download about {size_text(size)}" if size else "download"
    return f"{words}, about {speed:.2g} tokens/s" if speed else words


def on_this_machine() -> "dict[ModelRef, LocalModel]":
    """Return the models on this machine, by name, with those next to the page's own; none if others reach it."""
    return {} if not offers_files() else _stored_models(page_preset().target)


@lru_cache(maxsize=1)
def _stored_models(target: ModelRef) -> "dict[ModelRef, LocalModel]":
    return {model.name: model for model in local_models(target)}


def targets() -> list[ModelRef]:
    """Return the targets of all presets."""
    return list(dict.fromkeys(p.target for p in load_presets().values()))


def model_card(trace: RunTrace) -> dict[str, object]:
    """Return facts about the target of a run on this machine, `card`, and the query of a link to what the last `tune`
    found for it, `found`; empty for the shipped models."""
    target, speed = ModelRef(trace.config.get("target")), trace.lanes[0].summary.get("tokens_per_s")
    if target.embedded or whole_requests(trace.lanes[0]) or not speed:
        return {}
    rows = [("This model", target.short_name), ("Plain decoding", f"{speed:.0f} tokens/s")]
    if curve := curve_of(trace.environment):
        cost = pass_ratio(curve, PASS_TOKENS)
        rows.append((f"A pass over {PASS_TOKENS} tokens", f"costs as much as {cost:.1f} plain tokens"))
    fits = [fit for fit in pairs(target) if fit.fits is not False][:CARD_MODELS]
    drafters = [f"{fit.drafter.short_name} ({fit.reason})".removesuffix(f" ({UNKNOWN})") for fit in fits]
    rows.append(("Drafters for it", ", ".join(drafters) or f"none is known; it would be {RULES[0]}"))
    rows += [("It can draft for", ", ".join(larger[:CARD_MODELS])) for larger in drafts_for(target).values()][:1]
    tuned, query = last_found(target, trace.environment.get("device")) or ("", "")
    return {"card": [*rows, ("Found here", tuned)] if tuned else rows, "found": query}
