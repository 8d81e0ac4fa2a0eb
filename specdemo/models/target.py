"""transformers causal language model as a `core.protocol.Target`.

B rows, N draft nodes, S = N + 1 slots, V vocabulary rows of lm_head (padding included), H hidden size.

A model of plain attention layers verifies trees with a 4D mask and position ids; windows count positions. Any other
model (`supports_trees` False) verifies chains. Each forward is one call of the model, or of its fused layers
(models/fused.py).
"""

from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from specdemo.core.protocol import Forward
from specdemo.core.tree import chain_parents
from specdemo.models.cache import SPARE, SlabCache
from specdemo.models.devices import kind
from specdemo.models.fused import fused_decoder, kernels, unhastened
from specdemo.models.graphs import COLUMNS, ROOM, WIDTHS, Passes, Recorder, Tensors, covering, recorder_for
from specdemo.models.history import DraftPlan, GatherHistory, History, ReplayHistory, Write, continues_at_once
from specdemo.models.masks import Masks
from specdemo.models.packed import packed_bytes
from specdemo.models.place import placed
from specdemo.models.runner import Runner

UNLIMITED = 1 << 20  # positions, for models without a limit in their config
MASKED_ATTENTION = ("sdpa", "eager")  # implementations that accept any mask
COLUMN_BOUND = ("gpt_neo",)  # model types that count windows in cache columns and ignore position_ids


