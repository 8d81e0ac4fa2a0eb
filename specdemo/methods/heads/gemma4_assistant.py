"""Gemma 4 assistants: a few small Gemma layers that attend to the target's KV cache (transformers' `gemma4_assistant`).

B rows, V vocabulary, H hidden size of the target, D of the assistant, C centroids, K active centroids, E size of an
attention head, W columns of keys.

The layers have no keys and values of their own. A layer with sliding window reads the cache of the target's last layer
with sliding window, and one with full attention that of its last layer with full attention. There is nothing to roll
back. A step reads the embedding of the last token and a hidden state, both of size H: for the first draft token the
target's state before lm_head, for the others the previous output. All draft tokens have the position of the root.

Large vocabularies have an approximate output head: the tokens are ordered by centroid, and only those of the K best
centroids get a logit. All other tokens share one logit, 1 below the lowest.

transformers keeps the keys of one rejected draft token when it drafts after a rejection; this file reads committed
tokens only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from specdemo.core.protocol import Budget, DraftPlan, Progress, SharedKV, Target, Tensors
from specdemo.core.sampling import Sampling
from specdemo.core.shapes import Config
from specdemo.core.tree import Draft
from specdemo.kv.columns import Rope
from specdemo.methods import require_method
from specdemo.methods.base import FrozenHead, NoOptions
from specdemo.methods.drafting_cost import Gemma4AssistantCost
from specdemo.methods.heads.formats import check_target, rename_tensors
from specdemo.methods.heads.formats.config_keys import LAYER_KEYS
from specdemo.methods.heads.network import Network, move_to_target
from specdemo.methods.heads.runtime import last_columns
from specdemo.methods.heads.sampler import ChainBuilder, flatten_draft, unflatten_draft
from specdemo.models.checkpoints import Checkpoint, write_checkpoint
from specdemo.models.layers import MLP, attend
from specdemo.models.operations import apply_rope
from specdemo.models.packed import RMSNorm

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
SLIDING, FULL_ATTENTION = "sliding_attention", "full_attention"
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
ROPE_TYPES = ("default", "proportional")
# other values change the layers
REQUIRED = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "use_bidirectional_attention": None,
}
READ = (
    "attention_k_eq_v backbone_hidden_size centroid_intermediate_top_k final_logit_softcapping global_head_dim "
    "num_global_key_value_heads num_kv_shared_layers use_ordered_embeddings vocab_size_per_layer_input per_layer_config"
).split()
NAMES = {r"^model\.": "", r"^masked_embedding\.": ""}
HINT = "fetch the assistant again"


@dataclass(frozen=True, slots=True)
class AssistantDesign:
    """Sizes of an assistant. head_dims, kv_heads: by kind of layer. centroids: 0 for an exact output head."""

    target_size: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    layer_types: tuple[str, ...]
    head_dims: Mapping[str, int]
    kv_heads: Mapping[str, int]  # key/value heads of the target's cache
    rope: Mapping[str, Config]
    window: int
    rms_norm_eps: float = 1e-6
    centroids: int = 0
    active_centroids: int = 32

    @property
    def mlp(self) -> SimpleNamespace:
        """Return the config of an MLP as transformers names it."""
        return SimpleNamespace(
            hidden_size=self.hidden_size, intermediate_size=self.intermediate_size, hidden_act="gelu_pytorch_tanh"
        )


class QueryAttention(nn.Module):
    """Attention with queries only."""

    def __init__(self, design: AssistantDesign, kind: str) -> None:
        super().__init__()
        self.kind, self.heads, size = kind, design.num_heads, design.head_dims[kind]
        self.q_proj = nn.Linear(design.hidden_size, self.heads * size, bias=False)
        self.q_norm = RMSNorm(size, design.rms_norm_eps)
        self.o_proj = nn.Linear(self.heads * size, design.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: Rope, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, 1, D] -> [B, 1, D]. keys, values, mask: see `SharedKV`."""
        query = apply_rope(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1))), rope).transpose(1, 2)
        out: Tensor = self.o_proj(attend(query, keys, values, mask, False, 1.0).flatten(2))
        return out


