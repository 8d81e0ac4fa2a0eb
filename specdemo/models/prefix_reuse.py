"""Target that keeps the KV cache of its last text, so that a text with the same prefix, such as the next turn of a
chat, is read from the first different token.

T tokens of a text, S slots, A accepted slots, H hidden size.
"""

from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from specdemo.core.protocol import Forward
from specdemo.models.graphs import Tensors
from specdemo.models.history import DraftPlan, Write
from specdemo.models.target import HFTarget


@dataclass(frozen=True, slots=True)
class _Text:
    """Tokens and hidden states of a released history, whose keys and values stay in the cache."""

    tokens: list[int]
    hidden: dict[int, Tensor]  # tap -> [1, T, H]


class _Piece(NamedTuple):
    """Tokens committed in one step. After a crop, a later segment may start before the end of an earlier one."""

    start: int
    tokens: Tensor  # [1, A]
    hidden: dict[int, Tensor]  # tap -> [1, A, H]


class Remembering(HFTarget):
    """Target whose `release` keeps the history of a single row, and whose `start` reuses the common prefix.

    Hidden states are kept for the taps of the last text. A text with other taps is read from its start, and so is one
    whose prefix the history cannot be cropped to (`History.max_crop`).
    """

    kept = 0  # tokens of the last text that `start` reused
    _text: _Text | None = None  # set between `release` and `start`
    _pieces: list[_Piece] | None = None  # set between `start` and `release`, for a single row
    _fed: tuple[Tensor, dict[int, Tensor]] | None = None  # tokens [1, S] and hidden states of the last forward

    @property
    def history_bytes(self) -> int:
        """Return the size of the cache and of the stored hidden states."""
        kept = self._text or (self._pieces[0] if self._pieces else None)
        if kept is None:
            return super().history_bytes
        return super().history_bytes + self.length[0] * sum(h[0, 0].nbytes for h in kept.hidden.values())

    @torch.no_grad()
    def start(self, tokens: Tensor, taps: tuple[int, ...] = (), reserve: int = 0) -> Forward:
        self.release()
        text, self._text = self._text, None  # if reading fails, there is nothing to continue
        self.kept = self._agreed(text, tokens, taps)
        if text is None or not self.kept:
            forward = super().start(tokens, taps, reserve)
        else:
            forward = self._go_on(text, tokens, taps, reserve)
        self._pieces = [_Piece(0, tokens, dict(forward.hidden))] if len(tokens) == 1 else None
        return forward

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        forward = super().forward(tokens, parents, taps)
        self._fed = tokens, dict(forward.hidden)
        return forward

    def commit(self, path: list[list[int]]) -> None:
        before = self.length
        super().commit(path)
        if self._pieces is not None and self._fed is not None:
            tokens, hidden = self._fed
            (slots,) = path
            if len(slots) < tokens.shape[1]:
                tokens, hidden = tokens[:, slots], {tap: h[:, slots] for tap, h in hidden.items()}
            self._pieces.append(_Piece(before[0], tokens, hidden))

    def draft(self, tokens: Tensor, counts: list[int], write: Write, more: Tensors, plan: DraftPlan) -> Tensors | None:
        before = self.length
        said = super().draft(tokens, counts, write, more, plan)
        if said is not None and plan.keeps and self._pieces is not None:
            read = torch.cat([tokens[:, : counts[0]], said[0][:, : plan.depth - 1]], 1)
            self._pieces.append(_Piece(before[0], read, {}))
        return said

    def release(self) -> None:
        """Keep the history of a single row for the next `start`; free it otherwise."""
        pieces, self._pieces, self._fed = self._pieces, None, None
        if pieces is not None:
            self._started().settle(self.kept)
            with suppress(torch.OutOfMemoryError):  # a finished text must not fail because it cannot be cached
                self._text = _joined(pieces, self.length[0])
        if self._text is None:
            super().release()

    def rewind(self) -> None:
        """Drop what was read and generated since the last `start`."""
        self.release()
        text, self._text = self._text, None
        if text is not None and self.kept:
            self.crop([self.kept])
            self._text = _cut(text, self.kept)
        else:
            self.forget()

    def forget(self) -> None:
        """Free the history and all cached tokens."""
        self._pieces = self._fed = self._text = None
        self.kept = 0
        self._last = None
        super().release()

    def _agreed(self, text: _Text | None, tokens: Tensor, taps: tuple[int, ...]) -> int:
        """Return the number of tokens to reuse. The last token is always read, for its logits."""
        if text is None or len(tokens) != 1 or not set(taps) <= text.hidden.keys():
            return 0
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text.tokens, tokens[0, :-1].tolist(), strict=False))
        return self._started().reach(sum(1 for _ in same))

    def _go_on(self, text: _Text, tokens: Tensor, taps: tuple[int, ...], reserve: int) -> Forward:
        self._check_length(tokens.shape[1])
        self.crop([self.kept])
        forward = self._started().go_on(tokens[:, self.kept :], taps, reserve)
        kept = _cut(text, self.kept).hidden
        return Forward(forward.logits, {tap: torch.cat([kept[tap], forward.hidden[tap]], 1) for tap in taps})


def _cut(text: _Text, length: int) -> _Text:
    return _Text(text.tokens[:length], {tap: h[:, :length] for tap, h in text.hidden.items()})


def _joined(pieces: list[_Piece], length: int) -> _Text:
    """Concatenate the segments to a text of `length` tokens, with the hidden states that all segments have."""
    columns: list[int] = []
    read = 0
    for piece in pieces:
        width = piece.tokens.shape[1]
        columns[piece.start :] = range(read, read + width)
        read += width
    tokens: list[int] = torch.cat([piece.tokens for piece in pieces], 1)[0].tolist()
    columns = columns[:length]
    taps = set(pieces[0].hidden).intersection(*(piece.hidden for piece in pieces))
    hidden = {tap: torch.cat([piece.hidden[tap] for piece in pieces], 1)[:, columns] for tap in taps}
    return _Text([tokens[column] for column in columns], hidden)
