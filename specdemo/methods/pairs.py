"""Which drafters fit a target, and why the others do not; told from configs, tokenizers and file headers alone.

Whether a head fits is for its method to say (`read`), and of a draft model for `draft_model.unlike`; here their
answers are collected.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from specdemo.methods import kind_of, method
from specdemo.methods.base import Head
from specdemo.methods.draft_model import DraftModel, unlike
from specdemo.methods.vocabularies import Bridge
from specdemo.models.checkpoints import outline_checkpoint, readable
from specdemo.models.load import outline
from specdemo.models.target import HFTarget


@dataclass(frozen=True, slots=True)
class Pair:
    """fits: None where it cannot be told here."""

    drafter: str
    method: str
    fits: bool | None
    reason: str


def check_pair(target: HFTarget, drafter: str, method_name: str | None = None) -> Pair:
    """target: an outline will do. method_name: who reads the drafter; None: what its files say.

    Raises ValueError when the drafter's files cannot be had.
    """
    checkpoint = outline_checkpoint(drafter)
    try:
        with readable(drafter):
            name = method_name or kind_of(checkpoint)
    except ValueError as error:
        return Pair(drafter, "?", False, str(error))
    cls = method(name)
    draft = None if issubclass(cls, Head) else outline(drafter)
    fits = f"made for hidden size {target.hidden_size}, vocabulary {target.vocab_size}"
    try:
        if issubclass(cls, Head):
            with readable(drafter):
                cls.read(checkpoint, target)
        elif draft is not None:
            fits = _alike(target, draft, issubclass(cls, DraftModel) and cls.crosses)
    except ValueError as error:
        return Pair(drafter, name, False, str(error))
    return Pair(drafter, name, True, fits)


def _alike(target: HFTarget, draft: HFTarget, crosses: bool) -> str:
    """How a whole model fits. Raises ValueError where it does not."""
    difference = unlike(target, draft)
    if difference and not crosses:
        raise ValueError(f"another tokenizer: {difference}; choose a draft of the same model family")
    if difference:
        bridge = Bridge(target, draft)
        shared = f"{100 * bridge.share:.0f} % shared tokens, {100 * bridge.own_share:.0f} % of its own"
        return f"fits through {shared}; another tokenizer: {difference}"
    if draft.vocab_size == target.vocab_size:
        return "same tokenizer"
    return f"same tokenizer; {draft.vocab_size} rows against {target.vocab_size}, the rest is padding"


def check_pairs(target: HFTarget, known: Iterable[tuple[str, str]]) -> list[Pair]:
    """known: a method and the drafter that it reads. Those that fit come first, those that cannot be told last."""
    pairs = []
    for name, drafter in dict.fromkeys(known):
        try:
            pairs.append(check_pair(target, drafter, name))
        except ValueError as error:
            pairs.append(Pair(drafter, name, None, str(error)))
    return sorted(pairs, key=lambda pair: (pair.fits is None, not pair.fits, pair.method, pair.drafter))
