"""Cache of loaded models, limited by memory."""

import gc
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch

from specdemo.core.protocol import Target
from specdemo.costs.memory import Footprint
from specdemo.engine.comparison import Comparison, Lane
from specdemo.kv.graphs import graph_bytes
from specdemo.methods import BASELINE, method, model_method
from specdemo.methods.pairs import load_model
from specdemo.models.checkpoints import PICKLED
from specdemo.models.cpu_plan import CpuSettings
from specdemo.models.devices import best_device, device_kind
from specdemo.models.errors import checkpoint_errors
from specdemo.models.gguf_files import is_gguf
from specdemo.models.llamacpp import LlamaCppSettings
from specdemo.models.memory import (
    Needs,
    Precision,
    check_memory,
    estimate_footprint,
    free_bytes,
    free_memory,
    gguf_footprint,
    resolve_placement,
)
from specdemo.models.sources import LoadProgress, locate, no_progress

NOTHING = Footprint(0, 0)

Key = tuple[str, ...]  # method that reads it, name, then the key of its target or the settings it was loaded with


@dataclass(slots=True)
class _Loaded:
    """A loaded model. model: a LoadedModel for a target, the result of its method's `load` for a drafter."""

    model: Any
    bytes: int


class ModelCache:
    """Loaded models; the least recently used one is dropped when memory is short. A drafter is dropped with its
    target."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        """budget_bytes: limit for all loaded models, including unused ones; None: half of the free memory."""
        self._budget = budget_bytes
        self._models: dict[Key, _Loaded] = {}  # least recently used first, a target after its drafters
        self._target: Key = ()

    def loaded(self) -> list[tuple[str, int]]:
        """Return name and bytes of every loaded model, the most recently used first."""
        return [(key[1], entry.bytes) for key, entry in reversed(list(self._models.items()))]

    def load(self, spec: Comparison, progress: LoadProgress = no_progress) -> None:
        """Load the models of the local lanes, and drop others if memory is short. Raises ValueError with one line."""
        target, lanes = target_key(spec), _local_drafters(spec)
        bytes_of = self._make_room(spec, target, lanes, progress)
        total = 1 + len(lanes)
        if target not in self._models:
            report = _scaled(progress, 0, total)
            loaded = load_model(
                spec.target,
                spec.dtype,
                _device(spec),
                spec.quantization,
                report,
                llamacpp=_llamacpp(spec),
                cpu=CpuSettings(spec.threads, spec.bit_exact),
            )
            self._models[target] = _Loaded(loaded, bytes_of[target])
        self._target = target
        for done, (key, lane) in enumerate(lanes.items(), start=1):
            if key not in self._models:
                loader = method(model_method(lane.method, lane.options))
                report = _scaled(progress, done, total)
                report(0.0, f"loading {lane.model}")
                with checkpoint_errors(str(lane.model)):
                    self._models[key] = _Loaded(loader.load(str(lane.model), self.target(), report), bytes_of[key])
        for key in (*lanes, target):  # now the most recently used
            self._models[key] = self._models.pop(key)
        progress(1.0, "models ready")

    def check_room(self, spec: Comparison) -> None:
        """Raise ValueError if the models of a comparison do not fit into memory. Reads no weights."""
        self._make_room(spec, target_key(spec), _local_drafters(spec), no_progress)

    def target(self) -> Target:
        """Return the target of the last comparison, with its own history on the shared weights."""
        target: Target = self._models[self._target].model.target()
        return target

    def drafter(self, lane: Lane, spec: Comparison) -> object:
        """Return the model that the lane's method loaded; None if it needs none."""
        return None if lane.model is None else self._models[drafter_key(lane, spec)].model

    @property
    def tokenizer(self) -> Any:
        """Return the target's tokenizer; None if it has none."""
        return self._models[self._target].model.tokenizer

    def _make_room(
        self, spec: Comparison, target: Key, lanes: Mapping[Key, Lane], progress: LoadProgress
    ) -> dict[Key, int]:
        """Drop models until those to be loaded fit; return the bytes of each.

        Raises ValueError, before any download, if they do not fit even into empty memory.
        """
        missing = {key: str(lane.model) for key, lane in lanes.items() if key not in self._models}
        if target not in self._models:
            missing[target] = spec.target
        if not missing:
            return {}
        progress(0.0, f"looking for {', '.join(missing.values())}")
        device, precision = resolve_placement(spec.dtype, _device(spec), spec.quantization)
        unquantised = Precision(precision.dtype)  # drafters and heads are not quantised
        # heads inside the target's own checkpoint need no extra memory
        new = {key: name for key, name in missing.items() if key == target or name != spec.target}
        sizes = {
            key: _footprint(name, precision if key == target else unquantised, spec, progress)
            for key, name in new.items()
        }
        tokens, num_lanes = len(spec.prompt) // 2 + spec.max_new_tokens, 1 + len(spec.lanes)  # 2 characters per token
        first = sizes.get(target, NOTHING)
        drafters = [size for key, size in sizes.items() if key != target]
        names = " with ".join([new[key] for key in reversed(new)])
        needs = Needs(names, first, drafters, tokens, num_lanes)
        needed = needs.bytes + graph_bytes(device, 2 * num_lanes)  # target and drafter of every lane
        self._evict(needed, device, {target, *lanes})
        if is_gguf(spec.target):
            needs.check_llamacpp(free_memory())
            progress(0.0, f"loading {needs.describe()}")
        else:
            check_memory(names, needed, device, precision)
        return {key: sizes.get(key, NOTHING).weights for key in missing}

    def _evict(self, needed: int, device: torch.device, required: Set[Key]) -> None:
        """Drop the least recently used models, except the required ones, until the budget has room for `needed`
        bytes."""
        budget = (sum(free_bytes(device)) + self._used_bytes()) // 2 if self._budget is None else self._budget
        for key in [key for key in self._models if key not in required]:
            if self._used_bytes() + needed <= budget:
                break
            self.forget(key)

    def _used_bytes(self) -> int:
        return sum(loaded.bytes for loaded in self._models.values())

    def forget(self, key_to_drop: Key | None = None) -> None:
        """Drop a model, a target with its drafters; None: all."""
        self._models = {key: m for key, m in self._models.items() if key_to_drop and key_to_drop not in (key, key[2:])}
        if best_device().type != "cpu":
            gc.collect()  # models with hooks of accelerate are in reference cycles
            device_kind(best_device()).empty_cache()


