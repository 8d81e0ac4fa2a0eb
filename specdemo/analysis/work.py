"""Shapes of models and drafters by name, and the work of their forward passes: bytes read, operations, launches."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from specdemo.core.shapes import UNREADABLE, Config, Shape, shape_of
from specdemo.core.suggest import suggest
from specdemo.methods import METHODS, facts_of, usable
from specdemo.methods.facts import FACTS, PREDICTED, Drafting

KNOWN = Path(__file__).with_name("known.json")
MOST_TRIED = 64  # longest draft length to try if the drafter's config contains one


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a pass: bytes, operations and launches."""

    weight_bytes: float
    flop: float  # of the matrix products
    kv_bytes: float  # of keys, values and states
    kv_flop: float  # of attention
    written: float  # new cache entries
    rows: float  # input tokens
    operations: float
    layers: int


def work(
    shape: Shape, tokens: float, batch: float, context: int, dtype_bytes: float, heads: float | None = None
) -> Work:
    """Return the work of a pass over `tokens` of each of `batch` rows after `context` tokens.

    heads: tokens of each row for which the output head runs; None: all.
    """
    rows, output_rows = tokens * batch, (tokens if heads is None else heads) * batch
    expert = shape.expert * shape.expert_layers
    width = shape.width(dtype_bytes)
    weights = (shape.dense + expert * shape.touched(rows)) * width + (shape.head * dtype_bytes if output_rows else 0.0)
    flop = 2.0 * rows * (shape.dense + expert * shape.chosen) + 2.0 * output_rows * shape.head
    attending = 0.0
    for memory in shape.memory:
        seen = min(context, memory.window) if memory.window else context
        attending += rows * memory.layers * (memory.operations * seen + 2.0 * memory.state)
    kv_bytes = batch * shape.kv_bytes(context, dtype_bytes)
    written = rows * sum(memory.layers * memory.numbers for memory in shape.memory)
    return Work(weights, flop, kv_bytes, attending, written, rows, shape.operations, shape.layers)


@lru_cache(maxsize=1)
def known() -> dict[str, Config]:
    """Return the sizes in configs of well-known models by hub id."""
    found: dict[str, Config] = json.loads(KNOWN.read_text(encoding="utf-8"))
    return found


def shape(name: str, quantization: str | None = None) -> Shape:
    """Return the shape of a folder, an embedded name, a well-known hub id, or a hub id whose config can be fetched.

    Raises ValueError, one line with the nearest match.
    """
    config = config_of(name)
    if name not in known():
        _reject_head(name)
    return shape_of(config, name, quantization)


def _reject_head(name: str) -> None:
    """Raise ValueError for an embedded head."""
    from specdemo.models.shipped import embedded_heads

    if name in embedded_heads():
        from specdemo.methods import detect_head

        raise ValueError(f"{name} is a head for method {detect_head(name)!r}; choose a complete model as the target")


def config_of(name: str) -> Config:
    """Return the config.json of a model; well-known ones need no network. Raises ValueError with one line."""
    if name in known():
        return known()[name]
    from specdemo.models.sources import config_folder, read_config

    try:
        return read_config(config_folder(name), "config.json", "params.json")
    except ValueError as error:
        near = suggest(name[:60], known())
        raise ValueError(f"{error}; {near}" if near.startswith("did") else str(error)) from None


def drafting(name: str, target: Shape, config: Config | None, options: Mapping[str, int]) -> Drafting:
    """Return the passes of a method. config: the drafter's; None: typical sizes for the target. Raises ValueError with
    one line.
    """
    hint = suggest(name[:60], PREDICTED)
    if name not in METHODS:
        raise ValueError(f"unknown method {name[:60]!r}; {hint}")
    cost = facts_of(name).cost
    if cost is None:
        raise ValueError(f"method {name!r} drafts adaptively and cannot be predicted; {hint}")
    try:
        passes = cost(target, config or {}, options)
    except UNREADABLE as error:
        if type(error) is ValueError:
            raise
        raise ValueError(
            f"this config.json lacks the sizes of a drafter for method {name!r}; choose another --model"
        ) from None
    if passes is None:
        raise ValueError(f"method {name!r} declares no drafting cost and cannot be predicted; {hint}")
    return replace(passes, method=name, longest=min(max(passes.longest, 1), MOST_TRIED))


def method_in(config: Config, plug_ins: bool = True) -> str:
    """Return the method of the drafter that a config describes. EAGLE-1 looks like a complete model, so its method must
    be given. plug_ins: whether to import and try methods that are not in the table of facts.
    """
    text = " ".join(map(str, (config.get("architectures"), config.get("model_type"), *config))).lower()
    others = [name for name in usable() if name not in FACTS or not FACTS[name].title] if plug_ins else []
    named = (name for name in [*PREDICTED, *others] if any(mark in text for mark in facts_of(name).marks))
    return next(named, "draft_model")
