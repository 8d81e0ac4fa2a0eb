"""Which heads can be trained: `specdemo train medusa --target TARGET`, and the same step by step for the page.

A recipe is a method, the sizes of an untrained head of it, and a name; the training itself is training/heads.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdemo.core.suggest import suggest
from specdemo.methods import METHODS, method
from specdemo.methods.base import Head, Recipe
from specdemo.methods.heads.network import Network
from specdemo.models.load import load_target
from specdemo.models.machine import device_name, one_thread
from specdemo.models.place import pick_device
from specdemo.models.target import HFTarget
from specdemo.training.cards import write_card, write_head_card
from specdemo.training.collect import Plan
from specdemo.training.corpus import Epochs, byte_tokenizer, check_corpus, read_corpus
from specdemo.training.fit import Schedule, Tick, make_folder, positive, show, write_provenance
from specdemo.training.heads import Material, gather, gathering, save_head, train_head, train_jointly
from specdemo.training.recipes import GrowingWindows, Shape, build, held_out_rows, save_model

ROWS_PER_MINUTE = 120  # what a small head reads in a minute on one CPU core, several times over
CONTEXT = 256  # tokens of a row: on a CPU the target spends more time on writing them than the head on learning


def _of_methods() -> Iterator[tuple[str, Recipe]]:
    for name in METHODS:
        cls = method(name)
        if issubclass(cls, Head):
            for recipe, told in cls.recipes.items():
                yield recipe, replace(told, method=name)


HEAD_RECIPES = dict(_of_methods())


def recipes() -> dict[str, str]:
    """Name -> title of every head that can be trained."""
    return {name: recipe.title for name, recipe in HEAD_RECIPES.items()}


def head_recipe(name: str) -> Recipe:
    """Raises ValueError for an unknown name."""
    if name not in HEAD_RECIPES:
        raise ValueError(f"unknown recipe {name!r}; {suggest(name, HEAD_RECIPES)}")
    return HEAD_RECIPES[name]


def untrained(recipe: Recipe, target: HFTarget) -> Head[Network]:
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
    recipe, minutes = head_recipe(name), positive(20.0 if minutes is None else minutes)
    if corpus is not None:
        check_corpus(corpus)
    out = out or Path("runs") / name
    loaded = (
        target
        if isinstance(target, HFTarget)
        else load_target(target, "auto", device, quantization, kernels="transformers")
    )
    drafter = untrained(recipe, loaded)
    make_folder(out)
    with one_thread(loaded.device):
        material = gather(loaded, cache or out / "cache", drafter.taps, corpus, _plan(drafter, minutes))
        history = show(train_head(drafter, loaded, material, out, minutes), minutes, name)
        save_head(drafter, loaded, out, history, material, recipe=name, minutes=minutes)
    return out


BYTE_MODEL = "stories-bytes"
BYTES = Shape(layers=12, hidden=128, intermediate=344, heads=2, context=1024)  # narrow: seven heads are cheap beside it
CONTEXTS = (256, BYTES.context)  # windows of the first part of a run, and of the last
BYTE_HEADS = Recipe("Eight heads on a byte-level model", {"modules": 7, "kind": "parallel"}, "mtp")


def train_bytes(corpus: Path, out: Path | None = None, minutes: float | None = None, device: str = "auto") -> Path:
    """A byte-level model and seven heads beside its own, trained together from scratch: `out` and `out`-heads.

    Bytes are easy to guess and many, so multi-token prediction shows most here. Raises ValueError, one line.
    """
    check_corpus(corpus)
    out, minutes = out or Path("runs") / BYTE_MODEL, positive(60.0 if minutes is None else minutes)
    where = pick_device(device)
    text, tokenizer = read_corpus(corpus), byte_tokenizer()
    make_folder(out)
    model = nn.Module.to(build(BYTES, tokenizer.get_vocab_size()), where)
    target = HFTarget(model, name=out.name)
    drafter = untrained(BYTE_HEADS, target)
    large = where.type != "cpu"
    batches = GrowingWindows(
        Epochs(text.train, tokenizer), 65536 if large else 4096, where, short=CONTEXTS[0], long=CONTEXTS[1]
    )
    held_out = held_out_rows(text, tokenizer, CONTEXTS[0] + 1)[:128].to(where)
    schedule = Schedule(minutes, decay_from=0.4)
    ticks = train_jointly(model, drafter, batches, held_out, out, schedule, 65536 if large else 2048)
    history = show(ticks, minutes, out.name)
    save_model(model, tokenizer, out)
    facts = {"recipe": BYTE_MODEL, "minutes": minutes, "hardware": device_name(where)}
    facts |= {"threads": torch.get_num_threads(), "data_sha256": text.sha256}
    heads = out.with_name(f"{out.name}-heads")
    heads.mkdir(exist_ok=True)
    drafter.save(heads, out.name)
    for folder, module in ((out, model), (heads, drafter.head)):
        write_provenance(folder, history, **facts, parameters=sum(p.numel() for p in module.parameters()))
    write_card(out)
    write_head_card(heads, BYTE_HEADS.title)
    return out


def train_live(
    name: str, minutes: float, out: Path, cancelled: Callable[[], bool], target: str = "stories"
) -> Iterator[dict[str, Any]]:
    """The same, told as it goes: a note while the text is written, what `tick` says at every step, at last `done` and
    the folder. A run that is cancelled keeps the head as far as it got, and nothing if it had not begun.
    """
    recipe, minutes = head_recipe(name), positive(minutes)
    loaded = load_target(target, kernels="transformers")
    drafter = untrained(recipe, loaded)
    with one_thread(loaded.device):
        texts = gathering(loaded, out / "cache", drafter.taps, None, _plan(drafter, minutes))
        while True:
            try:
                share = next(texts)
            except StopIteration as end:
                material: Material = end.value
                break
            yield {"note": f"{loaded.name} is writing the text that the head will learn from: {share:.0%}"}
            if cancelled():
                return
        last = None
        for last in train_head(drafter, loaded, material, out, minutes):
            yield tick(last, minutes)
            if cancelled():
                break
        if last is not None:
            save_head(drafter, loaded, out, last.history, material, recipe=name, minutes=minutes)
            yield {"done": True, "folder": str(out)}


def tick(now: Tick, minutes: float) -> dict[str, Any]:
    """One step for people: seconds of `of_seconds`, step, tokens, loss, and the evaluation if there was one."""
    history = now.history
    said = {"seconds": history.seconds, "of_seconds": 60.0 * minutes, "step": history.step, "tokens": history.tokens}
    return said | {"loss": now.loss} | (now.evaluation or {})


def _plan(drafter: Head[Network], minutes: float) -> Plan:
    rows = min(6144, max(64, round(minutes * ROWS_PER_MINUTE)))
    return Plan(text_rows=rows, sampled_rows=rows // 3, rows_per_shard=32, context=CONTEXT, taps=drafter.taps)
