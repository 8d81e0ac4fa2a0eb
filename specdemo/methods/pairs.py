"""Compatibility of drafters with a target, from configs, tokenizers and file headers, without loading weights.

Targets are loaded here too, with an error that names the method if the source is a head. Heads are checked by
`Head.read`, draft models by `vocabularies.tokenizer_difference`.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from typing import ParamSpec, TypeVar

from specdemo.core.protocol import Target
from specdemo.methods import check_no_head, detect_method, method
from specdemo.methods.draft_model import DraftModel
from specdemo.methods.heads.head import Head
from specdemo.methods.vocabularies import VocabBridge, tokenizer_difference
from specdemo.models import load
from specdemo.models.checkpoints import open_meta_checkpoint
from specdemo.models.errors import checkpoint_errors
from specdemo.models.gguf_files import local_header
from specdemo.models.local_models import DrafterFit
from specdemo.models.ref import ModelRef

P = ParamSpec("P")
T = TypeVar("T")


def name_head_in_error(loader: Callable[P, T]) -> Callable[P, T]:
    """Wrap a model loader: if the source is the folder of a head, its ValueError names the method."""

    @wraps(loader)
    def load_or_explain(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return loader(*args, **kwargs)
        except ValueError:
            name = next(iter((*args, *kwargs.values())))
            if isinstance(name, str):
                check_no_head(ModelRef(name))
            raise

    return load_or_explain


load_target = name_head_in_error(load.load_target)
load_model = name_head_in_error(load.load_model)


@name_head_in_error
def outline(name: ModelRef) -> Target:
    """Return a model without its weights; a GGUF file, which llama.cpp maps into memory, as it is."""
    return load.load_target(name) if name.gguf else load.load_meta_target(name)


HEADS_READ = {"eagle3": "eagle", "dflash": "dflash"}  # architecture of a GGUF file -> the method that reads it
GGUF_HEADS = ("mtp", *HEADS_READ.values())
LEAST_OVERLAP = 0.1  # share of the target's tokens below which almost no draft is accepted


def gguf_head(name: ModelRef, target: str) -> str:
    """Return the method that reads a GGUF file as a head: of EAGLE-3 and DFlash, and of a prediction layer that is
    alone or the target's own; empty for a model and for a file that is not here."""
    with suppress(ValueError):
        if header := local_header(name):
            layer = header.prediction_layer and (header.prediction_only or name == target)
            return HEADS_READ.get(header.architecture, "mtp" if layer else "")
    return ""


def _gguf_head_fit(target: Target, drafter: ModelRef, name: str) -> DrafterFit:
    """Check a GGUF file with a prediction layer or an EAGLE-3 head."""
    try:
        with checkpoint_errors(drafter):
            method(name).load(drafter, target)
    except ValueError as error:
        return DrafterFit(drafter, name, False, str(error))
    return DrafterFit(drafter, name, True, "prediction layer of this model" if name == "mtp" else "head of this model")


def check_pair(target: Target, drafter: ModelRef, method_name: str | None = None) -> DrafterFit:
    """Check one drafter. target: may be an outline without weights. method_name: None detects it from the files.

    Raises ValueError when the drafter's files cannot be opened.
    """
    if drafter.gguf and (head := method_name if method_name in GGUF_HEADS else gguf_head(drafter, target.name)):
        return _gguf_head_fit(target, drafter, head)
    checkpoint = None if drafter.gguf else open_meta_checkpoint(drafter)
    try:
        with checkpoint_errors(drafter):
            name = "draft_model" if checkpoint is None else method_name or detect_method(checkpoint)
    except ValueError as error:
        return DrafterFit(drafter, "?", False, str(error))
    cls = method(name)
    draft = None if issubclass(cls, Head) else outline(drafter)
    reason, shares = f"made for hidden size {target.hidden_size}, vocabulary {target.vocab_size}", False
    try:
        if checkpoint is not None and issubclass(cls, Head):
            with checkpoint_errors(drafter):
                reason = "; ".join(filter(None, (reason, cls.read(checkpoint, target).note)))
        elif draft is not None:
            if checkpoint is not None and issubclass(cls, DraftModel):
                cls.check(checkpoint, draft.vocab_size)
            reason, shares = _tokenizer_fit(target, draft, issubclass(cls, DraftModel) and cls.cross_vocabulary)
            if draft.max_length < target.max_length:
                reason += (
                    f"; reads {draft.max_length} tokens, the target {target.max_length}: it drafts nothing after them"
                )
    except ValueError as error:
        return DrafterFit(drafter, name, False, str(error))
    return DrafterFit(drafter, name, True, reason, shares_text=shares)


def _tokenizer_fit(target: Target, draft: Target, cross_vocabulary: bool) -> tuple[str, bool]:
    """Return how a draft model fits, and whether only by text. Raises ValueError when it does not fit."""
    difference = tokenizer_difference(target, draft)
    if difference and not cross_vocabulary:
        raise ValueError(f"another tokenizer: {difference}; choose a draft model of the same family")
    if difference:
        bridge = VocabBridge(target, draft)
        if bridge.target_overlap < LEAST_OVERLAP:
            raise ValueError(
                f"it shares only {100 * bridge.target_overlap:.0f} % of the target's tokens; choose a draft model of "
                "the same family"
            )
        shared = (
            f"{100 * bridge.target_overlap:.0f} % of the target's tokens, {100 * bridge.draft_overlap:.0f} % of its own"
        )
        return f"shares {shared}; another tokenizer: {difference}", True
    if draft.vocab_size == target.vocab_size:
        return "same tokenizer", False
    padded = f"same tokenizer; vocabulary {draft.vocab_size}, the target's is {target.vocab_size}, the rest is padding"
    return padded, False


def check_pairs(target: Target, candidates: Iterable[tuple[str | None, ModelRef]]) -> list[DrafterFit]:
    """Check candidates (method, drafter); without a method, that of the drafter's files is used.

    Sorted: those that fit, those that do not, those that could not be opened.
    """
    pairs = []
    for name, drafter in dict.fromkeys(candidates):
        try:
            pairs.append(check_pair(target, drafter, name))
        except ValueError as error:
            pairs.append(DrafterFit(drafter, name or "?", None, str(error)))
    return sorted(pairs, key=lambda pair: (pair.fits is None, not pair.fits, pair.method, pair.drafter))
