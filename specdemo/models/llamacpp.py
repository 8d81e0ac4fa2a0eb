"""GGUF models on llama.cpp as targets, through the ctypes interface of `llama-cpp-python`.

B rows, T tokens, N draft nodes, S = N + 1 slots, V vocabulary, H hidden size.

Row b of a batch is sequence b of one unified KV cache. In a tree every further leaf of a row gets a sequence of its
own that shares the row's history, and a node belongs to the sequences of all leaves below it. A pass is provisional:
its cells are removed by the next `forward`, or `commit` keeps those of the accepted path.
"""

import ctypes
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch
from torch import Tensor, nn

from specdemo.core.protocol import Capabilities, Forward, Target
from specdemo.core.tree import ABSENT
from specdemo.models.gguf_files import Header, all_parts, read_header
from specdemo.models.sources import LoadProgress, no_progress

PACKAGE = "llama_cpp"
INSTALL = "pip install llama-cpp-python gguf"
BATCH_TOKENS = 512  # tokens per call of llama.cpp; a longer prompt takes several
SPARE_CELLS = 256  # free cells of the KV cache where no reserve is given
ROUNDED = 256  # llama.cpp rounds the size of a context up to a multiple of this
_callbacks: list[Any] = []  # llama.cpp keeps pointers to them
CACHE_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}  # ggml.h
CACHE_BYTES = {"f32": 4, "f16": 2, "q8_0": 34 / 32}
SMALL_MODEL = 200_000_000  # weights; below, further threads cost more than they gain
MAX_CONTEXT = 1 << 20  # tokens, for a file that states no context length


@cache
def library() -> Any:
    """Return the module `llama_cpp`, with its log switched off. Raises ValueError if it is not installed."""
    try:
        llama, _ = import_module(PACKAGE), import_module("gguf")
    except ImportError:
        raise ValueError(f"GGUF models need llama.cpp; install it with: {INSTALL}") from None
    _callbacks.append(llama.llama_log_callback(lambda *_: None))
    llama.llama_log_set(_callbacks[0], ctypes.c_void_p(0))
    llama.llama_backend_init()
    return llama


@dataclass(frozen=True, slots=True)
class LlamaCppSettings:
    """Settings that all lanes of a comparison share.

    gpu_layers: layers on the GPU; -1: all that fit. threads: 0: one for small models, else one per core. context: most
    tokens of a lane; 0: as the file states. cache_type: of keys and values; auto: f32 for F32 files, else f16.
    """

    gpu_layers: int = -1
    threads: int = 0
    context: int = 0
    cache_type: str = "auto"
    flash_attention: bool = False

    def __post_init__(self) -> None:
        if self.cache_type == "q8_0" and not self.flash_attention:
            raise ValueError("cache type q8_0 needs flash attention; turn it on, or choose cache type f16")

    def resolved(self, path: Path) -> "LlamaCppSettings":
        """Return the settings with the automatic choices for a file."""
        header = read_header(path)
        threads = self.threads or (1 if header.weights < SMALL_MODEL else _cores())
        cache_type = cache_type_of(header, self.cache_type)
        length = header.number("context_length", MAX_CONTEXT)
        return replace(self, threads=threads, cache_type=cache_type, context=min(self.context or length, length))


def cache_type_of(header: Header, chosen: str) -> str:
    """Return the type of the KV cache: the chosen one, for `auto` f32 for F32 files, else f16."""
    if chosen != "auto":
        return chosen
    return "f32" if header.quantisation == "F32" else "f16"


