"""GGUF models on llama.cpp as targets.

B rows, T tokens, N draft nodes, S = N + 1 slots, V vocabulary, H hidden size.

Row b of a batch is sequence b of one unified KV cache. In a tree every further leaf of a row gets a sequence of its
own that shares the row's history, and a node belongs to the sequences of all leaves below it. A pass is provisional:
its cells are removed by the next `forward`, or `commit` keeps those of the accepted path, and keeps their order: the
text is then that of plain decoding.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from specdemo.core.protocol import NO_HISTORY, Capabilities, Forward, Target, TargetFacts
from specdemo.core.tree import ABSENT, is_chain
from specdemo.models.errors import pass_cancelled
from specdemo.models.gguf_files import ROPE_BASE
from specdemo.models.gguf_header import EMBEDDINGS, OUTPUT, read_header
from specdemo.models.llamacpp import LlamaCppModel, LlamaCppSettings, library, part_with, read_tensor
from specdemo.models.llamacpp_context import Inputs, LlamaCppContext, Outputs
from specdemo.models.llamacpp_layers import Values
from specdemo.models.llamacpp_recurrent import RecurrentHistory

SPARE_CELLS = 256  # free cells of the KV cache where no reserve is given
RMS_EPSILON = 1e-5  # of files without one
RECURRENT_ROWS = 16  # most rows with recurrent layers, whose states take memory
ROUNDED = 256  # llama.cpp rounds the size of a context up to a multiple of this


@dataclass(slots=True)
class _Row:
    """One row: its committed length, and the last provisional pass."""

    length: int = 0
    tokens: list[int] = field(default_factory=list)  # provisional tokens by slot, ABSENT included
    leaf_of: list[int] = field(default_factory=list)  # a sequence that runs through each slot; empty: the row's own


class LlamaCppTarget(Target):
    """Target with one history on a shared GGUF model."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(
        self, model: LlamaCppModel, tokenizer: Any = None, name: str = "", notes: tuple[str, ...] = ()
    ) -> None:
        self.weights, self.tokenizer, self.name, self.notes = model, tokenizer, name or model.path, notes
        self.vocab_size, self.hidden_size, self.num_layers = model.vocab_size, model.hidden_size, model.num_layers
        self.max_length, self.stop_token_ids = model.max_length, model.stop_token_ids
        self._sequences = int(library().llama_max_parallel_sequences()) - 1  # for branches; the last one is spare
        batch = RECURRENT_ROWS if model.recurrent else (self._sequences + 1) // 4
        self.capabilities = Capabilities(trees=not model.recurrent, hidden_states=model.taps, batch=batch)
        self._rows: list[_Row] = []
        self._branches = range(0)  # sequences of further leaves of the last pass
        self._context: LlamaCppContext | None = None
        self._recurrent: RecurrentHistory | None = None  # of the rows of a model with recurrent layers

    @cached_property
    def embed(self) -> nn.Module:  # type: ignore[override]
        weight = self._output if self._is_tied else read_tensor(self.weights.path, EMBEDDINGS)
        scale = self._embedding_scale()
        embedding: nn.Module = nn.Embedding.from_pretrained(weight if scale == 1.0 else weight * scale)
        return embedding

    @property
    def _is_tied(self) -> bool:
        return part_with(self.weights.path, OUTPUT) is None

    @cached_property
    def _output(self) -> Tensor:
        return read_tensor(self.weights.path, EMBEDDINGS if self._is_tied else OUTPUT)

    def _embedding_scale(self) -> float:
        """Return the factor of the embeddings that the first layer reads: Gemma's is not in the file."""
        header = read_header(Path(self.weights.path))
        fallback = self.hidden_size**0.5 if header.architecture.startswith("gemma") else 1.0
        return float(header.metadata.get(f"{header.architecture}.embedding_scale", fallback))

    @cached_property
    def lm_head(self) -> nn.Module:  # type: ignore[override]
        head: nn.Module = nn.utils.skip_init(nn.Linear, *reversed(self._output.shape), bias=False)
        head.weight = nn.Parameter(self._output, requires_grad=False)
        return head

    @property
    def layer_config(self) -> dict[str, Any]:  # type: ignore[override]
        header = read_header(Path(self.weights.path))
        epsilon = header.metadata.get(f"{header.architecture}.attention.layer_norm_rms_epsilon", RMS_EPSILON)
        rope = {
            "rope_type": "default",
            "rope_theta": float(header.metadata.get(f"{header.architecture}.rope.freq_base", ROPE_BASE)),
        }
        return {**header.layer_sizes, "rms_norm_eps": float(epsilon), "rope_parameters": rope}

    @property
    def facts(self) -> TargetFacts:
        model, settings = self.weights, self.weights.settings
        words = ["llama.cpp", model.description, f"{settings.cache_type} KV cache"]
        words += ["flash attention"] if settings.flash_attention else []
        words += [f"{model.gpu_layers} layers on the GPU"] if model.gpu_layers else []
        return TargetFacts(
            precision=read_header(Path(model.path)).quantisation or "unknown precision",
            kernels=", ".join(words),
            pass_bytes=model.weight_bytes,
            wall_time=model.gpu_layers > 0 or model.threads > 1,
        )

    @property
    def settings(self) -> LlamaCppSettings:
        """Return the settings that the model was loaded with, without the automatic choices for its file."""
        return self.weights.given

    @property
    def threads(self) -> int:
        return self.weights.used_threads

    @threads.setter
    def threads(self, count: int) -> None:
        self.weights.threads = count

    @property
    def weight_bytes(self) -> int:
        return self.weights.weight_bytes

    @property
    def pass_ms(self) -> dict[int, float]:
        return self.weights.pass_ms

    @property
    def history_bytes(self) -> int:
        weights, copies = self.weights, self._recurrent.bytes if self._recurrent else 0
        states = self._context.sequences * (1 + weights.rollback) * weights.state_bytes if self._context else 0
        return self.capacity * weights.token_bytes + copies + states

    @property
    def capacity(self) -> int:
        return self._context.cells if self._context else 0

    @property
    def length(self) -> list[int]:
        """Return the number of committed tokens per row."""
        return [row.length for row in self._rows]

    def start(self, tokens: Tensor, taps: tuple[int, ...] = (), reserve: int = 0) -> Forward:
        """Raises ValueError if the tokens exceed the model's context, and Cancelled if the generation is stopped."""
        rows, columns = tokens.shape
        self.check_length(columns)
        self._reserve(rows * (columns + (reserve or SPARE_CELLS)) + SPARE_CELLS, rows)
        self._rows = [_Row() for _ in range(rows)]
        if self.weights.recurrent:
            self._recurrent = RecurrentHistory(self._open_context(), rows, self.weights.rollback)
        parts = [self._read_text(row, ids, taps) for row, ids in enumerate(tokens.tolist())]
        logits = torch.from_numpy(numpy.stack([logits for logits, _ in parts]))
        return Forward(logits, {tap: torch.from_numpy(numpy.stack([of[tap] for _, of in parts])) for tap in taps})

    def extend(self, ids: list[int]) -> Forward:
        """Read a text of a single row, of which the history has the start."""
        self.check_length(len(ids))
        logits, _ = self._read_text(0, ids, ())
        return Forward(torch.from_numpy(logits[None]))

    def _read_text(self, row: int, ids: list[int], taps: tuple[int, ...]) -> Outputs:
        """Read a text as the history of a row, which may have its start already.

        Return the last logits [1, V] and the states of the taps [T, H] of the tokens that were read.
        """
        start = self._rows[row].length
        if self._recurrent:
            outputs = self._recurrent.read_text(row, ids, taps)
        else:
            outputs = self._open_context().read_text(ids[start:], start, row, taps, pass_cancelled())
        self._rows[row].length = len(ids)
        return outputs

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        """Raises ValueError for trees with too many leaves."""
        self._drop_provisional()
        if self._recurrent:
            for row, ids in zip(self._rows, tokens.tolist(), strict=True):
                row.tokens = ids
            logits, states = self._recurrent.forward(tokens, taps)
        else:
            inputs = self._chain_inputs(tokens) if is_chain(parents) else self._tree_inputs(tokens, parents)
            logits, states = self._open_context().decode(inputs, taps)
        return _Output(self._open_context().until_next_pass(logits), states, tokens)

    def draft_greedy(self, tokens: list[int], depth: int, vocab_size: int) -> tuple[list[int], list[float]] | None:
        if len(self._rows) != 1 or self._recurrent:
            return None
        self._drop_provisional()
        context, (row,) = self._open_context(), self._rows
        drafted: list[int] = []
        probs: list[float] = []
        unread = tokens
        for _ in range(depth):
            logits = context.append(unread, row.length, 0)[0, :vocab_size]
            row.length += len(unread)
            best = int(logits.argmax())
            probs.append(1.0 / float(numpy.exp(logits - logits[best]).sum()))
            drafted.append(best)
            unread = [best]
        self.check_length(row.length)
        return drafted, probs

    def _chain_inputs(self, tokens: Tensor) -> Inputs:
        """Return the present tokens [B, S] of chains, each in the sequence of its row."""
        present: list[int] = []
        positions: list[int] = []
        sequences: list[tuple[int, ...]] = []
        for number, (row, ids) in enumerate(zip(self._rows, tokens.tolist(), strict=True)):
            row.tokens, row.leaf_of = ids, []
            count = ids.index(ABSENT) if ABSENT in ids else len(ids)
            present += ids[:count]
            positions += range(row.length, row.length + count)
            sequences += [(number,)] * count
        return Inputs(present, positions, sequences)

    def _tree_inputs(self, tokens: Tensor, parents: Tensor) -> Inputs:
        """Return the present tokens [B, S] of trees, in sequences that share the history of their row."""
        entries: list[tuple[int, int, list[int]]] = []  # token, position and sequences
        free = len(self._rows)
        for number, (ids, row_parents) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
            row, first = self._rows[number], free
            paths, free = _sequences_of(ids, row_parents, number, first)
            self._open_branches(number, range(first, free))
            row.tokens, row.leaf_of = ids, [path[0] if path else number for path in paths]
            depths = [0]
            for parent in row_parents:
                depths.append(depths[parent] + 1)
            entries += [(t, row.length + d, path) for t, d, path in zip(ids, depths, paths, strict=True) if t != ABSENT]
        return Inputs(*zip(*entries, strict=True))

    def _open_branches(self, row: int, branches: range) -> None:
        """Let further sequences share the history of a row. Raises ValueError if llama.cpp has too few."""
        if branches.stop > self._sequences:
            raise ValueError(f"llama.cpp verifies {self._sequences} branches at once; draft a smaller tree")
        self._branches = range(len(self._rows), branches.stop)
        for sequence in branches:
            self._open_context().copy_sequence(row, sequence)

    def commit(self, path: list[list[int]]) -> None:
        """Raises ValueError if the history would exceed the model's context."""
        context = self._open_context()
        if self._recurrent:
            self._recurrent.commit(path)
        tails: list[tuple[int, int]] = []  # accepted tokens in cells behind freed ones
        gap = False
        for number, (row, slots) in enumerate(zip(self._rows, path, strict=True)):
            present = [slot for slot, token in enumerate(row.tokens) if token != ABSENT]
            in_order = 0 if gap else sum(takewhile(bool, map(eq, slots, present)))
            if in_order < len(slots) and not self._recurrent:
                tails.append((number, row.length + in_order))
            gap |= in_order < len(present)
            leaf = row.leaf_of[slots[-1]] if row.leaf_of and slots else number
            if leaf != number:  # the row continues with the branch of the accepted path
                context.remove(number, row.length)
                context.copy_sequence(leaf, number)
            row.length += len(slots)
            if len(slots) < len(row.tokens) and not self._recurrent:
                context.remove(number, row.length)
            row.tokens = []
        self._drop_branches()
        if tails:
            context.move_down(tails, self._sequences)
        self.check_length(max(self.length))

    def crop(self, lengths: list[int]) -> None:
        context = self._open_context()
        self._drop_provisional()
        if self._recurrent:
            self._recurrent.crop(lengths)
        for number, (row, length) in enumerate(zip(self._rows, lengths, strict=True)):
            if length < row.length:
                if not self._recurrent:
                    context.remove(number, length)
                row.length = length

    def max_crop(self, length: int) -> int:
        """Return the largest number of tokens, at most `length`, that `crop` shortens a single row to at no cost."""
        return self._recurrent.max_crop(length) if self._recurrent else length

    def release(self) -> None:
        self._rows, self._recurrent = [], None
        if self._context is not None:
            self._context.clear()

    def _drop_provisional(self) -> None:
        for number, row in enumerate(self._rows):
            if row.tokens and not self._recurrent:  # which may use the pass again
                self._open_context().remove(number, row.length)
            row.tokens = []
        self._drop_branches()

    def _drop_branches(self) -> None:
        if self._branches:
            for sequence in self._branches:
                self._open_context().remove(sequence, 0)
            self._branches = range(0)

    def _reserve(self, cells: int, rows: int) -> None:
        """Provide an empty context with room for `cells` tokens; with recurrent layers for as many sequences as rows,
        because each has its own states."""
        sequences = rows if self.weights.recurrent else self._sequences + 1
        if self._context is None or self._context.cells < cells or self._context.sequences != sequences:
            self._context = self._recurrent = None  # before the next one is allocated
            self._context = LlamaCppContext(self.weights, -(-cells // ROUNDED) * ROUNDED, sequences)
        self._context.clear()

    def _open_context(self) -> LlamaCppContext:
        if self._context is None or not self._rows:
            raise ValueError(NO_HISTORY)
        return self._context


class _Output(Forward):
    """Output of a pass, of which plain decoding needs the argmax only. The logits are copied from llama.cpp's memory
    when they are first read, which must be before the next pass."""

    __slots__ = ("_copy", "_read", "_tokens")
    _copy: Tensor | None
    _read: Callable[[], Values]
    _tokens: Tensor

    def __init__(self, read: Callable[[], Values], states: dict[int, Values], tokens: Tensor) -> None:
        """read: returns the logits [T, V] of the present tokens [B, S] in llama.cpp's memory. states: [T, H] by tap."""
        assign = object.__setattr__  # the class is frozen
        assign(self, "hidden", {tap: _by_slot(of, tokens) for tap, of in states.items()})
        assign(self, "experts", None)
        assign(self, "_read", read)
        assign(self, "_tokens", tokens)
        assign(self, "_copy", None)

    @property
    def logits(self) -> Tensor:
        copy = self._copy
        if copy is None:
            copy = _by_slot(self._read().copy(), self._tokens)
            object.__setattr__(self, "_copy", copy)
        return copy

    def argmax(self) -> Tensor:
        best, shape = self._read().argmax(-1), self._tokens.shape
        return torch.from_numpy(best.reshape(shape)) if len(best) == shape.numel() else super().argmax()


def _by_slot(values: Values, tokens: Tensor) -> Tensor:
    """Arrange the values [T, X] of the present tokens as [B, S, X], with zeros for absent ones."""
    rows, width = tokens.shape
    if len(values) == rows * width:
        return torch.from_numpy(values.reshape(rows, width, -1))
    arranged = torch.zeros(rows, width, values.shape[-1])
    arranged[tokens != ABSENT] = torch.from_numpy(values)
    return arranged


def _sequences_of(ids: list[int], parents: list[int], row: int, free: int) -> tuple[list[list[int]], int]:
    """Return the sequences that run through each slot, one per leaf, and the next free sequence.

    The first leaf uses the sequence of the row, the others take free ones. Absent slots have none.
    """
    present = [token != ABSENT for token in ids]
    has_child = [False] * len(ids)
    for slot, parent in enumerate(parents, start=1):
        has_child[parent] |= present[slot]
    leaves = [slot for slot in range(len(ids)) if present[slot] and not has_child[slot]]
    paths: list[list[int]] = [[] for _ in ids]
    for number, leaf in enumerate(leaves):
        slot = leaf
        while True:
            paths[slot].append(free + number - 1 if number else row)
            if not slot:
                break
            slot = parents[slot - 1]
    return paths, free + max(len(leaves) - 1, 0)
