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
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.tree import Draft
from specdemo.costs.shapes import Config
from specdemo.kv.graphs import Tensors
from specdemo.kv.masks import Rope
from specdemo.kv.view import View
from specdemo.methods import require_method
from specdemo.methods.base import DraftOptions
from specdemo.methods.heads.formats import LAYER_KEYS, check_target
from specdemo.methods.heads.head import Head
from specdemo.methods.heads.network import Network, untrained
from specdemo.methods.heads.runtime import last_columns
from specdemo.methods.heads.sampler import ChainBuilder, flatten_draft, unflatten_draft
from specdemo.models.checkpoints import Checkpoint, write_checkpoint
from specdemo.models.layers import MLP, attend
from specdemo.models.operations import apply_rope
from specdemo.models.packed import RMSNorm
from specdemo.models.shared import DraftPlan, SharedTarget

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
SLIDING = "sliding_attention"
SIZE_KEYS = {  # kind of layer -> config keys of its key/value heads and their size
    SLIDING: ("num_key_value_heads", "head_dim"),
    "full_attention": ("num_global_key_value_heads", "global_head_dim"),
}
NUM_CENTROIDS, ACTIVE_CENTROIDS, EPSILON = 2048, 32, 1e-6  # transformers' defaults
ACTIVATION = "gelu_pytorch_tanh"
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
ROPE_TYPES = ("default", "proportional")
# other values change the layers
REQUIRED = {
    "hidden_activation": ACTIVATION,
    "attention_bias": False,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "use_bidirectional_attention": None,
}
READ = (
    "attention_k_eq_v backbone_hidden_size centroid_intermediate_top_k final_logit_softcapping global_head_dim "
    "num_centroids num_global_key_value_heads num_kv_shared_layers use_ordered_embeddings "
    "vocab_size_per_layer_input per_layer_config"
).split()
HINT = "fetch the assistant again"


