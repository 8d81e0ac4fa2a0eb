"""What made the shipped models: `specdemo train stories-target | stories-draft-wide | ...`.

A recipe leaves a standard Hugging Face folder with `MODEL_CARD.md` and `provenance.json`. Killed, it goes on from its
last checkpoint when it is started again with the same folder.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from specdemo.core.files import replacing, replacing_all
from specdemo.models import machine
from specdemo.models.checkpoints import SHARD, SHARDS
from specdemo.models.machine import device_name
from specdemo.models.place import pick_device
from specdemo.models.resolve import check_shipped, resolve
from specdemo.training.agreement import agreement, next_probs
from specdemo.training.cards import write_attribution, write_card
from specdemo.training.code_corpus import collect_code, edit
from specdemo.training.collect import Plan, Recorded, autocast, claim, collect, complete, load_cache
from specdemo.training.corpus import (
    END,
    VOCAB_SIZE,
    Again,
    Corpus,
    Epochs,
    check_corpus,
    gpt2_words,
    read_corpus,
    retell_some,
    token_stream,
    train_tokenizer,
    windows,
)
from specdemo.training.fit import Batch, History, Schedule, fit, make_folder, positive, write_provenance
from specdemo.training.losses import cross_entropy, head_forward_kl, toward_argmax

CONTEXT = 512
DROPOUT = 0.15  # of the target: it reads its 2.6 M tokens many times over, and without it learns them by heart
DROPOUT_UNTIL = 0.8  # share of the time; what is left fits the network to being whole
START_SHARES = (0.0, 0.2, 0.3, 0.4, 0.5)  # of the weights that a run began with, tried in its result


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    context: int = CONTEXT


@dataclass(frozen=True, slots=True)
class World:
    """A kind of text, and how models learn from it."""

    name: str
    vocab_size: int = VOCAB_SIZE
    windows: tuple[int, int] = (256, CONTEXT)  # tokens, at first and from 70 % of the time on
    windows_later: tuple[int, int] = (CONTEXT, CONTEXT)  # of a run that goes on
    again: Again = retell_some
    copies: tuple[float, float] = (0.1, 0.1)  # of the documents; of a run that goes on
    parts: int = 1  # of an epoch
    dropout: float = DROPOUT
    later_batch: int = 8192  # tokens, of a run on a CPU that goes on
    collect: Callable[[Path], Path] | None = None  # without a corpus of one's own
    rates_later: float = 0.5  # of the learning rates, of a run that goes on

    def epochs(self, documents: list[str], tokenizer: Tokenizer, later: bool = False) -> Epochs:
        """Of these documents; `later`: of a run that goes on."""
        return Epochs(documents, tokenizer, self.again, self.copies[later], self.parts)


STORIES = World("stories")
# Edits are short: a fifth of the documents is 4 % of the text, four fifths two fifths.
CODE = World(
    "code",
    4096,
    windows_later=(384, 1024),
    again=edit,
    copies=(0.2, 0.8),
    parts=24,
    dropout=0.0,  # the text is read once at most
    later_batch=4096,
    collect=collect_code,
    rates_later=0.75,
)
SEED_LAYERS, SEED_SHARE = 4, 0.5  # of a target that is deepened, and of its time
COPYING, COPYING_SHARE = 0.97, 0.1  # of the documents told again once text was learned, and of the time
OPENINGS = 10_000  # documents that the samples of a target begin like

KINDS = ("text", "samples")  # of what a target says
OTHER_WORDS = 15  # a draft of another vocabulary has the words of one document in so many
OTHER_TURNS = 2  # and reads what the target wrote so often in an epoch

TARGET = Shape(layers=12, hidden=256, intermediate=672, heads=4)
WIDE = Shape(layers=1, hidden=256, intermediate=672, heads=4)
DEEP = Shape(layers=4, hidden=128, intermediate=512, heads=2)  # as many parameters as WIDE


@dataclass(frozen=True, slots=True)
class Job:
    """One call of `train`, everything decided."""

    recipe: str
    world: World
    shape: Shape
    corpus: Path
    out: Path
    minutes: float
    device: torch.device
    target: str  # drafts only, as is the rest
    cache: Path
    plan: Plan
    backwards: bool
    start: str | None  # a trained model of this shape to go on from
    threads: int
    compile: bool
    seed: bool = False  # a run that another goes on from

    @property
    def schedule(self) -> Schedule:
        """Lower rates for a run that goes on; those of a seed end half-way down."""
        if self.seed:
            return Schedule(self.minutes, decay_from=0.8 if self.start else 0.4, floor=0.5)
        if self.start:
            later = self.world.rates_later
            return Schedule(self.minutes, muon=0.02 * later, adamw=0.004 * later, decay_from=0.2)
        return Schedule(self.minutes, decay_from=0.4)

    @property
    def large(self) -> bool:
        """Whether the device takes large batches."""
        return self.device.type != "cpu"

    @property
    def micro_tokens(self) -> int:
        """Tokens of one pass forward and back."""
        return 65536 if self.large else 2048


def build(shape: Shape, vocab_size: int = VOCAB_SIZE) -> LlamaForCausalLM:
    """A tied Llama with small initial residual branches."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")  # forward + backward 1.2x as fast as SDPA at these sizes on a CPU
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_((2 * shape.layers) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * shape.layers) ** -0.5)
    return model


