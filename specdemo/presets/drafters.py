"""Drafters of a target: those on this machine, in presets, and in the catalogue of published ones, drafters.yaml."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specdemo.core.deployment import public
from specdemo.core.safe_io import read_json
from specdemo.core.settings import Settings
from specdemo.core.suggest import program
from specdemo.engine.comparison import Lane, Model
from specdemo.methods import model_method
from specdemo.models.gguf_files import is_here
from specdemo.models.gguf_header import read_header
from specdemo.models.local_models import DrafterFit, draft_models, local_models
from specdemo.models.packaged import embedded_folder
from specdemo.models.ref import ModelRef
from specdemo.presets.files import Preset, is_recorded, load_presets, read_yaml, recorded
from specdemo.presets.pair import has_prediction_layer

if TYPE_CHECKING:  # imports torch
    from specdemo.core.protocol import Target

CATALOGUE = Path(__file__).with_name("drafters.yaml")
RULES = (
    "a draft model of the same family, with the same vocabulary, 10 to 20 times smaller than the target",
    "a head that was trained for exactly this target and the way it is prompted, with or without thinking",
    "without any drafter: n-gram or suffix drafting where the answer repeats the prompt, as in editing",
    f"your own head: `{program()} train medusa --target TARGET` (transformers models)",
)
UNKNOWN = "unknown"
PLACES = SHIPPED, INSIDE, HERE, ABSENT = "embedded", "in the target", "this machine", "not here"  # besides stores
HEADER = ("drafter", "kind", "size", "format", "licence", "engines", "trained", "accepted", "source")


class Kind(Settings):
    """A kind of drafter. method: how specdemo reads it; empty if it does not."""

    method: str = ""
    format: str
    engines: str


class PublishedDrafter(Settings):
    """A drafter of the catalogue.

    gb: size of its files. computed: what gb was computed from, if not measured. engines: overrides those of its kind.
    thinking: whether its training answers contain thinking. trained: on what, if that is known instead.
    """

    target: Model
    drafter: Model
    kind: str
    source: str
    gb: float | None = None
    computed: Literal["parameters", "config"] | None = None
    licence: str = UNKNOWN
    engines: str = ""
    thinking: Literal["with", "without"] | None = None
    trained: str = ""
    acceptance: str = ""

    @property
    def about(self) -> Kind:
        """Return the kind of the drafter."""
        return _catalogue()[0][self.kind]

    @property
    def method(self) -> str:
        """Return the method that reads the drafter; empty if specdemo does not run it."""
        return self.about.method if "specdemo" in self.runs_in else ""

    @property
    def runs_in(self) -> str:
        """Return the engines that run the drafter."""
        return self.engines or self.about.engines

    @property
    def size(self) -> str:
        """Return the size of the files in words."""
        if self.drafter == self.target:
            return "in the target"
        if self.gb is None:
            return UNKNOWN
        return f"about {self.gb:g} GB (computed from {self.computed})" if self.computed else f"{self.gb:g} GB"

    def row(self) -> dict[str, str]:
        """Return the entry as a row of HEADER."""
        trained = f"{self.thinking} thinking" if self.thinking else self.trained or UNKNOWN
        files = (self.size, self.about.format, self.licence, self.runs_in)
        values = (self.drafter, self.kind, *files, trained, self.acceptance or UNKNOWN, self.source)
        return dict(zip(HEADER, values, strict=True))


@lru_cache(maxsize=1)
def _catalogue() -> tuple[dict[str, Kind], list[PublishedDrafter]]:
    """Read the catalogue. Raises ValueError for an invalid entry."""
    data = read_yaml(CATALOGUE)
    assert isinstance(data, dict)
    kinds = {str(name): Kind.build(kind) for name, kind in data["kinds"].items()}
    return kinds, [PublishedDrafter.build(entry) for entry in data["drafters"]]


def all_published() -> list[PublishedDrafter]:
    """Return the whole catalogue."""
    return _catalogue()[1]


def drafters_of(target: ModelRef, opened: "Target | None" = None, trained: Sequence[ModelRef] = ()) -> list[DrafterFit]:
    """Return the drafters of a target, those that fit and the best first: its own layer, models on this machine by
    size, and those that presets and the catalogue name, other vocabularies last. Others have a reason: embedded ones of
    an embedded target, and where no model on this machine fits, those that were compared.

    Transformers models on this machine are opened without weights; the hub is asked if the caller has `opened` a target
    of it. A public page lists what its presets name. trained: folders of heads that no preset names.
    """
    from specdemo.methods.pairs import check_pairs, outline  # these import torch

    if opened is None and target.path and not target.gguf and (target.embedded or not public()):
        with suppress(ValueError):
            opened = outline(target)
    layer = not public() and has_prediction_layer(target)
    drafts = [] if target.embedded or public() else _local_drafts(target)
    smaller = {fit.drafter for fit in drafts if fit.fits}
    fits = [fit for fit in drafts if fit.fits or not smaller]
    candidates = [("mtp", target), *_named(target, opened)] if layer else _named(target, opened)
    if target.gguf and not layer and is_here(target):
        candidates = [pair for pair in candidates if pair[1] != target]
    candidates = [pair for pair in dict.fromkeys(candidates) if pair[1] not in smaller]
    readable = [pair for pair in candidates if not target.path or (pair[1].path and pair[1].path.exists())]
    if opened is not None:
        fits += check_pairs(opened, [*readable, *((None, folder) for folder in trained)])
    sizes = {entry.drafter: entry.size for entry in published_drafters(target)}
    for name, model in candidates:
        if layer and model == target and not opened:
            fits.append(DrafterFit(model, name, True, "prediction layer of this model"))
        elif not opened or (name, model) not in readable:
            fits.append(DrafterFit(model, name, None, sizes.get(model, UNKNOWN)))
    fits = [fit if fit.place else replace(fit, place=_place(fit.drafter, target)) for fit in fits]
    listed = [fit for fit in fits if fit.fits is not False or fit.place != SHIPPED or target.embedded]
    rank = {pair: place for place, pair in reversed([*enumerate(candidates)])}

    def badness(fit: DrafterFit) -> tuple[object, ...]:
        return fit.fits is False, fit.place == ABSENT, fit.shares_text, rank.get((fit.method, fit.drafter), -1)

    return sorted(listed, key=badness)


def _named(target: ModelRef, opened: "Target | None") -> list[tuple[str, ModelRef]]:
    """Return methods and drafters that presets and the catalogue name for a target, and those that ship for one that is
    opened, which may fit it too."""
    lanes = [lane for _, of_preset in lanes_for(target) for lane in of_preset]
    if opened and not target.gguf:
        lanes += [lane for p in load_presets().values() for lane in p.lanes if lane.model and lane.model.embedded]
    pairs = [(model_method(lane.method, lane.options), lane.model) for lane in lanes if lane.model]
    entries = [] if public() else published_drafters(target)
    return [*pairs, *((entry.method, entry.drafter) for entry in entries if entry.method)]


def _local_drafts(target: ModelRef) -> list[DrafterFit]:
    """Return how the models on this machine fit a target on it as draft models."""
    models = local_models(target)
    own = next((model for model in models if target == model.name or target.path == model.path), None)
    return draft_models(own, models) if own else []


def _place(drafter: ModelRef, target: ModelRef) -> str:
    if drafter == target:
        return INSIDE
    return SHIPPED if drafter.embedded else HERE if is_here(drafter) else ABSENT


def published_drafters(target: ModelRef) -> list[PublishedDrafter]:
    """Return the drafters of a target: those of the catalogue, then those of presets with their recorded acceptance.

    The target is compared by its base name, so that files, quantisations and names of Ollama find their model. GGUF
    drafters come first for a GGUF target.
    """
    listed = [entry for entry in all_published() if entry.target.base_name == target.base_name]
    names = {entry.drafter.repository for entry in listed}
    own = [entry for entry in _of_presets(target) if entry.drafter.repository not in names]
    others = {entry.drafter: entry for entry in reversed(own)}  # the first preset of a drafter counts
    return sorted([*listed, *reversed(others.values())], key=lambda entry: entry.drafter.gguf != target.gguf)


def unpublished(target: ModelRef) -> list[DrafterFit]:
    """Return the drafters of `drafters_of` on this machine that are none of `published_drafters`."""
    published = {entry.drafter for entry in published_drafters(target)}
    return [fit for fit in drafters_of(target) if fit.place != ABSENT and fit.drafter not in published]


def rows(target: ModelRef) -> list[dict[str, str]]:
    """Return the drafters of a target as rows of HEADER, published ones first."""
    others = [fit for fit in unpublished(target) if fit.fits]
    entries = [
        PublishedDrafter(target=target, drafter=fit.drafter, kind=kind, source=fit.place, **_shipped(fit.drafter))
        for fit in others
        if (kind := _kind(fit.method, fit.drafter))
    ]
    return [entry.row() for entry in [*published_drafters(target), *entries]]


def drafts_for(model: ModelRef) -> dict[str, list[str]]:
    """Return the drafters of the catalogue that are this model, with their targets.

    A GGUF file is known by its name, and by the names in its header, which may lack the training of a variant.
    """
    names, variants = {model.base_name}, ""
    if model.gguf and (file := Path(model).expanduser()).is_file():
        stated = read_header(file).metadata
        title, *parts = (str(stated.get(f"general.{key}", "")) for key in ("name", "basename", "size_label"))
        names |= {ModelRef(name.replace(" ", "-")).base_name for name in (title, "-".join(parts)) if name.strip("-")}
        variants = "-(instruct|it)$"
    targets: dict[str, list[str]] = {}
    for entry in all_published():
        name = entry.drafter.base_name
        if entry.drafter != entry.target and {name, re.sub(variants, "", name)} & names:
            targets.setdefault(entry.drafter.repository, []).append(entry.target)
    return targets


def lanes_for(target: ModelRef) -> Iterator[tuple[Preset, list[Lane]]]:
    """Yield the presets for a model, by its base name, with their lanes. A layer in a GGUF file is that of `target`."""
    for preset in load_presets().values():
        if preset.target.base_name == target.base_name:
            file = preset.target if preset.target.gguf else ""
            layer = {"model": target}
            yield preset, [lane.model_copy(update=layer) if lane.model == file else lane for lane in preset.lanes]


def _of_presets(target: ModelRef) -> Iterator[PublishedDrafter]:
    """Yield the drafters that presets pair with a target, with the acceptance of the recorded run."""
    for preset, lanes in lanes_for(target):
        for place, lane in enumerate(lanes, start=1):
            if lane.model and (kind := _kind(lane.method, lane.model)):
                about = {"acceptance": _recorded(preset.id, place), "source": f"preset {preset.id}"}
                yield PublishedDrafter(target=target, drafter=lane.model, kind=kind, **_shipped(lane.model) | about)


def _shipped(name: str) -> dict[str, Any]:
    """Return size, licence and training of an embedded drafter; nothing for any other."""
    provenance = embedded_folder() / name / "provenance.json"
    if not provenance.is_file():
        return {}
    size = sum(file.stat().st_size for file in provenance.parent.glob("*.safetensors"))
    trained = f"on {read_json(provenance)['tokens'] / 1e6:.1f} million tokens"
    return {"gb": round(size / 1e9, 3), "licence": "Apache 2.0", "trained": trained}


def _kind(method: str, drafter: ModelRef) -> str:
    """Return the kind of a preset's drafter: the first of its method and format, but EAGLE-1 where its name is that.
    Empty for methods that are not in the catalogue."""
    if "eagle-1" in drafter.lower():
        return "EAGLE-1"
    read, gguf = {name: kind for name, kind in _catalogue()[0].items() if kind.method == method}, drafter.gguf
    return next((name for name, kind in read.items() if (kind.format == "GGUF") == gguf), "")


def _recorded(preset_id: str, lane: int) -> str:
    trace = recorded(preset_id) if is_recorded(preset_id) else None
    length = trace.lanes[lane].summary.get("tokens_per_step") if trace else None
    return f"{length:.2f} tokens per step in the recorded run" if isinstance(length, float) else ""
