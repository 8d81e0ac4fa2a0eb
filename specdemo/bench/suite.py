"""The suites. Repeats are interleaved (A B C A B C) so that a machine that warms up or slows down touches every lane
alike; a result is the median over the repeats with their quartiles."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Generator

from specdemo.core.protocol import Budget, Drafter, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.trace import LaneTrace, RunTrace, StepEvent
from specdemo.core.tree import Draft
from specdemo.core.words import suggest
from specdemo.engine.loop import generate
from specdemo.engine.race import race, step_ms
from specdemo.engine.session import LaneSpec, RunSpec, Session, environment
from specdemo.methods import load_drafter
from specdemo.models.load import load_target
from specdemo.models.target import HFTarget
from specdemo.models.text import encode
from specdemo.presets.schema import load_presets

PROMPTS = (
    "Once upon a time, there was a girl named Sue. She had a big kite. One windy day,",
    "Tom and his dog went to the beach. They found a shiny shell in the sand. Tom said,",
    "There was a little bear who could not sleep. He asked his mom,",
    "One day, Anna saw a frog sitting on a rock by the pond. The frog was sad because",
    "Max liked to build tall towers with his blocks. His sister wanted to play too, but",
    "In a small house near the woods lived an old man and his cat. Every morning they",
    "Lily baked cookies with her grandma. They smelled so good that",
    "The red truck was stuck in the mud. All the animals came to help.",
)
COPYING = (
    "Tom had a red ball. He played with it in the park. A big dog took the ball and ran away. Tom was sad. Then the dog"
    " came back and gave him the ball.\n\nTell it again with Ben, not Tom.\n\n",
    "Mia saw a small bird in the garden. The bird could not fly. Mia took it home and gave it some bread. Soon the bird"
    " was well again.\n\nTell it again with Anna, not Mia.\n\n",
    "Sam and his mom went to the shop. They wanted to buy a cake. The cake was big and sweet. Sam was very happy.\n\n"
    "Tell it again with Max, not Sam.\n\n",
    "One day, Lily found a key in the sand. She looked for a door. The door was in an old tree. Inside she saw a tiny"
    " house.\n\nTell it again with Sue, not Lily.\n\n",
)
NEW_TOKENS = 96
STALL_MS = 20.0

Report = Callable[[float, str], None]  # share done 0..1, what is being done


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
        return cls(round(median, 4), round(q1, 4), round(q3, 4))


@dataclass(frozen=True, slots=True)
class Result:
    suite: str
    repeats: int
    config: dict[str, Any]
    environment: dict[str, Any]
    rows: list[dict[str, Any]]  # column -> text, number, Spread or None
    remarks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Total:
    """One lane over all prompts of one repeat."""

    tokens: int = 0
    ms: float = 0.0
    drafted: int = 0
    accepted: int = 0
    passes: int = 0

    def add(self, lane: LaneTrace) -> None:
        steps = lane.events[1:]  # decoding; the prefill is not
        self.tokens += sum(len(e.emitted[0]) for e in steps)
        self.ms += sum(map(step_ms, steps))
        self.passes += len(steps)
        self.drafted += sum(t >= 0 for e in steps for t in e.drafted[0])
        self.accepted += sum(len(e.path[0]) - 1 for e in steps)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.ms * 1000.0


def run_suite(name: str, repeats: int, ks: Sequence[int] | None, report: Report) -> Result:
    """Run a suite. ks: the draft lengths of suite `embedded`. Raises ValueError with one line that names the cure."""
    if name not in SUITES:
        raise ValueError(f"unknown suite {name!r}; {suggest(name, SUITES)}")
    if repeats < 1:
        raise ValueError(f"repeats must be 1 or more, not {repeats}")
    if ks is not None and name != "embedded":
        raise ValueError(f"suite {name!r} has no draft length to choose; leave --k out")
    return SUITES[name](repeats, ks or (4,), report)


def embedded(repeats: int, ks: Sequence[int], report: Report) -> Result:
    """Plain decoding against the wide draft, the deep draft and prompt lookup, greedy, on the shipped models."""
    lanes = [
        LaneSpec(method, model, k, name=f"{title}, k={k}")
        for method, model, title in (
            ("draft_model", "stories-draft-wide", "wide draft"),
            ("draft_model", "stories-draft-deep", "deep draft"),
            ("ngram", None, "prompt lookup"),
        )
        for k in ks
    ]
    return compare_lanes("embedded", "stories", tuple(lanes), PROMPTS, repeats, report)


def methods(repeats: int, _ks: Sequence[int], report: Report) -> Result:
    """Every embedded preset of one greedy lane on the story model, each as it ships, all on the same prompts."""
    return compare_lanes("methods", "stories", shipped_lanes(), PROMPTS, repeats, report)


def copying(repeats: int, _ks: Sequence[int], report: Report) -> Result:
    """The methods without weights on prompts whose answer repeats the prompt."""
    lanes = tuple(lane for lane in shipped_lanes() if lane.model is None)
    return compare_lanes("copying", "stories", lanes, COPYING, repeats, report)


def shipped_lanes() -> tuple[LaneSpec, ...]:
    """The lanes of those presets, named by their preset."""
    chosen = [p for p in load_presets().values() if p.embedded and p.target == "stories" and p.temperature == 0.0]
    return tuple(replace(p.spec().lanes[0], name=p.id) for p in chosen if len(p.lanes) == 1)


def compare_lanes(
    suite: str,
    target: str,
    lanes: tuple[LaneSpec, ...],
    prompts: Sequence[str],
    repeats: int,
    report: Report,
    new_tokens: int = NEW_TOKENS,
) -> Result:
    """Lanes against plain decoding, one lane after the other on every prompt, all of it `repeats` times."""
    runner = Session()
    totals: list[list[_Total]] = []
    verdicts: list[Counter[str]] = [Counter() for _ in lanes]
    trace: RunTrace | None = None
    for repeat in range(repeats):
        totals.append([_Total() for _ in range(len(lanes) + 1)])
        for number, prompt in enumerate(prompts):
            report((repeat + number / len(prompts)) / repeats, f"repeat {repeat + 1} of {repeats}")
            spec = RunSpec(f"bench-{suite}", target, prompt, lanes, new_tokens, schedule="sequential")
            trace = runner.run(spec)
            for total, lane in zip(totals[-1], trace.lanes, strict=True):
                if lane.note:
                    raise ValueError(f"lane {lane.name!r} failed: {lane.note}")
                total.add(lane)
            for verdict, row in zip(verdicts, trace.comparison, strict=True):
                verdict[str(row["verdict"])] += 1
    assert trace is not None
    names = [lane.name for lane in trace.lanes]
    rows = [_row(name, [t[i] for t in totals], [t[0] for t in totals]) for i, name in enumerate(names)]
    for row, verdict in zip(rows[1:], verdicts, strict=True):
        row["output"] = ", ".join(f"{count} {word}" if len(verdict) > 1 else word for word, count in verdict.items())
    config = {"target": target, "prompts": len(prompts), "new_tokens": new_tokens, "temperature": 0.0}
    return Result(suite, repeats, config, trace.environment, rows)


def _row(name: str, totals: list[_Total], plain: list[_Total]) -> dict[str, Any]:
    last = totals[-1]  # greedy: every repeat drafts and accepts the same
    return {
        "lane": name,
        "tokens/s": Spread.of([t.tokens_per_s for t in totals]),
        "speed-up": Spread.of([t.tokens_per_s / p.tokens_per_s for t, p in zip(totals, plain, strict=True)]),
        "accepted": round(last.accepted / last.drafted, 4) if last.drafted else None,
        "tokens/pass": round(last.tokens / last.passes, 4),
        "output": None,
    }


def race_fairness(repeats: int, _ks: Sequence[int], report: Report) -> Result:
    """Does a slow lane slow the other one's clock? A plain lane races a draft lane, once as it is, once stalled."""
    target, other = load_target("stories"), load_target("stories")
    drafter = load_drafter("draft_model", other, "stories-draft-wide")
    beside = {"its usual rival": drafter, f"a rival stalled {STALL_MS:.0f} ms a step": Stalled(drafter, STALL_MS)}
    _race_once(target, other, drafter, PROMPTS[0])  # warm-up
    own: dict[str, list[float]] = {name: [] for name in beside}
    rival: dict[str, list[float]] = {name: [] for name in beside}
    for repeat in range(repeats):
        report(repeat / repeats, f"repeat {repeat + 1} of {repeats}")
        for name, opponent in beside.items():
            clocks = [_race_once(target, other, opponent, prompt) for prompt in PROMPTS[:3]]
            own[name].append(statistics.fmean(a for a, _ in clocks))
            rival[name].append(statistics.fmean(b for _, b in clocks))
    rows: list[dict[str, Any]] = [
        {"plain lane beside": n, "its ms/token": Spread.of(own[n]), "the rival's ms/token": Spread.of(rival[n])}
        for n in beside
    ]
    usual, stalled = (row["its ms/token"] for row in rows)
    change = stalled.median / usual.median - 1.0
    noise = max(s.q3 - s.q1 for s in (usual, stalled)) / usual.median
    remark = f"The plain lane's own clock changed by {change:+.1%}; the quartiles of its repeats lie {noise:.1%} apart."
    config = {"target": "stories", "prompts": 3, "new_tokens": NEW_TOKENS, "stall_ms": STALL_MS}
    return Result("race-fairness", repeats, config, environment(target), rows, [remark])


