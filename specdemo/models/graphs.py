"""Passes of fixed shapes, recorded once and replayed.

On a GPU a pass over a few tokens costs more in starting its hundreds of operations than in running them; recorded as a
CUDA graph it is started as one. A recorded pass is the same operations on the same memory every time: its inputs are
copied into tensors of its own, and whatever differs from one replay to the next, such as how long a text is, has to be
in these. What runs is a function of tensors alone, be it a pass of the target or a whole draft.
"""

import os
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from specdemo.models.fused import TOLERANCE

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)  # of passes over slots; wider ones are not recorded
COLUMNS = 64  # a cache of recorded passes holds a multiple of so many; rows of a mask are then aligned
ROOM = 512  # columns kept free when nobody said how many will follow: a cache that grows is recorded anew
WARM_UPS = 3  # passes before a recording: libraries choose their kernels and take their memory in the first ones
# bytes of one owner's recordings, as they add up for 152,000 words: a workspace of cuBLAS of 32 MiB on the GPUs that
# want most, the logits of every width, what a draft draws, and what passes work with
OWNED = 128 << 20
# environment: 0 starts every operation on its own, compile lets torch.compile join some first
SWITCH = "SPECDEMO_GRAPHS"
# torch's streams come round: of each priority it has so many per device, and creates no more
STREAMS, PRIORITIES = 32, (0, -1, -2, -3)
COMPILATIONS = 64  # a target has one for every width and set of taps; the usual limit of 8 would end in eager passes

Decoder = TypeVar("Decoder", bound=Callable[..., object])
Tensors = tuple[Tensor, ...]
Run = Callable[[], Tensors]
Shapes = Sequence[Sequence[int]]
Recorder = Callable[[Run], Run]  # what runs -> what replays it, into the same memory

_taken: weakref.WeakSet[torch.cuda.Stream] = weakref.WeakSet()  # by recorders, and by graphs that live longer


def recorder_for(device: torch.device) -> Recorder | None:
    """CUDA graphs where there are any; None: nothing is recorded."""
    return CudaGraphs(device) if device.type == "cuda" and os.environ.get(SWITCH) != "0" else None


def recorded_bytes(device: torch.device, owners: int) -> int:
    """What the recordings of so many owners may take beside weights and caches."""
    return owners * OWNED if recorder_for(device) else 0


def compiled(decoder: Decoder) -> Decoder:
    """Through torch.compile where that was asked for: its first pass of every width then takes a minute or so."""
    if os.environ.get(SWITCH) != "compile":
        return decoder
    config: Any = torch._dynamo.config  # public nowhere else
    config.recompile_limit = max(config.recompile_limit, COMPILATIONS)
    return cast(Decoder, torch.compile(decoder, dynamic=False))


def covering(slots: int) -> list[int]:
    """The fewest of `WIDTHS` by which every pass over up to so many slots has one that is not much wider."""
    full = next((w for w in WIDTHS if w >= slots), WIDTHS[-1])
    widths = [1]
    while widths[-1] < full:
        widths.append(max(w for w in WIDTHS if w <= min(_loosest(widths[-1] + 1), full)))
    return widths


def _loosest(slots: int) -> int:
    """The widest pass that may read so many slots: beyond, what it reads for nothing would be felt."""
    return 2 * slots + 6


class CudaGraphs:
    """Records on `device`, for one owner, who drops all its recordings at once.

    Warm-up and capture run on a stream that no other recorder has: the end of any graph takes the cuBLAS workspaces of
    its stream from all others recorded there (pytorch #193402). All graphs share one pool of memory, so that each
    result has to be copied before the next replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._newest: Callable[[], Any] = lambda: None

    def __call__(self, run: Run) -> Run:
        with torch.cuda.device(self._device):
            beside = self._stream = self._stream or _free_stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(beside)
            return partial(self._replay, *self._capture(run, beside))

    def _replay(self, graph: torch.cuda.CUDAGraph, outputs: Tensors) -> Tensors:
        """Bound to the recorder, so that its stream stays taken as long as a graph of it lives."""
        graph.replay()
        return outputs

    def _capture(self, run: Run, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, Tensors]:
        """Return the graph of `run` and its outputs. Raise what `run` raised, not the error in which the capture ends
        because of that."""
        graph, newest, caller = torch.cuda.CUDAGraph(), self._newest(), torch.cuda.current_stream()
        pool = newest.pool() if newest else torch.cuda.graph_pool_handle()  # a pool without graphs cannot be reused
        try:
            # a server has other threads
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                outputs = run()
        except BaseException as error:
            torch.cuda.set_stream(caller)
            self._newest = lambda: None
            _abandon(graph, self._device, pool, shared=newest is not None)
            raise (error.__context__ if isinstance(error.__context__, RuntimeError) else error) from None
        self._newest = weakref.ref(graph)
        return graph, outputs


def _free_stream() -> torch.cuda.Stream:
    """Return a stream of the current device that holds no recordings. Raise RuntimeError where all of them do."""
    for priority, _ in product(PRIORITIES, range(STREAMS)):
        stream = torch.cuda.Stream(priority=priority)
        if stream not in _taken:
            _taken.add(stream)
            return stream
    raise RuntimeError("every CUDA stream of the device holds the recordings of another model")


def _abandon(graph: torch.cuda.CUDAGraph, device: torch.device, pool: tuple[int, int], shared: bool) -> None:
    """Undo what a failed capture leaves in the allocator. Each call fails where torch has already done its work.

    torch up to 2.11 keeps allocating to the pool, and 2.13 still holds a reference to it (pytorch #180395, #190308).
    A shared pool keeps that reference: one too few would free memory that other graphs use.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, pool)
    graph.reset()
    with suppress(RuntimeError):
        if not shared:
            torch._C._cuda_releasePool(index, pool)


