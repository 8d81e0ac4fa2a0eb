"""Histories of models with recurrent layers on llama.cpp, whose states cannot be cut like keys and values.

llama.cpp keeps the states after the last tokens of a pass, so that up to `LlamaCppModel.rollback` of them can be taken
back; none in some architectures. It keeps no state from before a pass: it removes a whole pass without an error and
continues wrongly (llama.cpp issue 26695). Where too few are kept, a pass starts with a copy of the state. A row returns
to a copy and reads what was accepted again.

B rows, S slots, V vocabulary, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy
from torch import Tensor

from specdemo.core.tree import ABSENT
from specdemo.models.errors import pass_cancelled
from specdemo.models.gguf_header import COPIES
from specdemo.models.llamacpp import BATCH_TOKENS
from specdemo.models.llamacpp_context import RECURRENT_ONLY, Inputs, LlamaCppContext, Outputs, State, Taps

UNKNOWN = [ABSENT]  # provisional tokens of a row whose state is not that after its text
PROMPTS = COPIES - 1  # copies at the ends of prompts: of the last one, and of the one before, to drop a turn of a chat


@dataclass(slots=True)
class _Chain:
    """One row. provisional: tokens of the last pass, which llama.cpp has read after `text`. outputs: of that pass."""

    text: list[int] = field(default_factory=list)
    provisional: list[int] = field(default_factory=list)
    outputs: Outputs | None = None
    prompts: list[tuple[int, State]] = field(default_factory=list)  # copies of the state after so many tokens
    latest: tuple[int, State] | None = None  # a newer copy

    @property
    def copies(self) -> list[tuple[int, State]]:
        """Return all copies, in order of their lengths."""
        return sorted([*self.prompts, *([self.latest] if self.latest else [])], key=lambda copy: copy[0])


class RecurrentHistory:
    """Histories of B rows in the sequences of a context. Rows without tokens of their own in a pass cost nothing: a
    pass that is repeated, as for a finished row, returns its outputs again."""

    def __init__(self, context: LlamaCppContext, rows: int, rollback: int) -> None:
        self._context, self._rollback = context, rollback
        self._rows = [_Chain() for _ in range(rows)]

    @property
    def bytes(self) -> int:
        """Return the size of all copies."""
        return sum(len(state) for row in self._rows for _, state in row.copies)

    def max_crop(self, length: int) -> int:
        """Return the largest number of tokens, at most `length`, that a single row can return to at once."""
        (row,) = self._rows
        ends = [] if row.provisional else [len(row.text)]
        return max((end for end in (*ends, *(copy[0] for copy in row.copies)) if end <= length), default=0)

    def read_text(self, number: int, ids: list[int], taps: Taps) -> Outputs:
        """Continue a row to a text; return as `LlamaCppContext.read_text`."""
        row = self._rows[number]
        if row.provisional:
            self._return_to(number, len(row.text))
        outputs = self._read(number, ids[len(row.text) :], len(row.text), taps)
        row.text = list(ids)
        row.prompts = [*row.prompts, (len(ids), self._context.save(number, RECURRENT_ONLY))][-PROMPTS:]
        return outputs

    def forward(self, tokens: Tensor, taps: Taps) -> Outputs:
        """Run chains [B, S] provisionally; return logits [T, V] and states [T, H] of the present tokens."""
        unread = []
        for number, (row, ids) in enumerate(zip(self._rows, tokens.tolist(), strict=True)):
            present = [token for token in ids if token != ABSENT]
            if row.provisional == present and row.outputs is not None and {*taps} <= row.outputs[1].keys():
                continue
            if row.provisional:
                self._return_to(number, len(row.text))
            if len(present) - 1 > self._rollback:
                row.latest = len(row.text), self._context.save(number, RECURRENT_ONLY)
            row.provisional = present
            unread.append(number)
        together = sum(len(self._rows[number].provisional) for number in unread) <= BATCH_TOKENS
        for numbers in [unread] if together else [[number] for number in unread]:
            if numbers:
                self._decode(numbers, taps)
        outputs = [row.outputs for row in self._rows if row.outputs is not None]
        logits = numpy.concatenate([logits for logits, _ in outputs])
        return logits, {tap: numpy.concatenate([states[tap] for _, states in outputs]) for tap in taps}

    def _decode(self, numbers: Sequence[int], taps: Taps) -> None:
        """Read the provisional tokens of rows in one batch."""
        rows = [self._rows[number] for number in numbers]
        texts = [Inputs.of_text(r.provisional, len(r.text), n) for n, r in zip(numbers, rows, strict=True)]
        columns = ([x for part in column for x in part] for column in zip(*texts, strict=True))
        logits, states = self._context.decode(Inputs(*columns), taps)
        end = 0
        for row in rows:
            begin, end = end, end + len(row.provisional)
            row.outputs = logits[begin:end].copy(), {tap: of[begin:end] for tap, of in states.items()}

    def commit(self, path: Sequence[Sequence[int]]) -> None:
        """Append the accepted slots of the last pass. A row with an empty path keeps the pass, see `forward`."""
        for number, (row, slots) in enumerate(zip(self._rows, path, strict=True)):
            if not slots:
                continue
            accepted = row.provisional[: len(slots)]
            if len(accepted) < len(row.provisional) and not self._take_back(number, len(accepted)):
                self._return_to(number, len(row.text))
                self._read(number, accepted, len(row.text))
            row.text += accepted
            row.provisional, row.outputs = [], None

    def _take_back(self, number: int, accepted: int) -> bool:
        """Remove all but the first `accepted` tokens of the last pass; return False if llama.cpp cannot."""
        row = self._rows[number]
        last = (len(row.provisional) - 1) % BATCH_TOKENS  # tokens whose states llama.cpp may have kept
        rejected = len(row.provisional) - accepted
        return rejected <= min(self._rollback, last) and self._context.remove(number, len(row.text) + accepted)

    def crop(self, lengths: Sequence[int]) -> None:
        """Shorten every row to its first lengths[b] tokens, without the last pass, and keep a copy there: the next crop
        of a draft model is to a little more."""
        for number, (row, length) in enumerate(zip(self._rows, lengths, strict=True)):
            shorter = length < len(row.text)
            if shorter or row.provisional:
                self._return_to(number, min(length, len(row.text)))
            if shorter:
                del row.text[length:]
                row.latest = length, self._context.save(number, RECURRENT_ONLY)

    def _return_to(self, number: int, length: int) -> None:
        """Return a row to the first `length` tokens of its text: to the nearest copy, and read on from there."""
        row = self._rows[number]
        row.prompts = [copy for copy in row.prompts if copy[0] <= length]
        row.latest = row.latest if row.latest and row.latest[0] <= length else None
        row.provisional, row.outputs = UNKNOWN, None
        start = 0
        if row.copies:
            start, state = row.copies[-1]
            self._context.restore(number, state, RECURRENT_ONLY)
        if not self._context.remove(number, start):
            raise ValueError(f"llama.cpp cannot return to token {start}; choose plain decoding")
        if start < length:
            self._read(number, row.text[start:length], start)
        row.provisional = []

    def _read(self, number: int, ids: list[int], position: int, taps: Taps = ()) -> Outputs:
        """Read tokens of a row. If the user stops it, the row returns to a copy before it continues."""
        row = self._rows[number]
        row.provisional, row.outputs = UNKNOWN, None
        outputs = self._context.read_text(ids, position, number, taps, pass_cancelled())
        row.provisional = []
        return outputs
