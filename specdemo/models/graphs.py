"""Passes of fixed shapes, recorded once and replayed.

On a GPU a pass over a few tokens costs more in starting its hundreds of operations than in running them; recorded as a
CUDA graph it is started as one. A recorded pass reads and writes the same memory every time, so its inputs are copied
into a `_Frame`, its text is as long as the whole cache, with a mask over what is not there yet, and its slots are
padded to one of `WIDTHS`. Padding slots lie behind the others and are seen by nobody.

B rows, S slots, W columns of the cache.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from specdemo.core.protocol import Forward
from specdemo.models.cache import SlabCache
from specdemo.models.fused import close

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)  # wider passes are not recorded
COLUMNS = 64  # a cache of recorded passes holds a multiple of so many; rows of a mask are then aligned
ROOM = 512  # columns kept free when nobody said how many will follow: a cache that grows is recorded anew
WARM_UPS = 3  # passes before a recording: libraries choose their kernels and take their memory in the first ones
SWITCH = (
    "SPECDEMO_GRAPHS"  # environment: 0 starts every operation on its own, compile lets torch.compile join some first
)
COMPILATIONS = 64  # a target has one for every width and set of taps; the usual limit of 8 would end in eager passes

Decoder = TypeVar("Decoder", bound=Callable[..., Any])
Run = Callable[[], Forward]
Recorder = Callable[[Run], Run]  # what runs -> what replays it, into the same memory


@dataclass(slots=True)
class Recording:
    """Of one target: how its passes are recorded, and why no longer."""

    record: Recorder
    refused: str = ""


def recorder_for(device: torch.device) -> Recorder | None:
    """CUDA graphs where there are any; None: nothing is recorded."""
    return CudaGraphs(device) if device.type == "cuda" and os.environ.get(SWITCH) != "0" else None


def compiled(decoder: Decoder) -> Decoder:
    """Through torch.compile where that was asked for: its first pass of every width then takes a minute or so."""
    if os.environ.get(SWITCH) != "compile":
        return decoder
    config: Any = torch._dynamo.config  # public nowhere else
    config.recompile_limit = max(config.recompile_limit, COMPILATIONS)
    return cast(Decoder, torch.compile(decoder, dynamic=False))


class CudaGraphs:
    """Records on `device`. All graphs share one pool of memory, since each result is copied before the next replay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, run: Run) -> Run:
        with torch.cuda.device(self._device):
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # a server has others
                said = run()
            self._pool = graph.pool()

        def replay() -> Forward:
            graph.replay()
            return said

        return replay


@dataclass(slots=True)
class _Frame:
    tokens: Tensor  # [B, S] int64
    positions: Tensor  # [B, S] int64
    columns: Tensor  # [B, 1, S, 1] int64, where keys and values are written
    mask: Tensor  # [B, 1, S, W] additive
    replay: Run


class Graphs:
    """The recorded passes over one cache. `run(tokens, cache, positions, mask, taps)` is the pass itself."""

    def __init__(self, run: Callable[..., Forward], cache: SlabCache, dtype: torch.dtype, recording: Recording) -> None:
        self._run, self._cache, self._dtype, self._recording = run, cache, dtype, recording
        self._capacity = 0
        self._frames: dict[tuple[int, tuple[int, ...]], _Frame] = {}

    def width(self, slots: int, taps: tuple[int, ...]) -> int | None:
        """The width of the pass that is to read so many slots: of one that is recorded where that is not much wider,
        so that the short last steps of a text need no recordings of their own. None: too wide, or refused."""
        if self._recording.refused:
            return None
        known = (w for w, t in self._frames if t == taps and slots <= w <= 2 * slots + 6)
        return min(known, default=next((w for w in WIDTHS if w >= slots), None))

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, taps: tuple[int, ...], width: int
    ) -> Forward | None:
        """tokens and positions [B or 1, S] behind the history, mask [B or 1, 1, S, L + S] over it and the slots, None:
        nothing is hidden. The cache has room for `width` slots. None: the pass was refused.
        """
        slots = tokens.shape[1]
        if self._cache.cursor.capacity != self._capacity:  # what was recorded writes to memory that is gone
            self._frames.clear()
            self._capacity = self._cache.cursor.capacity
        if (width, taps) not in self._frames:
            widths = (1, 2) if width == 1 and self._cache.cursor.longest + 2 <= self._capacity else (width,)
            for each in widths:  # who reads one token at a time, as a draft model does, now and then reads two
                self._add(each, tokens, positions, mask, taps)
                if self._recording.refused:
                    return None
        frame = self._frames[width, taps]
        self._fill(frame, tokens, positions, mask)
        said = frame.replay()
        return Forward(said.logits[:, :slots].clone(), {tap: h[:, :slots].clone() for tap, h in said.hidden.items()})

    def _add(self, width: int, tokens: Tensor, positions: Tensor, mask: Tensor | None, taps: tuple[int, ...]) -> None:
        frame = self._frame(len(tokens), width, tokens.device, taps)
        self._fill(frame, tokens, positions, mask)
        self._check_in(frame)
        self._frames[width, taps] = frame

    def _frame(self, rows: int, width: int, device: torch.device, taps: tuple[int, ...]) -> _Frame:
        tokens, positions = (torch.zeros(rows, width, dtype=torch.int64, device=device) for _ in range(2))
        columns = torch.zeros(rows, 1, width, 1, dtype=torch.int64, device=device)
        mask = torch.empty(rows, 1, width, self._capacity, dtype=self._dtype, device=device)

        def run() -> Forward:
            with self._cache.whole(columns):
                return self._run(tokens, self._cache, positions, mask, taps)

        return _Frame(tokens, positions, columns, mask, run)

    def _fill(self, frame: _Frame, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> None:
        cursor = self._cache.cursor
        slots, width = tokens.shape[1], frame.tokens.shape[1]
        frame.tokens[:, :slots].copy_(tokens)
        frame.positions[:, :slots].copy_(positions)
        frame.mask.fill_(torch.finfo(self._dtype).min)
        seen = frame.mask[:, :, :slots, : cursor.longest + slots]
        seen.zero_() if mask is None else seen.copy_(mask)
        if slots < width:
            frame.mask[:, :, slots:, 0] = 0.0  # a slot that sees nothing may become NaN, and stay in the cache as that
        every = torch.arange(width, device=tokens.device)
        start = cursor.longest if cursor.each is None else cursor.each[:, None]
        frame.columns.copy_((every + start).view(-1, 1, width, 1))

    def _check_in(self, frame: _Frame) -> None:
        """Replace the frame's run by its recording; refused unless both say the same."""
        expected = frame.replay().logits.float()
        try:
            frame.replay = self._recording.record(frame.replay)
        except RuntimeError as error:
            self._recording.refused = f"passes could not be recorded ({str(error).partition(chr(10))[0]})"
            return
        if not close(frame.replay().logits.float(), expected, self._dtype):
            self._recording.refused = "a recorded pass said something else than the pass itself"
