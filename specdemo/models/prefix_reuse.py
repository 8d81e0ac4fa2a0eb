"""Target that keeps the KV cache of its last text, so that a text with the same prefix, such as the next turn of a
chat, is read from the first different token.

T tokens of a text, S slots, A accepted slots, H hidden size.
"""

from contextlib import suppress
from itertools import takewhile
from operator import eq
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdemo.core.protocol import Forward
from specdemo.kv.graphs import Tensors
from specdemo.models.llamacpp_target import SPARE_CELLS, LlamaCppTarget
from specdemo.models.load import LoadedModel
from specdemo.models.shared import DraftFunction, DraftPlan
from specdemo.models.target import HFTarget


class TextState(NamedTuple):
    """Committed tokens and their hidden states."""

    tokens: Tensor  # [1, T]
    hidden: dict[int, Tensor]  # tap -> [1, T, H]

    def cut(self, length: int) -> "TextState":
        """Return the first `length` tokens."""
        return TextState(self.tokens[:, :length], {tap: h[:, :length] for tap, h in self.hidden.items()})


class PrefixCachedTarget(HFTarget):
    """Target whose `release` keeps the history of a single row, and whose `start` reuses the common prefix.

    Hidden states are kept for the taps of the last text. A text with other taps is read from its start, and so is one
    whose prefix the history cannot be cropped to (`KVHistory.max_crop`).
    """

    _cached_text: TextState | None = None  # set between `release` and `start`
    # one per commit, after the length before it; set between `start` and `release`, for a single row
    _segments: list[tuple[int, TextState]] | None = None
    _last_forward: TextState | None = None  # all slots, [1, S]

    @property
    def history_bytes(self) -> int:
        """Return the size of the cache and of the stored hidden states."""
        cached = self._cached_text or (self._segments[0][1] if self._segments else None)
        if cached is None:
            return super().history_bytes
        return super().history_bytes + self.length[0] * sum(h[:, :1].nbytes for h in cached.hidden.values())

    @torch.no_grad()
    def start(self, tokens: Tensor, taps: tuple[int, ...] = (), reserve: int = 0) -> Forward:
        self.release()
        text, self._cached_text = self._cached_text, None  # if reading fails, there is nothing to continue
        self.cached_tokens = self._shared_prefix(text, tokens, taps)
        if text is None or not self.cached_tokens:
            forward = super().start(tokens, taps, reserve)
        else:
            forward = self._extend(text, tokens, taps, reserve)
        self._segments = [(0, TextState(tokens, dict(forward.hidden)))] if len(tokens) == 1 else None
        return forward

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        forward = super().forward(tokens, parents, taps)
        self._last_forward = TextState(tokens, dict(forward.hidden))
        return forward

    def commit(self, path: list[list[int]]) -> None:
        before = self.length
        super().commit(path)
        if self._segments is not None and self._last_forward is not None:
            tokens, hidden = self._last_forward
            (slots,) = path
            if len(slots) < tokens.shape[1]:
                tokens, hidden = tokens[:, slots], {tap: h[:, slots] for tap, h in hidden.items()}
            self._segments.append((before[0], TextState(tokens, hidden)))

    def draft(
        self, tokens: Tensor, counts: list[int], write: DraftFunction, extra: Tensors, plan: DraftPlan
    ) -> Tensors | None:
        before = self.length
        outputs = super().draft(tokens, counts, write, extra, plan)
        if outputs is not None and plan.commits and self._segments is not None:
            read = torch.cat([tokens[:, : counts[0]], outputs[0][:, : plan.depth - 1]], 1)
            self._segments.append((before[0], TextState(read, {})))
        return outputs

    def release(self) -> None:
        """Keep the history of a single row for the next `start`; free it otherwise."""
        segments, self._segments, self._last_forward = self._segments, None, None
        if segments is not None:
            self._require_history().drop_snapshots(self.cached_tokens)
            with suppress(torch.OutOfMemoryError):  # a finished text must not fail because it cannot be cached
                self._cached_text = _joined(segments, self.length[0])
        if self._cached_text is None:
            super().release()

    def discard_turn(self) -> None:
        """Drop what was read and generated since the last `start`."""
        self.release()
        text, self._cached_text = self._cached_text, None
        if text is not None and self.cached_tokens:
            self.crop([self.cached_tokens])
            self._cached_text = text.cut(self.cached_tokens)
        else:
            self.forget()

    def forget(self) -> None:
        """Free the history and all cached tokens."""
        self._segments = self._last_forward = self._cached_text = None
        self.cached_tokens = 0
        self._store.release_graphs()
        super().release()

    def _shared_prefix(self, text: TextState | None, tokens: Tensor, taps: tuple[int, ...]) -> int:
        """Return the number of tokens to reuse. The last token is always read, for its logits."""
        if text is None or len(tokens) != 1 or not set(taps) <= text.hidden.keys():
            return 0
        width = min(text.tokens.shape[1], tokens.shape[1] - 1)
        same = (text.tokens[0, :width] == tokens[0, :width]).int().cumprod(0)
        return self._require_history().max_crop(int(same.sum()))

    def _extend(self, text: TextState, tokens: Tensor, taps: tuple[int, ...], reserve: int) -> Forward:
        self.check_length(tokens.shape[1])
        self.crop([self.cached_tokens])
        forward = self._require_history().extend(tokens[:, self.cached_tokens :], taps, reserve)
        cached_hidden = text.cut(self.cached_tokens).hidden
        return Forward(forward.logits, {tap: torch.cat([cached_hidden[tap], forward.hidden[tap]], 1) for tap in taps})


