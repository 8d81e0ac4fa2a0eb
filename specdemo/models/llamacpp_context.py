"""A context of llama.cpp: the KV cache of one history, with its input and output buffers.

T tokens of a call, O outputs (tokens with logits), V vocabulary, H hidden size.
"""

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from specdemo.core.signals import defer_signals
from specdemo.models.errors import Cancelled
from specdemo.models.llamacpp import BATCH_TOKENS, LlamaCppModel, library, open_context
from specdemo.models.llamacpp_layers import Handle, Llama, Values, layer_functions, state_functions

ABORTED = 2  # status of llama_decode
ALL_POSITIONS = -1
OUTPUT_TAP = -1  # the input of lm_head; tap n is the input of layer n, see `core.protocol.Forward`
Taps = tuple[int, ...]
RECURRENT_ONLY = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
State = ctypes.Array[ctypes.c_uint8]  # a sequence as llama.cpp stores it
Outputs = tuple[Values, dict[int, Values]]  # logits, and states by tap


class Inputs(NamedTuple):
    """Input of a forward pass, one entry per token."""

    tokens: Sequence[int]
    positions: Sequence[int]
    sequences: Sequence[Sequence[int]]  # all sequences that a token belongs to

    @staticmethod
    def of_text(tokens: Sequence[int], position: int, sequence: int) -> "Inputs":
        """Return consecutive tokens of one sequence, from a position on."""
        return Inputs(tokens, range(position, position + len(tokens)), [(sequence,)] * len(tokens))

    def part(self, begin: int) -> "Inputs":
        """Return at most BATCH_TOKENS entries from `begin` on."""
        part = slice(begin, begin + BATCH_TOKENS)
        return Inputs(self.tokens[part], self.positions[part], self.sequences[part])


class _InputBuffers:
    """Memory of a `llama_batch`. ctypes writes a few numbers in a fifth of numpy's time, right after a pass."""

    def __init__(self, llama: Llama, sequences: int, width: int = 0) -> None:
        """width: of states that come with the tokens; 0: none."""
        numbers = ctypes.c_int32 * BATCH_TOKENS
        self._tokens, self._positions, self._sequence_counts = numbers(), numbers(), numbers()
        self._sequences = (ctypes.c_int32 * sequences * BATCH_TOKENS)()
        self._outputs = (ctypes.c_int8 * BATCH_TOKENS)()
        self.states = numpy.zeros((BATCH_TOKENS, width), numpy.float32)
        begin, row = ctypes.addressof(self._sequences), ctypes.sizeof(self._sequences[0])
        # llama.cpp reads one pointer per token
        self._sequence_rows = (ctypes.c_void_p * BATCH_TOKENS)(*range(begin, begin + BATCH_TOKENS * row, row))
        self.batch = llama.llama_batch()
        arrays: list[tuple[str, Any]] = [
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._sequence_counts),
            ("seq_id", self._sequence_rows),
            ("logits", self._outputs),
            *([("embd", self.states.ctypes.data)] if width else []),
        ]
        for name, values in arrays:
            setattr(self.batch, name, ctypes.cast(values, type(getattr(self.batch, name))))

    def write(self, inputs: Inputs, every_output: bool) -> int:
        """Write at most BATCH_TOKENS entries; return the number of outputs, of all tokens or of the last one."""
        count = len(inputs.tokens)
        self.batch.n_tokens = count
        self._tokens[:count] = [*inputs.tokens]
        self._positions[:count] = [*inputs.positions]
        for index, sequences in enumerate(inputs.sequences):
            self._sequence_counts[index] = len(sequences)
            self._sequences[index][: len(sequences)] = [*sequences]
        self._outputs[:count] = [*[every_output] * (count - 1), True]
        return count if every_output else 1


class OutputBuffer:
    """Matrix that llama.cpp writes at an address that may change from call to call."""

    def __init__(self, columns: int) -> None:
        self._columns, self._address = columns, 0
        self._values: Values = numpy.empty((0, columns), numpy.float32)

    def read(self, pointer: Handle, rows: int) -> Values:
        """Return a copy of the first rows, because the next pass overwrites them."""
        return self.view(pointer, rows).copy()

    def view(self, pointer: Handle, rows: int) -> Values:
        """Return the first rows, which are valid until the next pass of the context, or until it is freed."""
        address = ctypes.addressof(pointer.contents)
        if address != self._address:  # of the view, only rows that llama.cpp has written may be read
            memory = (ctypes.c_float * (BATCH_TOKENS * self._columns)).from_address(address)
            self._values = numpy.ctypeslib.as_array(memory).reshape(BATCH_TOKENS, self._columns)
            self._address = address
        return self._values[:rows]