class Stalled:
    """A drafter that wastes `ms` before every draft; else it is the one it wraps."""

    def __init__(self, drafter: Drafter, ms: float, now: Callable[[], float] = time.perf_counter) -> None:
        self.taps = drafter.taps
        self._drafter = drafter
        self._seconds = ms / 1000.0
        self._now = now

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        self._drafter.start(batch, sampling, rng)

    def propose(self, budget: Budget) -> Draft:
        end = self._now() + self._seconds
        while self._now() < end:  # busy, as a slow draft is: a sleeping core would clock down
            pass
        return self._drafter.propose(budget)

    def observe(self, progress: Progress) -> None:
        self._drafter.observe(progress)


def _race_once(target: HFTarget, other: HFTarget, opponent: Drafter, prompt: str) -> tuple[float, float]:
    """Milliseconds per token on the clocks of the plain lane and of its opponent."""
    tokenizer = target.tokenizer
    assert tokenizer is not None
    ids = torch.tensor([encode(tokenizer, prompt, target.max_length - NEW_TOKENS)], device=target.device)
    config = GenerationConfig(NEW_TOKENS, budget=Budget(4, 4), stop_token_ids=())
    lanes = [
        generate(target, load_drafter("none", target), ids, config),
        generate(other, opponent, ids, config),
    ]
    events: list[list[StepEvent]] = [[], []]
    for index, event in race(lanes):
        events[index].append(event)
    plain, rival = (sum(map(step_ms, e[1:])) / (NEW_TOKENS - 1) for e in events)
    return plain, rival


SUITES: dict[str, Callable[[int, Sequence[int], Report], Result]] = {
    "embedded": embedded,
    "methods": methods,
    "copying": copying,
    "race-fairness": race_fairness,
}