class PrefixCachedLlamaCpp(LlamaCppTarget):
    """GGUF target whose `release` keeps the history of a single row, and whose `start` reuses the common prefix.

    A text that is read with hidden states is read from its start.
    """

    _text: list[int] | None = None  # committed tokens of a single row

    def start(self, tokens: Tensor, taps: tuple[int, ...] = (), reserve: int = 0) -> Forward:
        self.release()
        ids = tokens[0].tolist() if len(tokens) == 1 else []
        # the last token is always read, for its logits
        self.cached_tokens = 0 if taps or not self._text else sum(takewhile(bool, map(eq, self._text, ids[:-1])))
        if self.capacity < len(ids) + max(reserve, SPARE_CELLS):
            self.cached_tokens = 0
        self.cached_tokens = self.max_crop(self.cached_tokens) if self.cached_tokens else 0
        self._text, text = None, self._text  # if reading fails, there is nothing to continue
        if text and self.cached_tokens:
            self.crop([self.cached_tokens])
            forward = self.extend(ids)
        else:
            forward = super().start(tokens, taps, reserve)
        self._text = ids or None
        return forward

    def commit(self, path: list[list[int]]) -> None:
        accepted = [self._rows[0].tokens[slot] for slot in path[0]] if self._text is not None else []
        super().commit(path)
        if self._text is not None:
            self._text += accepted

    def draft_greedy(self, tokens: list[int], depth: int, vocab_size: int) -> tuple[list[int], list[float]] | None:
        drafted = super().draft_greedy(tokens, depth, vocab_size)
        if drafted is not None and self._text is not None:
            self._text += [*tokens, *drafted[0][:-1]]
        return drafted

    def crop(self, lengths: list[int]) -> None:
        super().crop(lengths)
        if self._text is not None:
            self._text = self._text[: lengths[0]]

    def release(self) -> None:
        """Keep the history of a single row for the next `start`; free it otherwise."""
        if self._text is None:
            super().release()
        else:
            self._drop_provisional()

    def discard_turn(self) -> None:
        """Drop what was read and generated since the last `start`."""
        if self._text and self.cached_tokens:
            self.crop([self.cached_tokens])
        else:
            self.forget()

    def forget(self) -> None:
        """Free the history and all cached tokens."""
        self._text, self.cached_tokens = None, 0
        super().release()


def with_prefix_cache(model: object) -> Any:
    """Return a loaded model with a prefix cache; heads are returned unchanged."""
    if isinstance(model, LoadedModel | LlamaCppTarget) and model.weights is not None:
        return PrefixCachedLlamaCpp(model.weights, model.tokenizer, model.name, model.notes)
    if not isinstance(model, HFTarget | LoadedModel):
        return model
    return PrefixCachedTarget(model.model, model.tokenizer, model.name, notes=model.notes)


def prefix_cached(*models: object) -> list[PrefixCachedTarget | PrefixCachedLlamaCpp]:
    """Return those of the models that have a prefix cache."""
    return [model for model in models if isinstance(model, PrefixCachedTarget | PrefixCachedLlamaCpp)]


def _joined(segments: list[tuple[int, TextState]], length: int) -> TextState:
    """Return the text of `length` tokens, with the hidden states that all of its segments have. Where the text was
    cropped, later segments replace earlier ones.
    """
    parts: list[TextState] = []
    for start, segment in reversed(segments):
        if start < length or not start:
            parts.insert(0, segment.cut(length - start))
            length = start
    taps = set(parts[0].hidden).intersection(*(part.hidden for part in parts))
    tokens = torch.cat([part.tokens for part in parts], 1)
    return TextState(tokens, {tap: torch.cat([part.hidden[tap] for part in parts], 1) for tap in taps})
