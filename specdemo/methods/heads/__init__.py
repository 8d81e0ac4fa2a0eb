"""What drafters that read the target's hidden states have in common.

B rows, A columns, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from specdemo.core.protocol import Progress, Target
from specdemo.models.cache import SlabCache
from specdemo.models.kernels import packed_bytes

NEVER = -1e4  # the logit of a token outside a truncated vocabulary; finite, so that a loss stays so
PROMPT = "Once upon a time"
WRITTEN_TOKENS = 48

Module = TypeVar("Module", bound=nn.Module)


class HeadDrafter:
    """The memory of a drafter that has a `head` and perhaps keys and values of its own."""

    head: Any  # nn.Module
    _cache: SlabCache | None = None

    @property
    def weight_bytes(self) -> int:
        return packed_bytes(self.head) + sum(int(p.numel() * p.element_size()) for p in self.head.parameters())

    @property
    def history_bytes(self) -> int:
        return self._cache.bytes if self._cache else 0


def as_target(head: Module, target: Target) -> Module:
    """The head frozen, where the target is and in its precision."""
    dtype: torch.dtype = getattr(target, "dtype", torch.float32)
    return nn.Module.to(head, target.device, dtype).requires_grad_(False).eval()


def odd_tensors(head: nn.Module, tensors: Mapping[str, Tensor]) -> list[tuple[str, Any, Any]]:
    """Name, shape found and shape wanted (None: no such tensor) wherever a file does not fit a head."""
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    held = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return [(n, held.get(n), wanted.get(n)) for n in sorted(wanted | held) if held.get(n) != wanted.get(n)]


def at_last(progress: Progress, columns: Tensor) -> Tensor:
    """columns [B, A, ...] -> [B, ...] at every row's last real column; any column of a finished row"""
    last = torch.tensor([max(n - 1, 0) for n in progress.lengths], device=columns.device)
    return columns[torch.arange(len(last), device=columns.device), last]


def likeliest(said: Tensor) -> Tensor:
    """[B, A, V] probabilities or [B, A] tokens -> tokens [B, A]"""
    return said.argmax(-1) if said.is_floating_point() else said


def greedy_text(target: Target) -> Tensor:
    """[1, T] what the target writes."""
    tokenizer = getattr(target, "tokenizer", None)
    prompt = tokenizer(PROMPT, verbose=False).input_ids if tokenizer else [0]
    text = torch.tensor([prompt], device=target.device)
    logits = target.start(text, reserve=WRITTEN_TOKENS).logits
    alone = text.new_empty(1, 0)
    for _ in range(min(WRITTEN_TOKENS, target.max_length - text.shape[1])):
        token = logits[:, -1:].argmax(-1)
        text = torch.cat([text, token], 1)
        logits = target.forward(token, alone).logits
        target.commit([[0]])
    return text
