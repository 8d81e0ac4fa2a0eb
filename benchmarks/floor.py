"""Overhead of the engine: time of a step against the same model calls repeated with the same widths on the same
caches.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.pairs import Pair
from specdemo.bench.base import Report, Tick
from specdemo.bench.measure import run_repeats
from specdemo.bench.result import Result
from specdemo.core.estimate import Estimate, over_repeats
from specdemo.core.protocol import Budget, Drafter, Forward, GenerationConfig, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft
from specdemo.engine.clock import stopwatch_for
from specdemo.engine.loop import generate
from specdemo.engine.session import environment
from specdemo.kv.graphs import GraphCapture, Run, Tensors
from specdemo.kv.store import KVStore
from specdemo.methods import BASELINE, load_drafter
from specdemo.models.devices import capture_for
from specdemo.models.fused import fuse_layers
from specdemo.models.runner import Runner
from specdemo.models.target import HFTarget

K = 5
TREE = (0, 0, 0, 0, 1, 1, 2, 2, 5, 6)  # parent slots of ten nodes
PASS_PLACE = ("longest", "row_lengths", "write_columns", "read_columns", "full_read")  # where a pass writes and reads
LAPS = ("draft", "verify", "accept", "commit", "observe")
TARGET, DRAFT = "target", "draft"


@dataclass(frozen=True, slots=True)
class Overhead:
    """Milliseconds of the steps of one run and of their forward passes alone. None for parts that cannot be
    repeated.
    """

    step_ms: float  # all steps
    steps: int
    floor_ms: float
    target: float | None  # time of verifying, accepting and committing / the target's forwards
    draft: float | None  # time of drafting / the draft model's forwards

    @property
    def total(self) -> float:
        return self.step_ms / self.floor_ms


class RecordingTarget(HFTarget):
    """A target that records its model calls on request, so that they can be repeated."""

    calls: list["_Call"] | None = None  # in order, from all targets that share the list

    def __init__(self, model: PreTrainedModel) -> None:
        recorder = capture_for(model.device)
        super().__init__(model, capture=self._recording(recorder) if recorder else None)

    def release(self) -> None:
        """Keep the text while calls are recorded, because they are repeated on its cache."""
        if self.calls is None:
            super().release()

    def runner(self, *about: Any) -> Runner:
        """Return a runner that records its calls."""
        return _Watched(self, *about)

    def _recording(self, recorder: GraphCapture) -> GraphCapture:
        """Wrap a recorder so that graph replays are recorded and repeated as calls."""

        def record(run: Run) -> Run:
            replay = recorder(run)

            def called() -> Tensors:
                if self.calls is not None:
                    self.calls.append(_Call(self, replay))
                return replay()

            return called

        return record


class _Watched(Runner):
    def __init__(self, of: RecordingTarget, *about: Any) -> None:
        super().__init__(*about)
        self._of = of

    def __call__(self, tokens: Tensor, cache: Any, *more: Any, **named: Any) -> Forward:
        run = partial(super().__call__, tokens, cache, *more, **named)
        if self._of.calls is not None:
            again = partial(_again, run, cache, copy(vars(cache))) if isinstance(cache, KVStore) else None
            self._of.calls.append(_Call(self._of, again))
        return run()


def _again(run: Callable[[], Forward], store: KVStore, before: dict[str, Any]) -> Forward:
    vars(store).update({name: before[name] for name in PASS_PLACE})
    return run()


@dataclass(frozen=True, slots=True)
class _Call:
    of: RecordingTarget
    again: Callable[[], Any] | None  # None: the cache cannot be rolled back


def overhead(
    target: RecordingTarget, drafter: Drafter, draft: RecordingTarget | None, prompt: Tensor, config: GenerationConfig
) -> Overhead | None:
    """Run once, then repeat the run's forward passes. draft: the drafter's model, if it has one.

    Returns None if the passes cannot be repeated because the cache is not a `KVStore`.
    """
    steps = generate(target, drafter, prompt, config)
    next(steps)  # the prefill
    calls: list[_Call] = []
    models = [model for model in (target, draft) if model is not None]
    for model in models:
        model.calls = calls
    try:
        events = list(steps)
    finally:
        for model in models:
            model.calls = None
    if not events or not all(call.again for call in calls):
        return None
    floor = _replayed(calls, target)
    spent = {name: sum(e.ms.get(name, 0.0) for e in events) for name in LAPS}
    drafting = spent["draft"] + spent["observe"]
    judging = spent["verify"] + spent["accept"] + spent["commit"]
    return Overhead(
        step_ms=drafting + judging,
        steps=len(events),
        floor_ms=sum(floor.values()),
        target=judging / floor[TARGET],
        draft=drafting / floor[DRAFT] if floor.get(DRAFT) else None,
    )


@torch.no_grad()
def _replayed(calls: Sequence[_Call], target: RecordingTarget) -> dict[str, float]:
    watch = stopwatch_for(target.device)
    watch.start()
    for call in calls:
        assert call.again is not None
        call.again()
        watch.lap(TARGET if call.of is target else DRAFT)
    return watch.read()


class FixedTree(Drafter):
    """A drafter that proposes one tree of random tokens at no cost, to isolate the engine's cost of a tree."""

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