class LlamaCppContext:
    """KV cache of llama.cpp for one history, with its input and output buffers."""

    def __init__(self, model: LlamaCppModel, cells: int, sequences: int, layer: Any = None) -> None:
        """cells: size of the KV cache in tokens. sequences: most sequences that share it, each with its own recurrent
        state. layer: a prediction layer with weights of its own or the model's; None: the model."""
        llama = self._llama = library()
        self._model, self.cells, self.sequences = model, cells, sequences
        rollback = 0 if layer else model.rollback
        handle = (layer or model).handle
        self._handle, _ = open_context(handle, model.settings, cells, sequences, rollback, layer is not None)
        if not self._handle:
            raise ValueError(f"llama.cpp cannot allocate a context of {cells} tokens; use a shorter context")
        self._memory_owner = weakref.finalize(self, _free, llama, self._handle, layer or model)
        self._memory = llama.llama_get_memory(self._handle)
        self._inputs = _InputBuffers(llama, sequences, model.hidden_size if layer else 0)
        self._logits = OutputBuffer(model.vocab_size)
        self._states = defaultdict[int, OutputBuffer](lambda: OutputBuffer(model.hidden_size))  # tap -> its states
        self._layers = layer_functions(llama)
        self._next: Any = state_functions(llama)
        self._taps: frozenset[int] = frozenset()  # that llama.cpp returns at present
        self._threads = 0
        self._passes = 0  # so far

    def decode(self, inputs: Inputs, taps: Taps) -> Outputs:
        """Run the tokens; return the logits [T, V] and the states of the taps [T, H] of each.

        The logits are valid until the next pass; see `until_next_pass`.
        """
        if len(inputs.tokens) <= BATCH_TOKENS:
            return self._decode(inputs, taps)
        batches = (inputs.part(begin) for begin in range(0, len(inputs.tokens), BATCH_TOKENS))
        parts = [(logits.copy(), states) for logits, states in (self._decode(batch, taps) for batch in batches)]
        return numpy.concatenate([logits for logits, _ in parts]), _joined(parts, taps)

    def until_next_pass(self, logits: Values) -> Callable[[], Values]:
        """Return a function that returns the logits of the last pass, and raises RuntimeError after another pass."""
        number = self._passes

        def read() -> Values:
            if self._passes != number:
                raise RuntimeError("another pass has replaced these logits; read them before it")
            return logits

        return read

    def read_text(
        self, tokens: Sequence[int], position: int, sequence: int, taps: Taps, cancelled: Callable[[], bool]
    ) -> Outputs:
        """Run consecutive tokens of a sequence; return the last logits [1, V] and the states of the taps [T, H].

        Raises `Cancelled` when `cancelled()` is true: on a CPU within one operation of the model, else after
        BATCH_TOKENS tokens.
        """
        text = Inputs.of_text(tokens, position, sequence)
        with defer_signals() as received:  # ctypes would drop what a signal raises in the callback
            abort = self._llama.ggml_abort_callback(lambda _: bool(received) or cancelled())
            self._llama.llama_set_abort_callback(self._handle, abort, None)
            try:
                parts = [
                    self._decode(text.part(begin), taps, OUTPUT_TAP not in taps or self._model.states_alone, cancelled)
                    for begin in range(0, len(tokens), BATCH_TOKENS)
                ]
            except Cancelled:
                if not received:  # else the signal takes effect below
                    raise
            finally:
                self._llama.llama_set_abort_callback(self._handle, self._llama.ggml_abort_callback(), None)
        return parts[-1][0][-1:].copy(), _joined(parts, taps)

    def append(self, tokens: list[int], position: int, sequence: int) -> Values:
        """Run at most BATCH_TOKENS consecutive tokens of a sequence; return the last logits [1, V], valid as in
        `decode`."""
        return self._decode(Inputs.of_text(tokens, position, sequence), (), last_only=True)[0]

    def _decode(
        self, inputs: Inputs, taps: Taps, last_only: bool = False, cancelled: Callable[[], bool] | None = None
    ) -> Outputs:
        """Run at most BATCH_TOKENS tokens; return a view of the logits [O, V] and the states of the taps [T, H].

        The states of OUTPUT_TAP need outputs of all tokens, unless the model returns them alone.
        """
        if cancelled is not None and cancelled():
            raise Cancelled("stopped")
        self._select(frozenset(taps))
        outputs = self._run(inputs, not last_only)
        logits = self._logits.view(self._llama.llama_get_logits(self._handle), outputs)
        return logits, {tap: self._states[tap].read(self._pointer(tap), len(inputs.tokens)) for tap in taps}

    def _run(self, inputs: Inputs, every_output: bool) -> int:
        """Run at most BATCH_TOKENS tokens; return the number of outputs, of all tokens or of the last one."""
        llama = self._llama
        if self._model.used_threads != self._threads:
            self._threads = self._model.used_threads
            llama.llama_set_n_threads(self._handle, self._threads, self._threads)
        count = self._inputs.write(inputs, every_output)
        self._passes += 1
        status = llama.llama_decode(self._handle, self._inputs.batch)
        if status == ABORTED:
            raise Cancelled("stopped")
        if status:
            raise ValueError(f"llama.cpp cannot decode (status {status}); use a shorter context or a smaller draft")
        return count

    def _select(self, taps: frozenset[int]) -> None:
        """Let llama.cpp return the states of the taps, and no others. Raises ValueError for taps that it lacks."""
        if taps == self._taps:
            return
        if missing := sorted(taps - self._model.taps):
            raise ValueError(f"this build of llama.cpp does not return the inputs of layers {missing} of this model")
        for tap in taps ^ self._taps:
            if tap == OUTPUT_TAP and self._model.states_alone:
                self._next.keep(self._handle, tap in taps, False)
            elif tap == OUTPUT_TAP:
                self._llama.llama_set_embeddings(self._handle, tap in taps)
            elif self._layers:
                self._layers.keep(self._handle, tap, tap in taps)
        self._taps = taps

    def _pointer(self, tap: int) -> Handle:
        """Return where llama.cpp has the states of a tap."""
        if tap == OUTPUT_TAP and self._model.states_alone:
            return self._next.read(self._handle)
        if tap == OUTPUT_TAP or not self._layers:
            return self._llama.llama_get_embeddings(self._handle)
        return self._layers.read(self._handle, tap)

    def remove(self, sequence: int, begin: int) -> bool:
        """Remove the cells of a sequence from position `begin` on. Return False, and change nothing, if a recurrent
        state cannot be taken back so far."""
        return bool(self._llama.llama_memory_seq_rm(self._memory, sequence, begin, ALL_POSITIONS))

    def save(self, sequence: int, flags: int = 0) -> State:
        """Return a copy of a sequence: its cells and recurrent state, with RECURRENT_ONLY the state alone."""
        size = self._llama.llama_state_seq_get_size_ext(self._handle, sequence, flags)
        state: State = (ctypes.c_uint8 * size)()
        self._llama.llama_state_seq_get_data_ext(self._handle, state, size, sequence, flags)
        return state

    def restore(self, sequence: int, state: State, flags: int = 0) -> None:
        """Replace a sequence by a copy of `save`, whose cells take the first free ones; with RECURRENT_ONLY its
        recurrent state alone."""
        size = len(state)
        if self._llama.llama_state_seq_set_data_ext(self._handle, state, size, sequence, flags) != size:
            raise ValueError(f"llama.cpp cannot restore {self._model.path}; choose plain decoding")

    def copy_sequence(self, source: int, destination: int, begin: int = ALL_POSITIONS) -> None:
        """Let `destination` share all cells of `source`, or those from position `begin` on."""
        self._llama.llama_memory_seq_cp(self._memory, source, destination, begin, ALL_POSITIONS)

    def move_down(self, tails: Sequence[tuple[int, int]], spare: int) -> None:
        """Move cells behind freed ones into these: per sequence those from a position on, in the order of the cells.

        Later tokens would fill the gaps else. Attention sums in the order of cells, and with other rounding in another
        order: by 0.6 to 0.9 in the logits of a Q4_1 file. spare: an unused sequence.
        """
        states = []
        for sequence, begin in tails:
            self.copy_sequence(sequence, spare, begin)
            states.append(self.save(spare))
            self.remove(sequence, begin)
            self.remove(spare, 0)
        for (sequence, _), state in zip(tails, states, strict=True):
            self.restore(spare, state)
            self.copy_sequence(spare, sequence)
            self.remove(spare, 0)

    def clear(self) -> None:
        """Remove all cells."""
        if self._memory_owner.alive:  # else Python exits while a generator is open, and the memory is free already
            self._llama.llama_memory_clear(self._memory, False)


def _joined(parts: Sequence[Outputs], taps: Taps) -> dict[int, Values]:
    """Return the states of consecutive batches as one."""
    return {tap: numpy.concatenate([states[tap] for _, states in parts]) for tap in taps}


def _free(llama: Llama, handle: Handle, weights: object) -> None:
    """Free a context before its model, which the argument keeps alive until here."""
    llama.llama_free(handle)
