"""History of models whose cache cannot be rolled back: recurrent layers, or positions and windows counted in columns.

The rows run one by one on the cache of transformers. Their state is copied before each provisional pass, and a partly
accepted pass runs again from that copy. Only chains are verified.

B rows, S slots, T prompt tokens.
"""

from collections import deque
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

from specdemo.core.protocol import Forward
from specdemo.core.rounding import difference
from specdemo.core.tree import ABSENT
from specdemo.kv.history import ForwardFunction, KVHistory

CacheLayer = Any  # a layer of a transformers cache, of any kind
MULTI_TOKEN_TEXT = 16  # tokens of a text with which `supports_multi_token` decides
SINGLE_TOKENS = "its layers read the tokens after a stored text one by one, so a draft saves no time"
SNAPSHOTS = 24  # snapshots per row: so many commits can be cropped without reading the text again


@dataclass
class _RowState:
    """State of one row."""

    cache: DynamicCache
    tokens: list[int]
    provisional: list[int]  # provisional tokens, in the cache after `tokens`
    snapshots: deque[tuple[int, list[CacheLayer]]]  # (length, copies of the layers), oldest first


class SnapshotHistory:
    """History that is restored from snapshots.

    multi_token: the model continues a cache with several tokens in one pass correctly.
    """

    def __init__(self, run: ForwardFunction, config: PreTrainedConfig, multi_token: bool, device: torch.device) -> None:
        self._run, self._config, self._multi_token, self._device = run, config, multi_token, device
        self._rows: list[_RowState] = []

    @property
    def lengths(self) -> list[int]:
        """See `KVHistory.lengths`."""
        return [len(row.tokens) for row in self._rows]

    @property
    def bytes(self) -> int:
        """See `KVHistory.bytes`."""
        return sum(_tensor_bytes(vars(layer)) for row in self._rows for layer in row.cache.layers)

    def extend(self, tokens: Tensor, taps: tuple[int, ...], reserve: int = 0) -> Forward:
        """See `KVHistory.extend`."""
        if not self._rows:
            self._rows = [_RowState(self._empty(), row, [], deque(maxlen=SNAPSHOTS)) for row in tokens.tolist()]
            return _concat([self._run_tokens(row.cache, row.tokens, taps, first=True) for row in self._rows], 0)
        forwards = [
            self._forward_row(row, new, taps, last=True) for row, new in zip(self._rows, tokens.tolist(), strict=True)
        ]
        self.commit([list(range(tokens.shape[1]))] * len(tokens))
        return _concat([forward for forward in forwards if forward is not None], 0)

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...]) -> Forward:
        """See `KVHistory.forward`."""
        forwards = [self._forward_row(row, ids, taps) for row, ids in zip(self._rows, tokens.tolist(), strict=True)]
        reference = next(forward for forward in forwards if forward is not None)
        return _concat([_pad_slots(forward, reference, tokens.shape[1]) for forward in forwards], 0)

    def commit(self, path: list[list[int]]) -> None:
        """See `KVHistory.commit`."""
        for row, slots in zip(self._rows, path, strict=True):
            accepted = row.provisional[: len(slots)]
            if len(accepted) < len(row.provisional):
                self._restore(row, len(row.tokens))
                if accepted:
                    self._run_tokens(row.cache, accepted, ())
            row.tokens += accepted
            row.provisional = []

    def crop(self, lengths: list[int]) -> None:
        """See `KVHistory.crop`."""
        for row, length in zip(self._rows, lengths, strict=True):
            if length < len(row.tokens):
                self._restore(row, length)
                del row.tokens[length:]

    def max_crop(self, length: int) -> int:
        """See `KVHistory.max_crop`. 0 if the model continues one token at a time: a new prefill is a single pass."""
        (row,) = self._rows
        ends = [len(row.tokens), *(marked for marked, _ in row.snapshots)] if self._multi_token else []
        return max((end for end in ends if end <= length), default=0)

    def drop_snapshots(self, length: int) -> None:
        """Drop all snapshots except the one at `length` and the newest one. Single row only."""
        (row,) = self._rows
        row.snapshots = deque((m for m in row.snapshots if m[0] == length or m is row.snapshots[-1]), maxlen=SNAPSHOTS)

    def _forward_row(
        self, row: _RowState, tokens: list[int], taps: tuple[int, ...], last: bool = False
    ) -> Forward | None:
        """Return None for a row without tokens."""
        if row.provisional:
            self._restore(row, len(row.tokens))
        row.provisional = [token for token in tokens if token != ABSENT]
        if not row.provisional:
            return None
        row.snapshots.append((len(row.tokens), [*map(_copy_layer, row.cache.layers)]))
        return self._run_tokens(row.cache, row.provisional, taps, last=last)

    def _restore(self, row: _RowState, length: int) -> None:
        """Restore the row's cache to its first `length` tokens, from the nearest snapshot or from an empty cache."""
        while row.snapshots and row.snapshots[-1][0] > length:
            row.snapshots.pop()
        row.provisional = []
        start = 0
        row.cache = self._empty()
        if row.snapshots:
            start, layers = row.snapshots[-1]
            row.cache.layers = [*map(_copy_layer, layers)]  # looped decoders have more than an empty cache
        if start < length:
            self._run_tokens(row.cache, row.tokens[start:length], (), first=not start)

    def _run_tokens(
        self, cache: DynamicCache, tokens: list[int], taps: tuple[int, ...], first: bool = False, last: bool = False
    ) -> Forward:
        """Run one row.

        first: the cache is empty. last: only the logits of the last token are needed, as they are for a prefill.
        """
        ids = torch.tensor([tokens], device=self._device)
        if first or self._multi_token or len(tokens) == 1:
            return self._run(ids, cache, taps=taps, last=first or last)
        return _concat([self._run(column, cache, taps=taps) for column in ids.split(1, 1)], 1)

    def _empty(self) -> DynamicCache:
        return DynamicCache(config=self._config)


