"""Small Llama models: creation, deepening, weight averaging, saving; their losses, and agreement with a target.

N tokens, H hidden size, V vocabulary, K stored entries. `agreement` compares a draft with its target, teacher-forced,
on held-out rows of T tokens. `greedy_agreement`: share of positions where both models have the same most probable
token, that is the probability that a greedy draft token is accepted. `overlap`: mean of sum(min(p, q)), the acceptance
probability at temperature 1 (Leviathan et al. 2023, arXiv 2211.17192, theorem 3.5).
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from specdemo.core.atomic_io import atomic_folder
from specdemo.models.checkpoints import SHARD, SHARDS
from specdemo.models.machine import matmul_dtype
from specdemo.models.packaged import check_embedded
from specdemo.training.collect import END

VOCAB_SIZE = 2048
TINY = 1e-6
END_IDS: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
START_SHARES = (0.0, 0.2, 0.3, 0.4, 0.5)  # shares of the initial weights tried in the average
WIDTH = ("hidden_size", "intermediate_size", "num_attention_heads")


def build(shape: Mapping[str, int], vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    """Create a Llama with tied embeddings and small initial residual branches. shape: sizes as in its config."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**shape, **END_IDS}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, tie_word_embeddings=True, rms_norm_eps=1e-5, **sizes))
    model.set_attn_implementation("eager")  # forward + backward 1.2x as fast as SDPA at these sizes on a CPU
    with torch.no_grad():
        for branch in _branches(model):
            branch.weight.mul_((2 * len(model.model.layers)) ** -0.5)
    return model


def _branches(model: LlamaForCausalLM) -> list[nn.Linear]:
    """Return the last matrix of every residual branch."""
    return [part for layer in model.model.layers for part in (layer.self_attn.o_proj, layer.mlp.down_proj)]


def drop_out(model: LlamaForCausalLM, share: float) -> None:
    """Apply dropout to the embedding and to the output of every residual branch during training."""

    def some(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return F.dropout(output, share, module.training)

    for part in (model.model.embed_tokens, *_branches(model)):
        part.register_forward_hook(some)


def are_as_wide(one: PreTrainedConfig, other: PreTrainedConfig) -> bool:
    """Return whether layers of one model fit into the other."""
    return all(getattr(one, name) == getattr(other, name) for name in WIDTH)


LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


def to_depth(state: Mapping[str, Tensor], layers: int) -> Mapping[str, Tensor]:
    """Return the weights of another model with `layers` layers.

    If layers are added, the output stays the same: copies between the old layers start with zero contribution (block
    expansion of LLaMA Pro, Wu et al. 2024, arXiv 2401.02415). If layers are removed, evenly spaced ones remain
    (DistilBERT, Sanh et al. 2019, arXiv 1910.01108, section 3).
    """
    depth = 1 + max(int(found[0]) for name in state if (found := LAYER.search(name)))
    grown = {name: weight for name, weight in state.items() if not LAYER.search(name)}
    for layer in range(layers):
        source = layer * depth // layers
        copied = layer > 0 and source == (layer - 1) * depth // layers
        for name, weight in state.items():
            if (found := LAYER.search(name)) and int(found[0]) == source:
                silent = copied and name.endswith(("o_proj.weight", "down_proj.weight"))
                grown[LAYER.sub(str(layer), name)] = torch.zeros_like(weight) if silent else weight.clone()
    return grown


def load(folder: str | Path) -> PreTrainedModel:
    """Load a shipped or trained model in fp32. Raises ValueError, one line, if there is none."""
    check_embedded(Path(folder))
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except OSError as error:
        raise ValueError(f"no trained model at {folder}: name the folder of one with --target or --start") from error
    return model


@torch.no_grad()
def average(model: nn.Module, start: Mapping[str, Tensor], loss: Callable[[], float]) -> float:
    """Mix the weights of `start` into `model` if that lowers `loss` (Wortsman et al. 2022, arXiv 2203.05482).

    Returns the share of `start`, one of START_SHARES.
    """
    end = {name: weight.clone() for name, weight in model.state_dict().items()}

    def mixed(share: float) -> float:
        model.load_state_dict({name: weight.lerp(start[name].to(weight), share) for name, weight in end.items()})
        return loss()

    best = min(START_SHARES, key=mixed)
    mixed(best)
    return best


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Save bf16 safetensors in shards below 10 MB, tokenizer and generation config; replace existing files all at once.

    Raises ValueError, one line, if they cannot be written.
    """
    model = nn.Module.to(model, torch.bfloat16)
    model.generation_config = GenerationConfig(**END_IDS)
    ends, length = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END), model.config.max_position_embeddings
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **ends)
    with atomic_folder(out, SHARDS, "config.json") as staging:
        model.save_pretrained(staging, max_shard_size=SHARD)
        wrapped.save_pretrained(staging)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return mean nats per token for logits [..., V] and labels [...] int64."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def head_forward_kl(hidden: Tensor, weight: Tensor, indices: Tensor, probs: Tensor) -> Tensor:
    """Return KL(p || q) for q = softmax(hidden @ weight.T), where p is known on its K largest entries.

    The rest of the mass is matched as a whole. Forward KL: Hinton et al. 2015; for drafts DistillSpec, arXiv
    2310.08461, section 3. hidden [N, H], weight [V, H], both fp32, multiplied in `matmul_dtype`; indices [N, K], probs
    [N, K] -> mean nats, up to p's entropy, which has no gradient. With K = 1 and probs 1 it is the cross-entropy to
    `indices`.
    """
    dtype, p = matmul_dtype(hidden.device), probs.float()
    log_q = F.linear(hidden.to(dtype), weight.to(dtype)).float().log_softmax(-1).gather(1, indices.long())
    p_rest, q_rest = (1.0 - p.sum(1)).clamp_min(0.0), (1.0 - log_q.exp().sum(1)).clamp_min(TINY)
    return -((p * log_q).sum() + (p_rest * q_rest.log()).sum()) / len(hidden)


def toward_argmax(probs: Tensor, weight: float) -> Tensor:
    """Return (1 - weight) * probs + weight * one-hot of the largest, for probs [..., K] in descending order.

    Forward KL to the result is forward KL to `probs` with a share of cross-entropy to the target's greedy choice.
    """
    mixed = probs.float() * (1.0 - weight)
    mixed[..., 0] += weight
    return mixed


@torch.no_grad()
def next_probs(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """Return the next-token probabilities of rows [N, T] as [N, T, V], in the model's precision and on its device."""
    chunks = [model(input_ids=chunk.to(model.device), use_cache=False).logits for chunk in rows.split(4)]
    return torch.cat([torch.softmax(logits.float(), dim=-1) for logits in chunks])


def agreement(draft: PreTrainedModel, target_probs: Tensor, rows: Tensor) -> dict[str, float]:
    """Compare a draft with target_probs [N, T, V] on rows [N, T]; return `greedy_agreement` and `overlap`, both in
    0..1.
    """
    same = shared = 0.0
    for chunk, p in zip(rows.split(4), target_probs.split(4), strict=True):
        q = next_probs(draft, chunk)
        same += float((q.argmax(-1) == p.argmax(-1)).float().sum())
        shared += float(torch.minimum(p, q).sum())
    return {"greedy_agreement": round(same / rows.numel(), 4), "overlap": round(shared / rows.numel(), 4)}
