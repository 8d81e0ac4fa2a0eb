"""MLPSpeculator: a small recurrent MLP continues from the target's last hidden state (Wertheimer et al. 2404.19124).

B rows, A columns, P paths, N nodes, V vocabulary, H hidden, I inner. The state starts as h, tap -1 of the column that
predicted the root. Step i (from 0) adds the last token to the state and predicts the next one (section 2):

    s <- P_i s + r E_i[token]        s <- GELU(norm_i(s))        logits = W_i s

r is the ratio of two weights that preserve the scale of the state (`Speculator.ratio`); norm is RMS with weight and
bias. Weights may be tied over the steps, except P_0. Training is teacher-forced, first on text, then on text generated
by the target (section 3): the state at t and tokens up to t + 1 + i predict token t + 2 + i.

Files are `ibm-ai-platform/*-accelerator`, tensors `speculator.{emb,proj,head,ln}.{i}.*`. Tied tensors may be stored
once or per step; `save` writes them once, as transformers does.
"""

import re
from collections.abc import Iterator
from itertools import repeat
from math import sqrt
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.tree import Draft
from specdemo.methods import require_method, setting
from specdemo.methods.base import DraftOptions
from specdemo.methods.heads.formats import check_target
from specdemo.methods.heads.head import Head, Recipe
from specdemo.methods.heads.network import Network, untrained
from specdemo.methods.heads.runtime import DraftPass, last_columns
from specdemo.methods.heads.sampler import ChainBuilder, DraftVocab, prune_tree
from specdemo.models.checkpoints import Checkpoint, write_checkpoint

EPSILON = 1e-6
TREE_WIDTHS = (4, 3, 2, 2)  # tokens per step of the published trees; 1 at every further step
CANDIDATES = 5  # paths that the authors' engine verifies
HINT = "fetch the speculator again"
VOCAB_MULTIPLE = 512  # vocabularies are padded to a multiple of at most this


