"""Run the target once over text and over its own samples, and keep what it said: a cache that drafts train on.

The cache is a folder of shards `text-000.safetensors`, `samples-000.safetensors`, ... Each holds R rows of T tokens
and, for every position, the target's K most probable next tokens: `tokens` [R, T] int32, `indices` [R, T, K] int32,
`probs` [R, T, K] float16, largest first; with `taps`, also the hidden states `tap.N` [R, T, H] float16 that heads read
(numbered as in core.protocol). A shard appears only when it is complete, so a kill costs one shard at most.
Two processes that begin at different ends (`backwards`) share the work without talking to each other.
"""

import copy
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from specdemo.models.machine import matmul_dtype

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
    taps: tuple[int, ...] = ()  # hidden states to keep


def autocast(device: torch.device) -> torch.autocast:
    """Matrix products in what the device is fastest in."""
    dtype = matmul_dtype(device)
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


@torch.no_grad()
def listen(model: PreTrainedModel, rows: Tensor, taps: Sequence[int] = (), kept: int = KEPT) -> dict[str, Tensor]:
    """rows [R, T] int64 -> the columns of a shard, on the CPU."""
    found: list[dict[str, Tensor]] = []
    for chunk in rows.split(4):
        with autocast(model.device):
            said = model(input_ids=chunk.to(model.device), use_cache=False, output_hidden_states=bool(taps))
        best = torch.softmax(said.logits.float(), dim=-1).topk(min(kept, said.logits.shape[-1]), dim=-1)
        columns = {"tokens": chunk.int(), "indices": best.indices.int(), "probs": best.values.half()}
        columns |= {f"tap.{tap}": said.hidden_states[tap].half() for tap in taps}
        found.append({name: column.cpu() for name, column in columns.items()})
    return {name: torch.cat([f[name] for f in found]) for name in found[0]}


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
    """A copy in the device's fastest precision; what it draws is scored by `model` itself afterwards."""
    fast = nn.Module.to(copy.deepcopy(model), matmul_dtype(model.device))
    fast.set_attn_implementation("eager")
    return fast


def fingerprint(model: PreTrainedModel) -> str:
    """Changes when the target's weights do."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def complete(folder: Path) -> bool:
    """Whether every shard is there."""
    label = folder / "cache.json"
    begun = json.loads(label.read_text(encoding="utf-8")) if label.exists() else {}
    return bool(begun) and all((folder / f"{name}.safetensors").exists() for name in begun["shards"])


def claim(folder: Path, model: PreTrainedModel, text: Tensor | None, plan: Plan) -> Plan:
    """Make `folder` the cache of model, text and plan; one that has begun keeps its own plan, which comes back.

    text None: whatever text it was made of will do. Raises ValueError when it is another model's or another text's, or
    lacks one of the plan's taps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    label = folder / "cache.json"
    mark = {"model": fingerprint(model)}
    if text is not None:
        mark["text"] = hashlib.sha256(text.int().numpy().tobytes()).hexdigest()
    if text is not None and not label.exists():
        begun = {**mark, "plan": asdict(plan), "shards": shards(plan, len(text))}
        label.write_text(json.dumps(begun) + "\n", encoding="utf-8")
        return plan
    begun = json.loads(label.read_text(encoding="utf-8"))
    own = Plan(**begun["plan"] | {"taps": tuple(begun["plan"]["taps"])})
    if any(begun.get(name) != value for name, value in mark.items()):
        raise ValueError(f"the cache {folder} is of another target or corpus: remove it or name another with --cache")
    if not set(plan.taps) <= set(own.taps):
        raise ValueError(f"the cache {folder} lacks taps {plan.taps}: remove it or name another with --cache")
    return own


