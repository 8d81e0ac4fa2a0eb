"""Base class of the networks of heads."""

from collections.abc import Mapping
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from specdemo.core.protocol import Target
from specdemo.models.checkpoints import Checkpoint
from specdemo.models.packed import dtype_of, pack

Module = TypeVar("Module", bound=nn.Module)


class Network(nn.Module):
    """The network of a head. An ambiguous checkpoint has several `conventions`, the most likely first."""

    note = ""  # the selected convention, and why
    conventions: tuple[object, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return dtype_of(self)

    def use_convention(self, convention: Any) -> None:
        """Switch to one of `conventions`."""

    def fuse(self) -> Self:
        """Fuse and pack the weights for inference. Training afterwards needs a deep copy."""
        return pack(self)

    def load_tensors(self, tensors: Mapping[str, Tensor], checkpoint: Checkpoint, target: Target, hint: str) -> Self:
        """Load tensors into a network on the meta device and move it to the target's device and dtype.

        Raises ValueError when a tensor is missing, unknown or of another shape than in `state_dict`; `hint` is the end
        of the message.
        """
        expected = {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}
        actual = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        mismatch = next((name for name in sorted(expected | actual) if actual.get(name) != expected.get(name)), None)
        if mismatch:
            raise ValueError(
                f"{checkpoint.name}: tensor {mismatch}: expected shape {expected.get(mismatch, 'none')}, "
                f"found {actual.get(mismatch, 'none')}; {hint}"
            )
        self.load_state_dict(tensors, assign=True)
        return move_to_target(self, target)


def move_to_target(head: Module, target: Target) -> Module:
    """Freeze the head and move it to the target's device and dtype."""
    return nn.Module.to(head, target.device, target.dtype).requires_grad_(False).eval()
