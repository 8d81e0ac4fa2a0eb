"""CUDA graphs of forward passes with fixed shapes: captured once, then replayed.

On a GPU, a pass over a few tokens spends more time launching its hundreds of kernels than running them; a CUDA graph
launches them as one. A graph runs the same operations on the same memory every time: inputs are copied into its static
buffers, and everything that differs between replays, such as the length of a text, must be in these inputs. A graph
captures a function of tensors: a target pass or a complete draft.
"""

import os
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

GRAPH_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)  # slots per captured pass; wider passes run eagerly
COLUMN_MULTIPLE = 64  # the capacity of a captured cache is a multiple of this, so that mask rows are aligned
GRAPH_SPARE_COLUMNS = 512  # default number of free columns; a cache that grows needs new graphs
WARM_UPS = 3  # eager passes before a capture, in which libraries choose kernels and allocate memory
# estimate for a vocabulary of 152,000: a cuBLAS workspace of 32 MiB on the GPUs with the largest ones, the logits of
# every width, the noise of a draft, and temporary tensors
BYTES_PER_OWNER = 128 << 20
ENVIRONMENT_VARIABLE = "SPECDEMO_GRAPHS"  # 0 disables graphs
# torch has this many streams per device and priority; torch.cuda.Stream() returns them in turn
STREAMS, PRIORITIES = 32, (0, -1, -2, -3)

# largest difference between equivalent kernels, relative to the largest output
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}

Tensors = tuple[Tensor, ...]
Run = Callable[[], Tensors]
GraphCapture = Callable[[Run], Run]  # function -> its replay, which writes to the same memory
Shapes = Sequence[Sequence[int]]
Probe = Callable[[], tuple[Callable[..., Tensors], Sequence[Tensor]]]  # returns an eager function and its inputs


def new_capture(device: torch.device) -> GraphCapture | None:
    """Return a function that captures CUDA graphs for one owner, on a device that has them; None if they are off."""
    return None if os.environ.get(ENVIRONMENT_VARIABLE) == "0" else CudaGraphs(device)


def covering_widths(slots: int) -> list[int]:
    """Return the fewest of `GRAPH_WIDTHS` that cover all passes of up to `slots` slots without much padding."""
    largest = next((w for w in GRAPH_WIDTHS if w >= slots), GRAPH_WIDTHS[-1])
    widths = [1]
    while widths[-1] < largest:
        widths.append(max(w for w in GRAPH_WIDTHS if w <= min(_max_padded_width(widths[-1] + 1), largest)))
    return widths


def _max_padded_width(slots: int) -> int:
    """Return the widest pass to use for `slots` slots; with more padding the extra time is noticeable."""
    return 2 * slots + 6


class CudaGraphs:
    """Captures CUDA graphs on `device` for one owner, who drops all of them at once.

    Warm-up and capture run on a stream that no other owner uses: the end of any capture takes the cuBLAS workspaces of
    its stream from all other graphs captured there (pytorch #193402). All graphs share one memory pool, so each result
    must be copied before the next replay.
    """

    # Owners of captures and living graphs, for their streams. Streams themselves must not be weakly referenced: torch
    # 2.11 frees them without clearing these references, and the process crashes later (pytorch #183403).
    living: ClassVar[weakref.WeakSet["CudaGraphs"]] = weakref.WeakSet()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream: torch.cuda.Stream | None = None
        self._last_graph: Callable[[], torch.cuda.CUDAGraph | None] = lambda: None

    def __call__(self, run: Run) -> Run:
        with torch.cuda.device(self._device):
            stream = self.stream = self.stream or _free_stream()
            self.living.add(self)
            stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(stream):
                    for _ in range(WARM_UPS):
                        run()
            finally:  # a pass that fails may have written to memory of the caller
                torch.cuda.current_stream().wait_stream(stream)
            return partial(self._replay, *self._capture(run, stream))

    def _replay(self, graph: torch.cuda.CUDAGraph, outputs: Tensors) -> Tensors:
        """Replay a graph. A bound method keeps this object, and so its stream, in use as long as a graph exists."""
        graph.replay()
        return outputs

    def _capture(self, run: Run, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, Tensors]:
        """Return the graph of `run` and its outputs. If `run` fails, raise its error and not the capture's."""
        graph, last_graph, caller = torch.cuda.CUDAGraph(), self._last_graph(), torch.cuda.current_stream()
        # a pool without graphs cannot be reused
        pool = last_graph.pool() if last_graph else torch.cuda.graph_pool_handle()
        try:
            # other threads, such as a server's, may use CUDA meanwhile
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                outputs = run()
        except BaseException as error:
            torch.cuda.set_stream(caller)
            self._last_graph = lambda: None
            _abandon(graph, self._device, pool, shared=last_graph is not None)
            raise (error.__context__ if isinstance(error.__context__, RuntimeError) else error) from None
        self._last_graph = weakref.ref(graph)
        return graph, outputs