def _cores() -> int:
    """Return the number of threads for large models: OMP_NUM_THREADS, or one per physical core."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else psutil.cpu_count(logical=False) or 1


class LlamaCppModel:
    """Weights of one GGUF model, shared by targets."""

    def __init__(
        self, path: str, settings: LlamaCppSettings | None = None, progress: LoadProgress = no_progress
    ) -> None:
        """path: of a split model the first part. progress: may raise to stop.

        Raises ValueError if llama.cpp cannot load the file, and for a model that cannot be a target.
        """
        llama = library()
        self.path, self.given = path, settings or LlamaCppSettings()
        self.settings = self.given.resolved(Path(path))
        self.handle, self.gpu_layers = self._load(progress)
        weakref.finalize(self, llama.llama_model_free, self.handle)
        if llama.llama_model_is_recurrent(self.handle) or llama.llama_model_is_hybrid(self.handle):
            raise ValueError(f"{path} has recurrent layers, which cannot take draft tokens back; choose another model")
        if llama.llama_model_has_encoder(self.handle) or not llama.llama_model_has_decoder(self.handle):
            raise ValueError(f"{path} does not continue text; choose a language model with a decoder only")
        self.vocab = llama.llama_model_get_vocab(self.handle)
        self.vocab_size = int(llama.llama_vocab_n_tokens(self.vocab))
        self.hidden_size = int(llama.llama_model_n_embd(self.handle))
        self.num_layers = int(llama.llama_model_n_layer(self.handle))
        self.max_length = self.settings.context
        self.weight_bytes = int(llama.llama_model_size(self.handle))
        self.token_bytes = read_header(Path(path)).cache_bytes(CACHE_BYTES[self.settings.cache_type])
        size = ctypes.create_string_buffer(256)
        llama.llama_model_desc(self.handle, size, 256)
        self.description = size.value.decode(errors="replace")  # such as "llama 8B Q4_K - Medium"

    def _load(self, progress: LoadProgress) -> tuple[Any, int]:
        """Return the handle, and the number of layers on the GPU. With too little memory there, use fewer layers."""
        header = read_header(Path(self.path))
        every = header.number("block_count") + 1  # with the output layer
        chosen = self.settings.gpu_layers
        if not library().llama_supports_gpu_offload():
            layers = [0]
        else:
            layers = [every * share // 4 for share in (4, 3, 2, 1, 0)] if chosen < 0 else [min(chosen, every)]
        for count in layers:
            handle = self._try(count, progress)
            if handle:
                return handle, count
        raise ValueError(f"llama.cpp cannot load {self.path}; update llama-cpp-python, or choose another GGUF file")

    def _try(self, gpu_layers: int, progress: LoadProgress) -> Any:
        """Return the handle; None if llama.cpp cannot load the file. Raises the errors of `progress`."""
        llama, stopped = library(), []

        def report(share: float, _: object) -> bool:
            try:
                progress(share, f"reading {Path(self.path).name}, {share:.0%}")
            except Exception as error:  # must not pass through llama.cpp
                stopped.append(error)
            return not stopped

        parameters = llama.llama_model_default_params()
        parameters.n_gpu_layers = gpu_layers
        callback = llama.llama_progress_callback(report)
        parameters.progress_callback = callback
        handle = llama.llama_model_load_from_file(self.path.encode(), parameters)
        if stopped:
            if handle:
                llama.llama_model_free(handle)
            raise stopped[0]
        return handle

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Return all tokens that end a text."""
        llama = library()
        return tuple(t for t in range(self.vocab_size) if llama.llama_vocab_is_eog(self.vocab, t))


@dataclass(slots=True)
class _Row:
    """One row: its committed length, and the last provisional pass."""

    length: int = 0
    tokens: list[int] = field(default_factory=list)  # provisional tokens by slot, ABSENT included
    leaf_of: list[int] = field(default_factory=list)  # a sequence that runs through each slot