History = KVHistory | SnapshotHistory  # of a target


def supports_multi_token(run: ForwardFunction, config: PreTrainedConfig, text: Tensor, eps: float, layers: int) -> bool:
    """Return True if several tokens after a cached prefix give the same logits as one at a time.

    Some recurrent layers restart instead. text: token ids [1, T]. eps, layers: see `core.rounding.difference`. Raises
    ValueError for a model that cannot continue its cache after another text was read.
    """
    start = text.shape[1] // 2
    if not start:
        return False
    expected = run(text, DynamicCache(config=config)).logits[0].float()
    shorter = run(text[:, :-1], DynamicCache(config=config)).logits[0].float()

    def resumed(width: int, interrupted: bool = True) -> Tensor:
        cache = DynamicCache(config=config)
        run(text[:, :start], cache)
        if interrupted:
            run(text.flip(1), DynamicCache(config=config))
        return torch.cat([run(part, cache).logits[0] for part in text[:, start:].split(width, 1)]).float()

    own, rest = (expected[:-1], shorter), expected[start:]
    single, several = resumed(1), resumed(3)
    # the same passes give the same bits, whatever was read between them
    elsewhere = not difference(single, resumed(1, interrupted=False), [], eps, layers).is_rounding
    if elsewhere or 2 * len(difference(rest, single, [own], eps, layers).wrong) >= len(rest):
        why = "it stores its history elsewhere" if elsewhere else "most of its next tokens are others than in one pass"
        raise ValueError(
            f"a {config.model_type} model cannot be continued from its cache ({why}); choose another model"
        )
    return difference(rest, several, [own, (rest, single)], eps, layers).is_rounding


def _copy_layer(layer: CacheLayer) -> CacheLayer:
    """Copy a layer of a cache. Keys and values are replaced in every pass and never written in place, so they need no
    copy."""
    twin = copy(layer)
    state = vars(layer).items()
    vars(twin).update({name: value if name in ("keys", "values") else deepcopy(value) for name, value in state})
    return twin


def _tensor_bytes(state: dict[str, object]) -> int:
    tensors = [v for v in state.values() if isinstance(v, Tensor)]
    inner = [v for v in state.values() if isinstance(v, dict)]
    return sum(t.numel() * t.element_size() for t in tensors) + sum(map(_tensor_bytes, inner))


def _concat(parts: list[Forward], dim: int) -> Forward:
    if len(parts) == 1:
        return parts[0]
    hidden = {tap: torch.cat([p.hidden[tap] for p in parts], dim) for tap in parts[0].hidden}
    return Forward(torch.cat([p.logits for p in parts], dim), hidden)


def _pad_slots(forward: Forward | None, like: Forward, width: int) -> Forward:
    """Pad to `width` slots with zeros, for rows that ran fewer tokens or none."""
    slots = 0 if forward is None else forward.logits.shape[1]
    source = like if forward is None else forward
    if slots == width:
        return source

    def pad(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x[:, :slots], (0, 0, 0, width - slots))

    return Forward(pad(source.logits), {tap: pad(h) for tap, h in source.hidden.items()})
