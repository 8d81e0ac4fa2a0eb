"""Training recipes of `specdemo train stories-target | stories-draft-wide | ...` in a checkout.

A recipe writes a standard Hugging Face folder with `MODEL_CARD.md` and `provenance.json`. An interrupted run resumes
from its last checkpoint if it is started again with the same folder.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.byte_model import BYTES, train_bytes
from recipes.drafts import train_draft, train_other
from recipes.job import CODE, STORIES, Job, World
from recipes.llama import Shape
from recipes.targets import deepened_target, train_target
from specdemo.core.outputs import check_output_folder
from specdemo.core.suggest import suggest
from specdemo.methods.recipes import HEAD_RECIPES
from specdemo.models import cpu_threads
from specdemo.models.devices import pick_device
from specdemo.models.sources import resolve
from specdemo.training.collect import Plan, check_corpus
from specdemo.training.fit import check_minutes

TARGET = Shape(layers=12, hidden=256, intermediate=672, heads=4)
WIDE = Shape(layers=1, hidden=256, intermediate=672, heads=4)
DEEP = Shape(layers=4, hidden=128, intermediate=512, heads=2)  # as many parameters as WIDE


@dataclass(frozen=True, slots=True)
class Recipe:
    make: Callable[[Job], None]
    shape: Shape
    minutes: float  # on CPU
    threads: int | None  # on CPU; None: one per core
    plan: Plan = Plan()
    backwards: bool = False  # start at the end of the shared cache, so that two drafts can fill it together
    world: World = STORIES


OTHER_PLAN = Plan(text_rows=0, sampled_rows=1024)
CODE_DRAFT = replace(WIDE, layers=2, context=1024)  # one layer cannot copy
CODE_PLAN = Plan(text_rows=3072, sampled_rows=512, context=CODE_DRAFT.context)  # shorter rows teach no later position
RECIPES: dict[str, Recipe] = {
    "stories-target": Recipe(train_target, TARGET, minutes=100.0, threads=None),
    "stories-draft-wide": Recipe(train_draft, WIDE, minutes=19.0, threads=1),
    "stories-draft-deep": Recipe(train_draft, DEEP, minutes=19.0, threads=1, backwards=True),
    "stories-draft-other": Recipe(train_other, WIDE, 20.0, 1, OTHER_PLAN, world=replace(STORIES, dropout=0.0)),
    "stories-bytes": Recipe(train_bytes, BYTES, 60.0, None, world=replace(STORIES, windows=(256, BYTES.context))),
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
    force: bool = False,
) -> Path:
    """Run a recipe and return its folder. Raises ValueError, one line, if something is missing.

    `minutes` counts training only. A draft first completes the target's cache in `cache` (default: `cache` next to
    `out`). Drafts of one target share it: if started at the same time, they also share the work. `target` is a folder,
    an embedded name or a hub id, and so is `start`, a trained model to continue from. `threads`: number of CPU threads;
    a small draft is fastest with one. `compile` runs the target through `torch.compile`, which needs a C++ compiler.
    """
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}; {suggest(recipe, [*HEAD_RECIPES, *RECIPES])}")
    chosen = RECIPES[recipe]
    minutes = check_minutes(chosen.minutes if minutes is None else minutes)
    out = out or Path("runs") / recipe
    check_output_folder(out, force)
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
        force=force,
    )
    with cpu_threads.threads(count):
        chosen.make(job)
    return out
