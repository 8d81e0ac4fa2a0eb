"""Drafting with a target's own layers, KV cache and CUDA graphs.

B rows, n tokens, V vocabulary.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

from torch import Tensor

from specdemo.core.protocol import Target
from specdemo.kv.graphs import GraphCapture, Tensors

ReadFunction = Callable[[Tensor | None], Tensor]
DraftFunction = Callable[..., Tensors]  # (read or `View`, depth, *extra) -> draft tokens [B, depth], other tensors


class DraftPlan(NamedTuple):
    """A draft that runs as one CUDA graph."""

    kind: Hashable  # graphs of one kind differ in depth only
    depth: int  # draft tokens needed; the graph may produce more
    room: int  # most input tokens
    layers: int = 0  # number of layers to run; 0: all
    commits: bool = False  # commit the input tokens and all draft tokens but the last


class SharedTarget(Target):
    """Target that lets drafters use its layers, its KV cache and its device's graphs. All members are optional."""

    @property
    def uses_cuda_graphs(self) -> bool:
        """Return True if passes run as CUDA graphs."""
        return False

    def new_graph_capture(self) -> GraphCapture | None:
        """Return a function that captures CUDA graphs for one drafter. None: no graphs on this device."""
        return None

    def capture_graphs(self, slots: int, taps: tuple[int, ...] = (), tree: bool = False) -> None:
        """Capture the CUDA graphs for all drafts of fewer than `slots` nodes."""

    def early_exit_logits(self, chain: Tensor, layers: int) -> Tensor:
        """Return logits [B, V] after chain [B, n] as if the model ended after `layers` layers.

        Reads the last token only; the earlier ones were read by previous calls. Requires `layers` and `shared_kv`.
        """
        raise NotImplementedError

    def draft_from_kv(self, write: DraftFunction, extra: Tensors, plan: DraftPlan) -> Tensors:
        """Run `write(kv, depth, *extra)`, a draft of at least `plan.depth` tokens, as a CUDA graph if possible.

        kv: a `View` of the root, with the committed keys and values of the last layer of every kind that has a cache.
        Copy the result before the next pass. Requires the capability `shared_kv`.
        """
        raise NotImplementedError

    def draft(
        self, tokens: Tensor, counts: list[int], write: DraftFunction, extra: Tensors, plan: DraftPlan
    ) -> Tensors | None:
        """Run `write(read, depth, *extra)`, a draft of at least `plan.depth` tokens, as one CUDA graph.

        `read(None)` returns the logits [B, V] after tokens [B, m], of which counts[b] are real; `read(drafted)` returns
        those after [B, 1] further tokens. Copy the result before the next pass. Return None if it cannot be captured;
        nothing was read then.
        """
        return None


def capture_of(target: Target) -> GraphCapture | None:
    """Return a function that captures CUDA graphs for one drafter of a target; None: no graphs."""
    return target.new_graph_capture() if isinstance(target, SharedTarget) else None


def graph_target(target: Target) -> SharedTarget | None:
    """Return the target if its passes run as CUDA graphs, else None."""
    return target if isinstance(target, SharedTarget) and target.uses_cuda_graphs else None