class Norm(nn.Module):
    """x / rms(x) * weight + bias; the mean is not subtracted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, EPSILON) + self.bias


class Speculator(Network):
    """The recurrent MLP. Tensor names are the authors'."""

    def __init__(
        self,
        hidden_size: int,
        inner_dim: int,
        vocab_size: int,
        n_predict: int,
        tie_weights: bool = False,
        scale_input: bool = False,
        widths: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.hidden_size, self.inner_dim, self.vocab_size = hidden_size, inner_dim, vocab_size
        self.n_predict, self.tie_weights, self.scale_input = n_predict, tie_weights, scale_input
        self.widths = (*widths, *TREE_WIDTHS[len(widths) :], *[1] * n_predict)[:n_predict]
        num_distinct = 1 if tie_weights else n_predict
        copies = n_predict // num_distinct
        first = nn.Linear(hidden_size, inner_dim, bias=False)
        further = [nn.Linear(inner_dim, inner_dim, bias=False) for _ in range(min(num_distinct, n_predict - 1))]
        self.emb = nn.ModuleList([nn.Embedding(vocab_size, inner_dim) for _ in range(num_distinct)] * copies)
        self.proj = nn.ModuleList([first, *(further * copies)[: n_predict - 1]])
        self.head = nn.ModuleList([nn.Linear(inner_dim, vocab_size, bias=False) for _ in range(num_distinct)] * copies)
        self.ln = nn.ModuleList([Norm(inner_dim) for _ in range(num_distinct)] * copies)

    def __len__(self) -> int:
        return self.n_predict

    @property
    def state_weight(self) -> float:
        """Weight of the state; after `n_predict` steps half of its variance still comes from the first state."""
        return float(0.5 ** (0.5 / self.n_predict))

    @property
    def emb_weight(self) -> float:
        """Weight of the embedding; the complement of `state_weight`."""
        return sqrt((1 - self.state_weight**2) * self.inner_dim / 2)

    @property
    def ratio(self) -> float:
        """Weight of the embedding divided by the weight of the state."""
        return self.emb_weight / self.state_weight

    def initial_state(self, hidden: Tensor) -> Tensor:
        """Return the first state for hidden [..., H]."""
        hidden = hidden.to(self.dtype)
        return F.rms_norm(hidden, hidden.shape[-1:], eps=EPSILON) / sqrt(2) if self.scale_input else hidden

    def forward(self, state: Tensor, tokens: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Run a step: state [..., H or I], tokens [...] -> next state [..., I], logits [..., V]."""
        embedded = self.emb[step](tokens.clamp_max(self.vocab_size - 1))  # larger ids are padding
        state = F.gelu(self.ln[step](self.proj[step](state) + self.ratio * embedded))
        return state, self.head[step](state)


class MLPSpeculatorOptions(DraftOptions):
    draft: str = setting(
        "chain",
        "chain: one token after the other, sampled if the target samples; tree: the most likely continuations",
        choices=("chain", "tree"),
    )
    nodes: int = setting(0, "nodes of the draft tree; 0 uses k nodes", low=0, high=128, step=1)


class MLPSpeculator(Head[Speculator], method="mlp_speculator", tree=lambda o: o.nodes if o.draft == "tree" else None):
    summary = "A small recurrent network drafts from the target's last hidden state and its own last token."
    taps: tuple[int, ...] = (-1,)
    config_keys = frozenset(
        "emb_dim inner_dim n_candidates n_predict scale_input tie_weights top_k_tokens_per_head".split()
    )
    recipes: ClassVar = {"mlp-speculator": Recipe("MLPSpeculator, 4 tokens", {"n_predict": 4})}

    Options = MLPSpeculatorOptions

    options: MLPSpeculatorOptions
    _hidden: Tensor  # [B, H] of the last column of every row
    _root: Tensor  # [B]

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        return checkpoint.config_has("model_type", "mlp_speculator")

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: Target) -> Speculator:
        require_method(checkpoint, "mlp_speculator")
        config = checkpoint.config
        missing = [key for key in ("emb_dim", "n_predict", "vocab_size") if not config.get(key)]
        if missing:
            raise ValueError(f"{checkpoint.name}: config.json lacks {missing[0]}; {HINT}")
        smaller, larger = sorted((config["vocab_size"], target.vocab_size))
        only_padding = larger <= -(-smaller // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        expected_vocab = target.vocab_size if only_padding else config["vocab_size"]
        check_target(
            checkpoint,
            hidden_size=(config["emb_dim"], target.hidden_size),
            vocabulary=(expected_vocab, target.vocab_size),
        )
        with torch.device("meta"):
            network = Speculator(
                config["emb_dim"],
                config.get("inner_dim") or config["emb_dim"],
                min(config["vocab_size"], target.vocab_size),
                config["n_predict"],
                config.get("tie_weights", False),
                config.get("scale_input", False),
                tuple(config.get("top_k_tokens_per_head", ())),
            )
        return network.load_tensors(_expand_tied(checkpoint, network), checkpoint, target, HINT)

    def __init__(self, target: Target, model: Speculator | str, options: MLPSpeculatorOptions | None = None) -> None:
        super().__init__(target, model, options)
        self._draft_vocab = DraftVocab(None, target.vocab_size)

    @classmethod
    def fresh(
        cls, target: Target, n_predict: int = 4, inner_dim: int = 0, tie_weights: bool = True, scale_input: bool = True
    ) -> Speculator:
        """Return an untrained speculator. inner_dim: 0 for the hidden size."""
        inner = inner_dim or target.hidden_size
        network = Speculator(target.hidden_size, inner, target.vocab_size, n_predict, tie_weights, scale_input)
        return untrained(network, target, inner**-0.5)  # `ratio` assumes this scale

    def observe(self, progress: Progress) -> None:
        self._hidden, self._root = last_columns(progress, progress.hidden[-1]), last_columns(progress, progress.outputs)

    def propose(self, budget: Budget) -> Draft:
        depth = min(budget.chain, len(self.head))
        if depth < 1:
            return Draft.empty(len(self._root), self._root.device)
        inputs = self._hidden, self._root
        if self.options.draft == "chain":
            return self.runtime.draft(self._chain, depth, self.sampler, *inputs, enough=budget.enough)
        return self.runtime.draft(self._tree, depth, self.sampler, *inputs, nodes=budget.nodes)

    def _chain(self, draft: DraftPass, hidden: Tensor, token: Tensor) -> Draft:
        state = self.head.initial_state(hidden)
        builder = ChainBuilder(draft.sampler, self._draft_vocab, draft.enough)
        while len(builder) < draft.depth and not builder.ended:
            state, logits = self.head(state, token, len(builder))
            token = builder.append(logits[:, None])[:, 0]
        return builder.build()

    def _tree(self, draft: DraftPass, hidden: Tensor, root: Tensor) -> Draft:
        """Extend every path by the `widths[i]` most likely tokens of step i and draft the most likely nodes.

        The authors verify the `CANDIDATES` most likely complete paths instead. Nodes use a budget better, because the
        gain of a node is the probability of its path. Nothing is sampled, so probs is None.
        """
        state, tokens = self.head.initial_state(hidden)[:, None], root[:, None]
        scores = torch.zeros_like(tokens, dtype=torch.float32)
        path_slots = torch.zeros_like(tokens)  # last slot of every path, in the unpruned tree
        slots, levels = 1, []
        for step, width in enumerate(self.head.widths[: draft.depth]):
            state, logits = self.head(state, tokens, step)
            log_probs, ranked = draft.sampler.log_probs(logits, step).topk(min(width, logits.shape[-1]))
            parents, state = (x.repeat_interleave(ranked.shape[-1], 1) for x in (path_slots, state))
            scores, tokens = (scores[..., None] + log_probs).flatten(1), ranked.flatten(1)
            path_slots = torch.arange(slots, slots + tokens.shape[1], device=tokens.device).expand_as(tokens)
            slots += tokens.shape[1]
            levels.append((tokens, parents, scores, log_probs.flatten(1).exp()))
        drafted, parents, scores, confidence = (torch.cat(column, 1) for column in zip(*levels, strict=True))
        return prune_tree(drafted, parents, scores, confidence, draft.nodes)

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """Sum over steps of the loss to the target's distribution (or the text)."""
        steps = (self.objective.compare(logits, labels) for logits, labels in self._training_steps(batch))
        return self.objective.steps_loss(steps, repeat(1.0))

    def _training_steps(self, batch: Progress) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield per step i its logits [B, A - 1 - i, V] and the target's probabilities, or else tokens."""
        probs = batch.target_probs()
        vocab_size = self.head.vocab_size
        labels = batch.outputs.clamp_max(vocab_size - 1) if probs is None else probs[..., :vocab_size]
        state = self.head.initial_state(batch.hidden[-1])
        columns = state.shape[1]
        for i in range(min(len(self.head), columns - 1)):
            state, logits = self.head(state[:, : columns - 1 - i], batch.outputs[:, i:-1], i)
            yield logits.float(), labels[:, i + 1 :]

    def save(self, folder: Path, target_name: str) -> None:
        speculator = self.head
        config = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "base_model_name_or_path": target_name,
            "emb_dim": speculator.hidden_size,
            "inner_dim": speculator.inner_dim,
            "n_predict": speculator.n_predict,
            "vocab_size": speculator.vocab_size,
            "tie_weights": speculator.tie_weights,
            "scale_input": speculator.scale_input,
            "n_candidates": CANDIDATES,
            "top_k_tokens_per_head": speculator.widths,
            "torch_dtype": str(speculator.dtype).removeprefix("torch."),
        }
        # named_parameters yields tied tensors once
        write_checkpoint(folder, config, {f"speculator.{name}": p for name, p in speculator.named_parameters()})


def _expand_tied(checkpoint: Checkpoint, speculator: Speculator) -> dict[str, Tensor]:
    """Return the tensors under all of their names, tied ones repeated, without padding rows."""
    stored = {
        name: tensor[: speculator.vocab_size] if re.match(r"(emb|head)\.", name) else tensor
        for name, tensor in (checkpoint.take("speculator.") or checkpoint.tensors).items()
    }
    parameters = speculator.state_dict(keep_vars=True)
    tensor_of = {id(p): stored[name] for name, p in reversed(parameters.items()) if name in stored}
    return stored | {name: tensor_of[id(p)] for name, p in parameters.items() if id(p) in tensor_of}
