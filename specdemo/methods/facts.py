"""Facts about methods that need no torch: class, title, drafting cost, and the marks and words that name a method in
configs and in engines' output.

The registry, predictions and diagnoses read this table. A row with nothing but the class leaves the other facts to
attributes of the class, as for methods of other packages; reading these imports torch.
"""

from dataclasses import dataclass

from specdemo.costs import drafting


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a method.

    cls: module below this package, and class. cost: None for a method that chooses at run time what it drafts, and so
    cannot be predicted. marks: lower-case strings that only configs of its drafters contain. words: lower-case parts of
    the names that engines give the method, besides its own name. targets: the same of the names of targets that were
    trained for it, where their configs have no mark. parallel: it drafts all tokens in one pass. short: its form in the
    names of lanes where one method wraps another, such as `Adaptive lookup`; empty: the title. A wrapper without one is
    named alone.
    """

    cls: str
    title: str = ""
    cost: drafting.DraftingCost | None = None
    marks: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    parallel: bool = False
    short: str = ""


# The last one that recognises a checkpoint reads it: heads come after draft_model, which any complete model is for.
FACTS = {
    "none": Facts("base:NoDraft", "Plain decoding", drafting.no_passes),
    "draft_model": Facts(
        "draft_model:DraftModel",
        "Draft model",
        drafting.draft_model,
        words=("draft-simple", "standalone", "draft model"),
        short="draft",
    ),
    "pard": Facts("pard:Pard", "PARD", drafting.pard, (drafting.MASK_TOKEN,), parallel=True),
    "ngram": Facts("ngram:NGram", "Prompt lookup", drafting.no_passes, words=("lookup",), short="lookup"),
    "suffix": Facts("suffix:Suffix", "Suffix decoding", drafting.no_passes, short="suffix"),
    "medusa": Facts("heads.medusa:Medusa", "Medusa", drafting.medusa, ("medusa",)),
    "mlp_speculator": Facts(
        "heads.mlp_speculator:MLPSpeculator",
        "MLPSpeculator",
        drafting.mlp_speculator,
        ("mlp_speculator", "mlpspeculator"),
    ),
    "mtp": Facts(
        "heads.mtp:MTP",
        "Multi-token prediction",
        drafting.mtp,
        ("num_nextn_predict_layers", "mtp_"),
        ("nextn",),
        short="MTP",
    ),
    "eagle": Facts("heads.eagle:Eagle", "EAGLE", drafting.eagle, ("eagle3", "eagle_config", "draft_vocab_size")),
    "dflash": Facts(
        "heads.dflash:DFlash",
        "DFlash",
        drafting.dflash,
        ("dflash", "dspark", "domino"),
        ("dspark", "domino"),
        parallel=True,
    ),
    "gemma4_assistant": Facts(
        "heads.gemma4_assistant:Gemma4Assistant",
        "Gemma 4 assistant",
        drafting.gemma4_assistant,
        ("gemma4_assistant", "gemma4_unified_assistant"),
        ("assistant",),
    ),
    "lookahead": Facts("lookahead:Lookahead", "Lookahead decoding", drafting.no_passes, short="lookahead"),
    "layer_skip": Facts("layer_skip:LayerSkip", "Layer skip", drafting.layer_skip, targets=("layerskip",)),
    "adaptive": Facts("adaptive:Adaptive", "Adaptive length", short="Adaptive"),
    "online": Facts("online:Online", "Online learning", short="Online"),
    "cascade": Facts("cascade:Cascade", "Cascade"),
    "router": Facts("router:Router", "Router"),
    "gated": Facts("gated:Gated", "Gated lookup"),
    "synthetic": Facts("synthetic:Synthetic", "Synthetic acceptance", short="Synthetic"),
}
MODELS = ("draft_model", "pard")  # methods whose drafter is a complete model
PARALLEL = [name for name, facts in FACTS.items() if facts.parallel]
PREDICTED = {name: facts for name, facts in FACTS.items() if facts.cost}


def method_of(name: str) -> str:
    """Return the method that an engine's name means, an empty text for an unknown name. Of the methods in a name of
    several, one with a model counts, because it costs most."""
    text = name.lower()
    matches = [method for method, facts in PREDICTED.items() if any(word in text for word in (method, *facts.words))]
    return min(matches, key=lambda method: FACTS[method].cost is drafting.no_passes, default="")
