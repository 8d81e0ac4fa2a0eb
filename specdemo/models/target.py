"""transformers causal language model as a `core.protocol.Target`.

B rows, N draft nodes, S = N + 1 slots, V vocabulary rows of lm_head (padding included), H hidden size.

A model of plain attention layers verifies trees with a 4D mask and position ids; windows count positions. Any other
model (capability `trees` False) verifies chains. Each forward is one call of the model, or of its fused layers
(models/fused.py).
"""

from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from specdemo.core.protocol import NO_HISTORY, UNLIMITED, Capabilities, Forward, TargetFacts
from specdemo.core.rounding import difference, moved_share, spacing
from specdemo.core.tree import chain_parents
from specdemo.kv.graphs import GRAPH_SPARE_COLUMNS, GRAPH_WIDTHS, GraphCapture, Tensors, covering_widths
from specdemo.kv.history import KVHistory
from specdemo.kv.snapshots import (
    MULTI_TOKEN_TEXT,
    SINGLE_TOKENS,
    History,
    SnapshotHistory,
    supports_multi_token,
)
from specdemo.kv.store import SPARE_COLUMNS, KVStore
from specdemo.models.cpu_plan import cpu_plan
from specdemo.models.cpu_threads import thread_limit
from specdemo.models.devices import capability, capture_for, device_kind, device_map_summary
from specdemo.models.fused import fused_decoder, kernels, missing_kernels
from specdemo.models.packed import linear_bytes, packed_bytes
from specdemo.models.runner import Runner
from specdemo.models.shared import DraftFunction, DraftPlan, SharedTarget
from specdemo.models.text import end_of_turn, sample_tokens

NO_LENGTH_LIMIT = 1 << 20  # positions, for models without a limit in their config
HISTORY_ENDS = (6, 7, 11, 16)  # tokens of a text at which a stored history is checked
MASKED_ATTENTION = ("sdpa", "eager")  # implementations that accept any mask
COLUMN_WINDOW_MODELS = ("gpt_neo",)  # model types that count windows in cache columns and ignore position_ids