class QueryAttention(nn.Module):
    """Attention with queries only."""

    def __init__(self, text: Config, head_dim: int) -> None:
        super().__init__()
        self.heads, size = text["num_attention_heads"], text["hidden_size"]
        self.q_proj = nn.Linear(size, self.heads * head_dim, bias=False)
        self.q_norm = RMSNorm(head_dim, text.get("rms_norm_eps", EPSILON))
        self.o_proj = nn.Linear(self.heads * head_dim, size, bias=False)

    def forward(self, x: Tensor, rope: Rope, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, 1, D] -> [B, 1, D]. keys, values: committed, [B, H, W, E]. mask: [B, 1, 1, W] or None."""
        query = apply_rope(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1))), rope).transpose(1, 2)
        out: Tensor = self.o_proj(attend(query, keys, values, mask, False, 1.0).flatten(2))
        return out


class AssistantLayer(nn.Module):
    """A Gemma 4 decoder layer without keys and values."""

    layer_scalar: Tensor

    def __init__(self, text: Config, head_dim: int) -> None:
        super().__init__()
        size, inner, eps = text["hidden_size"], text["intermediate_size"], text.get("rms_norm_eps", EPSILON)
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = QueryAttention(text, head_dim)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, inner, ACTIVATION)
        self.post_feedforward_layernorm = RMSNorm(size, eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, rope: Rope, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """x [B, 1, D] -> [B, 1, D]. See `QueryAttention.forward`."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rope, keys, values, mask))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class Assistant(Network):
    """The layers, the projections between the hidden sizes, and the output head, under transformers' names."""

    model: Any
    masked_embedding: Any

    def __init__(self, config: Config, head_dims: Mapping[str, int]) -> None:
        """config: of transformers' class. head_dims: size of an attention head by kind of layer."""
        super().__init__()
        text, target_size = config["text_config"], config["backbone_hidden_size"]
        size, self.vocab_size, self.kinds = text["hidden_size"], text["vocab_size"], text["layer_types"]
        self.config, self.head_dims = config, {kind: head_dims[kind] for kind in self.kinds}
        self.window = text.get("sliding_window") or 0
        self.num_centroids = num_centroids(config)
        self.pre_projection = nn.Linear(2 * target_size, size, bias=False)
        self.post_projection = nn.Linear(size, target_size, bias=False)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([AssistantLayer(text, head_dims[kind]) for kind in self.kinds])
        self.model.norm = RMSNorm(size, text.get("rms_norm_eps", EPSILON))
        if self.num_centroids:
            self.model.embed_tokens = nn.Embedding(self.vocab_size, size)
            self.masked_embedding = nn.Module()
            self.masked_embedding.centroids = nn.Linear(size, self.num_centroids, bias=False)
            # token ids, ordered by centroid
            self.masked_embedding.register_buffer("token_ordering", torch.arange(self.vocab_size))
        else:
            self.model.embed_tokens = nn.Linear(size, self.vocab_size, bias=False)

    def rope(self, positions: Tensor) -> dict[str, Rope]:
        """Return kind of layer -> rotary embeddings of positions [B, 1]."""
        parameters = self.config["text_config"]["rope_parameters"]
        return {kind: _rope(positions, size, parameters[kind], self.dtype) for kind, size in self.head_dims.items()}

    def step(self, embedding: Tensor, hidden: Tensor, kv: View, rope: Mapping[str, Rope]) -> tuple[Tensor, Tensor]:
        """Read embedding and hidden state [B, 1, H]; return logits [B, 1, V] and the next hidden state [B, 1, H]."""
        x = self.pre_projection(torch.cat([embedding, hidden], -1))
        # transformers counts the window from the last committed token, inclusively
        masks = {kind: kv.mask((self.window + 1 if kind == SLIDING else 0, True)) for kind in rope}
        for layer, kind in zip(self.model.layers, self.kinds, strict=True):
            x = layer(x, rope[kind], *kv.committed[kind], masks[kind])
        x = self.model.norm(x)
        return self.logits(x), self.post_projection(x)

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [B, 1, V] of states [B, 1, D]."""
        if not self.num_centroids:
            exact: Tensor = self.model.embed_tokens(x)
            return exact
        part, active = self.masked_embedding, self.config.get("centroid_intermediate_top_k", ACTIVE_CENTROIDS)
        best = part.centroids(x).topk(active, -1).indices
        ids = part.token_ordering.view(self.num_centroids, -1)[best].flatten(-2)  # [B, 1, K V / C]
        selected: Tensor = (self.model.embed_tokens(ids) @ x[..., None])[..., 0]
        other = selected.amin(-1, keepdim=True) - 1.0
        return other.expand(*x.shape[:-1], self.vocab_size).scatter(-1, ids, selected)


class Gemma4Assistant(Head[Assistant], method="gemma4_assistant"):
    summary = "A few small layers that attend to the target's KV cache draft from its last hidden state."
    requires: ClassVar = frozenset({"hidden_states", "shared_kv"})
    taps = (-1,)
    config_keys = LAYER_KEYS | frozenset(READ).union(REQUIRED)

    def __init__(self, target: SharedTarget, model: Assistant | str, options: DraftOptions | None = None) -> None:
        super().__init__(target, model, options)
        self._target = target
        self._last: Tensors = ()  # of every row: the root [B, 1] and the target's state [B, 1, H]

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        return checkpoint.config.get("model_type") in MODEL_TYPES

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: Target) -> Assistant:
        require_method(checkpoint, "gemma4_assistant")
        tensors = dict(checkpoint.tensors)
        name, config = checkpoint.name, checkpoint.config
        check_config(name, config)
        check_target(checkpoint, hidden_size=(config["backbone_hidden_size"], target.hidden_size))
        check_target(checkpoint, vocabulary=(config["text_config"]["vocab_size"], target.vocab_size))
        head_dims = _head_dims(name, config["text_config"], target, tensors)
        with torch.device("meta"):
            head = Assistant(config, head_dims)
        if "lm_head.weight" in tensors:  # tied
            tensors = {"model.embed_tokens.weight": tensors.pop("lm_head.weight")} | tensors
        return head.load_tensors(tensors, checkpoint, target, HINT)

    @classmethod
    def fresh(cls, target: Target, layers: int = 4, centroids: int = 0) -> Assistant:
        """Return an untrained assistant, whose last layer has the kind of the target's last full-attention layer.

        centroids: of an approximate output head; 0: exact.
        """
        kinds = [kind for kind in target.kv_shapes if kind != SLIDING] or [*target.kv_shapes]
        others = [kind for kind in target.kv_shapes if kind not in kinds[-1:]] or kinds
        layer_types, size = [*(others[-1:] * (layers - 1)), kinds[-1]], max(8, target.hidden_size // 4)
        text = {
            "model_type": "gemma4_text",
            "hidden_size": size,
            "intermediate_size": target.hidden_size,
            "num_hidden_layers": layers,
            "num_kv_shared_layers": layers,
            "num_attention_heads": 2 * max(heads for heads, _ in target.kv_shapes.values()),
            "vocab_size": target.vocab_size,
            "layer_types": layer_types,
            "rope_parameters": dict.fromkeys(layer_types, DEFAULT_ROPE),
            "sliding_window": 512,
            "rms_norm_eps": EPSILON,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "attention_k_eq_v": True,  # transformers reads num_global_key_value_heads only with it
        }
        for kind, names in SIZE_KEYS.items():
            text |= dict(zip(names, target.kv_shapes[kind], strict=True)) if kind in layer_types else {}
        config = {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": MODEL_TYPES[0],
            "backbone_hidden_size": target.hidden_size,
            "use_ordered_embeddings": bool(centroids),
            "num_centroids": centroids or NUM_CENTROIDS,
            "centroid_intermediate_top_k": max(1, centroids // 4),
            "text_config": text,
        }
        head = Assistant(config, {kind: head_dim for kind, (_, head_dim) in target.kv_shapes.items()})
        return untrained(head, target, size**-0.5)

    @property
    def graph_note(self) -> str:
        return ""  # the draft runs in the target's graphs, whose note is the target's

    def observe(self, progress: Progress) -> None:
        columns = progress.outputs, self.target_features(progress)
        self._last = tuple(last_columns(progress, column)[:, None] for column in columns)

    def propose(self, budget: Budget) -> Draft:
        depth, rows = budget.chain, self.runtime.rows
        if depth < 1:
            return Draft.empty(rows, self.device)
        noise = self.sampler.predraw_noise(rows, depth, self._target.vocab_size, self.device)
        plan = DraftPlan((self.head, self.sampler.kind), depth, room=0)  # another head may use this target

        def write(kv: View, depth: int, tokens: Tensor, hidden: Tensor, *noise: Tensor) -> Tensors:
            builder = ChainBuilder(self.sampler.with_noise(noise))
            rope = self.head.rope(kv.positions)
            for _ in range(depth):
                embedding = self._target.embed(tokens).to(hidden.dtype)
                logits, hidden = self.head.step(embedding, hidden, kv, rope)
                tokens = builder.append(logits)
            return flatten_draft(builder.build())

        return unflatten_draft(self._target.draft_from_kv(write, (*self._last, *noise), plan), depth)

    def save(self, folder: Path, target_name: str) -> None:
        head = self.head
        dtype = str(head.dtype).removeprefix("torch.")
        config = {**head.config, "base_model_name_or_path": target_name, "dtype": dtype}
        write_checkpoint(folder, config, head.state_dict())


def num_centroids(config: Config) -> int:
    """Return the number of centroids of the output head; 0: it is exact."""
    return config.get("num_centroids", NUM_CENTROIDS) if config.get("use_ordered_embeddings") else 0


def check_config(name: str, config: Config) -> None:
    """Raise ValueError, one line, for a config that is incomplete or unsupported."""
    text = config.get("text_config") or {}
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "layer_types", "rope_parameters")
    lacking = next((key for key in needed if not text.get(key)), None)
    if lacking or "backbone_hidden_size" not in config:
        raise ValueError(f"the config of {name} lacks {lacking or 'backbone_hidden_size'!r}; fetch its config.json")
    for key, usual in REQUIRED.items():
        if text.get(key, usual) != usual:
            raise ValueError(f"{name} has {key} {text[key]}, which is not supported; choose another assistant")
    count, vocabulary = num_centroids(config), text["vocab_size"]
    if count and vocabulary % count:
        raise ValueError(f"{name} has {vocabulary} tokens for {count} centroids, which is not a multiple; {HINT}")


def _head_dims(name: str, text: Config, target: Target, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the size of an attention head by kind of layer. Raises ValueError if the target's KV cache has no such
    layers or does not fit, and for unsupported rotary embeddings."""
    head_dims, heads = {}, text["num_attention_heads"]
    for index, kind in enumerate(text["layer_types"]):
        norm = f"model.layers.{index}.self_attn.q_norm.weight"
        if kind not in target.kv_shapes:
            layers = " and ".join(target.kv_shapes)
            raise ValueError(
                f"{name} reads the cache of {kind} layers, the target has {layers}; choose a Gemma 4 target"
            )
        if norm not in tensors:
            raise ValueError(f"{name} has no tensor {norm}; {HINT}")
        size = head_dims[kind] = len(tensors[norm])
        _check_rope(name, kind, text["rope_parameters"].get(kind))
        kv_heads, target_size = target.kv_shapes[kind]
        if target_size != size or heads % kv_heads:
            raise ValueError(
                f"{name} has {heads} heads of size {size} in {kind} layers, the target's cache has {kv_heads} "
                f"of size {target_size}; choose the target it was trained for"
            )
    return head_dims


def _check_rope(name: str, kind: str, parameters: object) -> None:
    if not isinstance(parameters, Mapping):
        raise ValueError(f"the config of {name} lacks rope_parameters for {kind!r}; fetch its config.json")
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"{name} has rope_type {rope_type!r}, which is not supported; choose another assistant")


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
