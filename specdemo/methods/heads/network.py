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
    readings: tuple[object, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The type of its weights."""
        return dtype_of(self)

    def read_as(self, reading: Any) -> None:
        """Follow one of `readings` from now on."""

    def hasten(self) -> Self:
        """Run with fewer and larger operations; from now on it is only read, or else deep copies are trained."""
        return pack(self)

    def fill(self, tensors: Mapping[str, Tensor], checkpoint: Checkpoint, target: Target, cure: str) -> Self:
        """Made on the meta device, it takes these tensors, where the target is and in its precision.

        Raises ValueError when one is missing, unknown or of another shape than in `state_dict`.
        """
        wanted = {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}
        held = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        odd = next((name for name in sorted(wanted | held) if held.get(name) != wanted.get(name)), None)
        if odd:
            raise ValueError(
                f"{checkpoint.name}: {odd} is missing, of another shape or unknown: it is {held.get(odd, 'missing')}, "
                f"its config asks for {wanted.get(odd, 'no such tensor')}; {cure}"
            )
        self.load_state_dict(tensors, assign=True)
        return as_target(self, target)


def as_target(head: Module, target: Target) -> Module:
    """The head frozen, where the target is and in its precision."""
    return nn.Module.to(head, target.device, target.dtype).requires_grad_(False).eval()
