"""Which drafters fit a target, and why the others do not; told from configs, tokenizers and file headers alone.

Whether a head fits is for its method to say (`read`), and of a draft model for `draft_model.unlike`; here their
answers are collected.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from specdemo.methods import detect_method, method
from specdemo.methods.base import Head
from specdemo.methods.draft_model import DraftModel, tokenizer_difference
from specdemo.methods.vocabularies import VocabBridge
from specdemo.models.checkpoints import checkpoint_errors, open_meta_checkpoint
from specdemo.models.load import load_meta_target
from specdemo.models.target import HFTarget


@dataclass(frozen=True, slots=True)
class DrafterFit:
    """fits: None where it cannot be told here."""

    drafter: str
    method: str
    fits: bool | None
    reason: str


def check_pair(target: HFTarget, drafter: str, method_name: str | None = None) -> DrafterFit:
    """target: an outline will do. method_name: who reads the drafter; None: what its files say.

    Raises ValueError when the drafter's files cannot be had.
    """
    checkpoint = open_meta_checkpoint(drafter)
    try:
        with checkpoint_errors(drafter):
            name = method_name or detect_method(checkpoint)
    except ValueError as error:
        return DrafterFit(drafter, "?", False, str(error))
    cls = method(name)
    draft = None if issubclass(cls, Head) else load_meta_target(drafter)
    reason = f"made for hidden size {target.hidden_size}, vocabulary {target.vocab_size}"
    try:
        if issubclass(cls, Head):
            with checkpoint_errors(drafter):
                cls.read(checkpoint, target)
        elif draft is not None:
            reason = _tokenizer_fit(target, draft, issubclass(cls, DraftModel) and cls.cross_vocabulary)
    except ValueError as error:
        return DrafterFit(drafter, name, False, str(error))
    return DrafterFit(drafter, name, True, reason)


def _tokenizer_fit(target: HFTarget, draft: HFTarget, cross_vocabulary: bool) -> str:
    """How a whole model fits. Raises ValueError where it does not."""
    difference = tokenizer_difference(target, draft)
    if difference and not cross_vocabulary:
        raise ValueError(f"another tokenizer: {difference}; choose a draft of the same model family")
    if difference:
        bridge = VocabBridge(target, draft)
        shared = f"{100 * bridge.target_overlap:.0f} % shared tokens, {100 * bridge.draft_overlap:.0f} % of its own"
        return f"fits through {shared}; another tokenizer: {difference}"
    if draft.vocab_size == target.vocab_size:
        return "same tokenizer"
    return f"same tokenizer; {draft.vocab_size} rows against {target.vocab_size}, the rest is padding"


def check_pairs(target: HFTarget, candidates: Iterable[tuple[str, str]]) -> list[DrafterFit]:
    """known: a method and the drafter that it reads. Those that fit come first, those that cannot be told last."""
    pairs = []
    for name, drafter in dict.fromkeys(candidates):
        try:
            pairs.append(check_pair(target, drafter, name))
        except ValueError as error:
            pairs.append(DrafterFit(drafter, name, None, str(error)))
    return sorted(pairs, key=lambda pair: (pair.fits is None, not pair.fits, pair.method, pair.drafter))
