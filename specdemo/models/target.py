"""An unmodified transformers causal language model as `core.protocol.Target`.

B rows, T prompt tokens, N draft nodes, S = N + 1 slots, V vocabulary rows of lm_head (padding included), H hidden size.

A model of plain attention layers verifies trees through its own 4D mask and position ids; windows count positions. Any
other model (`supports_trees` False) verifies chains. `model(...)` is called directly, one pass per forward; where its
layers are fused (models/fused.py), these are run one after the other.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from specdemo.core.protocol import Forward
from specdemo.models.cache import SPARE, SlabCache
from specdemo.models.devices import kind
from specdemo.models.fused import fused_decoder, kernels, unhastened
from specdemo.models.graphs import COLUMNS, ROOM, Graphs, Recorder, Recording, compiled, recorder_for
from specdemo.models.history import AttentionMask, GatherHistory, History, ReplayHistory, continues_at_once
from specdemo.models.masks import Masks
from specdemo.models.packed import packed_bytes

UNLIMITED = 1 << 20  # positions, for models that name no limit
MASKED_ATTENTION = ("sdpa", "eager")  # the implementations that take any mask
COLUMN_BOUND = ("gpt_neo",)  # count their windows in cache columns, whatever position_ids say


class HFTarget:
    """One history on a shared model; several targets may share one model as long as they take turns."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
        recorder: Recorder | None = None,
    ) -> None:
        """recorder: what records the passes of fused layers; None: CUDA graphs on a GPU.

        Raises ValueError for a model that keeps its history where it cannot be reached.
        """
        self.model, self.tokenizer = model.eval(), tokenizer
        self.name = name or str(model.config.name_or_path) or str(model.config.model_type)
        config = model.config.get_text_config(decoder=True)
        self.embed: nn.Module = model.get_input_embeddings()
        self.lm_head: nn.Module = model.get_output_embeddings()
        self.vocab_size = int(self.lm_head.weight.shape[0])
        self.hidden_size, self.num_layers = int(config.hidden_size), int(config.num_hidden_layers)
        self.max_length = int(getattr(config, "max_position_embeddings", None) or UNLIMITED)
        self.device: torch.device = self.embed.weight.device  # type: ignore[assignment]
        kind(self.device).prepare()
        self.dtype = model.dtype
        self.stop_token_ids = _stop_tokens(model, tokenizer)
        self._config = config
        self._arguments = _Arguments(model)
        windows = _windows(model, config) if self._arguments.positions else None
        self.supports_trees = windows is not None
        self._windows = windows or {}
        self._fused = None if windows is None or any(windows.values()) else fused_decoder(model)
        self._masks = Masks(tuple(set(self._windows.values())), self.dtype, self.device)
        recorder = recorder or recorder_for(self.device)
        self._recording = Recording(recorder) if recorder and self._fused else None
        self._history: History | None = None
        self._last: GatherHistory | None = None  # with recorded passes: of the last text, they serve the next one
        self._short: dict[int, nn.Module] = {}  # layers -> the model that ends after them

    @property
    def length(self) -> list[int]:
        """Committed tokens per row."""
        return list(self._history.lengths) if self._history else []

    @property
    def history_bytes(self) -> int:
        """Bytes of the keys and values held, those of a chat's last turn included."""
        held = self._history or self._last
        return held.bytes if held else 0

    @cached_property
    def weight_bytes(self) -> int:
        return packed_bytes(self.model) + sum(int(p.numel() * p.element_size()) for p in self.model.parameters())

    @property
    def kernels(self) -> str:
        """What runs the weights: transformers' layers, or fused ones, packed or in recorded passes."""
        return kernels(self.model) + (", graphs" if self._records else "")

    @property
    def note(self) -> str:
        """Why passes are slower than they were to be."""
        refused = self._recording.refused if self._recording else ""
        unrecorded = f"{refused}, so every operation is started on its own" if refused else ""
        return "; ".join(filter(None, (unrecorded, unhastened(self._config, self.device))))

    @torch.no_grad()
    def start(self, tokens: Tensor, taps: tuple[int, ...] = (), reserve: int = 0) -> Forward:
        """Raises ValueError when the tokens exceed the model's context."""
        self._check_length(tokens.shape[1])
        self._history = None  # before the next one is allocated
        self._history = self._new_history(tokens.shape[0], tokens.shape[1] + (reserve or self._spare))
        return self._history.start(tokens, taps)

    @torch.no_grad()
    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        return self._started().forward(tokens, parents, taps)

    @torch.no_grad()
    def shallow(self, chain: Tensor, layers: int) -> Tensor:
        """chain [B, n], drafted behind the history -> [B, V] logits behind it if the model ended after `layers` layers.

        Reads the last token alone: of the others, keys and values are where the calls for them left them, behind the
        history in the cache of those layers, until the next `forward` writes over them. Raises ValueError for a model
        that verifies chains only: its cache cannot take tokens back.
        """
        history = self._started()
        if not isinstance(history, GatherHistory):
            raise ValueError(f"{self.name} cannot run its first layers alone: they keep what they once read")
        run = partial(self._run, layers=layers)
        return history.ahead(run, chain[:, -1:], chain.shape[1] - 1).logits[:, -1]

    def commit(self, path: list[list[int]]) -> None:
        """Raises ValueError when the history would exceed the model's context."""
        history = self._started()
        history.commit(path)
        self._check_length(max(history.lengths))

    def crop(self, lengths: list[int]) -> None:
        """Rows forget all but their first lengths[b] tokens."""
        self._started().crop(lengths)

    def release(self) -> None:
        """Free the history and everything it holds."""
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
        recording = self._records
        if recording and self._last is not None and self._last.fits(rows, columns):
            self._last.crop([0] * rows)
            return self._last
        self._last = None  # before the next one is allocated
        layers = len(DynamicCache(config=self._config).layers)
        if recording:
            columns = -(-columns // COLUMNS) * COLUMNS
        cache = SlabCache(layers, rows, columns, self.device, alike=self._fused is not None)
        graphs = Graphs(partial(self._run, decoder=self._compiled), cache, self.dtype, recording) if recording else None
        history = GatherHistory(self._run, cache, self._windows, self._masks, self.max_length, graphs)
        if recording:
            self._last = history
        return history

    @property
    def _records(self) -> Recording | None:
        return self._recording if self._recording and not self._recording.refused else None

    @property
    def _spare(self) -> int:
        return ROOM if self._records else SPARE

    @cached_property
    def _compiled(self) -> Any:
        return compiled(self._fused.__call__) if self._fused else None

    @cached_property
    def _at_once(self) -> bool:
        return continues_at_once(self._run, self._config, self.vocab_size, self.device)

    def _run(
        self,
        tokens: Tensor,
        cache: Cache,
        positions: Tensor | None = None,
        mask: AttentionMask = None,
        taps: tuple[int, ...] = (),
        last: bool = False,
        layers: int | None = None,
        decoder: Callable[..., tuple[Tensor, dict[int, Tensor]]] | None = None,
    ) -> Forward:
        """layers: of the model so many alone. decoder: what runs them instead of the fused ones as they are."""
        decoder = decoder or self._fused
        if decoder is not None:
            assert positions is not None and not isinstance(mask, dict)
            return Forward(*decoder(tokens, cache, positions, mask, taps, last, layers))
        model = self.model if layers is None else self._ending_after(layers)
        arguments = self._arguments.of(cache, positions, mask, last)
        if not taps:
            return Forward(self._logits(model(tokens, **arguments), last))
        with self._tapped(taps) as hidden:
            output = model(tokens, **arguments)
        return Forward(self._logits(output, last), {tap: hidden[tap].to(self.device) for tap in taps})

    def _ending_after(self, layers: int) -> nn.Module:
        if layers not in self._short:
            self._short[layers] = _ending_after(self.model, self._layers, layers)
        return self._short[layers]

    def _logits(self, output: Any, last: bool) -> Tensor:
        logits: Tensor = output.logits
        if last and logits.shape[1] > 1:
            logits = logits[:, -1:]
        return logits if logits.device == self.device else logits.to(self.device)

    @contextmanager
    def _tapped(self, taps: tuple[int, ...]) -> Iterator[dict[int, Tensor]]:
        """Collects tap -> hidden state while the model runs; the model is left as it was."""
        hidden: dict[int, Tensor] = {}
        handles = []
        try:
            for tap in taps:
                if tap == -1:
                    handles.append(self._decoder.register_forward_hook(_keep_output(hidden, tap)))
                elif tap == 0:
                    first = self._layers[0]
                    handles.append(first.register_forward_pre_hook(_keep_input(hidden), with_kwargs=True))
                else:
                    handles.append(self._layers[tap - 1].register_forward_hook(_keep_output(hidden, tap)))
            yield hidden
        finally:
            for handle in handles:
                handle.remove()

    @cached_property
    def _decoder(self) -> nn.Module:
        """What runs between the token ids and lm_head: the module that owns the list of layers."""
        module: nn.Module
        for module in self.model.modules():
            if any(isinstance(m, nn.ModuleList) and len(m) == self.num_layers for m in module.children()):
                return module
        raise ValueError(f"{self.name} has no list of {self.num_layers} layers to take hidden states from")

    @cached_property
    def _layers(self) -> nn.ModuleList:
        lists = (m for m in self._decoder.children() if isinstance(m, nn.ModuleList))
        return next(m for m in lists if len(m) == self.num_layers)


class _Arguments:
    """How this model's forward calls what it is given."""

    def __init__(self, model: PreTrainedModel) -> None:
        known = inspect.signature(model.forward).parameters
        cache = next((name for name in ("past_key_values", "cache_params") if name in known), None)
        if cache is None:
            kind = model.config.model_type
            raise ValueError(f"a {kind} model keeps its history where it cannot be rolled back; choose another model")
        self._cache = cache
        self.positions = "position_ids" in known
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def of(self, cache: Cache, positions: Tensor | None, mask: AttentionMask, last: bool) -> dict[str, Any]:
        arguments: dict[str, Any] = {self._cache: cache, "attention_mask": mask, "use_cache": True}
        if positions is not None:
            arguments["position_ids"] = positions
        if last:
            arguments.update(self._last)
        return arguments


def _ending_after(module: nn.Module, layers: nn.ModuleList, count: int) -> nn.Module:
    """A twin of `module` with the first `count` of `layers`; whatever does not contain them is shared."""
    if module is layers:
        return layers[:count]
    twin = copy(module)
    twin.__dict__.pop("forward", None)  # accelerate's, which would run the original
    twin._modules = {
        name: _ending_after(part, layers, count) if part and any(m is layers for m in part.modules()) else part
        for name, part in module._modules.items()
    }
    return twin


def _windows(model: PreTrainedModel, config: Any) -> dict[str, int] | None:
    """Kind of layer -> attention window in positions (0: none). None when the model can only continue chains."""
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


def _keep_output(hidden: dict[int, Tensor], tap: int) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        hidden[tap] = output if isinstance(output, Tensor) else output[0]

    return hook


def _keep_input(hidden: dict[int, Tensor]) -> Any:
    def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden[0] = inputs[0] if inputs else named["hidden_states"]

    return hook
