"""Drafters of a target that are on this machine, as `tune` and `doctor` try them."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from specdemo.core.rules import DEFAULT_RULE
from specdemo.engine.comparison import Lane
from specdemo.methods import BASELINE, SYNTHETIC, method
from specdemo.methods.facts import FACTS
from specdemo.models.gguf_files import local_header
from specdemo.models.local_models import drafts_of
from specdemo.models.ref import ModelRef
from specdemo.models.sources import cached_folder
from specdemo.presets.drafters import lanes_for, published_drafters
from specdemo.presets.pair import LOOKUPS, drafter_method, has_prediction_layer


def drafters(target: ModelRef, drafts: Sequence[ModelRef], download: bool) -> dict[str, Lane]:
    """Return the lanes to try, named, without draft lengths. Raises ValueError, one line, for a named drafter that does
    not fit."""
    named = [Lane(method=drafter_method(target, draft), model=draft) for draft in drafts]
    found: dict[str, Lane] = {}
    for lane in [*named, *_found(target, download)]:
        options = "".join(f", {name}={value}" for name, value in lane.options.items())
        found.setdefault(f"{lane.method}{f' {lane.model.short_label}' if lane.model else ''}{options}", lane)
    return found


def _found(target: ModelRef, download: bool) -> Iterator[Lane]:
    """Yield lookups, the lanes of presets with this target, drafters of the catalogue, and matching models here."""
    own_name = target.base_name
    yield from (Lane(method=name) for name in LOOKUPS)
    if has_prediction_layer(target):
        yield Lane(method="mtp", model=target)
    for preset, lanes in lanes_for(target):
        if not preset.temperature and not preset.grammar:
            for lane in lanes:
                if _comparable(lane) and all(download or _is_here(model) for model in lane.models):
                    yield lane if lane.tree_nodes else lane.model_copy(update={"k": 0})
    for entry in published_drafters(target):
        if entry.method and (download or _is_here(entry.drafter)):
            yield Lane(method=entry.method, model=entry.drafter)
    for name, facts in FACTS.items():
        if any(word in own_name for word in facts.targets):
            yield Lane(method=name)
    yield from (Lane(method="draft_model", model=name) for name in drafts_of(target).ratios)


def not_here(target: ModelRef) -> list[ModelRef]:
    """Return the published drafters of a target that are not on this machine."""
    return [entry.drafter for entry in published_drafters(target) if entry.method and not _is_here(entry.drafter)]


def _comparable(lane: Lane) -> bool:
    """Return whether a short race on this machine can judge a preset's lane."""
    cls = method(lane.method)
    return cls.exact and not cls.learns and lane.method not in (BASELINE, SYNTHETIC) and lane.acceptance == DEFAULT_RULE


def _is_here(model: ModelRef) -> bool:
    path = model.path
    with suppress(ValueError):
        if path and path.exists():
            return True
        return local_header(model) is not None if model.gguf else cached_folder(model).is_dir()
    return False
