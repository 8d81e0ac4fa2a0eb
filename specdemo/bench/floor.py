"""How far the engine is from its own forwards: a step's time against that of the same model calls, made again with the
same widths on the same caches and nothing else between them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdemo.bench.measure import Ask, Report, Tick, repeated
from specdemo.bench.pairs import Pair, make_pair
from specdemo.bench.result import Result, Spread
from specdemo.core.protocol import Budget, Drafter, GenerationConfig, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft
from specdemo.engine.clock import stopwatch_for
from specdemo.engine.loop import generate
from specdemo.engine.session import environment
from specdemo.methods import BASELINE, load_drafter
from specdemo.models.target import HFTarget

NEW_TOKENS = 64
K = 5
TREE = (0, 0, 0, 0, 1, 1, 2, 2, 5, 6)  # parent slots of ten nodes
TARGET, DRAFT = "target", "draft"


@dataclass(frozen=True, slots=True)
class Overhead:
    """Milliseconds of the steps of one run, and of their forwards alone. A part is None where it makes no forward that
    can be made again."""

    step_ms: float  # all steps
    steps: int
    floor_ms: float
    target: float | None  # time of verifying, accepting and committing / the target's forwards
    draft: float | None  # time of drafting / the draft model's forwards

    @property
    def whole(self) -> float:
        return self.step_ms / self.floor_ms


@dataclass(frozen=True, slots=True)
class _Call:
    role: str
    model: nn.Module
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    cursor: dict[str, Any]  # where its cache stood

    def again(self) -> None:
        vars(self.named["past_key_values"].cursor).update(self.cursor)
        self.model(*self.inputs, **self.named)


def overhead(target: HFTarget, drafter: Drafter, prompt: Tensor, config: GenerationConfig) -> Overhead | None:
    """Run, then make the run's forwards again. None where they cannot be: the model's cache is not one of slabs, or
    not every pass of the target is a call of its model."""
    models: dict[str, Any] = {TARGET: target.model, DRAFT: getattr(drafter, "head", None)}
    steps = generate(target, drafter, prompt, config)
    next(steps)  # the prefill
    with _recorded({role: m for role, m in models.items() if isinstance(m, PreTrainedModel)}) as calls:
        events = list(steps)
    passes = sum(call.role == TARGET for call in calls)
    if not events or passes != len(events) or not all(call.cursor for call in calls):
        return None
    floor = _replayed(calls, target.device)
    spent = {
        name: sum(e.ms.get(name, 0.0) for e in events) for name in ("draft", "verify", "accept", "commit", "observe")
    }
    drafting = spent["draft"] + spent["observe"]
    judging = spent["verify"] + spent["accept"] + spent["commit"]
    return Overhead(
        step_ms=drafting + judging,
        steps=len(events),
        floor_ms=sum(floor.values()),
        target=judging / floor[TARGET],
        draft=drafting / floor[DRAFT] if floor.get(DRAFT) else None,
    )


@contextmanager
def _recorded(models: dict[str, PreTrainedModel]) -> Iterator[list[_Call]]:
    """Every call of these models, in order, with where its cache stood."""
    calls: list[_Call] = []

    def keep(role: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            cursor = getattr(named.get("past_key_values"), "cursor", None)
            state = {name: copy(value) for name, value in vars(cursor).items()} if cursor else {}
            calls.append(_Call(role, module, inputs, dict(named), state))

        return hook

    handles = [m.register_forward_pre_hook(keep(role), with_kwargs=True) for role, m in models.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _replayed(calls: Sequence[_Call], device: torch.device) -> dict[str, float]:
    watch = stopwatch_for(device)
    watch.start()
    for call in calls:
        call.again()
        watch.lap(call.role)
    return watch.read()


class FixedTree:
    """Drafts one tree of random tokens at no cost, so that what a tree costs the engine can be seen alone."""

    taps: tuple[int, ...] = ()

    def __init__(self, target: Target) -> None:
        rng = torch.Generator().manual_seed(0)
        tokens = torch.randint(1, target.vocab_size, (1, len(TREE)), generator=rng)
        self._draft = Draft(tokens.to(target.device), torch.tensor([TREE], device=target.device))

    def start(self, batch: int, sampling: Sampling, rng: torch.Generator) -> None:
        pass

    def propose(self, budget: Budget) -> Draft:
        return self._draft

    def observe(self, progress: Progress) -> None:
        pass


def lanes(pair: Pair) -> tuple[HFTarget, dict[str, tuple[Drafter, Budget]]]:
    """What the engine does in its three shapes on a pair of models."""
    target = HFTarget(pair.target)
    return target, {
        "plain": (load_drafter(BASELINE, target), Budget(0, 0)),
        f"chain, k={K}": (load_drafter("draft_model", target, pair.draft), Budget(K, K)),
        f"tree of {len(TREE)}": (FixedTree(target), Budget(len(TREE), len(TREE))),
    }


def floor(ask: Ask, report: Report, cancelled: Callable[[], bool]) -> Result:
    """The engine's step against its own forwards replayed: plain, a chain and a tree, greedy and sampling."""
    pair = make_pair(ask.pair or "embedded", ask.device, ask.dtype)
    target, drafters = lanes(pair)
    config = GenerationConfig(ask.new_tokens or NEW_TOKENS, stop_token_ids=())
    cells = [
        (name, mode, drafter, replace(config, budget=budget, sampling=Sampling(temperature)))
        for name, (drafter, budget) in drafters.items()
        for mode, temperature in (("greedy", 0.0), ("temperature 1", 1.0))
    ]

    def once(repeat: int, tick: Tick) -> list[list[Overhead]]:
        found = []
        for number, (_, _, drafter, settings) in enumerate(cells):
            tick(number / len(cells))
            if not repeat:
                overhead(target, drafter, pair.prompts[0], settings)  # warm-up
            runs = [overhead(target, drafter, prompt, settings) for prompt in pair.prompts]
            found.append([run for run in runs if run is not None])
        return found

    done, remarks = repeated(ask.repeats, report, cancelled, once)
    rows = [_row(name, mode, [found[i] for found in done]) for i, (name, mode, _, _) in enumerate(cells)]
    if any(not found for repeat in done for found in repeat):
        remarks.append("Rows without numbers: their forwards cannot be made again one by one.")
    settings = {"pair": pair.name, "agreement": round(pair.agreement, 3), "k": K, "new_tokens": config.max_new_tokens}
    return Result("floor", len(done), settings, environment(target), rows, remarks, "lane")


def _row(name: str, mode: str, repeats: Sequence[Sequence[Overhead]]) -> dict[str, Any]:
    row: dict[str, Any] = {"lane": name, "sampling": mode}
    if not all(repeats):
        return row
    return row | {
        "ms/step": Spread.of([sum(o.step_ms for o in r) / sum(o.steps for o in r) for r in repeats]),
        "forwards ms/step": Spread.of([sum(o.floor_ms for o in r) / sum(o.steps for o in r) for r in repeats]),
        **overhead_columns(repeats),
    }


def overhead_columns(repeats: Sequence[Sequence[Overhead]]) -> dict[str, Spread | None]:
    """Spreads over the repeats: of the whole step, of the target's side and of drafting."""

    def spread(part: str) -> Spread | None:
        values = [[value for o in r if (value := getattr(o, part)) is not None] for r in repeats]
        return Spread.of([sum(v) / len(v) for v in values]) if all(values) else None

    return {"overhead": spread("whole"), "of the target": spread("target"), "of drafting": spread("draft")}