def floor(pair: Pair, repeats: int, new_tokens: int, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Compare engine steps with their own forward passes alone: plain, a chain and a tree, greedy and sampled."""
    for model in (pair.target, pair.draft):
        fuse_layers(model)
    target, draft = RecordingTarget(pair.target), RecordingTarget(pair.draft)
    lanes: dict[str, tuple[Drafter, RecordingTarget | None, Budget]] = {
        "plain": (load_drafter(BASELINE, target), None, Budget(0, 0)),
        f"chain, k={K}": (load_drafter("draft_model", target, draft), draft, Budget(K, K)),
        f"tree of {len(TREE)}": (FixedTree(target), None, Budget(len(TREE), len(TREE))),
    }
    config = GenerationConfig(new_tokens, stop_token_ids=())
    cells = [
        (name, mode, drafter, model, replace(config, budget=budget, sampling=Sampling(temperature)))
        for name, (drafter, model, budget) in lanes.items()
        for mode, temperature in (("greedy", 0.0), ("temperature 1", 1.0))
    ]

    def once(repeat: int, tick: Tick) -> list[list[Overhead]]:
        found = []
        for number, (_, _, drafter, model, settings) in enumerate(cells):
            tick(number / len(cells))
            if not repeat:
                overhead(target, drafter, model, pair.prompts[0], settings)  # warm-up
            runs = [overhead(target, drafter, model, prompt, settings) for prompt in pair.prompts]
            found.append([run for run in runs if run is not None])
        return found

    done, remarks = run_repeats(repeats, report, cancelled, once)
    rows = [_row(name, mode, [found[i] for found in done]) for i, (name, mode, *_) in enumerate(cells)]
    if any(not found for repeat in done for found in repeat):
        remarks.append(
            "Rows without numbers: the cache of this model cannot be rolled back to repeat its forward passes."
        )
    settings = {"pair": pair.name, "agreement": round(pair.agreement, 3), "k": K, "new_tokens": config.max_new_tokens}
    return Result("floor", len(done), settings, environment(target), rows, remarks, "lane")


def _row(name: str, mode: str, repeats: Sequence[Sequence[Overhead]]) -> dict[str, Any]:
    row: dict[str, Any] = {"lane": name, "sampling": mode}
    if not all(repeats):
        return row
    return row | {
        "ms/step": over_repeats([sum(o.step_ms for o in r) / sum(o.steps for o in r) for r in repeats]),
        "forwards ms/step": over_repeats([sum(o.floor_ms for o in r) / sum(o.steps for o in r) for r in repeats]),
        **overhead_columns(repeats),
    }


def overhead_columns(repeats: Sequence[Sequence[Overhead]]) -> dict[str, Estimate | None]:
    """Return the spread over the repeats of the whole step, of the target's part and of drafting."""

    def spread(part: str) -> Estimate | None:
        values = [[value for o in r if (value := getattr(o, part)) is not None] for r in repeats]
        return over_repeats([sum(v) / len(v) for v in values]) if all(values) else None

    return {"overhead": spread("total"), "of the target": spread("target"), "of drafting": spread("draft")}
