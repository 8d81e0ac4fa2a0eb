"""Drafting cost by method: the passes that a step makes before verification.

H hidden size of the target, V its vocabulary. Sizes come from the drafter's config.json. Without one, they are typical
values of the method for a target of this shape.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from specdemo.core.shapes import CHAIN, ENDS, UNREADABLE, Config, ConfigReader, Shape, number, shape_of, with_layers
from specdemo.core.suggest import suggest

HEAD_OPERATIONS = 8  # of a head without attention, and before and after the layers of a pass
EAGLE_VOCABULARY = 32000  # vocabulary of a typical EAGLE-3 head on a target with a larger one
TAPS = 3
DFLASH_LAYERS, DFLASH_TAPS, DFLASH_BLOCK = 5, 5, 16
LONGEST = 16  # longest draft length to try
MOST_TRIED = 64  # longest draft length to try if the drafter's config contains one


@dataclass(frozen=True, slots=True)
class Drafting:
    """Passes of a drafter in one step.

    first: the pass that reads the committed tokens and drafts the first token; further: the pass of every other token;
    None: no such pass. block: the first pass drafts all tokens. own: weights in addition to the target's.
    """

    first: Shape | None = None
    further: Shape | None = None
    block: bool = False
    reads_all: bool = False  # the first pass reads all tokens of the last step, not only the last one
    own: Shape | None = None
    longest: int = LONGEST  # largest draft length
    method: str = "none"

    @property
    def remembers(self) -> bool:
        """Return whether the drafter has its own cache, which must catch up with committed tokens."""
        return bool(self.own and self.own.memory)


MARKS = {  # strings that only configs of this family contain
    "eagle": ("eagle3", "eagle_config", "draft_vocab_size"),
    "dflash": ("dflash", "dspark", "domino"),
    "medusa": ("medusa",),
    "mlp_speculator": ("mlp_speculator", "mlpspeculator"),
    "mtp": ("num_nextn_predict_layers", "mtp_"),
}
Maker = Callable[[Shape, Config, Mapping[str, int]], Drafting]


def drafting(method: str, target: Shape, config: Config | None, options: Mapping[str, int]) -> Drafting:
    """Return the passes of a method. config: the drafter's; None: typical sizes for the target. Raises ValueError with
    one line.
    """
    if method not in MAKERS:
        from specdemo.methods import METHODS

        known = (
            f"method {method!r} drafts adaptively and cannot be predicted"
            if method in METHODS
            else f"unknown method {method[:60]!r}"
        )
        raise ValueError(f"{known}; {suggest(method[:60], MAKERS)}")
    try:
        made = MAKERS[method](target, config or {}, options)
    except UNREADABLE as error:
        if type(error) is ValueError:
            raise
        raise ValueError(
            f"this config.json lacks the sizes of a drafter for method {method!r}; choose another --model"
        ) from None
    return replace(made, method=method, longest=min(max(made.longest, 1), MOST_TRIED))


def method_in(config: Config) -> str:
    """Return the method of the drafter that a config describes. EAGLE-1 looks like a complete model, so its method must
    be given.
    """
    named = " ".join(map(str, (config.get("architectures"), config.get("model_type"), *config))).lower()
    return next((method for method, words in MARKS.items() if any(word in named for word in words)), "draft_model")


def _nothing(target: Shape, config: Config, options: Mapping[str, int]) -> Drafting:
    return Drafting()


def _draft_model(target: Shape, config: Config, options: Mapping[str, int]) -> Drafting:
    if not config:
        raise ValueError("method 'draft_model' needs a draft model; name one with --model")
    shape = shape_of(config, "draft")
    return Drafting(shape, shape, own=shape)


def _layer_skip(target: Shape, config: Config, options: Mapping[str, int]) -> Drafting:
    layers = options.get("exit_layer") or max(1, round(target.layers / 3))
    if not 0 < layers < target.layers:
        raise ValueError(f"exit_layer ({layers}) must be from 1 to below the {target.layers} layers of {target.name}")
    shape = with_layers(target, layers)
    return Drafting(shape, shape)


def _step(target: Shape, dense: int, head: int, embedding: int = 0, operations: int = HEAD_OPERATIONS) -> Shape:
    """Return the shape of a small network that reads the target's hidden state."""
    return Shape("head", 1, target.hidden, target.vocabulary, dense, head, embedding, operations=operations)


def _times(shape: Shape, heads: int) -> Shape:
    return replace(shape, dense=heads * shape.dense, head=heads * shape.head)


def _medusa(target: Shape, config: Config, options: Mapping[str, int]) -> Drafting:
    """Return the passes of Medusa: W (h + SiLU(A h + b)) per token (2401.10774, section 2.1.1)."""
    layers = number(config, "medusa_num_layers", "num_hidden_layers", default=1)
    head = number(config, "truncated_vocab_size", default=target.vocabulary) * target.hidden
    one = _step(target, layers * target.hidden**2, head)
    heads = max(number(config, "num_heads", "medusa_num_heads", default=4), 4)  # many files contain too small a number
    return Drafting(one, one, own=_times(one, heads), longest=heads)


