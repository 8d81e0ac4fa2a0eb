"""Passes that a method makes in one step before verification. Sizes come from the drafter's config.json. Without one,
they are typical values of the method for a target of this shape.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from specdemo.costs.lengths import MAX_K
from specdemo.costs.shapes import CHAIN, ENDS, Config, ConfigReader, Shape, number, shape_of, with_layers

HEAD_OPERATIONS = 8  # of a head without attention, and before and after the layers of a pass
EAGLE_VOCABULARY = 32000  # vocabulary of a typical EAGLE-3 head on a target with a larger one
TAPS = 3
DFLASH_LAYERS, DFLASH_TAPS, DFLASH_BLOCK = 5, 5, 16
ASSISTANT_LAYERS, ASSISTANT_SIZE = 4, 256
MASK_TOKEN = "pard_token"  # key of a PARD model's config.json: the id of its mask token

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Drafting:
    """Passes of a drafter in one step.

    first: the pass that reads the committed tokens and drafts the first token; None: no passes. further: the pass of
    every other token; None: the first pass drafts all tokens. own: weights in addition to the target's.
    """

    first: Shape | None = None
    further: Shape | None = None
    reads_all: bool = False  # the first pass reads all tokens of the last step, not only the last one
    own: Shape | None = None
    longest: int = MAX_K  # largest draft length
    method: str = "none"


# Passes of a step for a target, the drafter's config.json (empty: typical sizes) and the method's whole-number options;
# None: unknown. Raises ValueError with one line.
DraftingCost = Callable[[Shape, Config, Sizes], Drafting | None]


def no_passes(target: Shape, config: Config, options: Sizes) -> Drafting:
    """Return the cost of a method that drafts without forward passes."""
    return Drafting()


def draft_model(target: Shape, config: Config, options: Sizes) -> Drafting:
    """Passes of a complete model. Raises ValueError without its config."""
    if not config:
        raise ValueError("this method needs a draft model; name one with --model")
    shape = shape_of(config, "draft")
    return Drafting(shape, shape, own=shape)


def pard(target: Shape, config: Config, options: Sizes) -> Drafting:
    """One pass of a complete model over the new tokens and k - 1 mask tokens (2504.18583, section 3.1). Raises
    ValueError without its config.
    """
    return replace(draft_model(target, config, options), further=None, reads_all=True)


def medusa(target: Shape, config: Config, options: Sizes) -> Drafting:
    """W (h + SiLU(A h + b)) per token (2401.10774, section 2.1.1)."""
    layers = number(config, "medusa_num_layers", "num_hidden_layers", default=1)
    head = number(config, "truncated_vocab_size", default=target.vocabulary) * target.hidden
    block = _network(target, layers * target.hidden**2, head)
    heads = max(number(config, "num_heads", "medusa_num_heads", default=4), 4)  # many files have too small a number
    own = replace(block, dense=heads * block.dense, head=heads * block.head)
    return Drafting(block, block, own=own, longest=heads)


def mlp_speculator(target: Shape, config: Config, options: Sizes) -> Drafting:
    """s <- GELU(norm(P s + E[token])), W s (2404.19124, section 2)."""
    inner = number(config, "inner_dim", "emb_dim", default=target.hidden, low=1)
    steps = number(config, "n_predict", default=3, low=1)
    copies = 1 if config.get("tie_weights") else steps
    table = number(config, "vocab_size", default=target.vocabulary) * inner
    first, further = (_network(target, rows * inner, table) for rows in (target.hidden, inner))
    dense = first.dense + (copies - 1) * further.dense
    own = replace(first, dense=dense, head=copies * table, embedding=copies * table)
    return Drafting(first, further, own=own, longest=steps)


def eagle(target: Shape, config: Config, options: Sizes) -> Drafting:
    """One decoder layer that reads features and embeddings.

    EAGLE-3 (arXiv 2503.01840, section 3) attends to both; EAGLE-1 (arXiv 2401.15077) joins them with a matrix first.
    The config of EAGLE-1 looks like that of a complete model, so it has no marks.
    """
    layer, reader = _layers(target, {**config, "num_hidden_layers": 1})
    hidden = reader.hidden
    old = bool(config) and not (config.get("draft_vocab_size") or "agle3" in str(config.get("architectures")))
    if old:
        head = replace(layer, dense=layer.dense + 2 * hidden**2, head=target.head, embedding=0)
        return Drafting(head, head, reads_all=True, own=replace(head, head=0))
    words = number(config, "draft_vocab_size", default=0) or min(target.vocabulary, EAGLE_VOCABULARY)
    wider = hidden * reader.head_dim * (reader.heads + 2 * reader.kv_heads)
    further = replace(layer, dense=layer.dense + wider, head=words * hidden, embedding=0)
    first = replace(further, dense=further.dense + TAPS * target.hidden * hidden)
    return Drafting(first, further, reads_all=True, own=first)


def dflash(target: Shape, config: Config, options: Sizes) -> Drafting:
    """Layers that read a complete block and the target's taps."""
    layers = number(config, "num_hidden_layers", default=DFLASH_LAYERS)
    body, reader = _layers(target, {**config, "num_hidden_layers": layers})
    taps = (config.get("dflash_config") or {}).get("target_layer_ids") or config.get("target_layer_ids")
    fc = (len(taps) if taps else DFLASH_TAPS) * target.hidden * reader.hidden
    head = replace(body, dense=body.dense + fc, head=target.head, embedding=0, operations=layers * CHAIN + ENDS)
    longest = number(config, "block_size", default=DFLASH_BLOCK) - 1
    return Drafting(head, reads_all=True, own=replace(head, head=0), longest=longest)