class HFTarget(SharedTarget):
    """Target with one history on a shared model. Several targets may share a model if they take turns."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
        capture: GraphCapture | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        """capture: captures forward passes; None: CUDA graphs on a GPU. notes: see LoadedModel.

        Raises ValueError for a model whose forward takes no cache.
        """
        self.model, self.tokenizer = model.eval(), tokenizer
        self.name = name or str(model.config.name_or_path) or str(model.config.model_type)
        config = model.config.get_text_config(decoder=True)
        self.embed: nn.Module = model.get_input_embeddings()
        self.lm_head: nn.Module = model.get_output_embeddings()
        self.vocab_size = int(self.lm_head.weight.shape[0])
        table: Any = self.embed
        self._embeddings = int(table.weight.shape[0])
        self.hidden_size, self.num_layers = int(config.hidden_size), int(config.num_hidden_layers)
        self.max_length = int(getattr(config, "max_position_embeddings", None) or NO_LENGTH_LIMIT)
        self.dtype = model.dtype
        self.stop_token_ids, stop_notes = _stop_tokens(model, tokenizer)
        self.notes = tuple(dict.fromkeys((*notes, *stop_notes)))
        self._config = config
        self._run = self.runner(model, self.num_layers, self.name)
        self.num_experts = int(getattr(self._run.experts[0], "num_experts", 0)) if self._run.experts else 0
        self.device = self._run.device
        device_kind(self.device).prepare()
        windows = _windows(model, config) if self._run.takes_positions else None
        trees = windows is not None
        self._windows = windows or {}
        if windows is not None and not any(windows.values()):
            self._run.fused = fused_decoder(model)
        self._capture = capture
        self._store = KVStore(
            self.device,
            self.dtype,
            len(DynamicCache(config=config).layers),
            self.new_graph_capture(),
            same_shape=self._run.fused is not None,
            row_sequences=device_kind(self.device).row_sequences,
            limit=self.max_length,
        )
        graphs = self._store.graphs
        if graphs.enabled and device_map_summary(model):
            graphs.disabled_reason = "its layers are on several devices"
        elif graphs.enabled and not trees:
            graphs.disabled_reason = "its cache cannot be rewritten in place"
        elif graphs.enabled and _experts_wait(model, self.device):
            dtype = str(self.dtype).removeprefix("torch.")
            graphs.disabled_reason = f"its experts wait for the device in {dtype} on this GPU"
        # every plain model can also run its first layers and share its cache, because its history can be cropped
        branches = trees and not cpu_plan(model).chains
        self.capabilities = Capabilities(branches, "all", trees, trees, cuda_graphs=graphs.enabled, batch=UNLIMITED)
        self._kv_layers = _kv_layers(config)
        self._history: History | None = None

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
        return self._history.bytes if self._history else self._store.bytes

    @cached_property
    def weight_bytes(self) -> int:
        return packed_bytes(self.model) + sum(int(p.numel() * p.element_size()) for p in self.model.parameters())

    @cached_property
    def layer_config(self) -> dict[str, Any]:  # type: ignore[override]
        return self._config.to_dict()

    @cached_property
    def kv_shapes(self) -> dict[str, tuple[int, int]]:  # type: ignore[override]  # computed when a drafter needs it
        return {kind: _kv_shape(self._config, index) for kind, index in self._kv_layers.items()}

    @property
    def facts(self) -> TargetFacts:
        plan, on_cpu = cpu_plan(self.model), device_kind(self.device).host
        words = {"one kernel for every width": plan.same_bits, "graphs": self.uses_cuda_graphs}
        return TargetFacts(
            precision=str(self.dtype).removeprefix("torch."),
            kernels=", ".join([kernels(self.model), *(word for word, applies in words.items() if applies)]),
            layout=str(plan.layout) if on_cpu else "",
            pass_bytes=self._pass_bytes,
            wall_time=plan.threads > 1,  # the clock of a run stays the same where the threads fall
            same_bits=plan.same_bits,
        )

    @cached_property
    def _pass_bytes(self) -> int:
        return 0 if self.num_experts else linear_bytes(self.model)

    @property
    def note(self) -> str:
        single = ""
        if isinstance(self._history, SnapshotHistory) and not self._multi_token:
            single = SINGLE_TOKENS
        return "; ".join(filter(None, (self._store.graphs.note, missing_kernels(self._config, self.device), single)))

    @property
    def threads(self) -> int:
        return min(cpu_plan(self.model).threads, thread_limit.threads) if device_kind(self.device).host else 0

    @threads.setter
    def threads(self, count: int) -> None:
        cpu_plan(self.model).threads = count

    @property
    def pass_ms(self) -> dict[int, float]:
        return cpu_plan(self.model).pass_ms

    @property
    def uses_cuda_graphs(self) -> bool:
        return self._store.graphs.enabled

    @property
    def capacity(self) -> int:
        return self._store.capacity

    def release_graphs(self) -> None:
        self._store.release_graphs()

    def new_graph_capture(self) -> GraphCapture | None:
        return self._capture or capture_for(self.device)

    @torch.no_grad()
    def capture_graphs(self, slots: int, taps: tuple[int, ...] = (), tree: bool = False) -> None:
        if not self.uses_cuda_graphs or not self.capacity:
            return
        rows = len(self.length)
        for width in covering_widths(slots):
            tokens = torch.zeros(rows, width, dtype=torch.int64, device=self.device)
            chain = chain_parents(rows, width - 1, self.device)
            self.forward(tokens, chain.clone() if tree else chain, taps)

    @torch.no_grad()
    def start(self, tokens: Tensor, taps: tuple[int, ...] = (), reserve: int = 0) -> Forward:
        """Raises ValueError if the tokens exceed the model's context."""
        self.check_length(tokens.shape[1])
        self._history = None  # before the next one is allocated
        spare = GRAPH_SPARE_COLUMNS if self.uses_cuda_graphs else SPARE_COLUMNS
        self._history = self._new_history(tokens.shape[0], tokens.shape[1] + (reserve or spare))
        return self._history.extend(tokens, taps)

    @torch.no_grad()
    def forward(self, tokens: Tensor, parents: Tensor, taps: tuple[int, ...] = ()) -> Forward:
        return self._require_history().forward(tokens, parents, taps)

    @torch.no_grad()
    def early_exit_logits(self, chain: Tensor, layers: int) -> Tensor:
        # keys and values of the earlier tokens stay in the cache until the next `forward` overwrites them
        history = self._require_history()
        if not isinstance(history, KVHistory):
            raise ValueError(f"{self.name} cannot run only its first layers: its cache cannot be rolled back")
        run = partial(self._run, layers=layers)
        return history.forward_after_draft(run, chain[:, -1:], chain.shape[1] - 1).logits[:, -1]

    @torch.no_grad()
    def draft(
        self, tokens: Tensor, counts: list[int], write: DraftFunction, extra: Tensors, plan: DraftPlan
    ) -> Tensors | None:
        history = self._history
        if not isinstance(history, KVHistory) or tokens.shape[1] > plan.room:
            return None
        run = partial(self._run, layers=plan.layers or None)
        return history.draft(run, tokens, counts, write, extra, plan.kind, plan.depth, plan.room, plan.commits)

    @torch.no_grad()
    def draft_from_kv(self, write: DraftFunction, extra: Tensors, plan: DraftPlan) -> Tensors:
        history = self._require_history()
        if not isinstance(history, KVHistory):
            raise ValueError(f"{self.name} cannot share its KV cache, which is not of attention layers only")
        return history.draft_from_kv(self._kv_layers, write, extra, plan.kind, plan.depth, plan.room)

    @torch.no_grad()
    def check_history(self) -> str:
        """Compare tokens after a stored history with transformers' pass over the whole text.

        Return "" where they agree, and a sentence where they differ by more than the model's own rounding. Raises
        ValueError if most of the tokens are others, which no rounding explains.
        """
        text = self.sample_text(HISTORY_ENDS[-1])
        ends = [end for end in HISTORY_ENDS if end <= text.shape[1]] or [text.shape[1]]
        parts = [self.start(text[:, : ends[0]])]
        parts += [self._require_history().extend(text[:, begin:end], ()) for begin, end in pairwise(ends)]
        self.release()
        stored = torch.cat([part.logits[0, -1:] for part in parts]).float()
        expected = self.model(text).logits[0, [end - 1 for end in ends]].float()
        compare = partial(difference, expected, stored, eps=self.spacing, layers=self.num_layers)
        if compare([]).is_rounding:
            return ""
        own = torch.cat([self.model(text[:, :end]).logits[0, -1:] for end in ends]).float()
        result = compare([(expected, own)])
        if 2 * len(result.wrong) >= len(ends):
            first = result.wrong[0]
            before, token, other = text[0, : ends[first]], stored[first].argmax(), expected[first].argmax()
            raise ValueError(
                f"after {self._words(before)} it writes {self._words(token)}, transformers' layers write "
                f"{self._words(other)}"
            )
        if result.is_rounding:
            return ""
        return (
            f"passes after a stored text move {100 * result.moved:.2g}% of the probability of a token, "
            f"transformers' own passes of other widths {100 * moved_share(expected, own):.2g}%"
        )

    def sample_text(self, count: int) -> Tensor:
        """Return at most `count` token ids of a sentence, [1, T], for checks."""
        ids = sample_tokens(self.tokenizer, min(count, self.max_length), self._embeddings)
        return torch.tensor([ids], device=self.device)

    @property
    def spacing(self) -> float:
        """Return the relative spacing of the model's numbers."""
        return spacing(self.dtype, bool(getattr(self.model, "is_quantized", False)))

    def _words(self, ids: Tensor) -> str:
        """Return the text of token ids in quotes, or the ids."""
        tokens = ids.reshape(-1).tolist()
        return repr(self.tokenizer.decode(tokens)) if self.tokenizer is not None else str(tokens)

    def commit(self, path: list[list[int]]) -> None:
        """Raises ValueError if the history would exceed the model's context."""
        history = self._require_history()
        history.commit(path)
        self.check_length(max(history.lengths))

    def crop(self, lengths: list[int]) -> None:
        self._require_history().crop(lengths)

    def release(self) -> None:
        self._history = None
        self._store.start(0)

    def _require_history(self) -> History:
        if self._history is None:
            raise ValueError(NO_HISTORY)
        return self._history

    def _new_history(self, rows: int, columns: int) -> History:
        if not self.capabilities.layers:
            return SnapshotHistory(self._run, self._config, self._multi_token, self.device)
        self._store.shape = cpu_plan(self.model).shape
        self._store.start(rows, columns + (GRAPH_WIDTHS[-1] if self.uses_cuda_graphs else 0))  # room for padding slots
        return KVHistory(self._store, self._run, self._windows, takes_tree_masks=self._run.fused is not None)

    def first_layers(self, count: int) -> History:
        """Return an empty history of the model's first `count` layers and its head, for checks. Requires `trees`."""
        run: Any = self._run if count == self.num_layers else partial(self._run, layers=count)
        self._new_history(1, 0)
        return KVHistory(self._store, run, self._windows, takes_tree_masks=self._run.fused is not None)

    @cached_property
    def _multi_token(self) -> bool:
        text = self.sample_text(MULTI_TOKEN_TEXT)
        return supports_multi_token(self._run, self._config, text, self.spacing, self.num_layers)


