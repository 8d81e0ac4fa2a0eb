"""Predictions against measurements: one pair profiles this machine; other pairs, methods, k and batch sizes are
predicted from their shapes and then measured.

Acceptance is taken from the measured lane. For chains of a draft model it is measured at one k and simulated at others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.pairs import make_pair
from specdemo.bench.base import Report
from specdemo.bench.measure import Tick, repeated
from specdemo.bench.result import Result
from specdemo.core.protocol import Budget, Drafter, GenerationConfig
from specdemo.core.shapes import Config, shape_of
from specdemo.core.trace import StepEvent, step_ms
from specdemo.engine.loop import generate
from specdemo.engine.session import environment
from specdemo.methods import BASELINE, load_drafter
from specdemo.models.fused import fuse_layers
from specdemo.models.target import HFTarget
from specdemo.prediction.acceptance import Acceptance, PassCounts, of_passes
from specdemo.prediction.predict import Row, predict
from specdemo.prediction.profiles import Profile

PAIRS = {"8m": "8m", "98m": "98m", "stories": "embedded"}
KS = tuple(range(1, 9))
LONGEST = KS[-1]
BATCHES, BATCH_KS = (2, 4, 8, 16), (1, 3, 6)
HEAD_KS, HEAD_BATCH = (1, 3), 4
HEADS = ("eagle-1", "eagle-3", "mtp", "dflash", "mlp-speculator", "medusa")
TEXTS = 3  # texts that run one after the other at batch size 1: the last ones, because the first ones shaped the model
WARM_UP = 16  # tokens


@dataclass(frozen=True)
class Case:
    """One case to predict and to measure. model: the drafter's config."""

    pair: str
    method: str
    k: int
    prompts: Sequence[Tensor]  # [B, T] each
    target: HFTarget
    drafter: Drafter
    model: Config | None
    of: int | None = None  # draft length of the case whose acceptance is replayed; None: the same case

    @property
    def batch(self) -> int:
        return len(self.prompts[0])

    @property
    def name(self) -> tuple[str, str, int]:
        """Return the name under which acceptance is shared; it leaves out k."""
        return self.pair, self.method, self.batch


@dataclass
class Ran:
    """Totals over the runs of a case. passes: of all rows, in order."""

    tokens: int = 0
    ms: float = 0.0
    passes: tuple[PassCounts, ...] = ()

    def add(self, events: Sequence[StepEvent]) -> None:
        """Add the steps of a run while all rows are active, because later steps run at a smaller batch size."""
        steps = [event for event in events[1:] if all(event.emitted)][:-1]
        self.tokens += sum(len(row) for event in steps for row in event.emitted)
        self.ms += sum(map(step_ms, steps))
        rows = range(len(events[0].emitted))
        accepted = [(len(e.path[row]) - 1, sum(t >= 0 for t in e.drafted[row])) for row in rows for e in steps]
        self.passes = (*self.passes, *accepted)

    @property
    def rate(self) -> float:
        """Return tokens per second."""
        return 1e3 * self.tokens / self.ms


