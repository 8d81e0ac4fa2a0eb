"""Random Llama pairs for speed measurements, with real shapes and the acceptance rate of a real pair.

The draft consists of the target's first layers with the same embedding and output head, in separate memory. The
contribution of the deeper layers is scaled down until both models choose the same token in about AGREEMENT of all
cases. Queries and keys are scaled up, because otherwise every text runs into a loop.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers import GenerationConfig as HFGenerationConfig

from specdemo.bench.prompts import PROMPTS
from specdemo.core.protocol import GenerationConfig
from specdemo.core.suggest import suggest
from specdemo.engine.loop import generate
from specdemo.methods import BASELINE, load_drafter
from specdemo.models.devices import pick_device, pick_dtype
from specdemo.models.load import load_model
from specdemo.models.memory import free_bytes
from specdemo.models.target import HFTarget
from specdemo.models.text import encode

AGREEMENT = 0.8
CLOSE = 0.03
PROMPT_TOKENS = 64
PROBES = 8  # number of texts to measure the agreement on
PROBE_TOKENS = 48
STD = 0.02
PEAKED = 8.0  # factor on queries and keys, so that attention is peaked
SEED = 11
ROOM = 2.4  # memory in multiples of the weights: the engine's copy, caches and activations


@dataclass(frozen=True, slots=True)
class Size:
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int
    draft_layers: int

    @property
    def parameters(self) -> int:
        """Return the number of parameters of the target."""
        kv = self.hidden * self.kv_heads // self.heads
        layer = 2 * self.hidden**2 + 2 * self.hidden * kv + 3 * self.hidden * self.feed_forward
        return self.layers * layer + 2 * self.vocabulary * self.hidden

    def config(self, layers: int) -> LlamaConfig:
        sizes = {"vocab_size": self.vocabulary, "hidden_size": self.hidden, "intermediate_size": self.feed_forward}
        heads = {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "initializer_range": STD}
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        depth = {"num_hidden_layers": layers, "max_position_embeddings": 4096}
        return LlamaConfig.from_dict(sizes | heads | ids | depth)


SIZES = {
    "8m": Size(8, 256, 688, 4, 4, 4096, 1),
    "98m": Size(12, 768, 2048, 12, 12, 8192, 2),
    "342m": Size(24, 1024, 2816, 16, 16, 16384, 2),
    "8b": Size(32, 4096, 14336, 32, 8, 128256, 2),
}
PAIRS = ("embedded", *SIZES)


@dataclass(frozen=True, slots=True)
class Pair:
    name: str
    target: PreTrainedModel  # both use transformers' layers
    draft: PreTrainedModel
    prompts: list[Tensor]  # [1, T] each
    agreement: float  # share of the target's greedy tokens that are also the draft's first choice


def make_pair(name: str | None, device: str, dtype: str, texts: int = 3) -> Pair:
    """Create a pair by name on a device. Default: the largest that fits a GPU, the smallest on a CPU.

    Raises ValueError, one line.
    """
    where = pick_device(device)
    chosen = name or _usual(where, dtype)
    if chosen not in PAIRS:
        raise ValueError(f"unknown pair {chosen!r}; {suggest(chosen, PAIRS)}")
    if chosen == "embedded":
        return _embedded(where, dtype, texts)
    size = SIZES[chosen]
    _check_memory(chosen, size, where, pick_dtype(dtype, where))
    return random_pair(chosen, size, where, pick_dtype(dtype, where), texts)


def random_pair(name: str, size: Size, device: torch.device, dtype: torch.dtype, texts: int = 3) -> Pair:
    """Create a random pair of that size, with a fixed seed."""
    target, draft = (_new(size.config(layers), device, dtype) for layers in (size.layers, size.draft_layers))
    prompts = _prompts(size.vocabulary, texts + PROBES, device)
    agreement = _tune(target, draft, size.draft_layers, torch.cat(prompts[texts:]))
    return Pair(name, target, draft, prompts[:texts], agreement)


@torch.no_grad()
def agreement(target: PreTrainedModel, draft: PreTrainedModel, prompts: Tensor) -> float:
    """Return the share of tokens in the target's greedy continuations of prompts [B, T] that are also the draft's first
    choice.
    """
    engine = HFTarget(target)
    config = GenerationConfig(PROBE_TOKENS, stop_token_ids=())
    events = generate(engine, load_drafter(BASELINE, engine), prompts, config)
    output = torch.tensor([event.emitted for event in events], device=prompts.device)[..., 0].T
    seen = torch.cat([prompts, output], 1)[:, :-1]
    chosen = draft(seen, use_cache=False, logits_to_keep=output.shape[1]).logits.argmax(-1)
    return float((chosen == output).float().mean())


def _tune(target: PreTrainedModel, draft: PreTrainedModel, shared: int, prompts: Tensor) -> float:
    """Draw the weights, set the scale of the deeper layers by bisection, and return the agreement reached."""
    low, high = 0.0, 0.25
    found = 0.0
    for _ in range(8):
        share = (low + high) / 2.0
        _draw(target, shared, share)
        draft.load_state_dict({n: w for n, w in target.state_dict().items() if n in draft.state_dict()})
        found = agreement(target, draft, prompts)
        if abs(found - AGREEMENT) <= CLOSE:
            break
        low, high = (share, high) if found > AGREEMENT else (low, share)
    return found


def _draw(model: nn.Module, shared: int, share: float) -> None:
    """Draw random weights, the same for one shape; layers from `shared` on add `share` as much to the residual
    stream.
    """
    rng: dict[torch.device, torch.Generator] = {}
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            continue
        std = STD * (PEAKED if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0)
        parts = name.split(".")
        if parts[-2] in ("o_proj", "down_proj") and int(parts[parts.index("layers") + 1]) >= shared:
            std *= share
        generator = rng.setdefault(weight.device, torch.Generator(weight.device).manual_seed(SEED))
        weight.normal_(0.0, std, generator=generator)


def _new(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device(device):  # creating 8 B parameters takes seconds on a GPU and minutes on a CPU
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = HFGenerationConfig(pad_token_id=0)
    model.eval().requires_grad_(False)
    return model


def _prompts(vocabulary: int, count: int, device: torch.device) -> list[Tensor]:
    rng = torch.Generator().manual_seed(SEED)
    return [torch.randint(1, vocabulary, (1, PROMPT_TOKENS), generator=rng).to(device) for _ in range(count)]


def _embedded(where: torch.device, dtype: str, texts: int) -> Pair:
    """Return the shipped story model and its wide draft, with story prompts."""
    loaded = load_model("stories", dtype, str(where), kernels="transformers")
    draft = load_model("stories-draft-wide", dtype, str(where), kernels="transformers")
    assert loaded.tokenizer is not None
    ids = [encode(loaded.tokenizer, text, loaded.model.config.max_position_embeddings) for text in PROMPTS]
    width = min(map(len, ids))
    prompts = [torch.tensor([row], device=where) for row in ids]
    probes = torch.cat([prompt[:, -width:] for prompt in prompts])
    for model in (loaded.model, draft.model):
        model.generation_config = HFGenerationConfig(pad_token_id=0)
    found = agreement(loaded.model, draft.model, probes)
    return Pair("embedded", loaded.model, draft.model, prompts[:texts], found)


def _bytes(size: Size, kind: torch.dtype) -> int:
    """Return the bytes of the pair; the draft has a separate embedding and output head."""
    draft = replace(size, layers=size.draft_layers)
    return (size.parameters + draft.parameters) * kind.itemsize


def _usual(where: torch.device, dtype: str) -> str:
    if where.type == "cpu":
        return "8m"
    free, kind = free_bytes(where)[0], pick_dtype(dtype, where)
    return next(name for name in reversed(SIZES) if name == "8m" or ROOM * _bytes(SIZES[name], kind) <= free)


def _check_memory(name: str, size: Size, where: torch.device, kind: torch.dtype) -> None:
    needed = int(ROOM * _bytes(size, kind))
    free = free_bytes(where)[0]
    if needed > free:
        room = f"{needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free on {where}"
        raise ValueError(f"pair {name!r} needs {room}; choose a smaller --pair")
