"""Typical acceptance. p target."""

from dataclasses import replace
from math import log
from typing import ClassVar, Self

import torch
from pydantic import model_validator
from torch import Generator, Tensor

from specdemo.core.accept import (
    AcceptResult,
    accept_greedy,
    coins,
    count_changed,
    end_probs,
    read_nodes,
    rejected_by_lossless,
    token_probs,
)
from specdemo.core.sampling import draw
from specdemo.core.settings import BaseOptions, setting
from specdemo.core.tree import ABSENT, Draft


class Typical(BaseOptions):
    """Typical acceptance of Medusa (2401.10774). Lossy: the output does not follow the target's distribution.

    A node is accepted if its parent is and p(x) > min(epsilon, delta * exp(-H(p))), with H the entropy of p at the
    parent. The longest accepted path wins, ties go to the more likely one. The final token is sampled from the full p
    after the path, so every step outputs at least one token. Greedy decoding equals the lossless rule.
    """

    epsilon: float = setting(0.09, "largest probability that a token needs", step=0.01)
    delta: float = setting(0.3, "factor of exp(-entropy), the probability that a token needs if p is flat", step=0.05)
    exact: ClassVar[bool] = False
    note: ClassVar[str] = ""

    @model_validator(mode="after")
    def _check_thresholds(self) -> Self:
        if not 0.0 < self.epsilon < 1.0 or self.delta <= 0.0:
            raise ValueError(f"epsilon must be in (0, 1) and delta above 0, not {self.epsilon} and {self.delta}")
        return self

    def __call__(self, draft: Draft, target: Tensor, rng: Generator | None) -> AcceptResult:
        if rng is None:
            return replace(accept_greedy(draft, target), changed=[0] * len(target))
        rejected = rejected_by_lossless(draft, target, coins(draft, rng))
        entropy = torch.special.entr(target).sum(-1)
        thresholds = (self.delta * torch.exp(-entropy)).clamp_max(self.epsilon).gather(1, draft.parents)
        nodes, target_probs, host_thresholds, host_rejected = read_nodes(
            draft, token_probs(target, draft.parents, draft.tokens), thresholds, rejected
        )
        path = [
            _longest_path(*row) for row in zip(nodes.tokens, nodes.parents, target_probs, host_thresholds, strict=True)
        ]
        return AcceptResult(path, draw(end_probs(target, path), rng), changed=count_changed(host_rejected, path))


def _longest_path(
    tokens: list[int], parents: list[int], target_probs: list[float], thresholds: list[float]
) -> list[int]:
    """Return one row's longest path of nodes above their thresholds. Ties go to the higher product of probabilities."""
    paths: dict[int, tuple[int, float, list[int]]] = {0: (0, 0.0, [0])}
    for node, (x, parent) in enumerate(zip(tokens, parents, strict=True)):
        if x != ABSENT and parent in paths and target_probs[node] > thresholds[node]:
            depth, likelihood, slots = paths[parent]
            paths[node + 1] = (depth + 1, likelihood + log(target_probs[node]), [*slots, node + 1])
    return max(paths.values(), key=lambda path_entry: path_entry[:2])[2]
