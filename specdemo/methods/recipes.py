"""Which heads can be trained: `specdemo train medusa --target TARGET`, and the same step by step for the page.

A recipe is a method, the sizes of an untrained head of it, and a name; the training itself is training/heads.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdemo.core.suggest import suggest
from specdemo.methods import method, usable
from specdemo.methods.base import Head, Recipe
from specdemo.methods.heads.network import Network
from specdemo.methods.targets import load_target
from specdemo.models.machine import one_thread
from specdemo.models.target import HFTarget
from specdemo.training.collect import Plan
from specdemo.training.corpus import check_corpus
from specdemo.training.fit import TrainStep, check_minutes, make_folder, run_with_progress
from specdemo.training.heads import TeacherSplit, build_dataset, iter_dataset, save_head, train_head

ROWS_PER_MINUTE = 120  # what a small head reads in a minute on one CPU core, several times over
CONTEXT = 256  # tokens of a row: on a CPU the target spends more time on writing them than the head on learning


def _collect_recipes() -> dict[str, Recipe]:
    """Return every head's recipes. A variant of a head (a class derived from it) does not replace those it inherits."""
    found: dict[str, Recipe] = {}
    for name in usable():
        cls = method(name)
        if issubclass(cls, Head):
            for recipe, described in cls.recipes.items():
                found.setdefault(recipe, replace(described, method=name))
    return found


HEAD_RECIPES = _collect_recipes()


def recipes() -> dict[str, str]:
    """Name -> title of every head that can be trained."""
    return {name: recipe.title for name, recipe in HEAD_RECIPES.items()}


def head_recipe(name: str) -> Recipe:
    """Raises ValueError for an unknown name."""
    if name not in HEAD_RECIPES:
        raise ValueError(f"unknown recipe {name!r}; {suggest(name, HEAD_RECIPES)}")
    return HEAD_RECIPES[name]


def untrained_drafter(recipe: Recipe, target: HFTarget) -> Head[Network]:
    """A drafter of the recipe's method with a fresh head."""
    cls = method(recipe.method)
    assert issubclass(cls, Head)
    return cls(target, cls.fresh(target, **recipe.sizes))


def train_head_recipe(
    name: str,
    out: Path | None = None,
    minutes: float | None = None,
    target: str | HFTarget = "stories",
    corpus: Path | None = None,
    cache: Path | None = None,
    device: str = "auto",
    quantization: str | None = None,
) -> Path:
    """Train a head and return its folder. A killed run goes on when it is started again with the same folder.

    Without a corpus the head learns from what the target writes by itself. `cache` keeps what the target said; heads
    of one target may share it. `quantization` is the frozen target's. Raises ValueError, one line.
    """
    recipe, minutes = head_recipe(name), check_minutes(20.0 if minutes is None else minutes)
    if corpus is not None:
        check_corpus(corpus)
    out = out or Path("runs") / name
    loaded = (
        target
        if isinstance(target, HFTarget)
        else load_target(target, "auto", device, quantization, kernels="transformers")
    )
    drafter = untrained_drafter(recipe, loaded)
    make_folder(out)
    with one_thread(loaded.device):
        dataset = build_dataset(loaded, cache or out / "cache", _plan(drafter, minutes), corpus)
        history = run_with_progress(train_head(drafter, loaded, dataset, out, minutes), minutes, name)
        save_head(drafter, loaded, out, history, dataset, recipe=name, minutes=minutes)
    return out


def train_live(
    name: str, minutes: float, out: Path, cancelled: Callable[[], bool], target: str = "stories"
) -> Iterator[dict[str, Any]]:
    """The same, told as it goes: a note while the text is written, what `tick` says at every step, at last `done` and
    the folder. A run that is cancelled keeps the head as far as it got, and nothing if it had not begun.
    """
    recipe, minutes = head_recipe(name), check_minutes(minutes)
    loaded = load_target(target, kernels="transformers")
    drafter = untrained_drafter(recipe, loaded)
    with one_thread(loaded.device):
        collection = iter_dataset(loaded, out / "cache", _plan(drafter, minutes))
        while True:
            try:
                share = next(collection)
            except StopIteration as end:
                dataset: TeacherSplit = end.value
                break
            yield {"note": f"{loaded.name} is writing the text that the head will learn from: {share:.0%}"}
            if cancelled():
                return
        last = None
        for last in train_head(drafter, loaded, dataset, out, minutes):
            yield progress_event(last, minutes)
            if cancelled():
                break
        if last is not None:
            save_head(drafter, loaded, out, last.history, dataset, recipe=name, minutes=minutes)
            yield {"done": True, "folder": str(out)}


def progress_event(now: TrainStep, minutes: float) -> dict[str, Any]:
    """One step for people: seconds of `of_seconds`, step, tokens, loss, and the evaluation if there was one."""
    history = now.history
    event = {"seconds": history.seconds, "of_seconds": 60.0 * minutes, "step": history.step, "tokens": history.tokens}
    return event | {"loss": now.loss} | (now.evaluation or {})


def _plan(drafter: Head[Network], minutes: float) -> Plan:
    rows = min(6144, max(64, round(minutes * ROWS_PER_MINUTE)))
    return Plan(text_rows=rows, sampled_rows=rows // 3, rows_per_shard=32, context=CONTEXT, taps=drafter.taps)