def shards(plan: Plan, rows: int) -> list[str]:
    """The names of all shards when there are so many rows of text."""
    texts = -(-min(rows, plan.text_rows) // plan.rows_per_shard)
    samples = -(-plan.sampled_rows // (plan.rows_per_shard // 2))
    return [f"text-{i:03d}" for i in range(texts)] + [f"samples-{i:03d}" for i in range(samples)]


def collecting(
    model: PreTrainedModel, text: Tensor, stories: list[list[int]], folder: Path, plan: Plan, backwards: bool = False
) -> Iterator[float]:
    """Complete the cache in `folder`: rows of text [R, context] and samples begun like `stories` (token ids).

    Gives the share that is done after every shard.
    """
    plan = claim(folder, model, text, plan)
    fast = sampler(model)
    rows: dict[str, Callable[[int], Tensor]] = {
        "text": lambda i: text[: plan.text_rows][i * plan.rows_per_shard : (i + 1) * plan.rows_per_shard],
        "samples": lambda i: sampled_rows(fast, stories, plan, i),
    }
    names = shards(plan, len(text))
    for done, name in enumerate(names[::-1] if backwards else names, start=1):
        path = folder / f"{name}.safetensors"
        if not path.exists():
            kind, number = name.split("-")
            part = path.with_suffix(".backwards" if backwards else ".forwards")
            save_file(listen(model, rows[kind](int(number)), plan.taps), part)
            part.replace(path)
        yield done / len(names)


def collect(
    model: PreTrainedModel, text: Tensor, stories: list[list[int]], folder: Path, plan: Plan, backwards: bool = False
) -> None:
    """`collecting` to the end behind a progress bar."""
    for _ in watched(collecting(model, text, stories, folder, plan, backwards), f"cache {folder.name}"):
        pass


def watched(shares: Iterator[float], name: str) -> Iterator[float]:
    """The same shares 0..1, with a progress bar."""
    with tqdm(total=100, unit="%", desc=name) as bar:
        for share in shares:
            bar.n = round(100 * share)
            bar.refresh()
            yield share


@dataclass(frozen=True, slots=True)
class Recorded:
    """Rows the target has spoken on: tokens [R, T], indices and probs [R, T, K], hidden tap -> [R, T, H]."""

    tokens: Tensor
    indices: Tensor
    probs: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(columns: Mapping[str, Tensor]) -> "Recorded":
        """From the columns of a shard, as `listen` gives them."""
        hidden = {int(n.removeprefix("tap.")): c for n, c in columns.items() if n.startswith("tap.")}
        return Recorded(columns["tokens"], columns["indices"], columns["probs"], hidden)

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, chosen: Tensor) -> "Recorded":
        hidden = {tap: h[chosen] for tap, h in self.hidden.items()}
        return Recorded(self.tokens[chosen].long(), self.indices[chosen], self.probs[chosen], hidden)

    def turn(self, count: int, step: int) -> "Recorded":
        """`count` rows for `step`: every row once in an epoch, in an order of the epoch's own."""
        per_epoch = max(1, len(self) // count)
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(epoch))
        return self.rows(order[place * count : (place + 1) * count])

    def cut(self, pieces: int) -> "Recorded":
        """The same positions in rows 1 / `pieces` as long."""
        length = self.tokens.shape[1] // pieces

        def shorter(column: Tensor) -> Tensor:
            return column.view(-1, length, *column.shape[2:])

        hidden = {tap: shorter(h) for tap, h in self.hidden.items()}
        return Recorded(shorter(self.tokens), shorter(self.indices), shorter(self.probs), hidden)


def load_cache(folder: Path, kinds: Iterable[str] = ("text", "samples"), taps: Sequence[int] = ()) -> Recorded:
    """All shards of the given kinds, one after the other, with these of their taps."""
    loaded = [_load(p, taps) for kind in kinds for p in sorted(folder.glob(f"{kind}-*.safetensors"))]
    return Recorded.of({name: torch.cat([shard.pop(name) for shard in loaded]) for name in list(loaded[0])})


def _load(shard: Path, taps: Sequence[int]) -> dict[str, Tensor]:
    wanted = {"tokens", "indices", "probs", *(f"tap.{tap}" for tap in taps)}
    with safe_open(shard, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if name in wanted}  # noqa: SIM118 - no mapping