class HFTarget:
    """Target with one history on a shared model. Several targets may share a model if they take turns."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
        recorder: Recorder | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        """capture: captures forward passes; None: CUDA graphs on a GPU. notes: see LoadedModel.

        Raises ValueError for a model whose forward takes no cache.
        """
        self.model, self.tokenizer, self.notes = model.eval(), tokenizer, notes
        self.name = name or str(model.config.name_or_path) or str(model.config.model_type)
        config = model.config.get_text_config(decoder=True)
        self.embed: nn.Module = model.get_input_embeddings()
        self.lm_head: nn.Module = model.get_output_embeddings()
        self.vocab_size = int(self.lm_head.weight.shape[0])
        self.hidden_size, self.num_layers = int(config.hidden_size), int(config.num_hidden_layers)
        self.max_length = int(getattr(config, "max_position_embeddings", None) or UNLIMITED)
        self.dtype = model.dtype
        self.stop_token_ids = _stop_tokens(model, tokenizer)
        self._config = config
        self._run = self.runner(model, self.num_layers, self.name)
        self.device = self._run.device
        kind(self.device).prepare()
        windows = _windows(model, config) if self._run.positions else None
        self.supports_trees = windows is not None
        self._windows = windows or {}
        if windows is not None and not any(windows.values()):
            self._run.fused = fused_decoder(model)
        self._masks = Masks(tuple(set(self._windows.values())), self.dtype, self.device)
        self._recorder = recorder
        self._passes = self.passes(self.dtype)
        if self._passes and placed(model):
            self._passes.refused = "its layers are on several devices"
        elif self._passes and not self.supports_trees:
            self._passes.refused = "its cache cannot be rewritten in place"
        self._history: History | None = None
        self._last: GatherHistory | None = None  # reused for the next text, because graphs hold its addresses

    def runner(self, model: PreTrainedModel, layers: int, name: str) -> Runner:
        """Create the runner of the model. Subclasses may return one that observes passes."""
        return Runner(model, layers, name)

    @property
    def length(self) -> list[int]:
        """Return the number of committed tokens per row."""
        return list(self._history.lengths) if self._history else []

    @property
    def history_bytes(self) -> int:
        """Return the size of keys and values, including those cached from the last turn of a chat."""
        held = self._history or self._last
        return held.bytes if held else 0

    @cached_property
    def weight_bytes(self) -> int:
        return packed_bytes(self.model) + sum(int(p.numel() * p.element_size()) for p in self.model.parameters())

    @property
    def kernels(self) -> str:
        """Return the kind of layers in words: transformers or fused, packed, with graphs."""
        return kernels(self.model) + (", graphs" if self.records else "")

    @property
    def note(self) -> str:
        """Return why passes are slower than intended; empty if they are not."""
        unrecorded = self._passes.note if self._passes else ""
        return "; ".join(filter(None, (unrecorded, unhastened(self._config, self.device))))

    @property
    def records(self) -> bool:
        """Return True if passes run as CUDA graphs."""
        return self._passes is not None and not self._passes.refused

    @property
    def capacity(self) -> int:
        """Return the number of tokens that the history can hold without a new allocation."""
        return self._history.capacity if isinstance(self._history, GatherHistory) else 0

    def unrecord(self) -> None:
        """Free the graphs and the history they use. Both are created again when needed."""
        self._last = None
        if self._passes is not None:
            self._passes.clear()

    def passes(self, dtype: torch.dtype) -> Passes | None:
        """Create a graph cache for a drafter of this target. None: no graphs on this device."""
        recorder = self._recorder or recorder_for(self.device)
        return Passes(recorder, dtype) if recorder else None

    @torch.no_grad()
    def rehearse(self, slots: int, taps: tuple[int, ...] = (), tree: bool = False) -> None:
        """Capture the graphs for all drafts of fewer than `slots` nodes, so that none is captured while a run is
        timed."""
        if not self.records or not self.capacity:
            return
        rows = len(self.length)
        for width in covering(slots):
            tokens = torch.zeros(rows, width, dtype=torch.int64, device=self.device)
            chain = chain_parents(rows, width - 1, self.device)
            self.forward(tokens, chain.clone() if tree else chain, taps)

    @torch.no_grad()
    def start(self, tokens: Tensor, taps: tuple[int, ...] = (), reserve: int = 0) -> Forward:
        """Raises ValueError if the tokens exceed the model's context."""
        self._check_length(tokens.shape[1])
        self._history = None  # before the next one is allocated
        spare = ROOM if self.records else SPARE
        self._history = self._new_history(tokens.shape[0], tokens.shape[1] + (reserve or spare))
        return self._history.go_on(tokens, taps)

    @torch.no_grad()
    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        return self._started().forward(tokens, parents, taps)

    @torch.no_grad()
    def shallow(self, chain: Tensor, layers: int) -> Tensor:
        """Return logits [B, V] after chain [B, n] as if the model ended after `layers` layers.

        Reads the last token only. Keys and values of the earlier ones remain in the cache from the previous calls,
        until the next `forward` overwrites them. Raises ValueError for a model that verifies chains only, because its
        cache cannot drop tokens.
        """
        history = self._started()
        if not isinstance(history, GatherHistory):
            raise ValueError(f"{self.name} cannot run only its first layers: its cache cannot be rolled back")
        run = partial(self._run, layers=layers)
        return history.ahead(run, chain[:, -1:], chain.shape[1] - 1).logits[:, -1]

    @torch.no_grad()
    def draft(self, tokens: Tensor, counts: list[int], write: Write, more: Tensors, plan: DraftPlan) -> Tensors | None:
        """Run `write(read, depth, *extra)`, a draft of at least `plan.depth` tokens, as one CUDA graph.

        `read(None)` returns the logits [B, V] after tokens [B, m], of which counts[b] are real; `read(drafted)` returns
        those after [B, 1] further tokens. Copy the result before the next pass. Return None if it cannot be captured;
        nothing was read then.
        """
        history = self._history
        if not isinstance(history, GatherHistory) or tokens.shape[1] > plan.room:
            return None
        run = partial(self._run.recorded, layers=plan.layers or None)
        return history.draft(run, tokens, counts, write, more, plan)

    def commit(self, path: list[list[int]]) -> None:
        """Raises ValueError if the history would exceed the model's context."""
        history = self._started()
        history.commit(path)
        self._check_length(max(history.lengths))

    def crop(self, lengths: list[int]) -> None:
        """Shorten every row to its first lengths[b] tokens."""
        self._started().crop(lengths)

    def release(self) -> None:
        """Free the history."""
        self._history = None

    def _started(self) -> History:
        if self._history is None:
            raise ValueError("there is no history; call start() with the prompt first")
        return self._history

    def _check_length(self, length: int) -> None:
        if length > self.max_length:
            raise ValueError(f"{self.name} holds {self.max_length} tokens, not {length}; shorten the prompt")

    def _new_history(self, rows: int, columns: int) -> History:
        if not self.supports_trees:
            return ReplayHistory(self._run, self._config, self._at_once, self.device)
        if self.records:  # with room for padding slots
            columns = -(-(columns + WIDTHS[-1]) // COLUMNS) * COLUMNS
            if self._last is not None and self._last.fits(rows, columns):
                self._last.crop([0] * rows)
                return self._last
        self._last = None  # before the next one is allocated
        if self._passes is not None:
            self._passes.clear()
        layers = len(DynamicCache(config=self._config).layers)
        cache = SlabCache(layers, rows, columns, self.device, alike=self._run.fused is not None)
        history = GatherHistory(self._run, cache, self._windows, self._masks, self.max_length, self._passes)
        if self.records:
            self._last = history
        return history

    @cached_property
    def _at_once(self) -> bool:
        return continues_at_once(self._run, self._config, self.vocab_size, self.device)


def _windows(model: PreTrainedModel, config: Any) -> dict[str, int] | None:
    """Return layer kind -> attention window in positions (0: full). None if the model can only continue chains."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    caches: list[Any] = [c for c in DynamicCache(config=config).layers if type(c).__name__ != "DummyLayer"]
    if config._attn_implementation not in MASKED_ATTENTION or config.model_type in COLUMN_BOUND:
        return None
    if getattr(config, "alibi", False) or any(type(layer) not in plain for layer in caches):
        return None
    window = int(getattr(config, "sliding_window", None) or 0)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        return {"all": window if any(layer.is_sliding for layer in caches) else 0}
    if not kinds <= {"full_attention", "sliding_attention"}:
        return None
    return {kind: window if kind == "sliding_attention" else 0 for kind in sorted(kinds)}


def _stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    for source in (generation, model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()