class AssistantLayer(nn.Module):
    """A Gemma 4 decoder layer without keys and values."""

    layer_scalar: Tensor

    def __init__(self, design: AssistantDesign, kind: str) -> None:
        super().__init__()
        size, eps = design.hidden_size, design.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = QueryAttention(design, kind)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(design.mlp, ())
        self.post_feedforward_layernorm = RMSNorm(size, eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, rope: Rope, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, 1, D] -> [B, 1, D]. See `QueryAttention.forward`."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rope, keys, values, mask))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class Assistant(Network):
    """The layers, the projections between the hidden sizes, and the output head."""

    token_ordering: Tensor  # [V] token ids, ordered by centroid

    def __init__(self, design: AssistantDesign) -> None:
        super().__init__()
        self.design, size = design, design.hidden_size
        self.pre_projection = nn.Linear(2 * design.target_size, size, bias=False)
        self.layers = nn.ModuleList([AssistantLayer(design, kind) for kind in design.layer_types])
        self.norm = RMSNorm(size, design.rms_norm_eps)
        self.post_projection = nn.Linear(size, design.target_size, bias=False)
        if design.centroids:
            self.embedding = nn.Parameter(torch.empty(design.vocab_size, size))
            self.centroids = nn.Linear(size, design.centroids, bias=False)
            self.register_buffer("token_ordering", torch.arange(design.vocab_size))
        else:
            self.lm_head = nn.Linear(size, design.vocab_size, bias=False)

    @property
    def output_name(self) -> str:
        """Return the name of the output embeddings, which a checkpoint calls `embed_tokens.weight`."""
        return "embedding" if self.design.centroids else "lm_head.weight"

    def rope(self, positions: Tensor) -> dict[str, Rope]:
        """Return kind of layer -> rotary embeddings of positions [B, 1]."""
        design = self.design
        return {kind: _rope(positions, design.head_dims[kind], design.rope[kind], self.dtype) for kind in design.rope}

    def step(self, embedding: Tensor, hidden: Tensor, kv: SharedKV, rope: Mapping[str, Rope]) -> tuple[Tensor, Tensor]:
        """Read embedding and hidden state [B, 1, H]; return logits [B, 1, V] and the next hidden state [B, 1, H]."""
        x = self.pre_projection(torch.cat([embedding, hidden], -1))
        # transformers counts the window from the last committed token, inclusively
        masks = {kind: kv.mask(self.design.window + 1 if kind == SLIDING else 0) for kind in rope}
        for layer, kind in zip(self.layers, self.design.layer_types, strict=True):
            x = layer(x, rope[kind], *kv.layers[kind], masks[kind])
        x = self.norm(x)
        return self.logits(x), self.post_projection(x)

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [B, 1, V] of states [B, 1, D]."""
        if not self.design.centroids:
            exact: Tensor = self.lm_head(x)
            return exact
        best = self.centroids(x).topk(self.design.active_centroids, -1).indices
        ids = self.token_ordering.view(self.design.centroids, -1)[best].flatten(-2)  # [B, 1, K V / C]
        selected = (self.embedding[ids] @ x[..., None])[..., 0]
        other = selected.amin(-1, keepdim=True) - 1.0
        return other.expand(*x.shape[:-1], self.design.vocab_size).scatter(-1, ids, selected)


class Gemma4Assistant(Gemma4AssistantCost, FrozenHead[Assistant]):
    summary = "A few small layers that attend to the target's KV cache draft from its last hidden state."
    requires: ClassVar = frozenset({"hidden_states", "shared_kv"})
    taps = (-1,)
    config_keys = LAYER_KEYS | frozenset(READ).union(REQUIRED)

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        return checkpoint.config.get("model_type") in MODEL_TYPES

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: Target) -> Assistant:
        require_method(checkpoint, "gemma4_assistant")
        tensors = rename_tensors(checkpoint.tensors, NAMES)
        design = read_design(checkpoint, tensors, target)
        check_target(checkpoint, hidden_size=(design.target_size, target.hidden_size))
        check_target(checkpoint, vocabulary=(design.vocab_size, target.vocab_size))
        _check_cache(checkpoint.name, design, target)
        with torch.device("meta"):
            head = Assistant(design)
        tied = [tensors.pop(name) for name in ("lm_head.weight", "embed_tokens.weight") if name in tensors]
        if tied:
            tensors[head.output_name] = tied[-1]
        return head.load_tensors(tensors, checkpoint, target, HINT)

    def __init__(self, target: Target, model: Assistant | str, options: NoOptions | None = None) -> None:
        super().__init__(target, model, options)
        self._target = target
        self._hidden = self._roots = torch.empty(0)

    @classmethod
    def fresh(cls, target: Target, layers: int = 4, centroids: int = 0) -> Assistant:
        """Return an untrained assistant, whose last layer has the kind of the target's last full-attention layer.

        centroids: of an approximate output head; 0: exact.
        """
        kinds = [kind for kind in target.kv_shapes if kind != SLIDING] or [*target.kv_shapes]
        others = [kind for kind in target.kv_shapes if kind not in kinds[-1:]] or kinds
        kv_heads = max(heads for heads, _ in target.kv_shapes.values())
        layer_types = (*(others[-1:] * (layers - 1)), kinds[-1])
        design = AssistantDesign(
            target_size=target.hidden_size,
            hidden_size=max(8, target.hidden_size // 4),
            intermediate_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_heads=2 * kv_heads,
            layer_types=layer_types,
            head_dims={kind: target.kv_shapes[kind][1] for kind in layer_types},
            kv_heads={kind: target.kv_shapes[kind][0] for kind in layer_types},
            rope=dict.fromkeys(layer_types, DEFAULT_ROPE),
            window=512,
            centroids=centroids,
            active_centroids=max(1, centroids // 4),
        )
        head = Assistant(design)
        for parameter in head.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=design.hidden_size**-0.5)
        return move_to_target(head, target)

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, sampling, rng)
        self._hidden = self._roots = torch.empty(0)

    def release(self) -> None:
        super().release()
        self._hidden = self._roots = torch.empty(0)

    def observe(self, progress: Progress) -> None:
        self._hidden = last_columns(progress, self.target_features(progress))[:, None]
        self._roots = last_columns(progress, progress.outputs)[:, None]

    def propose(self, budget: Budget) -> Draft:
        depth, rows = min(budget.depth, budget.nodes), len(self._roots)
        if depth < 1:
            return Draft.empty(rows, self.device)
        noise = self.sampler.predraw_noise(rows, depth, self._target.vocab_size, self.device)
        plan = DraftPlan(("assistant", self.sampler.sampling), depth, room=0)
        outputs = self._target.draft_from_kv(self._draft, (self._roots, self._hidden, *noise), plan)
        return unflatten_draft(outputs, depth)

    def _draft(self, kv: SharedKV, depth: int, tokens: Tensor, hidden: Tensor, *noise: Tensor) -> Tensors:
        head, builder = self.head, ChainBuilder(self.sampler.with_noise(noise))
        rope = head.rope(kv.positions)
        for _ in range(depth):
            logits, hidden = head.step(self._target.embed(tokens).to(hidden.dtype), hidden, kv, rope)
            tokens = builder.append(logits)
        return flatten_draft(builder.build())

    @property
    def graph_note(self) -> str:
        return ""  # the draft runs in the target's graphs, whose note is the target's

    def save(self, folder: Path, target_name: str) -> None:
        head = self.head
        tensors = {_file_name(name, head.output_name): tensor for name, tensor in head.state_dict().items()}
        write_checkpoint(folder, to_config(head.design, target_name), tensors)


def read_design(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], target: Target) -> AssistantDesign:
    """Return the sizes of an assistant. Raises ValueError, one line, for a config that is incomplete or unsupported."""
    name, config, text = checkpoint.name, checkpoint.config, checkpoint.config.get("text_config") or {}
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "layer_types", "rope_parameters")
    lacking = next((key for key in needed if not text.get(key)), None)
    if lacking or "backbone_hidden_size" not in config:
        raise ValueError(f"the config of {name} lacks {lacking or 'backbone_hidden_size'!r}; fetch its config.json")
    for key, usual in REQUIRED.items():
        if text.get(key, usual) != usual:
            raise ValueError(f"{name} has {key} {text[key]}, which is not supported; choose another assistant")
    kinds, vocabulary = tuple(map(str, text["layer_types"])), int(text["vocab_size"])
    count = int(config.get("num_centroids", 2048)) if config.get("use_ordered_embeddings") else 0
    if count and vocabulary % count:
        raise ValueError(f"{name} has {vocabulary} tokens for {count} centroids, which is not a multiple; {HINT}")
    return AssistantDesign(
        target_size=int(config["backbone_hidden_size"]),
        hidden_size=int(text["hidden_size"]),
        intermediate_size=int(text["intermediate_size"]),
        vocab_size=vocabulary,
        num_heads=int(text["num_attention_heads"]),
        layer_types=kinds,
        head_dims=_head_dims(name, kinds, target, tensors),
        kv_heads={kind: heads for kind, (heads, _) in target.kv_shapes.items() if kind in kinds},
        rope=_rope_parameters(name, kinds, text["rope_parameters"]),
        window=int(text.get("sliding_window") or 0),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        centroids=count,
        active_centroids=int(config.get("centroid_intermediate_top_k", 32)),
    )


def to_config(design: AssistantDesign, target_name: str) -> dict[str, object]:
    """Return the config.json of an assistant."""
    sizes = {
        "head_dim": design.head_dims.get(SLIDING),
        "num_key_value_heads": design.kv_heads.get(SLIDING),
        "global_head_dim": design.head_dims.get(FULL_ATTENTION),
        "num_global_key_value_heads": design.kv_heads.get(FULL_ATTENTION),
    }
    text = {
        "model_type": "gemma4_text",
        "hidden_size": design.hidden_size,
        "intermediate_size": design.intermediate_size,
        "num_hidden_layers": len(design.layer_types),
        "num_kv_shared_layers": len(design.layer_types),
        "num_attention_heads": design.num_heads,
        "vocab_size": design.vocab_size,
        "layer_types": list(design.layer_types),
        "rope_parameters": {kind: dict(parameters) for kind, parameters in design.rope.items()},
        "sliding_window": design.window,
        "rms_norm_eps": design.rms_norm_eps,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "attention_k_eq_v": True,  # transformers reads num_global_key_value_heads only with it
        **{key: size for key, size in sizes.items() if size},
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": MODEL_TYPES[0],
        "base_model_name_or_path": target_name,
        "backbone_hidden_size": design.target_size,
        "use_ordered_embeddings": bool(design.centroids),
        "num_centroids": design.centroids or 2048,
        "centroid_intermediate_top_k": design.active_centroids,
        "text_config": text,
    }


def _file_name(name: str, output_name: str) -> str:
    """Return the name that transformers gives to a tensor of `Assistant`."""
    if name == output_name:
        return "model.embed_tokens.weight"
    if name.startswith(("centroids.", "token_ordering")):
        return f"masked_embedding.{name}"
    return f"model.{name}" if name.startswith(("layers.", "norm.")) else name


def _head_dims(name: str, kinds: tuple[str, ...], target: Target, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the size of the heads by kind of layer. Raises ValueError if the target has no such layers."""
    norms = {kind: f"layers.{index}.self_attn.q_norm.weight" for index, kind in enumerate(kinds)}
    for kind, norm in norms.items():
        if kind not in target.kv_shapes:
            found = " and ".join(target.kv_shapes)
            raise ValueError(
                f"{name} reads the cache of {kind} layers, the target has {found}; choose a Gemma 4 target"
            )
        if norm not in tensors:
            raise ValueError(f"{name} has no tensor {norm}; {HINT}")
    return {kind: len(tensors[norm]) for kind, norm in norms.items()}


