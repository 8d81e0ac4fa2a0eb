"""The weights of a head, however its files name and read them."""

from collections.abc import Mapping
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from specdemo.core.protocol import Target
from specdemo.models.checkpoints import Checkpoint
from specdemo.models.packed import dtype_of, pack

Module = TypeVar("Module", bound=nn.Module)


class Network(nn.Module):
    """The weights of a head. Files that leave open how they are meant have several `readings`, the likeliest first."""

    note = ""  # which reading was kept, and why
    conventions: tuple[object, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The type of its weights."""
        return dtype_of(self)

    def use_convention(self, convention: Any) -> None:
        """Follow one of `readings` from now on."""

    def fuse(self) -> Self:
        """Run with fewer and larger operations; from now on it is only read, or else deep copies are trained."""
        return pack(self)

    def load_tensors(self, tensors: Mapping[str, Tensor], checkpoint: Checkpoint, target: Target, hint: str) -> Self:
        """Made on the meta device, it takes these tensors, where the target is and in its precision.

        Raises ValueError when one is missing, unknown or of another shape than in `state_dict`.
        """
        expected = {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}
        actual = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        mismatch = next((name for name in sorted(expected | actual) if actual.get(name) != expected.get(name)), None)
        if mismatch:
            raise ValueError(
                f"{checkpoint.name}: {mismatch} is missing, of another shape or unknown: "
                f"it is {actual.get(mismatch, 'missing')}, its config asks for "
                f"{expected.get(mismatch, 'no such tensor')}; {hint}"
            )
        self.load_state_dict(tensors, assign=True)
        return move_to_target(self, target)


def move_to_target(head: Module, target: Target) -> Module:
    """The head frozen, where the target is and in its precision."""
    return nn.Module.to(head, target.device, target.dtype).requires_grad_(False).eval()
