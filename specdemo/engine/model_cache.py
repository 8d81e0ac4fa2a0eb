"""The models that are loaded: those of the last comparisons, as far as memory goes."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdemo.engine.comparison import Comparison, Lane
from specdemo.methods import BASELINE, method, reader
from specdemo.methods.targets import load_model
from specdemo.models.checkpoints import readable
from specdemo.models.devices import best, kind
from specdemo.models.footprint import Precision, free_bytes, measure
from specdemo.models.graphs import recorded_bytes
from specdemo.models.hub import LoadProgress, silent
from specdemo.models.place import check_memory, plan
from specdemo.models.resolve import locate
from specdemo.models.target import HFTarget

ANY_WEIGHTS = ("*.pt", "*.bin", "*.pth")  # of published speculators without safetensors

Key = tuple[str, ...]  # the method that reads it, its name, and for what target or how it was loaded


@dataclass(slots=True)
class _Loaded:
    """model: of the target a LoadedModel, of a drafter what its method's `load` gave."""

    model: Any
    bytes: int


class ModelCache:
    """Models, the least recently used going first where memory is short. A drafter is kept with the target it was
    loaded for, and goes when that goes."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        """budget_bytes: what models that are not in use may take with those that are; None: half of what is free."""
        self._budget = budget_bytes
        self._models: dict[Key, _Loaded] = {}  # the least recently used first, a target after its drafters
        self._target: Key = ()

    def loaded(self) -> list[tuple[str, int]]:
        """Name and bytes of every model that is in memory, the last used first."""
        return [(key[1], held.bytes) for key, held in reversed(list(self._models.items()))]

    def bring(self, spec: Comparison, progress: LoadProgress = silent) -> None:
        """Load what its lanes need here, in place of others where memory is short. Raises ValueError with one line."""
        target = target_key(spec)
        lanes = {drafter_key(lane, spec): lane for lane in spec.lanes if lane.model is not None and lane.server is None}
        bytes_of = self._make_room(spec, target, lanes, progress)
        total = 1 + len(lanes)
        if target not in self._models:
            report = _scaled(progress, 0, total)
            loaded = load_model(spec.target, spec.dtype, _device(spec), spec.quantization, report)
            self._models[target] = _Loaded(loaded, bytes_of[target])
        self._target = target
        for done, (key, lane) in enumerate(lanes.items(), start=1):
            if key not in self._models:
                loader = method(reader(lane.method, lane.options))
                report = _scaled(progress, done, total)
                report(0.0, f"loading {lane.model}")
                with readable(str(lane.model)):
                    self._models[key] = _Loaded(loader.load(str(lane.model), self.target(), report), bytes_of[key])
        for key in (*lanes, target):  # now the last used
            self._models[key] = self._models.pop(key)
        progress(1.0, "models ready")

    def target(self) -> HFTarget:
        """That of the last comparison, with a history of its own on the shared weights."""
        target: HFTarget = self._models[self._target].model.target()
        return target

    def drafter(self, lane: Lane, spec: Comparison) -> object:
        """What the lane's method loaded for it; None where it needs nothing."""
        return None if lane.model is None else self._models[drafter_key(lane, spec)].model

    @property
    def tokenizer(self) -> Any:
        """Of the target; None where it has none."""
        return self._models[self._target].model.tokenizer

    def _make_room(
        self, spec: Comparison, target: Key, lanes: Mapping[Key, Lane], progress: LoadProgress
    ) -> dict[Key, int]:
        """Bytes of every model that is to be loaded; others are forgotten until these fit.

        Raises ValueError, before anything is downloaded, when they do not fit even alone.
        """
        wanted = {key: str(lane.model) for key, lane in lanes.items() if key not in self._models}
        if target not in self._models:
            wanted[target] = spec.target
        if not wanted:
            return {}
        progress(0.0, f"looking for {', '.join(wanted.values())}")
        where, precision = plan(spec.dtype, _device(spec), spec.quantization)
        beside = Precision(precision.dtype)  # drafters and heads are not quantised
        new = {key: name for key, name in wanted.items() if key == target or name != spec.target}  # not its own heads
        sizes = {
            key: measure(locate(name, ANY_WEIGHTS), precision if key == target else beside) for key, name in new.items()
        }
        tokens = len(spec.prompt) // 2 + spec.max_new_tokens  # a token is seldom shorter than two characters
        histories = {key: tokens * (1 + len(spec.lanes) if key == target else 1) for key in sizes}
        needed = sum(size.weights + size.per_token * histories[key] for key, size in sizes.items())
        needed += recorded_bytes(where, 2 * (1 + len(spec.lanes)))  # of every lane's target and of what drafts for it
        budget = (sum(free_bytes(where)) + self._held()) // 2 if self._budget is None else self._budget
        for key in [key for key in self._models if key != target and key not in lanes]:
            if self._held() + needed <= budget:
                break
            self.forget(key)
        check_memory(" with ".join([new[key] for key in reversed(new)]), needed, where, precision)
        return {key: sizes[key].weights if key in sizes else 0 for key in wanted}

    def _held(self) -> int:
        return sum(loaded.bytes for loaded in self._models.values())

    def forget(self, gone: Key | None = None) -> None:
        """Drop a model, a target's drafters with it; None: all."""
        self._models = {key: m for key, m in self._models.items() if gone and gone not in (key, key[2:])}
        if best().type != "cpu":
            gc.collect()  # models that accelerate put its hooks on hold themselves in cycles
            kind(best()).empty()


def target_key(spec: Comparison) -> Key:
    """What a comparison's loaded target is known by."""
    return BASELINE, spec.target, _device(spec), spec.dtype, str(spec.quantization)


def drafter_key(lane: Lane, spec: Comparison) -> Key:
    """Names a loaded drafter; a head belongs to the target it was loaded for."""
    return reader(lane.method, lane.options), str(lane.model), *target_key(spec)


def _device(spec: Comparison) -> str:
    return best().type if spec.device == "auto" else spec.device


def _scaled(progress: LoadProgress, done: int, total: int) -> LoadProgress:
    return lambda share, what: progress((done + share) / total, what)