def _free_stream() -> torch.cuda.Stream:
    """Return a stream of the current device without graphs. Raise RuntimeError if there is none."""
    used = [owner.stream for owner in CudaGraphs.living]
    for priority, _ in product(PRIORITIES, range(STREAMS)):
        stream = torch.cuda.Stream(priority=priority)
        if stream not in used:
            return stream
    raise RuntimeError("every CUDA stream of the device has CUDA graphs of another model")


def _abandon(graph: torch.cuda.CUDAGraph, device: torch.device, pool: tuple[int, int], shared: bool) -> None:
    """Undo what a failed capture leaves in the allocator. Each call fails if torch has done its part already.

    torch up to 2.11 keeps allocating to the pool, and 2.13 keeps a reference to it (pytorch #180395, #190308). A shared
    pool must keep that reference: with one too few, memory of other graphs would be freed.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, pool)
    graph.reset()
    with suppress(RuntimeError):
        if not shared:
            torch._C._cuda_releasePool(index, pool)


@dataclass(slots=True)
class _CapturedGraph:
    """A captured graph with its static input buffers."""

    inputs: Tensors
    replay: Run

    def fill(self, inputs: Sequence[Tensor]) -> None:
        """Copy the inputs, from the device or from pinned memory. Smaller inputs fill the leading part of a buffer."""
        for buffer, value in zip(self.inputs, inputs, strict=True):
            part = buffer if buffer.shape == value.shape else buffer[tuple(map(slice, value.shape))]
            part.copy_(value, non_blocking=True)


class GraphCache:
    """CUDA graphs of one owner, by kind and size."""

    def __init__(self, capture: GraphCapture | None, device: torch.device, dtype: torch.dtype) -> None:
        """capture: None for a device without graphs. dtype: of the computation; results of a graph may differ from the
        eager ones by its rounding."""
        self.disabled_reason = ""  # why graphs are disabled; empty if they are not
        self._capture_run, self._device, self._dtype = capture, device, dtype
        self._graphs: dict[tuple[Hashable, int], _CapturedGraph] = {}
        self._too_large: set[tuple[Hashable, int]] = set()  # graphs for which there was no memory

    @property
    def enabled(self) -> bool:
        """Return True if passes may run as graphs."""
        return self._capture_run is not None and not self.disabled_reason

    @property
    def note(self) -> str:
        """Return why graphs are not used, for all passes or for some; empty if they are used."""
        if self.disabled_reason:
            return f"{self.disabled_reason}, so every operation is launched separately"
        if not self._too_large:
            return ""
        sizes = ", ".join(map(str, sorted({size for _, size in self._too_large})))
        return f"no memory for the CUDA graphs of size {sizes}, so their operations are launched separately"

    def clear(self) -> None:
        """Drop all graphs, before memory they use is freed."""
        self._graphs.clear()
        self._too_large.clear()

    def width(self, kind: Hashable, slots: int) -> int | None:
        """Return the width of the graph to use: an existing one if it is not much wider, so that short last steps of a
        text need no graphs of their own. None: too wide, or disabled."""
        if not self.enabled:
            return None
        widths = (w for w in self._sizes(kind) if slots <= w <= _max_padded_width(slots))
        return min(widths, default=next((w for w in GRAPH_WIDTHS if w >= slots), None))

    def depth(self, kind: Hashable, min_depth: int, cut: bool) -> int | None:
        """Return the draft depth of the graph to use: an existing, deeper one if the result can be `cut`. None: run
        eagerly, because graphs are disabled or this is one of the last steps of a text, which are not worth a
        capture."""
        if not self.enabled:
            return None
        depths = [depth for depth in self._sizes(kind) if depth >= min_depth]
        if min_depth in depths or not depths:
            return min_depth
        return min(depths) if cut else None

    def _sizes(self, kind: Hashable) -> list[int]:
        return [size for graph_kind, size in self._graphs if graph_kind == kind]

    def __call__(
        self,
        kind: Hashable,
        size: int,
        run: Callable[..., Tensors],
        inputs: Sequence[Tensor],
        shapes: Shapes,
        probe: Probe | None = None,
    ) -> Tensors | None:
        """Run `run(*inputs)` as a graph; return None if graphs are disabled or there is no memory for this one.

        inputs may be smaller than `shapes`, and in pinned memory (see `pinned`). Copy the result before the next call.
        `run` may write to persistent memory if it writes the same for the same inputs. probe: other inputs, such as
        those of a longer text, for which a new graph must agree with an eager pass too.
        """
        key = kind, size
        graph = self._graphs.get(key) or self._capture(key, partial(self._checked_graph, run, inputs, shapes, probe))
        if graph is None:
            return None
        graph.fill(inputs)
        return graph.replay()

    def _capture(self, key: tuple[Hashable, int], make: Callable[[], _CapturedGraph | None]) -> _CapturedGraph | None:
        """Store a new graph. Disable graphs if its results differ from the eager ones (`make` returns None)."""
        if key in self._too_large:
            return None
        try:
            graph = make()
            if graph is not None:
                self._graphs[key] = graph
                return graph
            self.disabled_reason = "a CUDA graph returned another result than the eager pass"
        except torch.OutOfMemoryError:
            self._too_large.add(key)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0].partition(". ")[0]
            self.disabled_reason = f"CUDA graph capture failed ({reason})"
        if self.disabled_reason:
            self.clear()
        torch.cuda.empty_cache()  # memory left by an out-of-memory error
        return None

    def _checked_graph(
        self, run: Callable[..., Tensors], inputs: Sequence[Tensor], shapes: Shapes, probe: Probe | None
    ) -> _CapturedGraph | None:
        """Return a graph of `run`, or None if a result of it differs from the eager one."""
        assert self._capture_run is not None
        pairs = zip(inputs, shapes, strict=True)
        buffers = (torch.zeros(*shape, dtype=x.dtype, device=self._device) for x, shape in pairs)
        graph = _CapturedGraph(tuple(buffers), tuple)
        runs = [(run, inputs), *([probe()] if probe else [])]
        expected = []
        for eager, values in runs:
            graph.fill(values)
            expected.append([output.clone() for output in eager(*graph.inputs)])
        graph.fill(inputs)
        graph.replay = self._capture_run(partial(run, *graph.inputs))
        for (_, values), outputs in zip(runs, expected, strict=True):
            graph.fill(values)
            if not all(map(self._matches, graph.replay(), outputs)):
                return None
        return graph

    def _matches(self, output: Tensor, expected: Tensor) -> bool:
        same = output == expected
        if output.is_floating_point() and output.numel():
            finite = expected.masked_fill(~expected.isfinite(), 0.0).float()
            same = same | ((output.float() - finite).abs() <= TOLERANCE[self._dtype] * finite.abs().max())
        return bool(same.all())
