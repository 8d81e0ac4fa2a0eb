"""A target that remembers its last text, so that one that begins alike, as a chat's next turn does, is read from where
the two part.

T tokens of a text, S slots, A kept slots, H hidden size.
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
    """What `release` left of a history beside its keys and values."""

    tokens: list[int]
    hidden: dict[int, Tensor]  # tap -> [1, T, H]


class _Piece(NamedTuple):
    """Tokens that became history at once. Later pieces may begin before its end, after a crop."""

    start: int
    tokens: Tensor  # [1, A]
    hidden: dict[int, Tensor]  # tap -> [1, A, H]


class Remembering(HFTarget):
    """`release` keeps the history of a single row, and `start` goes on from it as far as the tokens are the same.

    Hidden states are kept for the taps that were asked for; a text with other taps is read from its start. So is one
    that the history cannot be cropped to without reading it again (`History.reach`).
    """

    kept = 0  # tokens of the last text that `start` did not read
    _text: _Text | None = None  # between `release` and `start`
    _pieces: list[_Piece] | None = None  # between `start` and `release`, of a single row
    _fed: tuple[Tensor, dict[int, Tensor]] | None = None  # of the last forward: tokens [1, S], hidden states

    @property
    def history_bytes(self) -> int:
        """Kept hidden states too."""
        kept = self._text or (self._pieces[0] if self._pieces else None)
        if kept is None:
            return super().history_bytes
        return super().history_bytes + self.length[0] * sum(h[0, 0].nbytes for h in kept.hidden.values())

    @torch.no_grad()
    def start(self, tokens: Tensor, taps: tuple[int, ...] = (), reserve: int = 0) -> Forward:
        self.release()
        text, self._text = self._text, None  # should reading fail, nothing is left to go on from
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
        """Keep the history where it is known what it holds, and free it where it is not."""
        pieces, self._pieces, self._fed = self._pieces, None, None
        if pieces is not None:
            self._started().settle(self.kept)
            with suppress(torch.OutOfMemoryError):  # remembering is a favour: it must not fail a text that was written
                self._text = _joined(pieces, self.length[0])
        if self._text is None:
            super().release()

    def rewind(self) -> None:
        """Forget what was read and written since the last `start`, as if that had never been."""
        self.release()
        text, self._text = self._text, None
        if text is not None and self.kept:
            self.crop([self.kept])
            self._text = _cut(text, self.kept)
        else:
            self.forget()

    def forget(self) -> None:
        """Free the history and everything kept of it."""
        self._pieces = self._fed = self._text = None
        self.kept = 0
        self._last = None
        super().release()

    def _agreed(self, text: _Text | None, tokens: Tensor, taps: tuple[int, ...]) -> int:
        """How many tokens need not be read; the last one always is, for its logits."""
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
    """The first `length` tokens of the text that the pieces make up, with the hidden states that all of them have."""
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
