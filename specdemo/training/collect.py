"""Run the target once over text and over its own samples, and keep what it said: a cache that drafts train on.

The cache is a folder of shards `text-000.safetensors`, `samples-000.safetensors`, ... Each holds R rows of T tokens
and, for every position, the target's K most probable next tokens: `tokens` [R, T] int16, `indices` [R, T, K] int16,
`probs` [R, T, K] float16, largest first. A shard appears only when it is complete, so a kill costs one shard at most.
Two processes that begin at different ends (`backwards`) share the work without talking to each other.
"""

import copy
import hashlib
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

KEPT = 32  # K: at a held-out loss of 1.75 nats the 32 best hold 97 % of the probability
TEMPERATURES = (1.0, 0.7, 1.0, 0.0)  # of sampled rows, in turn
OPENINGS = (8, 16, 32, 64)  # tokens of a story that a sampled row begins with, one length per shard


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of the target to record."""

    text_rows: int = 5120  # at most; of `context` tokens
    sampled_rows: int = 1664
    rows_per_shard: int = 128  # of text; a shard of samples holds half as many, they take longer
    context: int = 512
    sample_length: int = 256  # two samples make a row: attention to a long history is what sampling spends its time on


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16)


@torch.no_grad()
def top_k(model: PreTrainedModel, rows: Tensor, kept: int = KEPT) -> tuple[Tensor, Tensor]:
    """rows [R, T] int64 -> indices int16 and probs float16, both [R, T, K], largest first, on the CPU."""
    found = []
    for chunk in rows.split(4):
        with autocast(model.device):
            logits = model(input_ids=chunk.to(model.device), use_cache=False).logits
        best = torch.softmax(logits.float(), dim=-1).topk(kept, dim=-1)
        found.append((best.indices.to(torch.int16).cpu(), best.values.half().cpu()))
    indices, probs = zip(*found, strict=True)
    return torch.cat(indices), torch.cat(probs)


@torch.no_grad()
def continue_texts(
    model: PreTrainedModel, prompts: Tensor, length: int, temperatures: Tensor, generator: torch.Generator
) -> Tensor:
    """prompts [B, P] -> [B, length], every row drawn at its own temperature [B]; 0 is greedy.

    A row goes on behind `<|endoftext|>`: the next story of the stream.
    """
    cache = DynamicCache(config=model.config)
    greedy, heat = temperatures[:, None] == 0.0, temperatures[:, None].clamp_min(1e-6)
    tokens = fresh = prompts
    while tokens.shape[1] < length:
        logits = model(input_ids=fresh, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
        drawn = torch.multinomial(torch.softmax(logits / heat, dim=-1), 1, generator=generator)
        fresh = torch.where(greedy, logits.argmax(-1, keepdim=True), drawn)
        tokens = torch.cat([tokens, fresh], dim=1)
    return tokens


def sampled_rows(model: PreTrainedModel, stories: list[list[int]], plan: Plan, number: int) -> Tensor:
    """Shard `number` of the target's own text [R, context], begun from the openings of training stories."""
    rng = random.Random(f"samples {number}")
    opening = min(OPENINGS[number % len(OPENINGS)], plan.sample_length // 2)
    count = plan.rows_per_shard // 2 * plan.context // plan.sample_length
    openings = [s[:opening] for s in rng.sample(stories, len(stories)) if len(s) > opening]
    prompts = torch.tensor([openings[i % len(openings)] for i in range(count)])
    temperatures = torch.tensor([TEMPERATURES[i % len(TEMPERATURES)] for i in range(count)])
    generator = torch.Generator(model.device).manual_seed(number)
    drawn = [
        continue_texts(model, p.to(model.device), plan.sample_length, t.to(model.device), generator)
        for p, t in zip(prompts.split(64), temperatures.split(64), strict=True)
    ]
    return torch.cat(drawn).view(-1, plan.context).cpu()


def sampler(model: PreTrainedModel) -> PreTrainedModel:
    """A bf16 copy that decodes twice as fast on a CPU; what it draws is scored by `model` itself afterwards."""
    fast = nn.Module.to(copy.deepcopy(model), torch.bfloat16)
    fast.set_attn_implementation("eager")
    return fast


def fingerprint(model: PreTrainedModel, text: Tensor) -> str:
    """Changes when the target's weights or the text do."""
    digest = hashlib.sha256(text.to(torch.int16).numpy().tobytes())
    for value in model.state_dict().values():
        digest.update(value.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def claim(folder: Path, mark: str) -> None:
    """Make `folder` the cache of `mark`. Raises ValueError when it was made of something else."""
    folder.mkdir(parents=True, exist_ok=True)
    label = folder / "cache.json"
    if label.exists() and json.loads(label.read_text(encoding="utf-8"))["fingerprint"] != mark:
        raise ValueError(f"the cache {folder} is of another target or corpus: remove it or name another with --cache")
    label.write_text(json.dumps({"fingerprint": mark}) + "\n", encoding="utf-8")


def shards(plan: Plan, text: Tensor) -> list[str]:
    """The names of all shards for rows of text [R, context]."""
    texts = -(-min(len(text), plan.text_rows) // plan.rows_per_shard)
    samples = -(-plan.sampled_rows // (plan.rows_per_shard // 2))
    return [f"text-{i:03d}" for i in range(texts)] + [f"samples-{i:03d}" for i in range(samples)]


def collect(
    model: PreTrainedModel, text: Tensor, stories: list[list[int]], folder: Path, plan: Plan, backwards: bool = False
) -> None:
    """Complete the cache in `folder`: rows of text [R, context] and samples begun like `stories` (token ids)."""
    claim(folder, fingerprint(model, text))
    fast = sampler(model)
    rows: dict[str, Callable[[int], Tensor]] = {
        "text": lambda i: text[: plan.text_rows][i * plan.rows_per_shard : (i + 1) * plan.rows_per_shard],
        "samples": lambda i: sampled_rows(fast, stories, plan, i),
    }
    names = shards(plan, text)
    for name in tqdm(names[::-1] if backwards else names, desc=f"cache {folder.name}", unit="shard"):
        path = folder / f"{name}.safetensors"
        if path.exists():
            continue
        kind, number = name.split("-")
        tokens = rows[kind](int(number))
        indices, probs = top_k(model, tokens)
        part = path.with_suffix(".backwards" if backwards else ".forwards")
        save_file({"tokens": tokens.to(torch.int16), "indices": indices, "probs": probs}, part)
        part.replace(path)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Rows the target has spoken on: tokens [R, T], indices and probs [R, T, K]."""

    tokens: Tensor
    indices: Tensor
    probs: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.tokens[chosen].long(), self.indices[chosen], self.probs[chosen]

    def cut(self, pieces: int) -> "Recorded":
        """The same positions in rows 1 / `pieces` as long."""
        length = self.tokens.shape[1] // pieces
        return Recorded(*(c.view(-1, length, *c.shape[2:]) for c in (self.tokens, self.indices, self.probs)))


def load_cache(folder: Path, kinds: Iterable[str] = ("text", "samples")) -> Recorded:
    """All shards of the given kinds, one after the other."""
    loaded = [load_file(p) for kind in kinds for p in sorted(folder.glob(f"{kind}-*.safetensors"))]
    return Recorded(*(torch.cat([shard[c] for shard in loaded]) for c in ("tokens", "indices", "probs")))