def mtp(target: Shape, config: Config, options: Sizes) -> Drafting:
    """A target layer after a matrix that joins state and embedding (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""
    layer, _ = _layers(target, {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": []})
    dense = layer.dense + 2 * target.hidden**2
    head = replace(layer, dense=dense, head=target.head, embedding=0, bits=target.bits)
    return Drafting(head, head, reads_all=True, own=replace(head, head=0))


def gemma4_assistant(target: Shape, config: Config, options: Sizes) -> Drafting:
    """Small layers without keys and values, between two projections."""
    text = config.get("text_config") or {}
    hidden = number(text, "hidden_size", default=ASSISTANT_SIZE)
    layers = number(text, "num_hidden_layers", default=ASSISTANT_LAYERS)
    inner = number(text, "intermediate_size", default=8 * hidden)
    heads = number(text, "num_attention_heads", default=4) * number(text, "global_head_dim", "head_dim", default=256)
    dense = layers * hidden * (2 * heads + 3 * inner) + 3 * target.hidden * hidden
    table = number(text, "vocab_size", default=target.vocabulary)
    read = table
    if config.get("use_ordered_embeddings"):
        centroids = number(config, "num_centroids", default=2048, low=1)
        read = centroids + number(config, "centroid_intermediate_top_k", default=32) * table // centroids
    head = Shape("head", layers, hidden, table, dense, read * hidden, operations=layers * CHAIN + ENDS)
    return Drafting(head, head, own=replace(head, head=table * hidden))


def layer_skip(target: Shape, config: Config, options: Sizes) -> Drafting:
    """Passes of the target's first layers and its head."""
    layers = options.get("exit_layer") or max(1, round(target.layers / 3))
    if not 0 < layers < target.layers:
        limit = f"must be from 1 to below the {target.layers} layers of {target.name}"
        raise ValueError(f"exit_layer ({layers}) {limit}")
    shape = with_layers(target, layers)
    return Drafting(shape, shape)


def _network(target: Shape, dense: int, head: int) -> Shape:
    """Return the shape of a small network that reads the target's hidden state."""
    return Shape("head", 1, target.hidden, target.vocabulary, dense, head, operations=HEAD_OPERATIONS)


def _layers(target: Shape, config: Config) -> tuple[Shape, ConfigReader]:
    """Return the shape of the drafter's decoder layers, with the target's sizes by default."""
    sizes = {**target.layer, "num_hidden_layers": 1, "vocab_size": target.vocabulary, "layer_types": None}
    sizes |= {name: value for name, value in config.items() if value is not None}
    return shape_of({**sizes, "quantization_config": None}, "head"), ConfigReader(sizes)