def _kv_layers(config: PreTrainedConfig) -> dict[str, int]:
    """Return kind of layer -> the last layer of this kind with a cache of its own."""
    count = sum(type(layer).__name__ != "DummyLayer" for layer in DynamicCache(config=config).layers)
    kinds = list(getattr(config, "layer_types", None) or ["all"] * count)
    return {kind: index for index, kind in enumerate(kinds[:count])}


def _kv_shape(config: PreTrainedConfig, layer: int) -> tuple[int, int]:
    """Return the number of key/value heads of a layer, and their size."""
    sizes = config.per_layer_config[layer] if hasattr(config, "per_layer_config") else config
    heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
    return int(heads), int(getattr(sizes, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _experts_wait(model: PreTrainedModel, device: torch.device) -> bool:
    """Return whether the experts of a model make the host wait for a GPU, so that no CUDA graph can capture them.

    torch's grouped product copies the group sizes to the host, except in bfloat16 on Hopper and data-centre Blackwell.
    """
    if not device_kind(device).cuda_graphs or not any(name.endswith(".experts") for name, _ in model.named_modules()):
        return False
    implementation = getattr(model.config.get_text_config(decoder=True), "_experts_implementation", None)
    if implementation == "grouped_mm":
        native = not torch.version.hip and capability(device) in ((9, 0), (10, 0))
        return not (native and model.dtype == torch.bfloat16)
    return implementation != "batched_mm"


def _windows(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, int] | None:
    """Return layer kind -> attention window in positions (0: full). None if the model can only continue chains."""
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    caches: list[Any] = [c for c in DynamicCache(config=config).layers if type(c).__name__ != "DummyLayer"]
    if config._attn_implementation not in MASKED_ATTENTION or config.model_type in COLUMN_WINDOW_MODELS:
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


def _stop_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ids at which a text ends, and a note where the end of a turn is not among those that the model
    states."""
    generation, stated = getattr(model, "generation_config", None), ()
    for source in (generation, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            stated = tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
            break
    end = None if tokenizer is None else end_of_turn(tokenizer)
    if tokenizer is None or end is None or end in stated:
        return stated, ()
    word, *others = (str(tokenizer.convert_ids_to_tokens(token)) for token in (end, *stated))
    names = " and ".join(others) or "no stop token"
    note = f"texts also end at {word}, where the chat template ends a turn; the model's files name {names}"
    return (*stated, end), (note,)
