"""Numbers between the host and a device. A GPU works behind the host, which loses time wherever it waits for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: object, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers, or lists of them, as a tensor on `device`. A GPU takes them when it comes to it: nobody waits."""
    if device.type != "cuda" or not torch.cuda.is_initialized():  # a lent GPU is not there while models are placed
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def padded(
    rows: Sequence[Sequence[float]], device: torch.device, filler: float, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Lists of any length as a tensor [rows, the longest]."""
    width = max(map(len, rows))
    return to_device([[*row, *[filler] * (width - len(row))] for row in rows], device, dtype)


class Reading:
    """A tensor on its way to the host, which is there as soon as whatever is read after it."""

    def __init__(self, tensor: Tensor) -> None:
        self._here, self._done = tensor, None
        if tensor.device.type == "cuda":
            self._here = tensor.to("cpu", non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(tensor.device))

    def tolist(self) -> Any:
        """Its numbers, waited for if they are not there yet."""
        if self._done is not None:
            self._done.synchronize()
        return self._here.tolist()
