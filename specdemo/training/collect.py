"""Run the target once over text and over its own samples, and keep what it said: a cache that drafts train on.

The cache is a folder of shards `text-000.safetensors`, `samples-000.safetensors`, ... Each holds R rows of T tokens
and, for every position, the target's K most probable next tokens: `tokens` [R, T] int32, `indices` [R, T, K] int32,
`probs` [R, T, K] float16, largest first; with `taps`, also the hidden states `tap.N` [R, T, H] float16 that heads read
(numbered as in core.protocol). A shard appears only when it is complete, so a kill costs one shard at most; a damaged
one is gathered again. Where there is no text, the target writes it, shard by shard. Two processes that begin at
different ends (`backwards`) share the work without talking to each other.
"""

import copy
import hashlib
import json
import logging
import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from specdemo.core.files import replacing, write_text
from specdemo.models.machine import matmul_dtype

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

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


def own_rows(model: PreTrainedModel, first: int, count: int, length: int, seed: int) -> Tensor:
    """What the target writes behind a token at temperature 1 [count, length]."""
    prompts = torch.full((count, 1), first, device=model.device)
    generator = torch.Generator(model.device).manual_seed(seed)
    heat = torch.ones(count, device=model.device)
    return continue_texts(model, prompts, length, heat, generator).cpu()


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
    """Whether every shard is there and whole."""
    begun = _label(folder)
    return bool(begun) and all(sound(folder / f"{name}.safetensors") for name in begun["shards"])


def _label(folder: Path) -> dict[str, Any]:
    """What the cache was begun with; empty for none. Raises ValueError when that cannot be read."""
    label = folder / "cache.json"
    try:
        return dict(json.loads(label.read_text(encoding="utf-8"))) if label.exists() else {}
    except (TypeError, ValueError):
        raise ValueError(f"{label} is damaged: remove its folder or name another with --cache") from None


def sound(shard: Path) -> bool:
    """Whether it is there; one that is cut short is taken away, with a line that says so."""
    if not shard.exists():
        return False
    try:
        with safe_open(shard, "pt"):  # compares the header with the length
            return True
    except SafetensorError:
        logger.warning("%s is damaged; it is gathered again", shard)
        shard.unlink()
        return False


def keep(shard: Path, columns: Mapping[str, Tensor]) -> None:
    """Raises ValueError, one line, when it cannot be written."""
    with replacing(shard) as part:
        save_file(dict(columns), part)


def claim(folder: Path, model: PreTrainedModel, text: str | None, plan: Plan, rows: int = 0) -> Plan:
    """Make `folder` the cache of model, text, so many of its rows, and plan; one that has begun keeps its own plan,
    which comes back.

    text: what tells it from others; None: whatever text it was made of will do. Raises ValueError when it is another
    model's or another text's, or lacks one of the plan's taps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = {"model": fingerprint(model)} | ({} if text is None else {"text": text})
    begun = _label(folder)
    if not begun:
        begun = {**mark, "plan": asdict(plan), "shards": shards(plan, rows)}
        write_text(folder / "cache.json", json.dumps(begun) + "\n")
        return plan
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
    model: PreTrainedModel,
    text: Tensor | int,
    stories: list[list[int]],
    folder: Path,
    plan: Plan,
    backwards: bool = False,
) -> Generator[float, None, None]:
    """Complete the cache in `folder`: rows of text [R, context] and samples begun like `stories` (token ids).

    text a token: what the target writes behind it; the samples begin like that. Gives the share that is done after
    every shard.
    """
    if isinstance(text, int):
        plan = claim(folder, model, f"its own behind {text}", plan, plan.text_rows)
    else:
        digest = hashlib.sha256(text.int().numpy().tobytes()).hexdigest()
        plan = claim(folder, model, digest, plan, len(text))
    fast, size = sampler(model), plan.rows_per_shard

    def texts(number: int) -> Tensor:
        if isinstance(text, int):
            return own_rows(fast, text, min(size, plan.text_rows - number * size), plan.context, number)
        return text[: plan.text_rows][number * size : (number + 1) * size]

    @cache
    def openings() -> list[list[int]]:
        return stories or [row.tolist() for row in load_cache(folder, ["text"]).tokens]

    def samples(number: int) -> Tensor:
        return sampled_rows(fast, openings(), plan, number)

    kinds = {"text": texts, "samples": samples}
    names = _label(folder)["shards"]
    for done, name in enumerate(names[::-1] if backwards else names, start=1):
        shard = folder / f"{name}.safetensors"
        if not sound(shard):
            kind, number = name.split("-")
            keep(shard, listen(model, kinds[kind](int(number)), plan.taps))
        yield done / len(names)


def watched(shares: Generator[float, None, Result], name: str) -> Result:
    """What comes of it at its end; a progress bar shows the shares 0..1 until then."""
    with tqdm(total=100, unit="%", desc=name) as bar:
        while True:
            try:
                bar.n = round(100 * next(shares))
            except StopIteration as end:
                return cast(Result, end.value)
            bar.refresh()


@dataclass(frozen=True, slots=True)
class Recorded:
    """Rows the target has spoken on: tokens [R, T] int64, indices and probs [R, T, K], hidden tap -> [R, T, H]."""

    tokens: Tensor
    indices: Tensor
    probs: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(columns: Mapping[str, Tensor]) -> "Recorded":
        """From the columns of a shard, as `listen` gives them."""
        hidden = {int(n.removeprefix("tap.")): c for n, c in columns.items() if n.startswith("tap.")}
        return Recorded(columns["tokens"].long(), columns["indices"], columns["probs"], hidden)

    def __len__(self) -> int:
        return len(self.tokens)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Recorded":
        hidden = {tap: change(h) for tap, h in self.hidden.items()}
        return Recorded(change(self.tokens), change(self.indices), change(self.probs), hidden)

    def rows(self, chosen: Tensor) -> "Recorded":
        """The chosen windows, as they were recorded."""
        return self._each(lambda column: column[chosen])

    def turn(self, count: int, step: int) -> "Recorded":
        """`count` rows for `step`: every row once in an epoch, in an order of the epoch's own."""
        per_epoch = max(1, len(self) // count)
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(epoch))
        return self.rows(order[place * count : (place + 1) * count])

    def cut(self, pieces: int) -> "Recorded":
        """The same positions in rows 1 / `pieces` as long."""
        length = self.tokens.shape[1] // pieces
        return self._each(lambda column: column.view(-1, length, *column.shape[2:]))


def load_cache(folder: Path, kinds: Iterable[str] = ("text", "samples"), taps: Sequence[int] = ()) -> Recorded:
    """All shards of the given kinds, one after the other, with these of their taps."""
    loaded = [_load(p, taps) for kind in kinds for p in sorted(folder.glob(f"{kind}-*.safetensors"))]
    return Recorded.of({name: torch.cat([shard.pop(name) for shard in loaded]) for name in list(loaded[0])})


def _load(shard: Path, taps: Sequence[int]) -> dict[str, Tensor]:
    wanted = {"tokens", "indices", "probs", *(f"tap.{tap}" for tap in taps)}
    with safe_open(shard, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if name in wanted}  # noqa: SIM118 - no mapping
