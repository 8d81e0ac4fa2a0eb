"""PARD: a draft model that drafts k tokens in one pass (2504.18583; authors' code: AMD-AGI/PARD).

It reads the tokens that it lacks and k - 1 mask tokens after the root. Logits of the root and of every mask are those
of a draft token, which is drawn without the others: its q is that of its position. The pass is provisional, so that the
masks never enter the KV cache.

A PARD-2 model (2605.08632) was trained to draft with the target's hidden states and without; here it drafts without.
"""

from typing import NoReturn

from specdemo.core.protocol import Budget, Enough, Progress, Target
from specdemo.core.tree import Draft
from specdemo.costs.drafting import MASK_TOKEN
from specdemo.methods.base import DraftOptions
from specdemo.methods.draft_model import DraftModel
from specdemo.methods.heads.sampler import ChainBuilder
from specdemo.models.checkpoints import Checkpoint
from specdemo.models.shared import graph_target

TARGET_LAYERS = "pard2_target_layers"  # key of a PARD-2 model's config.json
ALONE = "This PARD-2 model drafts without the target's hidden states here, one of its two modes."


class Pard(DraftModel, method="pard"):
    summary = "A small model drafts several tokens in one pass, by mask tokens; the target verifies them in one pass."
    parallel = True

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        return checkpoint.config.get(MASK_TOKEN) is not None and super().recognises(checkpoint)

    @classmethod
    def check(cls, checkpoint: Checkpoint, vocab_size: int) -> None:
        _mask_token(checkpoint.name, checkpoint.config.get(MASK_TOKEN), vocab_size)

    def __init__(self, target: Target, model: object, options: DraftOptions | None = None) -> None:
        """Raises ValueError for a model without a mask token, or with one outside its vocabulary."""
        super().__init__(target, model, options)
        self._mask = _mask_token(self.name, self.mask_token, self.model.vocab_size)
        if hasattr(self.model.model.config, TARGET_LAYERS):
            self.note = f"{ALONE} {self.note}".rstrip()

    def read_bytes(self, k: int) -> int:
        return self.weight_bytes  # one pass drafts all tokens

    def loss(self, batch: Progress) -> NoReturn:
        raise ValueError("a PARD model would forget its mask tokens while it learns; choose another draft model")

    def _draft(self, depth: int, enough: Enough | None = None) -> Draft:
        builder = ChainBuilder(self.sampler, self._draft_vocab)
        builder.append(self._shared_logits(self._catch_up(self._crop_to_common(), [self._mask] * (depth - 1))))
        return builder.build()

    def capture_graphs(self, budget: Budget) -> None:
        if model := graph_target(self.model):
            model.capture_graphs(2 * budget.chain)  # after a full acceptance k + 1 tokens are missing


def _mask_token(name: str, mask: object, vocab_size: int) -> int:
    """Return the mask token of a config. Raises ValueError without one, and for one outside the vocabulary."""
    if mask is None:
        raise ValueError(f"{name} has no {MASK_TOKEN} in a config.json; choose method 'draft_model' for it")
    if not isinstance(mask, int) or not 0 <= mask < vocab_size:
        raise ValueError(
            f"{MASK_TOKEN} {mask!r} of {name} is not in its vocabulary of {vocab_size}; fetch its config.json again"
        )
    return mask