@dataclass(slots=True)
class _Frame:
    inputs: Tensors
    replay: Run

    def fill(self, inputs: Sequence[Tensor]) -> None:
        """What is smaller than its place leaves the rest as it is."""
        for into, given in zip(self.inputs, inputs, strict=True):
            (into if into.shape == given.shape else into[tuple(map(slice, given.shape))]).copy_(given)


class Passes:
    """The recorded passes of one owner, by their kind and size."""

    def __init__(self, record: Recorder, dtype: torch.dtype) -> None:
        """dtype: what is worked out in; a recording may differ by so much rounding from what it records."""
        self.refused = ""  # why nothing is recorded any more
        self._record, self._dtype = record, dtype
        self._frames: dict[tuple[Hashable, int], _Frame] = {}

    @property
    def note(self) -> str:
        """Why every operation is started on its own; empty where passes are recorded."""
        return f"{self.refused}, so every operation is started on its own" if self.refused else ""

    def clear(self) -> None:
        """Before memory is freed that they read or write."""
        self._frames.clear()

    def width(self, kind: Hashable, slots: int) -> int | None:
        """Of the pass that is to read so many slots: of one that is there where that is not much wider, so that the
        short last steps of a text need no recordings of their own. None: too wide, or refused."""
        if self.refused:
            return None
        known = (w for w in self._sizes(kind) if slots <= w <= _loosest(slots))
        return min(known, default=next((w for w in WIDTHS if w >= slots), None))

    def depth(self, kind: Hashable, wanted: int, cut: bool) -> int | None:
        """Of the draft that is to be written: a deeper one that is there will do where it can be `cut`. None: it is to
        run as it is, being refused or one of the last of a text, which are not worth a recording."""
        if self.refused:
            return None
        known = [depth for depth in self._sizes(kind) if depth >= wanted]
        if wanted in known or not known:
            return wanted
        return min(known) if cut else None

    def _sizes(self, kind: Hashable) -> list[int]:
        return [size for each, size in self._frames if each == kind]

    def __call__(
        self, kind: Hashable, size: int, run: Callable[..., Tensors], inputs: Sequence[Tensor], shapes: Shapes
    ) -> Tensors | None:
        """`run(*inputs)`, of inputs that may be smaller than `shapes`; what it says is to be copied before the next
        call. `run` may write into memory that stays, the same whenever it is run on the same inputs. None: refused."""
        frame = self._frames.get((kind, size)) or self._added((kind, size), run, inputs, shapes)
        if frame is None:
            return None
        frame.fill(inputs)
        return frame.replay()

    def _added(
        self, key: tuple[Hashable, int], run: Callable[..., Tensors], inputs: Sequence[Tensor], shapes: Shapes
    ) -> _Frame | None:
        """Refused unless the recording says what is recorded."""
        try:
            places = tuple(x.new_zeros(shape) for x, shape in zip(inputs, shapes, strict=True))
            frame = _Frame(places, partial(run, *places))
            frame.fill(inputs)
            expected = [said.clone() for said in frame.replay()]
            frame.replay = self._record(frame.replay)
            if all(map(self._alike, frame.replay(), expected)):
                self._frames[key] = frame
                return frame
            self.refused = "a recorded pass said something else than the pass itself"
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].partition(". ")[0]
            self.refused = f"passes could not be recorded ({reason})"
        self.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what a lack of memory left
        return None

    def _alike(self, said: Tensor, expected: Tensor) -> bool:
        same = said == expected
        if said.is_floating_point() and said.numel():
            finite = expected.masked_fill(~expected.isfinite(), 0.0).float()
            same = same | ((said.float() - finite).abs() <= TOLERANCE[self._dtype] * finite.abs().max())
        return bool(same.all())
