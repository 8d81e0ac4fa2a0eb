"""Settings of one call of `train`: the kind of text, the model, the machine, and the files written at the end."""

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
from specdemo.training.collect import Corpus, Plan
from specdemo.training.fit import Schedule, TrainHistory, write_provenance

DROPOUT = 0.15  # of the target, which reads its 2.6 M tokens many times and would memorise them


@dataclass(frozen=True, slots=True)
class World:
    """A kind of text and the training settings for it."""

    name: str
    vocab_size: int = VOCAB_SIZE
    windows: tuple[int, int] = (256, CONTEXT)  # tokens, at first and after 70 % of the time
    windows_later: tuple[int, int] = (CONTEXT, CONTEXT)  # of a run that goes on
    again: Again = retell_some
    copies: tuple[float, float] = (0.1, 0.1)  # share of the documents; of a resumed run
    parts: int = 1  # per epoch
    dropout: float = DROPOUT
    later_batch: int = 8192  # tokens, of a resumed run on a CPU
    collect: Callable[[Path], Path] | None = None  # collects a corpus if none is given
    rates_later: float = 0.5  # factor of the learning rates in a resumed run

    def epochs(self, documents: list[str], tokenizer: Tokenizer, later: bool = False) -> Epochs:
        """Return epochs of these documents. `later`: for a resumed run."""
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
    dropout=0.0,  # the text is read at most once
    later_batch=4096,
    collect=collect_code,
    rates_later=0.75,
)


@dataclass(frozen=True, slots=True)
class Job:
    """One call of `train` with all settings resolved."""

    recipe: str
    world: World
    shape: Shape
    corpus: Path
    out: Path
    minutes: float
    device: torch.device
    target: str  # this and the rest apply to drafts only
    cache: Path
    plan: Plan
    backwards: bool
    start: str | None  # a trained model of this shape to continue from
    threads: int
    compile: bool
    seed: bool = False  # another run continues from this one
    force: bool = False  # overwrite a folder that specdemo did not make

    @property
    def schedule(self) -> Schedule:
        """Return the learning-rate schedule: lower rates for a resumed run; those of a seed end half-way down."""
        if self.seed:
            return Schedule(self.minutes, decay_from=0.8 if self.start else 0.4, floor=0.5)
        if self.start:
            return Schedule(self.minutes, decay_from=0.2).scaled(self.world.rates_later)
        return Schedule(self.minutes, decay_from=0.4)

    @property
    def large(self) -> bool:
        """Return whether the device takes large batches."""
        return self.device.type != "cpu"

    @property
    def micro_tokens(self) -> int:
        """Return the number of tokens per forward and backward pass."""
        return 65536 if self.large else 2048


def side_by_side(job: Job) -> AbstractContextManager[Executor | None]:
    """Create workers for the pieces of a batch: on a CPU one single-threaded worker per requested thread."""
    if job.device.type != "cpu" or job.threads < 2:
        return nullcontext()
    torch.set_num_threads(1)  # a piece that waits for a busy core must not block the others
    return ThreadPoolExecutor(job.threads, initializer=torch.set_num_threads, initargs=(1,))


def finish(
    job: Job,
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    corpus: Corpus,
    history: TrainHistory,
    start_share: float = 0.0,
) -> None:
    """Write model, provenance, attribution and card. start_share: share of the start's weights in the result."""
    save_model(model, tokenizer, job.out)
    start = {"start": Path(job.start).name} if job.start else {}
    share = {"start_share": start_share} if start_share else {}
    run_facts = facts(job, corpus) | start | share | seed_facts(job.out)
    write_provenance(job.out, history, **run_facts, parameters=model.num_parameters())
    write_card(job.out)


def facts(job: Job, corpus: Corpus) -> dict[str, object]:
    """Return the provenance of recipe, machine and text."""
    return {
        "recipe": job.recipe,
        "minutes": job.minutes,
        "hardware": device_name(job.device),
        "threads": job.threads,
        "data_sha256": corpus.sha256,
    }


def seed_facts(folder: Path) -> dict[str, object]:
    """Return the provenance of the models that this one started from."""
    seeds = []
    for path in (folder / name / "provenance.json" for name in ("seed", "copying")):
        if path.exists():
            seed = json.loads(path.read_text(encoding="utf-8"))
            layers = json.loads(path.with_name("config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
            loss = seed["evaluations"][-1]["held_out_loss"] if seed["evaluations"] else None
            at = {"minutes": seed["seconds"] / 60, "tokens": seed["tokens"], "held_out_loss": loss}
            seeds.append({"name": path.parent.name, "layers": layers, **at})
    return {"seeds": seeds} if seeds else {}
