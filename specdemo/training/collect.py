"""Teacher data: the target's top probabilities and hidden states on text and on its own samples, in a cache on disk.

The cache is a folder of shards `text-000.safetensors`, `samples-000.safetensors`, ... Each holds R rows of T tokens
and, for every position, the target's K most probable next tokens: `tokens` [R, T] int32, `indices` [R, T, K] int32,
`probs` [R, T, K] float16, largest first; with `taps`, also the hidden states `tap.N` [R, T, H] float16 (numbered as in
core.protocol). Shards are written atomically, so a killed process loses one shard at most; a damaged shard is written
again. Without a corpus the target generates the text, shard by shard.

A corpus is a folder of `*.txt` files with documents separated by `<|endoftext|>`; files with `valid` in their name are
for validation.
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
from typing import TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from specdemo.core.atomic_io import atomic_path, json_text, write_text
from specdemo.core.safe_io import JsonObject, read_text
from specdemo.kv.store import cache_argument
from specdemo.models.devices import mixed_precision
from specdemo.models.machine import matmul_dtype

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

TOP_K = 32  # K: at a validation loss of 1.75 nats the top 32 hold 97 % of the probability
TEMPERATURES = (1.0, 0.7, 1.0, 0.0)  # of sampled rows, cyclic
OPENINGS = (8, 16, 32, 64)  # prompt tokens of sampled rows, one length per shard


@dataclass(frozen=True, slots=True)
class Plan:
    """Size of a cache."""

    text_rows: int = 5120  # maximum number of rows of `context` tokens
    sampled_rows: int = 1664
    rows_per_shard: int = 128  # of text; a shard of samples has half as many, because sampling is slower
    context: int = 512
    sample_length: int = 256  # shorter than `context`, because attention to a long history dominates sampling
    taps: tuple[int, ...] = ()  # hidden states to store


def autocast(device: torch.device) -> torch.autocast:
    """Run matrix products in the fastest dtype of the device."""
    return mixed_precision(device, matmul_dtype(device))


@torch.no_grad()
def record_target(
    model: PreTrainedModel, rows: Tensor, taps: Sequence[int] = (), top_k: int = TOP_K
) -> dict[str, Tensor]:
    """Return the columns of a shard for rows [R, T] int64, on the CPU."""
    chunks: list[dict[str, Tensor]] = []
    for chunk in rows.split(4):
        with autocast(model.device):
            output = model(input_ids=chunk.to(model.device), use_cache=False, output_hidden_states=bool(taps))
        best = torch.softmax(output.logits.float(), dim=-1).topk(min(top_k, output.logits.shape[-1]), dim=-1)
        columns = {"tokens": chunk.int(), "indices": best.indices.int(), "probs": best.values.half()}
        columns |= {f"tap.{tap}": output.hidden_states[tap].half() for tap in taps}
        chunks.append({name: column.cpu() for name, column in columns.items()})
    return {name: torch.cat([f[name] for f in chunks]) for name in chunks[0]}


@torch.no_grad()
def continue_texts(
    model: PreTrainedModel, prompts: Tensor, length: int, temperatures: Tensor, generator: torch.Generator
) -> Tensor:
    """Continue prompts [B, P] to [B, length], each row at its own temperature [B]; 0 is greedy.

    Rows continue after `<|endoftext|>` with the next document.
    """
    cache = DynamicCache(config=model.config)
    greedy, clamped = temperatures[:, None] == 0.0, temperatures[:, None].clamp_min(1e-6)
    tokens = fresh = prompts
    named = {cache_argument(model.forward): cache, "logits_to_keep": 1}
    while tokens.shape[1] < length:
        logits = model(input_ids=fresh, **named).logits[:, -1].float()
        draws = torch.multinomial(torch.softmax(logits / clamped, dim=-1), 1, generator=generator)
        fresh = torch.where(greedy, logits.argmax(-1, keepdim=True), draws)
        tokens = torch.cat([tokens, fresh], dim=1)
    return tokens


def sampled_rows(model: PreTrainedModel, stories: list[list[int]], plan: Plan, number: int) -> Tensor:
    """Return shard `number` of the target's samples [R, context], prompted with the first tokens of training
    documents."""
    rng = random.Random(f"samples {number}")
    opening = min(OPENINGS[number % len(OPENINGS)], plan.sample_length // 2)
    count = plan.rows_per_shard // 2 * plan.context // plan.sample_length
    openings = [s[:opening] for s in rng.sample(stories, len(stories)) if len(s) > opening]
    prompts = torch.tensor([openings[i % len(openings)] for i in range(count)])
    temperatures = torch.tensor([TEMPERATURES[i % len(TEMPERATURES)] for i in range(count)])
    generator = torch.Generator(model.device).manual_seed(number)
    pieces = [
        continue_texts(model, p.to(model.device), plan.sample_length, t.to(model.device), generator)
        for p, t in zip(prompts.split(64), temperatures.split(64), strict=True)
    ]
    return torch.cat(pieces).view(-1, plan.context).cpu()


def generated_rows(model: PreTrainedModel, first: int, count: int, length: int, seed: int) -> Tensor:
    """Return text [count, length] that the target generates after token `first` at temperature 1."""
    prompts = torch.full((count, 1), first, device=model.device)
    generator = torch.Generator(model.device).manual_seed(seed)
    temperatures = torch.ones(count, device=model.device)
    return continue_texts(model, prompts, length, temperatures, generator).cpu()


def fast_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy in the fastest dtype, for sampling only; `model` itself computes the probabilities afterwards."""
    fast = nn.Module.to(copy.deepcopy(model), matmul_dtype(model.device))
    fast.set_attn_implementation("eager")
    return fast


def fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of the target's weights."""
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def is_complete(folder: Path) -> bool:
    """Return True if all shards are present and readable."""
    label = _label(folder)
    return bool(label) and all(is_valid_shard(folder / f"{name}.safetensors") for name in label["shards"])


def _label(folder: Path) -> JsonObject:
    """Read the cache's description; empty if there is none. Raises ValueError if it cannot be read."""
    label = folder / "cache.json"
    try:
        return dict(json.loads(label.read_text(encoding="utf-8"))) if label.exists() else {}
    except (TypeError, ValueError):
        raise ValueError(f"{label} is damaged: remove its folder or name another with --cache") from None


def is_valid_shard(shard: Path) -> bool:
    """Return True if the shard exists. A truncated one is deleted, with a warning."""
    if not shard.exists():
        return False
    try:
        with safe_open(shard, "pt"):  # checks the file size against the header
            return True
    except SafetensorError:
        logger.warning("%s is damaged and will be written again", shard)
        shard.unlink()
        return False


def write_shard(shard: Path, columns: Mapping[str, Tensor]) -> None:
    """Write a shard. Raises ValueError, one line, if it cannot be written."""
    with atomic_path(shard) as part:
        save_file(dict(columns), part)


def claim_cache(folder: Path, model: PreTrainedModel, text: str | None, plan: Plan, rows: int = 0) -> Plan:
    """Create the description of a cache for model, text, rows and plan; return the plan of an existing one.

    text: identifies the text; None: accept any. Raises ValueError if the cache belongs to another model or text, or
    lacks one of the plan's taps.
    """
    folder.mkdir(parents=True, exist_ok=True)
    identity = {"model": fingerprint(model)} | ({} if text is None else {"text": text})
    label = _label(folder)
    if not label:
        label = {**identity, "plan": asdict(plan), "shards": shards(plan, rows)}
        write_text(folder / "cache.json", json_text(label) + "\n")
        return plan
    cached_plan = Plan(**label["plan"] | {"taps": tuple(label["plan"]["taps"])})
    if any(label.get(name) != value for name, value in identity.items()):
        raise ValueError(
            f"the cache {folder} belongs to another target or corpus: remove it or name another with --cache"
        )
    if not set(plan.taps) <= set(cached_plan.taps):
        raise ValueError(f"the cache {folder} lacks taps {plan.taps}: remove it or name another with --cache")
    return cached_plan