def _rope_parameters(name: str, kinds: tuple[str, ...], by_kind: Config) -> dict[str, Config]:
    lacking = next((kind for kind in kinds if not isinstance(by_kind.get(kind), Mapping)), None)
    if lacking:
        raise ValueError(f"the config of {name} lacks rope_parameters for {lacking!r}; fetch its config.json")
    for kind in kinds:
        rope_type = by_kind[kind].get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"{name} has rope_type {rope_type!r}, which is not supported; choose another assistant")
    return {kind: by_kind[kind] for kind in dict.fromkeys(kinds)}


def _check_cache(name: str, design: AssistantDesign, target: Target) -> None:
    """Raise ValueError if the heads of the target's KV cache do not fit."""
    for kind, size in design.head_dims.items():
        heads, target_size = target.kv_shapes[kind]
        if target_size != size or design.num_heads % heads:
            raise ValueError(
                f"{name} has {design.num_heads} heads of size {size} in {kind} layers, the target's cache has {heads} "
                f"of size {target_size}; choose the target it was trained for"
            )


def _rope(positions: Tensor, size: int, parameters: Config, dtype: torch.dtype) -> Rope:
    """Return the rotary embeddings of positions [B, 1] for heads of `size`. With rope type proportional, only the
    first share of the frequencies rotates."""
    angles, theta = size // 2, float(parameters.get("rope_theta", DEFAULT_ROPE["rope_theta"]))
    rotated, factor = angles, 1.0
    if parameters.get("rope_type") == "proportional":
        rotated = int(float(parameters.get("partial_rotary_factor", 1.0)) * size // 2)
        factor = float(parameters.get("factor", 1.0))
    index = torch.arange(angles, device=positions.device)
    frequencies = torch.where(index < rotated, theta ** (-2.0 * index / size) / factor, 0.0)
    angle = positions[..., None, None].float() * frequencies
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