def logits_of(model: Callable[..., Any], tokens: Tensor) -> Tensor:
    """tokens [B, T] -> logits [B, T, V]."""
    with autocast(tokens.device):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def held_out_rows(corpus: Corpus, tokenizer: Tokenizer, length: int) -> Tensor:
    """The held-out text as [N, length]; one shorter row when there is less of it than that."""
    stream = token_stream(corpus.valid, tokenizer)
    return windows(stream, min(length, len(stream)))


def held_out_loss(model: PreTrainedModel, rows: Tensor) -> float:
    """rows [N, T + 1] -> mean nats per token."""
    total = 0.0
    for chunk in rows.split(16):
        total += float(cross_entropy(logits_of(model, chunk[:, :-1]), chunk[:, 1:])) * len(chunk)
    return total / len(rows)


@dataclass(slots=True)
class GrowingWindows:
    """Batches of a constant number of tokens: short windows first (cheaper), the full context from `long_from` on."""

    epochs: Epochs
    tokens_per_batch: int
    device: torch.device
    short: int
    long: int
    long_from: float = 0.7
    first_epoch: int = 0

    _epoch: int = -1
    _length: int = 0
    _queue: list[Tensor] = field(default_factory=list)

    def __call__(self, progress: float, step: int) -> Batch:
        length = self.long if progress >= self.long_from else self.short
        if not self._queue or length != self._length:
            if self._epoch < 0:  # a resumed run goes on with other epochs than those it has seen
                self._epoch = self.first_epoch + step
            self._epoch += 1
            self._length = length
            self._queue = list(self.epochs.batches(self._epoch, self.tokens_per_batch // length, length))
            if not self._queue:
                raise ValueError(f"the corpus is smaller than one batch of {self.tokens_per_batch} tokens: add text")
        return (self._queue.pop().to(self.device),)


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """bf16 safetensors in shards below 10 MB, tokenizer and generation config, all at once in the place of those that
    are there. Raises ValueError, one line, when they cannot be written."""
    model = nn.Module.to(model, torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=model.config.max_position_embeddings,
    )
    with replacing_all(out, SHARDS, "config.json") as beside:
        model.save_pretrained(beside, max_shard_size=SHARD)
        wrapped.save_pretrained(beside)


def finish(
    job: Job,
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    corpus: Corpus,
    history: History,
    start_share: float = 0.0,
) -> None:
    """Write model, provenance, attribution and card. start_share: how much of the weights is the start's."""
    save_model(model, tokenizer, job.out)
    write_provenance(
        job.out,
        history,
        recipe=job.recipe,
        minutes=job.minutes,
        **({"start": Path(job.start).name} if job.start else {}),
        **({"start_share": start_share} if start_share else {}),
        hardware=device_name(job.device),
        threads=job.threads,
        **seed_facts(job.out),
        parameters=model.num_parameters(),
        data_sha256=corpus.sha256,
    )
    write_card(job.out)


def drop_out(model: LlamaForCausalLM, share: float) -> None:
    """While it is trained, zero this share of what the embedding and every branch add to the residual stream."""

    def some(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return nn.functional.dropout(output, share, module.training)

    parts = [model.model.embed_tokens]
    parts += [part for layer in model.model.layers for part in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    for part in parts:
        part.register_forward_hook(some)


def train_target(job: Job) -> None:
    """A target: cross-entropy on the text of its world, some of it told again."""
    make_folder(job.out)
    write_attribution(job.corpus, job.out)
    train_on(job, read_corpus(job.corpus))


def train_on(job: Job, corpus: Corpus) -> None:
    """Cross-entropy on a corpus, some of it told again; `job.out` is there."""
    world = job.world
    tokenizer = load_or_train_tokenizer(corpus, job.out, job.start, world.vocab_size)
    model = nn.Module.to(build(job.shape, world.vocab_size), job.device)
    start = to_depth(weights(job.start), job.shape.layers) if job.start else {}
    if start:
        model.load_state_dict(start)
    short, long = world.windows_later if start else world.windows
    valid = held_out_rows(corpus, tokenizer, long + 1).to(job.device)
    tokens_per_batch = 65536 if job.large else world.later_batch if start else 4096
    batches = GrowingWindows(
        world.epochs(corpus.train, tokenizer, bool(start)), tokens_per_batch, job.device, short, long
    )
    if start:  # it sees other orders and other copies
        batches.first_epoch = 100_000
    drop_out(model, world.dropout)

    def lesson(progress: float, step: int) -> Batch:
        model.train(progress < DROPOUT_UNTIL)
        return batches(progress, step)

    forward = torch.compile(model, dynamic=False) if job.compile else model

    def loss(tokens: Tensor) -> Tensor:
        return cross_entropy(logits_of(forward, tokens[:, :-1]), tokens[:, 1:])

    def evaluate() -> dict[str, float]:
        return {"held_out_loss": round(held_out_loss(model, valid), 4)}

    with side_by_side(job) as pool:
        history = fit(
            model,
            lesson,
            loss,
            evaluate,
            job.schedule,
            job.out / "checkpoint.pt",
            micro_tokens=job.micro_tokens + 8,  # a row is its window and one token more
            pool=pool,
        )
    share = average(model, start, lambda: held_out_loss(model, valid)) if start else 0.0
    if share:
        history.evaluations.append({**history.evaluations[-1], **evaluate()})
    finish(job, model, tokenizer, corpus, history, share)


def seeded(job: Job, name: str, layers: int, minutes: float, make: Callable[[Job], None]) -> Job:
    """First a run of so many layers in the folder `name`; the job that goes on from what it leaves."""
    out = job.out / name
    make(replace(job, out=out, shape=replace(job.shape, layers=layers), minutes=minutes, seed=True))
    return replace(job, start=str(out))


def deepened_target(job: Job) -> None:
    """A shallow target first, which sees three times the text in the same time, and at its end little but edits, so
    that it learns to copy; then the whole one from it."""
    if not job.start:
        minutes, world = job.minutes, job.world
        job = seeded(job, "seed", SEED_LAYERS, minutes * SEED_SHARE, train_target)
        copying = replace(world, copies=(0.0, COPYING), windows_later=(world.windows_later[0], world.windows[1]))
        job = seeded(replace(job, world=copying), "copying", SEED_LAYERS, minutes * COPYING_SHARE, train_target)
        job = replace(job, world=world, minutes=minutes * (1.0 - SEED_SHARE - COPYING_SHARE))
    train_target(job)


def seed_facts(folder: Path) -> dict[str, object]:
    """What is told of the models that another one began as."""
    told = []
    for path in (folder / name / "provenance.json" for name in ("seed", "copying")):
        if path.exists():
            seed = json.loads(path.read_text(encoding="utf-8"))
            layers = json.loads(path.with_name("config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
            loss = seed["evaluations"][-1]["held_out_loss"] if seed["evaluations"] else None
            at = {"minutes": seed["seconds"] / 60, "tokens": seed["tokens"], "held_out_loss": loss}
            told.append({"name": path.parent.name, "layers": layers, **at})
    return {"seeds": told} if told else {}


LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


def to_depth(state: Mapping[str, Tensor], layers: int) -> Mapping[str, Tensor]:
    """The weights of a model of `layers` layers from those of another one. With more layers it says the same: between
    the old ones are copies that add nothing yet (block expansion of LLaMA Pro, Wu et al. 2024, arXiv 2401.02415). With
    fewer it has every so-manieth one (DistilBERT, Sanh et al. 2019, arXiv 1910.01108, section 3)."""
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


def weights(folder: str) -> Mapping[str, Tensor]:
    """The tensors of a shipped or trained model's folder, by name."""
    check_shipped(Path(folder))
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


@torch.no_grad()
def average(model: nn.Module, start: Mapping[str, Tensor], loss: Callable[[], float]) -> float:
    """Mix the weights of `start` into `model` where that lowers `loss` (Wortsman et al. 2022, arXiv 2203.05482) -> the
    share of `start`, one of START_SHARES."""
    end = {name: weight.clone() for name, weight in model.state_dict().items()}

    def mix(share: float) -> None:
        model.load_state_dict({name: weight.lerp(start[name].to(weight), share) for name, weight in end.items()})

    def mixed(share: float) -> float:
        mix(share)
        return loss()

    best = min(START_SHARES, key=mixed)
    mix(best)
    return best


def side_by_side(job: Job) -> AbstractContextManager[Executor | None]:
    """Workers for the pieces of a batch: on a CPU one for every thread asked for, each computing on one."""
    if job.device.type != "cpu" or job.threads < 2:
        return nullcontext()
    torch.set_num_threads(1)  # a piece that waits for a busy core must not hold up the others' operations
    return ThreadPoolExecutor(job.threads, initializer=torch.set_num_threads, initargs=(1,))


def load_or_train_tokenizer(corpus: Corpus, out: Path, start: str | None, vocab_size: int) -> Tokenizer:
    """The folder's tokenizer, or that of the start, or a new one, which is saved in the folder."""
    path = out / "tokenizer.json"
    if start and not path.exists():
        path = Path(start) / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(corpus.train[::5] if len(corpus.train) > 20_000 else corpus.train, vocab_size)
    with replacing(path) as part:
        tokenizer.save(str(part))
    return tokenizer


@dataclass(frozen=True, slots=True)
class Lessons:
    """What a draft sees at a share `progress` of its time; a pure function, so that a resumed run goes on exactly.

    Until `listen_from`: text, for cross-entropy, in short rows. Then text with the target's distributions, in rows of
    `context` tokens: a draft is asked far into a text. From `samples_from` on half of the rows are the target's own
    samples and the loss leans to the target's choice.
    """

    text: Recorded  # rows of `context` tokens
    samples: Recorded
    tokens_per_batch: int
    device: torch.device
    listen_from: float = 0.1
    samples_from: float = 0.5
    lean: float = 0.4

    def __call__(self, progress: float, step: int) -> Batch:
        if progress >= self.samples_from:
            half = max(1, self.tokens_per_batch // self.text.tokens.shape[1] // 2)
            a, b = self.text.turn(half, step), self.samples.turn(half, step)
            tokens, indices = torch.cat([a.tokens, b.tokens]), torch.cat([a.indices, b.indices])
            probs = toward_argmax(torch.cat([a.probs, b.probs]), self.lean)
        else:
            text = self.text if progress >= self.listen_from else self.text.cut(2)
            rows = text.turn(max(1, self.tokens_per_batch // text.tokens.shape[1]), step)
            tokens, indices, probs = rows.tokens, rows.indices, rows.probs
        if progress < self.listen_from:  # the text itself: its next token with certainty
            tokens, indices = tokens[:, :-1], tokens[:, 1:, None]
            probs = torch.ones(indices.shape)
        return tokens.to(self.device), indices.to(self.device), probs.to(self.device)


def is_as_wide(shape: Shape, config: PreTrainedConfig) -> bool:
    """Whether layers of the one are layers of the other."""
    its = (config.hidden_size, config.intermediate_size, config.num_attention_heads)
    return (shape.hidden, shape.intermediate, shape.heads) == its


def train_draft(job: Job) -> None:
    """A draft: forward KL to the target on text, at last also on the target's own samples. One as wide as its target
    begins as some of its layers, another one with cross-entropy."""
    corpus = read_corpus(job.corpus)
    target, wrapped = load_target(job)
    make_folder(job.out)
    tokenizer = wrapped.backend_tokenizer
    valid = held_out_rows(corpus, tokenizer, job.plan.context)
    truth = next_probs(target, valid)
    model = nn.Module.to(build(job.shape, target.config.vocab_size), job.device)
    alike = is_as_wide(job.shape, target.config)
    if job.start or alike:
        model.load_state_dict(weights(job.start) if job.start else to_depth(target.state_dict(), job.shape.layers))
    listen_from = 0.0 if job.start or alike else 0.1
    text, samples = record(job, target, corpus, tokenizer)
    batches = Lessons(text, samples, 65536 if job.large else 4096, job.device, listen_from)

    def loss(tokens: Tensor, indices: Tensor, probs: Tensor) -> Tensor:
        with autocast(job.device):
            hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return head_forward_kl(hidden.flatten(0, 1), model.lm_head.weight, indices.flatten(0, 1), probs.flatten(0, 1))

    def evaluate() -> dict[str, float]:
        return agreement(model, truth, valid)

    schedule = Schedule(job.minutes, decay_from=0.2)
    history = fit(
        model,
        batches,
        loss,
        evaluate,
        schedule,
        job.out / "checkpoint.pt",
        micro_tokens=job.micro_tokens,
        evaluate_every_seconds=120.0,
    )
    finish(job, model, tokenizer, corpus, history)


def train_other(job: Job) -> None:
    """A draft with a vocabulary of its own: cross-entropy on text and on what the target wrote itself, which is
    distillation by sequences (Kim & Rush 2016, arXiv 1606.07947) and needs no tokens in common."""
    corpus = read_corpus(job.corpus)
    target, wrapped = load_target(job)
    make_folder(job.out)
    words = job.out / "tokenizer.json"
    if not words.exists():
        with replacing(words) as part:  # of few documents, so that its words are others
            train_tokenizer(corpus.train[: -(-len(corpus.train) // OTHER_WORDS)], words=gpt2_words).save(str(part))
    (samples,) = record(job, target, corpus, wrapped.backend_tokenizer, ("samples",))
    rows = samples.tokens.view(-1, job.plan.sample_length)
    said = wrapped.batch_decode(rows, clean_up_tokenization_spaces=False)
    told = [story.strip() for text in said for story in text.split(END) if story.strip()]
    train_on(job, replace(corpus, train=corpus.train + OTHER_TURNS * told))


def load_target(job: Job) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """The target in fp32 and its tokenizer. Raises ValueError when there is none at `job.target`."""
    check_shipped(Path(job.target))
    try:
        target = AutoModelForCausalLM.from_pretrained(job.target, dtype=torch.float32)
        return nn.Module.to(target.eval(), job.device), PreTrainedTokenizerFast.from_pretrained(job.target)
    except OSError as error:
        raise ValueError(f"no target model at {job.target}: name the folder of stories-target with --target") from error


def record(
    job: Job, target: PreTrainedModel, corpus: Corpus, tokenizer: Tokenizer, kinds: Sequence[str] = KINDS
) -> list[Recorded]:
    """The target's cache of text and samples, completed if need be; a complete one of other text will do."""
    if complete(job.cache):
        claim(job.cache, target, None, job.plan)
        return [load_cache(job.cache, [kind]) for kind in kinds]
    text = windows(job.world.epochs(corpus.train, tokenizer, later=True).stream(0, job.plan.context), job.plan.context)
    openings = corpus.train[:: 1 + len(corpus.train) // OPENINGS]
    collect(target, text, [e.ids for e in tokenizer.encode_batch(openings)], job.cache, job.plan, job.backwards)
    return [load_cache(job.cache, [kind]) for kind in kinds]


@dataclass(frozen=True, slots=True)
class Recipe:
    make: Callable[[Job], None]
    shape: Shape
    minutes: float  # on CPU
    threads: int | None  # on CPU; None: one per core
    plan: Plan = Plan()
    backwards: bool = False  # the end of the shared cache to begin at, so that both drafts can collect at once
    world: World = STORIES


OTHER_PLAN = Plan(text_rows=0, sampled_rows=1024)
CODE_PLAN = Plan(text_rows=6144, sampled_rows=1024)
CODE_DRAFT = replace(WIDE, layers=2, context=1024)  # one layer cannot copy
RECIPES: dict[str, Recipe] = {
    "stories-target": Recipe(train_target, TARGET, minutes=100.0, threads=None),
    "stories-draft-wide": Recipe(train_draft, WIDE, minutes=19.0, threads=1),
    "stories-draft-deep": Recipe(train_draft, DEEP, minutes=19.0, threads=1, backwards=True),
    "stories-draft-other": Recipe(train_other, WIDE, 20.0, 1, OTHER_PLAN, world=replace(STORIES, dropout=0.0)),
    "code-target": Recipe(deepened_target, replace(TARGET, context=1024), 100.0, None, world=CODE),
    "code-draft": Recipe(train_draft, CODE_DRAFT, 62.0, 1, CODE_PLAN, world=replace(CODE, parts=4)),
}


def train(
    recipe: str,
    corpus: Path | None,
    out: Path | None = None,
    minutes: float | None = None,
    device: str = "auto",
    threads: int | None = None,
    target: str | None = None,
    cache: Path | None = None,
    start: str | None = None,
    compile: bool = False,
) -> Path:
    """Run a recipe and return its folder. Raises ValueError, one line, when something is missing.

    `minutes` counts training alone; a draft first completes the target's cache in `cache` (default: `cache` beside
    `out`), which drafts of one target share: started at the same time, they share that work too. `target` is a folder,
    an embedded name or a hub id, and so is `start`, a trained model that is to be trained further. `threads` of the
    CPU; a small draft is fastest with one. `compile` runs the target through `torch.compile`, for which the machine
    needs a C++ compiler.
    """
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe '{recipe}'; there are {', '.join(RECIPES)}")
    chosen = RECIPES[recipe]
    minutes = positive(chosen.minutes if minutes is None else minutes)
    out = out or Path("runs") / recipe
    if corpus is None:
        if chosen.world.collect is None:
            raise ValueError(f"recipe {recipe!r} needs a corpus: name a folder of *.txt files with --corpus")
        corpus = chosen.world.collect(out.parent / f"{chosen.world.name}-corpus")
    check_corpus(corpus)
    count = threads or chosen.threads or os.cpu_count() or 1
    job = Job(
        recipe=recipe,
        world=chosen.world,
        shape=chosen.shape,
        corpus=corpus,
        out=out,
        minutes=minutes,
        device=pick_device(device),
        target=resolve(target or chosen.world.name),
        cache=cache or out.parent / "cache",
        plan=chosen.plan,
        backwards=chosen.backwards,
        start=resolve(start) if start else None,
        threads=count,
        compile=compile,
    )
    with machine.threads(count):
        chosen.make(job)
    return out