class LlamaCppTarget(Target):
    """Target with one history on a shared GGUF model."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(
        self, model: LlamaCppModel, tokenizer: Any = None, name: str = "", notes: tuple[str, ...] = ()
    ) -> None:
        llama = library()
        self.weights, self.tokenizer, self.name, self.notes = model, tokenizer, name or model.path, notes
        self.vocab_size, self.hidden_size, self.num_layers = model.vocab_size, model.hidden_size, model.num_layers
        self.max_length, self.stop_token_ids = model.max_length, model.stop_token_ids
        self._sequences = int(llama.llama_max_parallel_sequences())
        self.capabilities = Capabilities(hidden_states=frozenset({-1}), batch=self._sequences // 4)
        self._rows: list[_Row] = []
        self._context: _Context | None = None

    @cached_property
    def embed(self) -> nn.Module:  # type: ignore[override]
        embedding: nn.Module = nn.Embedding.from_pretrained(_read_matrix(self.weights.path, "token_embd.weight"))
        return embedding

    @cached_property
    def lm_head(self) -> nn.Module:  # type: ignore[override]
        weight = _read_matrix(self.weights.path, "output.weight", "token_embd.weight")
        head: nn.Module = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias=False)
        head.weight = nn.Parameter(weight, requires_grad=False)
        return head

    @property
    def kernels(self) -> str:
        settings = self.weights.settings
        words = [f"{settings.cache_type} KV cache", *(["flash attention"] if settings.flash_attention else [])]
        words += [f"{self.weights.gpu_layers} layers on the GPU"] if self.weights.gpu_layers else []
        return ", ".join(["llama.cpp", self.weights.description, *words])

    @property
    def settings(self) -> LlamaCppSettings:
        """Return the settings that the model was loaded with, without the automatic choices for its file."""
        return self.weights.given

    @property
    def precision(self) -> str:
        return read_header(Path(self.weights.path)).quantisation or "unknown precision"

    @property
    def threads(self) -> int | None:
        return self.weights.settings.threads

    @property
    def wall_time(self) -> bool:
        return self.weights.gpu_layers > 0 or self.weights.settings.threads > 1

    @property
    def weight_bytes(self) -> int:
        return self.weights.weight_bytes

    @property
    def history_bytes(self) -> int:
        return self.capacity * self.weights.token_bytes

    @property
    def capacity(self) -> int:
        return self._context.cells if self._context else 0

    @property
    def length(self) -> list[int]:
        """Return the number of committed tokens per row."""
        return [row.length for row in self._rows]

    def start(self, tokens: Tensor, taps: tuple[int, ...] = (), reserve: int = 0) -> Forward:
        rows, columns = tokens.shape
        if columns > self.max_length:
            raise ValueError(f"{self.name} holds {self.max_length} tokens, not {columns}; shorten the prompt")
        self._reserve(rows, rows * (columns + (reserve or SPARE_CELLS)) + SPARE_CELLS)
        self._rows = [_Row() for _ in range(rows)]
        parts = [self._decode_text(row, ids, bool(taps)) for row, ids in enumerate(tokens.tolist())]
        logits = torch.stack([logits[-1:] for logits, _ in parts])
        hidden = {-1: torch.stack([states for _, states in parts if states is not None])} if taps else {}
        return Forward(logits, hidden)

    def _extend(self, ids: list[int]) -> Forward:
        """Read a text of a single row, of which the history has the start."""
        if len(ids) > self.max_length:
            raise ValueError(f"{self.name} holds {self.max_length} tokens, not {len(ids)}; shorten the prompt")
        logits, _ = self._decode_text(0, ids, False, self._rows[0].length)
        return Forward(logits[None])

    def _decode_text(self, row: int, ids: list[int], states: bool, start: int = 0) -> tuple[Tensor, Tensor | None]:
        """Read a text as the history of a row, which has its first `start` tokens already.

        Return the last logits [1, V] and the states [T, H], if requested.
        """
        context, hidden = self._open_context(), []
        for begin in range(start, len(ids), BATCH_TOKENS):
            part = ids[begin : begin + BATCH_TOKENS]
            last = begin + len(part) == len(ids)
            outputs = [states] * (len(part) - 1) + [states or last]
            entries = [
                _Entry(token, begin + i, (row,), output)
                for i, (token, output) in enumerate(zip(part, outputs, strict=True))
            ]
            logits, part_states = context.decode(entries, states)
            hidden.append(part_states)
        self._rows[row].length = len(ids)
        return logits[-1:], torch.cat([h for h in hidden if h is not None]) if states else None

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        self._drop_provisional()
        context, entries, places = self._open_context(), [], []
        next_sequence = len(self._rows)
        for number, (ids, row_parents) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
            row = self._rows[number]
            paths, next_sequence = _sequences_of(ids, row_parents, number, next_sequence)
            if next_sequence > self._sequences:
                raise ValueError(f"llama.cpp verifies {self._sequences} branches at once; draft a smaller tree")
            for sequence in {s for path in paths for s in path} - {number}:
                context.copy_sequence(number, sequence)
            depth = [0] * len(ids)
            for slot, parent in enumerate(row_parents, start=1):
                depth[slot] = depth[parent] + 1
            row.tokens, row.leaf_of = ids, [path[0] if path else number for path in paths]
            for slot, token in enumerate(ids):
                if token != ABSENT:
                    places.append((number, slot))
                    entries.append(_Entry(token, row.length + depth[slot], tuple(paths[slot]), True))
        self._branches = range(len(self._rows), next_sequence)
        logits, states = context.decode(entries, bool(taps))
        rows, slots = (torch.tensor(column) for column in zip(*places, strict=True))
        shape = tokens.shape
        whole = len(places) == tokens.numel()

        def arrange(values: Tensor) -> Tensor:
            if whole:
                return values.view(*shape, -1)
            arranged = values.new_zeros(*shape, values.shape[-1])
            arranged[rows, slots] = values
            return arranged

        return Forward(arrange(logits), {-1: arrange(states)} if states is not None else {})

    def commit(self, path: list[list[int]]) -> None:
        context = self._open_context()
        for number, slots in enumerate(path):
            row = self._rows[number]
            if slots:
                leaf, end = row.leaf_of[slots[-1]], row.length + len(slots)
                if leaf != number:  # the row continues with the branch of the accepted path
                    context.remove(number, row.length)
                    context.copy_sequence(leaf, number)
                context.remove(number, end)
                row.length = end
            elif row.tokens:
                context.remove(number, row.length)
            row.tokens = []
        self._drop_branches()
        if max(self.length) > self.max_length:
            raise ValueError(f"{self.name} holds {self.max_length} tokens, not {max(self.length)}; shorten the prompt")

    def crop(self, lengths: list[int]) -> None:
        context = self._open_context()
        self._drop_provisional()
        for number, length in enumerate(lengths):
            if length < self._rows[number].length:
                context.remove(number, length)
                self._rows[number].length = length

    def release(self) -> None:
        self._rows = []
        if self._context is not None:
            self._context.clear()

    def _drop_provisional(self) -> None:
        """Remove the cells of a pass that was not committed."""
        for number, row in enumerate(self._rows):
            if row.tokens:
                self._open_context().remove(number, row.length)
                row.tokens = []
        self._drop_branches()

    def _drop_branches(self) -> None:
        for sequence in self._branches:
            self._open_context().remove(sequence, 0)
        self._branches = range(0)

    _branches = range(0)  # sequences of further leaves of the last pass

    def _reserve(self, rows: int, cells: int) -> None:
        """Provide an empty context with room for `cells` tokens."""
        if self._context is None or self._context.cells < cells:
            self._context = None  # before the next one is allocated
            self._context = _Context(self.weights, -(-cells // ROUNDED) * ROUNDED, self._sequences)
        self._context.clear()

    def _open_context(self) -> "_Context":
        if self._context is None or not self._rows:
            raise ValueError("there is no history; call start() with the prompt first")
        return self._context


@dataclass(frozen=True, slots=True)
class _Entry:
    """One token of a batch."""

    token: int
    position: int
    sequences: tuple[int, ...]
    output: bool


class _Context:
    """KV cache and buffers of llama.cpp for one history."""

    def __init__(self, model: LlamaCppModel, cells: int, sequences: int) -> None:
        self._llama, self._model, self.cells = library(), model, cells
        llama, settings = self._llama, model.settings
        parameters = llama.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = cells, BATCH_TOKENS, BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = settings.threads
        parameters.n_seq_max, parameters.kv_unified = sequences, True
        parameters.type_k = parameters.type_v = CACHE_TYPES[settings.cache_type]
        parameters.flash_attn_type = int(settings.flash_attention)
        self._handle = llama.llama_init_from_model(model.handle, parameters)
        if not self._handle:
            raise ValueError(f"llama.cpp cannot allocate a context of {cells} tokens; use a shorter context")
        self._memory = llama.llama_get_memory(self._handle)
        self._batch = llama.llama_batch_init(BATCH_TOKENS, 0, sequences)
        weakref.finalize(self, _free, llama, self._handle, self._batch, model)

    def decode(self, entries: Sequence[_Entry], states: bool) -> tuple[Tensor, Tensor | None]:
        """Run the tokens; return logits [outputs, V] and, if requested, the input of lm_head [outputs, H]."""
        llama, logits, hidden = self._llama, [], []
        llama.llama_set_embeddings(self._handle, states)
        for part in _chunks(entries):
            self._fill(part)
            status = llama.llama_decode(self._handle, self._batch)
            if status:
                raise ValueError(f"llama.cpp cannot decode (status {status}); use a shorter context or a smaller draft")
            outputs = sum(entry.output for entry in part)
            if not outputs:
                continue
            logits.append(_copied(llama.llama_get_logits(self._handle), outputs, self._model.vocab_size))
            if states:
                hidden.append(_copied(llama.llama_get_embeddings(self._handle), outputs, self._model.hidden_size))
        if not logits:
            return torch.empty(0, self._model.vocab_size), None
        return torch.cat(logits) if len(logits) > 1 else logits[0], torch.cat(hidden) if states else None

    def _fill(self, entries: Sequence[_Entry]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, entry in enumerate(entries):
            batch.token[index], batch.pos[index] = entry.token, entry.position
            batch.n_seq_id[index] = len(entry.sequences)
            for number, sequence in enumerate(entry.sequences):
                batch.seq_id[index][number] = sequence
            batch.logits[index] = entry.output

    def remove(self, sequence: int, begin: int) -> None:
        """Remove the cells of a sequence from position `begin` on."""
        self._llama.llama_memory_seq_rm(self._memory, sequence, begin, -1)

    def copy_sequence(self, source: int, destination: int) -> None:
        """Let `destination` share all cells of `source`."""
        self._llama.llama_memory_seq_cp(self._memory, source, destination, -1, -1)

    def clear(self) -> None:
        """Remove all cells."""
        self._llama.llama_memory_clear(self._memory, False)


def _free(llama: Any, handle: Any, batch: Any, model: LlamaCppModel) -> None:
    """Free a context before its model, which the argument keeps alive until here."""
    llama.llama_batch_free(batch)
    llama.llama_free(handle)


def _read_matrix(path: str, *names: str) -> Tensor:
    """Return the first of the named matrices that the model has, in fp32."""
    readers = [import_module("gguf").GGUFReader(part) for part in all_parts(Path(path))]
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    found = next((tensors[name] for name in names if name in tensors), None)
    if found is None:
        raise ValueError(f"{path} has no {names[0]}; choose another GGUF file")
    values = import_module("gguf.quants").dequantize(found.data, found.tensor_type)
    return torch.from_numpy(numpy.array(values, dtype=numpy.float32))


def _chunks(entries: Sequence[_Entry]) -> Iterator[Sequence[_Entry]]:
    for begin in range(0, len(entries), BATCH_TOKENS):
        yield entries[begin : begin + BATCH_TOKENS]


def _copied(pointer: Any, rows: int, columns: int) -> Tensor:
    """Copy a matrix that the next call of llama.cpp overwrites."""
    return torch.from_numpy(numpy.ctypeslib.as_array(pointer, shape=(rows, columns)).copy())


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
