"""Configs and shapes of models by name, and the drafting passes of methods by name."""

from collections.abc import Mapping
from dataclasses import replace

from specdemo.core.suggest import suggest
from specdemo.costs.drafting import Drafting
from specdemo.costs.shapes import UNREADABLE, Config, Shape, reference_configs, shape_of
from specdemo.methods import METHODS, check_no_head, facts_of, usable
from specdemo.methods.facts import FACTS, PREDICTED
from specdemo.models.gguf_files import local_header
from specdemo.models.gguf_header import Header
from specdemo.models.packaged import embedded_heads
from specdemo.models.ref import ModelRef
from specdemo.models.sources import config_folder, read_config

MOST_TRIED = 64  # longest draft length to try if the drafter's config contains one


def shape(name: str, quantization: str | None = None) -> Shape:
    """Return the shape of a folder, an embedded name, a well-known hub id, or a hub id whose config can be fetched.

    Raises ValueError, one line with the nearest match.
    """
    config = config_of(name)
    if name not in reference_configs() and name in embedded_heads():
        check_no_head(ModelRef(name))
    return shape_of(config, name, quantization)


def config_of(name: str) -> Config:
    """Return the config.json of a model; well-known ones need no network. Raises ValueError with one line."""
    if name in reference_configs():
        return reference_configs()[name]

    ref = ModelRef(name)
    if ref.gguf:
        header = local_header(ref)
        if header is None:
            raise ValueError(f"{name} is not on this machine, so its sizes are unknown; run it once, which fetches it")
        return gguf_config(header)

    try:
        return read_config(config_folder(ref))
    except ValueError as error:
        near = suggest(name[:60], reference_configs())
        raise ValueError(f"{error}; {near}" if near.startswith("did") else str(error)) from None


def gguf_config(header: Header) -> Config:
    """Return the sizes in the header of a GGUF file under their names in a config.json, with its bits per weight."""
    number = header.number
    config: dict[str, object] = {
        **header.layer_sizes,
        "model_type": header.architecture,
        "num_hidden_layers": number("block_count"),
        "num_experts": number("expert_count"),
        "num_experts_per_tok": number("expert_used_count", 1),
        "moe_intermediate_size": number("expert_feed_forward_length") or None,
        "sliding_window": number("attention.sliding_window"),
        "vocab_size": header.tokens,
        "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "gguf", "mean_bits": 8.0 * header.data_bytes / max(header.weights, 1)},
    }
    shape = shape_of(config)
    return config | {"tie_word_embeddings": header.weights < shape.parameters + shape.head / 2}


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
