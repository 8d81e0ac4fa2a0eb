"""One call of `train`: the kind of text, the model, the machine, and what is written at its end."""

import json
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from recipes.cards import write_card
from recipes.code_corpus import collect_code
from recipes.code_edits import edit
from recipes.corpus import VOCAB_SIZE, Again, Epochs, retell_some
from recipes.llama import CONTEXT, Shape, save_model
from specdemo.models.machine import device_name
from specdemo.training.collect import Plan
from specdemo.training.corpus import Corpus
from specdemo.training.fit import History, Schedule, write_provenance

DROPOUT = 0.15  # of the target: it reads its 2.6 M tokens many times over, and without it learns them by heart


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


def side_by_side(job: Job) -> AbstractContextManager[Executor | None]:
    """Workers for the pieces of a batch: on a CPU one for every thread asked for, each computing on one."""
    if job.device.type != "cpu" or job.threads < 2:
        return nullcontext()
    torch.set_num_threads(1)  # a piece that waits for a busy core must not hold up the others' operations
    return ThreadPoolExecutor(job.threads, initializer=torch.set_num_threads, initargs=(1,))


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
    start = {"start": Path(job.start).name} if job.start else {}
    share = {"start_share": start_share} if start_share else {}
    told = facts(job, corpus) | start | share | seed_facts(job.out)
    write_provenance(job.out, history, **told, parameters=model.num_parameters())
    write_card(job.out)


def facts(job: Job, corpus: Corpus) -> dict[str, object]:
    """What provenance says of the recipe, the machine and the text."""
    return {
        "recipe": job.recipe,
        "minutes": job.minutes,
        "hardware": device_name(job.device),
        "threads": job.threads,
        "data_sha256": corpus.sha256,
    }


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
