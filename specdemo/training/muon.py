"""Muon optimizer (Keller Jordan 2024): momentum, then the nearest orthogonal matrix, for the hidden matrices of a
network.

Same update as `torch.optim.Muon`, which always multiplies in bfloat16. A CPU without bf16 instructions emulates these
and spends nine tenths of a step on them, so this version multiplies in `matmul_dtype`.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from specdemo.models.machine import matmul_dtype

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic iteration that brings singular values close to 1 in 5 steps
STEPS = 5


def orthogonal(matrix: Tensor) -> Tensor:
    """Approximate U V^T of the singular value decomposition of a matrix [n, m], by Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    x = matrix.to(matmul_dtype(matrix.device))
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / wide.norm().clamp_min(1e-7)
    for _ in range(STEPS):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    nearest: Tensor = wide if x.shape[0] <= x.shape[1] else wide.T
    return nearest.to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Optimizer with Nesterov momentum; a matrix [n, m] moves by lr * sqrt(max(1, n / m)) times an orthogonal
    matrix."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.1, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                buffer = state["momentum_buffer"].lerp_(matrix.grad, 1.0 - group["momentum"])
                update = orthogonal(matrix.grad.lerp(buffer, group["momentum"]))
                rows, columns = matrix.shape
                matrix.mul_(1.0 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)
