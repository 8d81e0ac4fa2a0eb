"""Tiny target for tests: the next-token distribution depends on the last `order` tokens, through a seeded table.

B rows, T prompt tokens, N draft nodes, S = N + 1 slots, V vocabulary, H hidden, R table rows.
"""

import torch
from torch import Tensor, nn

from specdemo.core.protocol import NO_HISTORY, UNLIMITED, Capabilities, Forward
from specdemo.kv.graphs import Tensors
from specdemo.kv.masks import AttentionKind, chain_mask
from specdemo.kv.view import View
from specdemo.models.shared import DraftFunction, DraftPlan, SharedTarget

TABLE_ROWS = 4096
PEAKEDNESS = 1.5


class ToyTarget(SharedTarget):
    """Target on the CPU, with trees, ragged batches, taps and crop. Equal seeds give equal models.

    A context shorter than `order` is padded with token 0 in front.
    """

    name = "toy"
    num_layers = 3
    dtype = torch.float32

    def __init__(
        self,
        vocab_size: int = 16,
        seed: int = 0,
        order: int = 2,
        hidden_size: int = 8,
        stop_token_ids: tuple[int, ...] = (),
        max_length: int = 4096,
    ) -> None:
        self.vocab_size, self.hidden_size, self.stop_token_ids = vocab_size, hidden_size, stop_token_ids
        self.capabilities = Capabilities(hidden_states="all", layers=True, shared_kv=True, batch=UNLIMITED)
        self.kv_shapes = dict.fromkeys(("sliding_attention", "full_attention"), (1, hidden_size))
        self.max_length = max_length
        self.device = torch.device("cpu")
        rng = torch.Generator().manual_seed(seed)
        rows = min(vocab_size**order, TABLE_ROWS)
        self._states = torch.randn(self.num_layers + 1, rows, hidden_size, generator=rng)
        self._powers = torch.tensor([vocab_size ** (order - 1 - i) % rows for i in range(order)])
        self.embed: nn.Module = nn.Embedding.from_pretrained(torch.randn(vocab_size, hidden_size, generator=rng))
        self.lm_head: nn.Module = nn.Linear(hidden_size, vocab_size, bias=False).requires_grad_(False)
        weight = PEAKEDNESS * torch.randn(vocab_size, hidden_size, generator=rng) / hidden_size**0.5
        self.lm_head.get_parameter("weight").copy_(weight)
        self._order = order
        self._history: list[list[int]] = []
        self._slots = torch.empty(0, 0, dtype=torch.int64)

    @property
    def length(self) -> list[int]:
        """Return the number of committed tokens per row."""
        return [len(row) for row in self._history]

    def next_probs(self, context: list[int]) -> Tensor:
        """Return the exact distribution [V] of the token after `context`, at temperature 1."""
        window = ([0] * self._order + context)[-self._order :]
        state = self._states[-1, self._rows(torch.tensor(window))]
        probs: Tensor = self.lm_head(state).softmax(-1)
        return probs

    def start(self, tokens: Tensor, taps: tuple[int, ...] = (), reserve: int = 0) -> Forward:
        self._history = tokens.tolist()
        windows = nn.functional.pad(tokens, (self._order - 1, 0)).unfold(1, self._order, 1)
        return self._forward(windows, taps, slice(-1, None))

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        if not self._history:
            raise ValueError(NO_HISTORY)
        self._slots = tokens.clamp_min(0)
        return self._forward(self._windows(parents), taps, slice(None))

    def early_exit_logits(self, chain: Tensor, layers: int) -> Tensor:
        histories = self._history or [[]] * len(chain)
        texts = [[0] * self._order + old + new for old, new in zip(histories, chain.tolist(), strict=True)]
        windows = torch.tensor([text[-self._order :] for text in texts])
        logits: Tensor = self.lm_head(self._states[layers, self._rows(windows)])
        return logits

    def draft_from_kv(self, write: DraftFunction, extra: Tensors, plan: DraftPlan) -> Tensors:
        lengths = torch.tensor(self.length)[:, None]
        tokens = [row + [0] * (int(lengths.max()) - len(row)) for row in self._history]
        states = self.embed(torch.tensor(tokens))[:, None]
        columns = torch.arange(states.shape[2])

        def mask(kind: AttentionKind) -> Tensor:
            return chain_mask(lengths - 1, columns, kind, self.dtype)

        committed = dict.fromkeys(self.kv_shapes, (states, states))
        return write(View(lengths, mask, committed=committed), plan.depth, *extra)

    def commit(self, path: list[list[int]]) -> None:
        for history, slots, accepted in zip(self._history, self._slots.tolist(), path, strict=True):
            history += [slots[slot] for slot in accepted]
            self.check_length(len(history))

    def crop(self, lengths: list[int]) -> None:
        for history, length in zip(self._history, lengths, strict=True):
            del history[length:]

    def release(self) -> None:
        self._history = []

    def _windows(self, parents: Tensor) -> Tensor:
        """Return the last `order` tokens [B, S, order] at every slot."""
        batch, nodes = parents.shape
        tails = [([0] * self._order + history[-self._order :])[-self._order :] for history in self._history]
        windows = torch.empty(batch, nodes + 1, self._order, dtype=torch.int64)
        windows[:, 0] = torch.tensor(tails)
        before, rows = windows[:, 0].clone(), torch.arange(batch)
        for slot in range(nodes + 1):
            above = before if slot == 0 else windows[rows, parents[:, slot - 1]]
            windows[:, slot] = torch.cat([above[:, 1:], self._slots[:, slot, None]], 1)
        return windows

    def _rows(self, windows: Tensor) -> Tensor:
        """Return the table rows [...] of windows [..., order]."""
        return (windows * self._powers).sum(-1) % self._states.shape[1]

    def _forward(self, windows: Tensor, taps: tuple[int, ...], positions: slice) -> Forward:
        rows = self._rows(windows)
        hidden = {tap: self.embed(windows[..., -1]) if tap == 0 else self._states[tap, rows] for tap in taps}
        return Forward(self.lm_head(self._states[-1, rows[:, positions]]), hidden)