def shards(plan: Plan, rows: int) -> list[str]:
    """Return the names of all shards for `rows` rows of text."""
    texts = -(-min(rows, plan.text_rows) // plan.rows_per_shard)
    samples = -(-plan.sampled_rows // (plan.rows_per_shard // 2))
    return [f"text-{i:03d}" for i in range(texts)] + [f"samples-{i:03d}" for i in range(samples)]


def build_cache(
    model: PreTrainedModel,
    text: Tensor | int,
    stories: list[list[int]],
    folder: Path,
    plan: Plan,
) -> Generator[float, None, None]:
    """Write the missing shards in `folder`: rows of text [R, context], and samples prompted with `stories` (token ids).
    Yield the fraction done after every shard.

    text: if a token id, the target generates the text after it, and that text provides the prompts of samples.
    """
    if isinstance(text, int):
        plan = claim_cache(folder, model, f"its own behind {text}", plan, plan.text_rows)
    else:
        digest = hashlib.sha256(text.int().numpy().tobytes()).hexdigest()
        plan = claim_cache(folder, model, digest, plan, len(text))
    fast, size = fast_copy(model), plan.rows_per_shard

    def texts(number: int) -> Tensor:
        if isinstance(text, int):
            return generated_rows(fast, text, min(size, plan.text_rows - number * size), plan.context, number)
        return text[: plan.text_rows][number * size : (number + 1) * size]

    @cache
    def openings() -> list[list[int]]:
        return stories or [row.tolist() for row in load_cache(folder, ["text"]).tokens]

    def samples(number: int) -> Tensor:
        return sampled_rows(fast, openings(), plan, number)

    kinds = {"text": texts, "samples": samples}
    names = _label(folder)["shards"]
    for done, name in enumerate(names, start=1):
        shard = folder / f"{name}.safetensors"
        if not is_valid_shard(shard):
            kind, number = name.split("-")
            write_shard(shard, record_target(model, kinds[kind](int(number)), plan.taps))
        yield done / len(names)


def with_progress(shares: Generator[float, None, Result], name: str) -> Result:
    """Run a generator of fractions 0..1 with a progress bar; return its result."""
    with tqdm(total=100, unit="%", desc=name) as bar:
        while True:
            try:
                bar.n = round(100 * next(shares))
            except StopIteration as end:
                return cast(Result, end.value)
            bar.refresh()


@dataclass(frozen=True, slots=True)
class TeacherData:
    """Teacher data of rows: tokens [R, T] int64, indices and probs [R, T, K], hidden: tap -> [R, T, H]."""

    tokens: Tensor
    indices: Tensor
    probs: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(columns: Mapping[str, Tensor]) -> "TeacherData":
        """Convert the columns of a shard."""
        hidden = {int(n.removeprefix("tap.")): c for n, c in columns.items() if n.startswith("tap.")}
        return TeacherData(columns["tokens"].long(), columns["indices"], columns["probs"], hidden)

    def __len__(self) -> int:
        return len(self.tokens)

    def _map(self, change: Callable[[Tensor], Tensor]) -> "TeacherData":
        hidden = {tap: change(h) for tap, h in self.hidden.items()}
        return TeacherData(change(self.tokens), change(self.indices), change(self.probs), hidden)

    def select(self, rows: Tensor) -> "TeacherData":
        """Select rows."""
        return self._map(lambda column: column[rows])

    def batch(self, count: int, step: int) -> "TeacherData":
        """Return `count` rows for `step`: every row once per epoch, shuffled in each epoch."""
        per_epoch = max(1, len(self) // count)
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(epoch))
        return self.select(order[place * count : (place + 1) * count])

    def split_rows(self, pieces: int) -> "TeacherData":
        """Split each row into `pieces` shorter rows."""
        length = self.tokens.shape[1] // pieces
        return self._map(lambda column: column.view(-1, length, *column.shape[2:]))


def load_cache(folder: Path, kinds: Iterable[str] = ("text", "samples"), taps: Sequence[int] = ()) -> TeacherData:
    """Load all shards of the given kinds, with these taps."""
    loaded = [_load(p, taps) for kind in kinds for p in sorted(folder.glob(f"{kind}-*.safetensors"))]
    return TeacherData.of({name: torch.cat([shard.pop(name) for shard in loaded]) for name in list(loaded[0])})


def _load(shard: Path, taps: Sequence[int]) -> dict[str, Tensor]:
    names = {"tokens", "indices", "probs", *(f"tap.{tap}" for tap in taps)}
    with safe_open(shard, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if name in names}  # noqa: SIM118 - no mapping


CORPUS_BYTES = 4 << 30  # limit of one file
END = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents for training and validation."""

    train: list[str]  # documents
    valid: list[str]
    sha256: str  # of all files in name order, for provenance


def check_corpus(folder: Path) -> None:
    """Raise ValueError, one line, if the folder has no text."""
    if not any(folder.glob("*.txt")):
        raise ValueError(f"no corpus folder {folder}: name a folder of *.txt files with --corpus")


def read_corpus(directory: Path) -> Corpus:
    """Read every `*.txt` in `directory`; without a `*valid*` file, every 100th document is for validation.

    Raises ValueError if there is no text.
    """
    train: list[str] = []
    valid: list[str] = []
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.txt")):
        text = read_text(path, CORPUS_BYTES)
        digest.update(path.name.encode() + b"\0" + text.encode())
        documents = [d.strip() for d in text.split(END) if d.strip()]
        (valid if "valid" in path.stem else train).extend(documents)
    if not train:
        raise ValueError(f"no training text in {directory}: put *.txt files there, documents separated by {END}")
    if not valid:
        valid = train[::100]
        train = [d for i, d in enumerate(train) if i % 100]
    return Corpus(train, valid, digest.hexdigest())


def windows(stream: Tensor, length: int) -> Tensor:
    """Split [N] into [N // length, length] and drop the rest."""
    return stream[: len(stream) // length * length].view(-1, length)