def _local_drafters(spec: Comparison) -> dict[Key, Lane]:
    lanes = (lane for lane in spec.lanes if lane.model is not None and lane.server is None)
    return {drafter_key(lane, spec): lane for lane in lanes}


def _footprint(name: str, precision: Precision, spec: Comparison, progress: LoadProgress) -> Footprint:
    if is_gguf(name):
        return gguf_footprint(name, _llamacpp(spec))
    return estimate_footprint(locate(name, PICKLED, progress), precision)


def _llamacpp(spec: Comparison) -> LlamaCppSettings:
    """Return the settings of GGUF models. Raises ValueError for a combination that llama.cpp does not support."""
    return LlamaCppSettings(spec.gpu_layers, spec.threads, spec.context, spec.cache_type, spec.flash_attention)


def target_key(spec: Comparison) -> Key:
    """Return the key of a comparison's target."""
    settings = str(_llamacpp(spec)) if is_gguf(spec.target) else spec.bit_exact
    return BASELINE, spec.target, _device(spec), spec.dtype, str(spec.quantization), settings


def drafter_key(lane: Lane, spec: Comparison) -> Key:
    """Return the key of a drafter; a head belongs to the target it was loaded for."""
    return model_method(lane.method, lane.options), str(lane.model), *target_key(spec)


def _device(spec: Comparison) -> str:
    return best_device().type if spec.device == "auto" else spec.device


def _scaled(progress: LoadProgress, done: int, total: int) -> LoadProgress:
    return lambda share, what: progress((done + share) / total, what)
