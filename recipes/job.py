"""Recipes from the files in `shipped`, one call of `train`, and the files written at its end."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaForCausalLM

from recipes.cards import write_card
from recipes.code_corpus import edit
from recipes.corpus import Again, Epochs, retell
from recipes.llama import VOCAB_SIZE, build, save_model
from specdemo.models.machine import device_name
from specdemo.training.collect import Corpus, Plan
from specdemo.training.fit import (
    Batches,
    Evaluate,
    Loss,
    Schedule,
    TrainHistory,
    run_with_progress,
    train_steps,
    write_provenance,
)

AGAIN: dict[str, Again] = {"stories": retell, "code": edit}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One shipped model, as its file describes it."""

    name: str
    make: str  # key of MAKERS
    text: str  # key of AGAIN
    shape: Mapping[str, int]  # sizes as in the config of a Llama
    minutes: float  # on a CPU
    about: str  # this and the next two are texts of the model card
    method: str = ""
    limits: str = ""
    threads: int | None = None  # on a CPU; None: one per core
    plan: Plan = Plan()
    vocab_size: int = VOCAB_SIZE
    windows: Sequence[int] = (256, 512)  # tokens, at first and after 70 % of the time
    windows_later: Sequence[int] = (512, 512)  # of a run that goes on
    copies: Sequence[float] = (0.1, 0.1)  # share of the documents; of a run that goes on
    parts: int = 1  # per epoch
    dropout: float = 0.0
    later_batch: int = 8192  # tokens, of a run that goes on, on a CPU
    adamw: float = 0.002  # learning rate of norms, embeddings and output rows of a head
    rates_later: float = 0.5  # factor of the learning rates in a run that goes on

    def epochs(self, documents: list[str], tokenizer: Tokenizer, later: bool = False) -> Epochs:
        """Return epochs of these documents. `later`: for a run that goes on."""
        return Epochs(documents, tokenizer, AGAIN[self.text], self.copies[later], self.parts)


def read_recipe(path: Path) -> Recipe:
    """Read a file of `shipped`."""
    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return Recipe(path.stem, **data | {"plan": Plan(**data.get("plan", {}))})


RECIPES = {path.stem: read_recipe(path) for path in sorted((Path(__file__).parent / "shipped").glob("*.yaml"))}


@dataclass(frozen=True, slots=True)
class Job:
    """One call of `train` with all settings resolved."""

    recipe: Recipe
    corpus: Path
    out: Path
    minutes: float
    device: torch.device
    target: str  # this and the cache apply to drafts only
    cache: Path
    start: str | None  # a trained model of this shape to continue from
    threads: int
    compile: bool
    force: bool = False  # overwrite a folder that specdemo did not make
    seed: bool = False  # another run continues from this one
    seeds: Sequence[Mapping[str, object]] = ()  # facts about the runs that this one started from

    @property
    def schedule(self) -> Schedule:
        """Return the learning-rate schedule: lower rates for a resumed run; those of a seed end half-way down."""
        if self.seed:
            return Schedule(self.minutes, decay_from=0.8 if self.start else 0.4, floor=0.5)
        if self.start:
            return Schedule(self.minutes, decay_from=0.2).scaled(self.recipe.rates_later)
        return Schedule(self.minutes, decay_from=0.4)

    def batch_tokens(self, on_cpu: int = 4096) -> int:
        """Return the number of tokens per batch."""
        return on_cpu if self.device.type == "cpu" else 65536

    def build(self, vocab_size: int) -> LlamaForCausalLM:
        """Create the model on the device."""
        return nn.Module.to(build(self.recipe.shape, vocab_size), self.device)

    def run(self, module: nn.Module, batches: Batches, loss: Loss, evaluate: Evaluate, **options: Any) -> TrainHistory:
        """Train as `train_steps` does, with the schedule and batches of this job unless the options name others."""
        own: dict[str, Any] = {"schedule": self.schedule, "micro_tokens": self.batch_tokens(2048)}
        ticks = train_steps(module, batches, loss, evaluate, checkpoint=self.out / "checkpoint.pt", **own | options)
        return run_with_progress(ticks, self.minutes, self.out.name)

    def facts(self, corpus: Corpus) -> dict[str, object]:
        """Return the provenance of recipe, machine and text."""
        machine = {"hardware": device_name(self.device), "threads": self.threads}
        return {"recipe": self.recipe.name, "minutes": self.minutes, **machine, "data_sha256": corpus.sha256}

    def finish(
        self, model: LlamaForCausalLM, tokenizer: Tokenizer, corpus: Corpus, history: TrainHistory, share: float = 0.0
    ) -> None:
        """Write model, provenance and card. share: that of the start's weights in the result."""
        save_model(model, tokenizer, self.out)
        known = {"start": self.start and Path(self.start).name, "start_share": share, "seeds": self.seeds}
        facts = self.facts(corpus) | {name: value for name, value in known.items() if value}
        write_provenance(self.out, history, **facts, parameters=model.num_parameters())
        write_card(self.out, self.recipe)


def side_by_side(job: Job) -> AbstractContextManager[Executor | None]:
    """Create workers for the pieces of a batch: on a CPU one single-threaded worker per requested thread."""
    if job.device.type != "cpu" or job.threads < 2:
        return nullcontext()
    torch.set_num_threads(1)  # a piece that waits for a busy core must not block the others
    return ThreadPoolExecutor(job.threads, initializer=torch.set_num_threads, initargs=(1,))
