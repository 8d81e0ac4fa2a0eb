"""Memory that the models of a comparison need, and the keys of loaded models. Reads no weights."""

from collections.abc import Callable, Mapping

import torch

from specdemo.costs.memory import Footprint
from specdemo.engine.comparison import Comparison, Lane
from specdemo.methods import BASELINE, model_method
from specdemo.models.checkpoints import PICKLED
from specdemo.models.devices import best_device
from specdemo.models.gguf_files import is_here
from specdemo.models.llamacpp import LlamaCppSettings
from specdemo.models.memory import (
    Needs,
    Precision,
    estimate_footprint,
    expected_footprint,
    fitting_precision,
    gguf_footprint,
    resolve_placement,
)
from specdemo.models.ref import ModelRef
from specdemo.models.sources import LoadProgress, locate, no_progress

ModelKey = tuple[str, ...]  # method that reads it, name, then the key of its target or the settings it was loaded with

NOTHING = Footprint(0, 0)


def local_drafters(spec: Comparison) -> dict[ModelKey, Lane]:
    """Return a lane for every drafter that runs here with a model."""
    lanes = (lane for lane in spec.lanes if lane.model is not None and lane.server is None)
    return {drafter_key(lane, spec): lane for lane in lanes}


def models_of(spec: Comparison) -> dict[ModelKey, ModelRef]:
    """Return the names of a comparison's models, the target last."""
    drafters = {key: lane.model for key, lane in local_drafters(spec).items() if lane.model}
    return {**drafters, target_key(spec): spec.target}


def placement(spec: Comparison, free: int, progress: LoadProgress | None) -> tuple[torch.device, Precision]:
    """Return the device and the precision of a target, as `load_model` chooses it with so many free bytes. progress
    None: does not ask the hub. Raises ValueError, one line."""
    device, precision = resolve_placement(spec.dtype, device_of(spec), spec.quantization)
    if spec.dtype == "auto" and not spec.target.gguf and (progress or is_here(spec.target)):
        precision = fitting_precision(locate(spec.target, PICKLED, progress or no_progress), precision, free)
    return device, precision


def sizes_of(
    spec: Comparison,
    models: Mapping[ModelKey, ModelRef],
    precision: Precision,
    measure: Callable[[ModelRef, Precision], Footprint],
) -> dict[ModelKey, Footprint]:
    """Return the memory of models, as `measure` has it. Heads inside the target's own checkpoint need none."""
    unquantised, target = Precision(precision.dtype), target_key(spec)  # drafters and heads are not quantised
    return {
        key: measure(name, precision if key == target else unquantised)
        for key, name in models.items()
        if key == target or name != spec.target
    }


def needs_of(spec: Comparison, sizes: Mapping[ModelKey, Footprint]) -> Needs:
    """Return the memory of a run with models of these sizes."""
    target, tokens = target_key(spec), len(spec.prompt) // 2 + spec.max_new_tokens  # 2 characters per token
    drafters = [size for key, size in sizes.items() if key != target]
    names = " with ".join([key[1] for key in reversed([*sizes])])
    return Needs(names, sizes.get(target, NOTHING), drafters, tokens, 1 + len(spec.lanes))


def footprint(spec: Comparison, name: ModelRef, precision: Precision, progress: LoadProgress) -> Footprint:
    """Return the memory of a model. May ask the hub; raises ValueError, one line."""
    if name.gguf:
        return gguf_footprint(name, llamacpp_settings(spec))
    return estimate_footprint(locate(name, PICKLED, progress), precision)


def known_footprint(spec: Comparison, name: ModelRef, precision: Precision) -> Footprint:
    """Return the memory of a model without asking the hub: about, by its name, if it is not on this machine."""
    return footprint(spec, name, precision, no_progress) if is_here(name) else expected_footprint(name, precision)


def llamacpp_settings(spec: Comparison) -> LlamaCppSettings:
    """Return the settings of GGUF models. Raises ValueError for a combination that llama.cpp does not support."""
    return LlamaCppSettings(spec.gpu_layers, spec.threads, spec.context, spec.cache_type, spec.flash_attention)


def target_key(spec: Comparison) -> ModelKey:
    """Return the key of a comparison's target."""
    settings = str(llamacpp_settings(spec)) if spec.target.gguf else spec.bit_exact
    return BASELINE, spec.target, device_of(spec), spec.dtype, str(spec.quantization), settings


def drafter_key(lane: Lane, spec: Comparison) -> ModelKey:
    """Return the key of a drafter; a head belongs to the target it was loaded for."""
    return model_method(lane.method, lane.options), str(lane.model), *target_key(spec)


def device_of(spec: Comparison) -> str:
    """Return the kind of device that a comparison runs on."""
    return best_device().type if spec.device == "auto" else spec.device