def _mlp_speculator(target: Shape, config: Config, options: Mapping[str, int]) -> Drafting:
    """Return the passes of s <- GELU(norm(P s + E[token])), W s (2404.19124, section 2)."""
    inner = number(config, "inner_dim", "emb_dim", default=target.hidden, low=1)
    steps = number(config, "n_predict", default=3, low=1)
    copies = 1 if config.get("tie_weights") else steps
    table = number(config, "vocab_size", default=target.vocabulary) * inner
    first, further = (_step(target, rows * inner, table) for rows in (target.hidden, inner))
    own = replace(
        first, dense=first.dense + (copies - 1) * further.dense, head=copies * table, embedding=copies * table
    )
    return Drafting(first, further, own=own, longest=steps)


def _layer(target: Shape, config: Config) -> tuple[Shape, ConfigReader]:
    """Return the shape of the drafter's decoder layers, with the target's sizes by default."""
    sizes = {**target.layer, "num_hidden_layers": 1, "vocab_size": target.vocabulary, "layer_types": None}
    sizes |= {name: value for name, value in config.items() if value is not None}
    return shape_of({**sizes, "quantization_config": None}, "head"), ConfigReader(sizes)


def _eagle(target: Shape, config: Config, options: Mapping[str, int]) -> Drafting:
    """Return the cost of one decoder layer that reads features and embeddings.

    EAGLE-3 (arXiv 2503.01840, section 3) attends to both; EAGLE-1 (arXiv 2401.15077) joins them with a matrix first.
    """
    layer, reader = _layer(target, {**config, "num_hidden_layers": 1})
    hidden = reader.hidden
    old = bool(config) and not (config.get("draft_vocab_size") or "agle3" in str(config.get("architectures")))
    if old:
        one = replace(layer, dense=layer.dense + 2 * hidden**2, head=target.head, embedding=0)
        return Drafting(one, one, reads_all=True, own=replace(one, head=0))
    words = number(config, "draft_vocab_size", default=0) or min(target.vocabulary, EAGLE_VOCABULARY)
    wider = hidden * reader.head_dim * (reader.heads + 2 * reader.kv_heads)
    further = replace(layer, dense=layer.dense + wider, head=words * hidden, embedding=0)
    first = replace(further, dense=further.dense + TAPS * target.hidden * hidden)
    return Drafting(first, further, reads_all=True, own=first)


def _mtp(target: Shape, config: Config, options: Mapping[str, int]) -> Drafting:
    """Return the cost of a target layer after a matrix that joins state and embedding (DeepSeek-V3, arXiv 2412.19437,
    section 2.2).
    """
    layer, _ = _layer(target, {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": []})
    one = replace(layer, dense=layer.dense + 2 * target.hidden**2, head=target.head, embedding=0, bits=target.bits)
    return Drafting(one, one, reads_all=True, own=replace(one, head=0))


def _dflash(target: Shape, config: Config, options: Mapping[str, int]) -> Drafting:
    """Return the passes of DFlash, whose layers read a complete block and the target's taps."""
    layers = number(config, "num_hidden_layers", default=DFLASH_LAYERS)
    body, reader = _layer(target, {**config, "num_hidden_layers": layers})
    taps = (config.get("dflash_config") or {}).get("target_layer_ids") or config.get("target_layer_ids")
    fc = (len(taps) if taps else DFLASH_TAPS) * target.hidden * reader.hidden
    one = replace(body, dense=body.dense + fc, head=target.head, embedding=0, operations=layers * CHAIN + ENDS)
    longest = number(config, "block_size", default=DFLASH_BLOCK) - 1
    return Drafting(one, block=True, reads_all=True, own=replace(one, head=0), longest=longest)


MAKERS: dict[str, Maker] = {
    "none": _nothing,
    "draft_model": _draft_model,
    "ngram": _nothing,
    "suffix": _nothing,
    "lookahead": _nothing,
    "medusa": _medusa,
    "mlp_speculator": _mlp_speculator,
    "eagle": _eagle,
    "mtp": _mtp,
    "dflash": _dflash,
    "layer_skip": _layer_skip,
}
TITLES = {  # copies of the methods' titles, which need torch to import
    "draft_model": "Draft model",
    "ngram": "Prompt lookup",
    "suffix": "Suffix decoding",
    "lookahead": "Lookahead decoding",
    "medusa": "Medusa",
    "mlp_speculator": "MLPSpeculator",
    "eagle": "EAGLE",
    "mtp": "Multi-token prediction",
    "dflash": "DFlash",
    "layer_skip": "Layer skip",
}
USUAL = tuple(name for name in TITLES if name != "draft_model")  # methods with a default drafter
