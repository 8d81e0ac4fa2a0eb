"""Layer skip: the first layers of the target, its final norm and lm_head draft a chain (Elhoushi et al. 2404.16710,
section 4.3).

B rows, n tokens of a chain, V vocabulary. Needs no further weights or cache: the draft uses the target's KV cache of
these layers and writes its provisional entries there, which the verification overwrites. Works with any model, best
with models trained for early exit. Sampled drafts carry the q they were drawn from.
"""

from typing import ClassVar

import torch
from torch import Generator

from specdemo.core.protocol import Budget, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft
from specdemo.methods import setting
from specdemo.methods.base import DraftOptions, Method
from specdemo.methods.heads.runtime import last_columns
from specdemo.methods.heads.sampler import ChainBuilder, TokenSampler, run_chain_graph
from specdemo.models.shared import DraftPlan, SharedTarget, graph_target


class LayerSkipOptions(DraftOptions):
    exit_layer: int = setting(0, "number of layers that draft; 0 uses a third", low=0, high=128, step=1)


class LayerSkip(Method, method="layer_skip"):
    summary = "The first layers of the target draft, the full target verifies; no second model, no extra memory."
    requires: ClassVar = frozenset({"layers", "shared_kv"})

    Options = LayerSkipOptions

    def __init__(self, target: SharedTarget, model: object = None, options: LayerSkipOptions | None = None) -> None:
        """Raises ValueError for a target that has too few layers."""
        name = target.name or "the target"
        self.exit_layer = (options or self.Options()).exit_layer or max(1, round(target.num_layers / 3))
        if self.exit_layer >= target.num_layers:
            raise ValueError(
                f"option 'exit_layer' ({self.exit_layer}) must be below the {target.num_layers} layers of {name}"
            )
        self.note = f"The first {self.exit_layer} of {target.num_layers} layers draft."
        self._target = target
        self._device = target.device
        self.sampler = TokenSampler()

    def read_bytes(self, k: int) -> int:
        one_pass = self._target.facts.pass_bytes or self._target.weight_bytes
        return k * one_pass * self.exit_layer // self._target.num_layers

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        self.sampler = TokenSampler(sampling, rng)

    def observe(self, progress: Progress) -> None:
        self._roots = last_columns(progress, progress.outputs)[:, None]  # drafts of finished rows are ignored

    def propose(self, budget: Budget) -> Draft:
        depth = budget.chain
        if depth < 1:
            return Draft.empty(len(self._roots), self._device)
        target, chain, builder = self._target, self._roots, ChainBuilder(self.sampler, enough=budget.enough)
        if graph_target(target):
            kind = "layers", self.exit_layer, self.sampler.kind
            plan = DraftPlan(kind, depth, room=1, layers=self.exit_layer)
            draft = run_chain_graph(target, chain, [1] * len(chain), plan, self.sampler)
            if draft is not None:
                return draft
        while len(builder) < depth and not builder.ended:
            logits = target.early_exit_logits(chain, self.exit_layer)
            chain = torch.cat([chain, builder.append(logits[:, None])], 1)
        return builder.build()