def what_if(profile: Profile, repeats: int, new_tokens: int, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Measure and predict every case; return its error and whether the interval contains the measured value."""
    cases = [case for pair in PAIRS for case in cases_of(pair)]

    def once(repeat: int, tick: Tick) -> list[tuple[Ran, Ran]]:
        found = []
        for number, case in enumerate(cases):
            tick(number / len(cases))
            if not repeat:
                measured(case, WARM_UP)
            found.append(measured(case, new_tokens))
        return found

    done, remarks = repeated(repeats, report, cancelled, once)
    pooled = [tuple(_pooled([runs[i][side] for runs in done]) for side in (0, 1)) for i in range(len(cases))]
    rows = rows_of(profile, cases, [(plain, lane) for plain, lane in pooled], new_tokens)
    config = {"profile": profile.name, "new_tokens": new_tokens, "by": "passes of " + _models(profile)}
    return Result("what-if", len(done), config, environment(cases[0].target), rows, [*remarks, *verdict(rows)])


@torch.no_grad()
def measured(case: Case, new_tokens: int) -> tuple[Ran, Ran]:
    """Measure plain decoding and the lane, interleaved text by text."""
    plain, lane = Ran(), Ran()
    nothing = load_drafter(BASELINE, case.target)
    for prompt in case.prompts:
        for drafter, k, ran in ((nothing, 0, plain), (case.drafter, case.k, lane)):
            config = GenerationConfig(new_tokens, budget=Budget(k, k), stop_token_ids=())
            ran.add(list(generate(case.target, drafter, prompt, config)))
    return plain, lane


def rows_of(
    profile: Profile, cases: Sequence[Case], ran: Sequence[tuple[Ran, Ran]], new_tokens: int
) -> list[dict[str, Any]]:
    """Return the result rows of all cases."""
    passes = {(case.name, case.k): lane.passes for case, (_, lane) in zip(cases, ran, strict=True)}
    found = []
    for case, (plain, lane) in zip(cases, ran, strict=True):
        guess = predicted(profile, case, passes[case.name, case.of or case.k], new_tokens)
        found.append(row_of(case.pair, case.method, case.k, case.batch, lane.rate / plain.rate, guess))
    return found


def predicted(profile: Profile, case: Case, passes: tuple[PassCounts, ...], new_tokens: int) -> Row:
    """Predict from model shapes, device profile and measured acceptance."""
    acceptance: Acceptance = of_passes(passes, exact=case.method == "draft_model")
    found = predict(
        shape_of(case.target.model.config.to_dict(), case.pair),
        device=profile,
        method=case.method,
        model=case.model,
        dtype="float32",
        batch=case.batch,
        context=case.prompts[0].shape[1] + new_tokens // 2,
        acceptance=acceptance,
        ks=(case.k,),
    )
    return found.rows[0]


def row_of(pair: str, method: str, k: int, batch: int, speed: float, found: Row) -> dict[str, Any]:
    """Return a result row: measured value, predicted value and error."""
    guess = found.speedup
    inside = guess.low is not None and guess.high is not None and guess.low <= speed <= guess.high
    return {
        "pair": pair,
        "method": method,
        "k": k,
        "batch": batch,
        "tokens a pass": round(found.tokens.value, 3),
        "measured": round(speed, 3),
        "predicted": guess,
        "error": round(guess.value / speed - 1.0, 4),
        "inside": inside,
    }


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return median and largest error and the coverage, overall and by kind."""
    kinds = {
        "all": rows,
        "other pairs, batch size 1": [r for r in rows if r["method"] == "draft_model" and r["batch"] == 1],
        "batches": [r for r in rows if r["batch"] > 1],
        "other methods": [r for r in rows if r["method"] != "draft_model"],
    }
    return [f"{kind}: {_as_percent(own)}" for kind, own in kinds.items() if own]


def _as_percent(rows: Sequence[dict[str, Any]]) -> str:
    errors = sorted(rows, key=lambda row: abs(row["error"]))
    worst = errors[-1]
    inside = sum(row["inside"] for row in rows) / len(rows)
    where = f"{worst['pair']}, {worst['method']}, k = {worst['k']}, batch {worst['batch']}"
    middle = median(abs(row["error"]) for row in rows)
    return f"{len(rows)} cases, median error {middle:.1%}, worst {worst['error']:+.1%} ({where}), {inside:.0%} inside"


def cases_of(pair: str) -> Iterator[Case]:
    """Return the cases: draft models at every k for one text and at some k for batches, and every method on the story
    model.
    """
    made = make_pair(PAIRS[pair], "cpu", "float32", texts=BATCHES[-1])
    fuse_layers(made.target)
    fuse_layers(made.draft)
    target, draft = HFTarget(made.target), HFTarget(made.draft)
    drafter = load_drafter("draft_model", target, draft)
    config: Config = made.draft.config.to_dict()
    width = min(prompt.shape[1] for prompt in made.prompts)
    texts = [prompt[:, -width:] for prompt in made.prompts]
    for k in KS:
        yield Case(pair, "draft_model", k, texts[-TEXTS:], target, drafter, config, LONGEST)
    for batch, k in product(BATCHES, BATCH_KS):
        if batch <= len(texts):
            yield Case(pair, "draft_model", k, [torch.cat(texts[-batch:])], target, drafter, config)
    if pair == "stories":
        yield from _methods(target, texts)


def _methods(target: HFTarget, every: Sequence[Tensor]) -> Iterator[Case]:
    from specdemo.prediction.work import config_of

    texts, together = every[-TEXTS:], [torch.cat([*every[-HEAD_BATCH:]])]
    deep = load_drafter("draft_model", target, "stories-draft-deep")
    for k in KS:
        yield Case(
            "stories, deep draft", "draft_model", k, texts, target, deep, config_of("stories-draft-deep"), LONGEST
        )
    for head in HEADS:
        name = f"stories-{head}"
        method = "eagle" if head.startswith("eagle") else head.replace("-", "_")
        drafter = load_drafter(method, target, name)
        for k in HEAD_KS:
            yield Case(name, method, k, texts, target, drafter, config_of(name))
        yield Case(name, method, HEAD_KS[-1], together, target, drafter, config_of(name))
    for method in ("layer_skip", "ngram"):
        drafter = load_drafter(method, target)
        for k in HEAD_KS:
            yield Case("stories", method, k, texts, target, drafter, None)


def _pooled(runs: Sequence[Ran]) -> Ran:
    return Ran(sum(run.tokens for run in runs), sum(run.ms for run in runs), runs[0].passes)


def _models(profile: Profile) -> str:
    return ", ".join(passes.model for passes in profile.passes)
