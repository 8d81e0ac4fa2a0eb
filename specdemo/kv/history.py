"""Storage of a text's state between forward passes of a target.

`KVHistory` serves models of attention layers only: it can commit any path of a draft tree, because columns of its cache
can be moved. All other models need `kv.snapshots.SnapshotHistory`.

B rows, S slots, T prompt tokens.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from specdemo.core.protocol import Forward
from specdemo.core.tree import chain_parents
from specdemo.kv.graphs import Tensors
from specdemo.kv.masks import AttentionMask
from specdemo.kv.store import KVStore
from specdemo.kv.view import View, run_captured

Write = Callable[..., Tensors]  # see `models.shared.DraftFunction`
ForwardFunction = Callable[..., Forward]  # one call of the model, see `models.runner.Runner`


class KVHistory:
    """History of a model of attention layers, in a `KVStore`.

    windows: layer kind -> attention window, 0 for full attention. With one kind the model gets a single mask, with
    several a dict of masks.
    """

    def __init__(self, store: KVStore, run: Any, windows: Mapping[str, int], takes_tree_masks: bool = False) -> None:
        """run: see `models.runner.Runner`. takes_tree_masks: the model accepts a `TreeMask`."""
        self.store, self._run, self._windows, self._takes_tree_masks = store, run, windows, takes_tree_masks

    @property
    def lengths(self) -> list[int]:
        """Return the number of committed tokens per row."""
        return self.store.lengths

    @property
    def bytes(self) -> int:
        """Return the size of the stored tensors."""
        return self.store.bytes

    def extend(self, tokens: Tensor, taps: tuple[int, ...], reserve: int = 0) -> Forward:
        """Read tokens [B, T] after rows of equal length, which may be 0. Return logits of the last position only.

        reserve: number of tokens that will follow.
        """
        store, (rows, slots) = self.store, tokens.shape
        length = max(store.lengths)
        store.reserve(length + slots + reserve)
        view = View.after(store).chain(slots)
        mask = self._masks(view) if length else None
        forward: Forward = self._run(tokens, store, view.positions.expand(rows, -1), mask, taps, last=True)
        store.lengths = [length + slots] * rows
        return forward

    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...]) -> Forward:
        """Read tokens [B, S] with parents [B, N] provisionally."""
        slots, least = tokens.shape[1], self.store.shape.slots
        if slots < least:
            tokens, parents = F.pad(tokens, (0, least - slots)), _padded(parents, least - 1)
        forward = self._forward_graph(tokens, parents, taps) if self.store.graphs.enabled else None
        if forward is None:
            forward = self._forward(self._run, View.after(self.store).tree(parents), tokens, taps)
        return forward if slots >= least else forward.first(slots)

    def _forward_graph(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...]) -> Forward | None:
        """Run the pass as a CUDA graph. Return None if it cannot be captured."""
        rows, slots = tokens.shape
        chain = slots < 3 or parents is chain_parents(rows, slots - 1, parents.device)
        width = self.store.graphs.width((taps, chain), slots)
        if width is None:
            return None

        def run(view: View, tokens: Tensor, parents: Tensor | None = None) -> Tensors:
            view = view.chain(width) if parents is None else view.tree(parents)
            forward = self._forward(self._run, view, tokens, taps)
            experts = () if forward.experts is None else (forward.experts,)
            return forward.logits, *(forward.hidden[tap] for tap in taps), *experts

        inputs = [tokens] + [parents] * (not chain)
        shapes = [(rows, width), (rows, width - 1)][: len(inputs)]
        outputs = run_captured(self.store, (taps, chain), width, run, [], inputs, shapes, columns=width)
        if outputs is None:
            return None
        logits, *rest = (x[:, :slots].clone() for x in outputs)
        experts = rest[len(taps)] if len(rest) > len(taps) else None
        return Forward(logits, dict(zip(taps, rest, strict=False)), experts)

    def draft(
        self,
        run: ForwardFunction,
        tokens: Tensor,
        counts: list[int],
        write: Write,
        extra: Tensors,
        kind: Hashable,
        least: int,
        room: int,
        commits: bool,
    ) -> Tensors | None:
        """See `SharedTarget.draft` and `DraftPlan`. least: draft tokens needed."""
        store, rows = self.store, len(tokens)
        depth = store.graphs.depth(kind, least, cut=True)
        if depth is None:
            return None

        def draft_pass(view: View, counts: Tensor, tokens: Tensor, *extra: Tensor) -> Tensors:
            def read(chain: Tensor | None) -> Tensor:
                nonlocal view
                view = view.chain(room, counts) if chain is None else view.chain()
                return view.last(self._forward(run, view, tokens if chain is None else chain, ()).logits)[:, 0]

            return write(read, depth, *extra)

        shapes, columns = [(rows, room), *(x.shape for x in extra)], room + depth
        outputs = run_captured(store, kind, depth, draft_pass, [counts], (tokens, *extra), shapes, columns=columns)
        if outputs is not None and commits:
            store.lengths = [n + c + least - 1 for n, c in zip(store.lengths, counts, strict=True)]
        return outputs

    def draft_from_kv(
        self,
        layers: Mapping[str, int],
        write: Write,
        extra: Tensors,
        kind: Hashable,
        least: int,
        room: int,
    ) -> Tensors:
        """See `SharedTarget.draft_from_kv`. layers: kind of layer -> layer of the cache. least: draft tokens needed."""
        store = self.store
        depth = store.graphs.depth(kind, least, cut=True)
        outputs = None
        if depth is not None:

            def draft(view: View, *extra: Tensor) -> Tensors:
                assert isinstance(view.ends, Tensor)
                return write(View.of_committed(store, layers, view.ends), depth, *extra)

            shapes = [x.shape for x in extra]
            outputs = run_captured(store, kind, depth, draft, [], extra, shapes, columns=room)
        return write(View.of_committed(store, layers), least, *extra) if outputs is None else outputs

    def forward_after_draft(self, run: ForwardFunction, tokens: Tensor, columns: int) -> Forward:
        """Run another pass over tokens [B, 1] as if `columns` columns after the history were committed."""
        view = View.after(self.store, [n + columns for n in self.lengths])
        return self._forward(run, view.chain(), tokens, ())

    def _forward(self, run: ForwardFunction, view: View, tokens: Tensor, taps: tuple[int, ...]) -> Forward:
        positions = view.positions.expand(len(tokens), -1)
        if tokens.numel() > 1:  # absent slots have no descendants, so no slot attends to them
            tokens = tokens.clamp_min(0)
        return view.run(lambda _: run(tokens, self.store, positions, self._masks(view), taps))

    def commit(self, path: list[list[int]]) -> None:
        """Commit the accepted slots of the last `forward`, per row."""
        self.store.commit(path)

    def crop(self, lengths: list[int]) -> None:
        """Shorten every row to its entry in `lengths`."""
        self.store.lengths = [min(old, new) for old, new in zip(self.lengths, lengths, strict=True)]

    def max_crop(self, length: int) -> int:
        """Return how many of the first `length` tokens `crop` can keep without reading them again. Single row only."""
        return min(length, *self.lengths)

    def drop_snapshots(self, length: int) -> None:
        """Do nothing, because this history has no snapshots."""

    def _masks(self, view: View) -> AttentionMask:
        """Return the mask, or the masks by layer kind if there are several."""
        if len(self._windows) == 1:
            kind = next(iter(self._windows.values())), True
            return view.visible(kind) if self._takes_tree_masks else view.mask(kind)
        return {kind: view.mask((window, True)) for kind, window in self._windows.items()}


def _padded(parents: Tensor, nodes: int) -> Tensor:
    """Return parents [B, N] with padding up to `nodes` nodes. A chain stays a chain, so that its mask is cached."""
    rows, count = parents.shape
    if count < 2 or parents is chain_parents(rows, count, parents.device):
        return chain_parents(rows, nodes, parents.device)
    return F.pad(parents, (0, nodes - count))
