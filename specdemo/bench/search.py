"""Search for the fastest candidate of every kind of work with few runs. Needs no torch.

The kinds take turns, one prompt after the other. On every prompt the best candidate so far runs with those that may be
even faster, each against plain decoding; the less is known of a candidate, the faster it may be. Others are predicted
where that is possible: a prediction is scaled by the candidate's own runs, so that candidates are compared over the
same prompts. The speed-up that is reported, a geometric mean over prompts, counts runs only; its interval contains the
differences between texts. Of a single prompt, which runs again and again, it is that of the runs.

On servers, where a candidate takes long to start, one runs after the other: each on the same prompts, one of every kind
after the other, until its share of the time is over or it is clearly behind in every kind.
"""

import time
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import geometric_mean
from typing import Any

from specdemo.core.estimate import MIN_RUNS, Estimate, over_kinds, over_runs
from specdemo.costs.step import CostModel
from specdemo.models.errors import Cancelled
from specdemo.models.sources import LoadProgress, no_progress

NEAR, DOUBT = 0.95, 0.3  # known speed of a candidate, in what it may be at most: NEAR - DOUBT / number of prompts
RIVALS = 2  # candidates in a race besides the best ones
KIND_ANSWERS = 9  # that say something of a kind: three prompts, plain decoding and two candidates
ENOUGH = 4  # races of a kind, if it has so few prompts, and runs of its best candidate


@dataclass(frozen=True, slots=True)
class Sample:
    """A candidate on one prompt. speed: its tokens/s in those of plain decoding in the same race; 0: it did not run.
    numbers: summary of the lane (core.tally.summarise). predicted: what `speed` was expected to be; 0: unknown.
    interval: of the speed on this text."""

    speed: float
    numbers: Mapping[str, Any] = field(default_factory=dict)
    costs: CostModel | None = None
    predicted: float = 0.0
    interval: tuple[float | None, float | None] = (None, None)


# prompt, candidates -> those that worked, and predictions
Measure = Callable[[str, Sequence[str]], Mapping[str, Sample]]


@dataclass(slots=True)
class KindOfWork:
    """One kind of work. samples: candidate -> number of the race -> run or prediction. scales: candidate -> its speed
    in the predicted one, over all kinds; one that did not run gets the mean of the others. seconds: of the last race,
    per lane; before the first one as expected. racing: the candidates of the last race."""

    name: str
    prompts: Sequence[str]
    samples: dict[str, dict[int, Sample]] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    rounds: int = 0
    seconds: float = 0.0
    racing: Sequence[str] = ()

    def runs(self, name: str) -> list[Sample]:
        """Return the runs of a candidate."""
        return [sample for sample in self.samples.get(name, {}).values() if sample.speed]

    def speed(self, name: str) -> Estimate | None:
        """Return the measured speed-up of a candidate; None if it did not run."""
        runs = self.runs(name)
        if 0 < len(runs) < MIN_RUNS and len(self.prompts) == 1:
            return over_runs([Estimate(run.speed, *run.interval) for run in runs])
        return over_kinds([[run.speed for run in runs]]) if runs else None

    def value(self, name: str) -> float:
        """Return the speed-up of a candidate over all prompts where it is measured or predicted; 0 if unknown."""
        if len(self.prompts) == 1 and (runs := self.runs(name)):
            return geometric_mean(run.speed for run in runs)
        scale = self.scales.get(name) or (geometric_mean(self.scales.values()) if self.scales else 1.0)
        speeds = [sample.speed or sample.predicted * scale for sample in self.samples.get(name, {}).values()]
        return geometric_mean(speeds) if speeds else 0.0

    def ranked(self) -> list[str]:
        """Return the measured candidates, the fastest first; those that are known on few of the prompts last."""
        most = max(map(len, self.samples.values()), default=0)
        few = {name for name, samples in self.samples.items() if 2 * len(samples) < most}
        return sorted(filter(self.runs, self.samples), key=lambda name: (name in few, -self.value(name)))

    def ratios(self, name: str, other: str) -> list[float]:
        """Return the speeds of a candidate in those of another one, on the prompts that both ran on."""
        own, others = self.samples.get(name, {}), self.samples.get(other, {})
        both = [(own[n].speed, others[n].speed) for n in own if n in others]
        return [speed / of_other for speed, of_other in both if speed and of_other]

    def most(self, name: str, value: float) -> float:
        """Return what the speed-up of a candidate may be at most: the less is known of it, the more."""
        return value / (NEAR - DOUBT / max(len(self.samples.get(name, {})), 1))

    @property
    def decided(self) -> bool:
        """Return True if further races cannot change the answer much."""
        best = max(self.samples.keys() - self.failed, key=self.value, default="")
        speed, most = self.speed(best), max(len(self.prompts), ENOUGH)
        if speed and speed.high is not None and speed.high < 1.0:
            return True
        again = bool(best) and len(self.runs(best)) < ENOUGH  # on prompts that were used
        # races that failed do not count, unless all did
        return (len(set[int]().union(*self.samples.values())) or self.rounds) >= most * (1 + again)


@dataclass(slots=True)
class Search:
    """Measures until time is up, every kind is decided, or the user stops it.

    prompts: by kind of work. families: drafter -> its candidates, of which the last one runs first. measure: runs
    candidates on a prompt, each against plain decoding, and predicts others. seconds: from `start` on. serve: makes a
    candidate ready, where they run one after the other; False if that failed. Its time does not count. after: where
    they run so, candidate -> those with shorter drafts, of which the last one must be the fastest. only: kind -> the
    candidates that run once on every prompt; None: those that may be the fastest. late: kinds without time.
    """

    prompts: Mapping[str, Sequence[str]]
    families: Mapping[str, Sequence[str]]
    measure: Measure
    seconds: float
    report: LoadProgress = no_progress
    now: Callable[[], float] = time.monotonic
    serve: Callable[[str], bool] | None = None
    only: Mapping[str, Sequence[str]] | None = None
    after: Mapping[str, Sequence[str]] = field(default_factory=dict)
    works: list[KindOfWork] = field(init=False)
    late: Sequence[str] = ()
    stopped: bool = False
    _scales: dict[str, float] = field(default_factory=dict)
    _start: float = field(init=False)
    _doing: str = ""

    def __post_init__(self) -> None:
        self.start()
        self.plan(self.prompts)

    def start(self) -> None:
        """Start the clock."""
        self._start = self.now()

    def plan(
        self, prompts: Mapping[str, Sequence[str]], lane_s: Callable[[str], float] = lambda _: 0.0, alone: bool = False
    ) -> None:
        """Set the prompts by kind of work, of the first kinds that there is time for.

        lane_s: prompt -> seconds that a lane is expected to take. alone: the first prompt is the only one where there
        is no time for twice as many answers.
        """
        kinds = [
            KindOfWork(name, texts, scales=self._scales, seconds=lane_s(texts[0])) for name, texts in prompts.items()
        ]
        ends = [*accumulate(KIND_ANSWERS * kind.seconds for kind in kinds)]
        fit = max(bisect(ends, self.rest), 1)
        self.works, self.late = kinds[:fit], [kind.name for kind in kinds[fit:]]
        if alone and 2 * ends[0] > self.rest:
            self.works[0].prompts = self.works[0].prompts[:1]

    @property
    def _names(self) -> list[str]:
        return [name for family in self.families.values() for name in family]

    def run(self) -> None:
        """Search. Ctrl-C ends it early."""
        try:
            if self.serve:
                self._one_by_one()
            else:
                while sum(map(self._round, self.works)):
                    pass
        except (KeyboardInterrupt, Cancelled):
            self.stopped = True

    def progress(self, loading: str = "") -> None:
        """Report what runs or is loaded, the best candidate so far, and the time that is left."""
        used, best = self.now() - self._start, self.leader()
        lead = f", best so far {best} {self.mixed(best).value:.2f}x" if best else ""
        self.report(min(used / self.seconds, 1.0), f"{loading or self._doing}{lead}, {max(self.rest, 0.0):.0f} s left")

    def leader(self, ran: bool = True) -> str:
        """Return the candidate with the highest speed-up over all kinds together, empty before the first race. ran: of
        those that ran in all kinds, if any did."""
        works = [work for work in self.works if work.samples]
        names = [name for name in self._names if works and all(work.value(name) for work in works)]
        ranks = {name: (ran and all(work.runs(name) for work in works), self.mean(name)) for name in names}
        return max(ranks, key=ranks.__getitem__, default="")

    def mixed(self, name: str) -> Estimate:
        """Return the speed-up of a candidate over all kinds: `over_kinds` of its runs, without interval where it is
        only predicted for one."""
        works = [work for work in self.works if work.value(name)]
        if len(works) == 1 and (speed := works[0].speed(name)):
            return speed
        if all(work.runs(name) for work in works):
            return over_kinds([run.speed for run in work.runs(name)] for work in works)
        return Estimate(round(self.mean(name), 4))

    def mean(self, name: str) -> float:
        """Return the geometric mean over the kinds of the speed-ups that are measured or predicted; 0 if unknown."""
        values = [value for work in self.works if (value := work.value(name))]
        return geometric_mean(values) if values else 0.0

    @property
    def rest(self) -> float:
        """Return the seconds that are left."""
        return self._start + self.seconds - self.now()

    def confirm(self, held: Mapping[str, Sequence[str]], seconds: float) -> "Search":
        """Return a search that runs the two best of each kind on other prompts. held: kind -> prompts.
        seconds: time besides what is left."""
        works = {work.name: work for work in self.works if len(work.ranked()) > 1 and work.name in held}
        best = {name: work.ranked()[:2] for name, work in works.items()}
        prompts, families = {name: held[name] for name in best}, {n: [n] for pair in best.values() for n in pair}
        rest = seconds + max(self.rest, 0.0)
        again = Search(prompts, families, self.measure, rest, self.report, self.now, self.serve, best)
        for work in again.works:
            work.seconds = works[work.name].seconds
        return again

    def race(self, work: KindOfWork, prompt: str, names: Sequence[str]) -> Mapping[str, Sample]:
        """Run candidates on a prompt, and note how long it took."""
        self._doing = f"racing on {work.name}, {names[0] if len(names) == 1 else f'{len(names)} candidates'}"
        work.racing = names
        self.progress()
        begin = self.now()
        samples = self.measure(prompt, names)
        work.seconds = (self.now() - begin) / (len(names) + 1)
        return samples

    def _ready(self, name: str) -> bool:
        """Serve a candidate, in time that does not count; return False if that failed."""
        assert self.serve
        begin = self.now()
        ready = self.serve(name)
        self.seconds += self.now() - begin
        return ready

    def _one_by_one(self) -> None:
        """Run one candidate after the other, each in an equal share of the time that is left."""
        most = max((len(work.prompts) for work in self.works), default=0)
        for place, name in enumerate(self._names):
            shorter = [self.mean(each) for each in self.after.get(name, ())]
            if self.rest <= 0.0 or (shorter and shorter[-1] < max(shorter)) or not self._ready(name):
                continue
            later = self._names[place + 1 :]
            shares = 1 + sum(each not in self.after for each in later) + any(each in self.after for each in later)
            end = self.now() + self.rest / shares
            for number in range(most):
                for work in self.works:
                    runs = self.only is None or name in self.only[work.name]
                    if runs and self.now() < end and number < len(work.prompts):
                        self._keep(work, number, self.race(work, work.prompts[number], [name]))
                # prompts that failed, such as too long ones, say nothing of a candidate
                hopeful = [self._hopeful(work, name) for work in self.works if name in work.samples]
                if hopeful and not (self.only or any(hopeful)) and len(self._names) > 1:
                    break

    def _hopeful(self, work: KindOfWork, name: str) -> bool:
        return work.most(name, work.value(name)) >= max([1.0, *map(work.value, work.samples)])

    def _round(self, work: KindOfWork) -> bool:
        """Race on the next prompt of a kind; return False if it is decided or there is no time. At the end, the fastest
        candidates use the time that is left."""
        fit = int(self.rest / max(work.seconds, 1e-3)) - 1
        if self.only is None and not work.rounds and self.rest > 0.0 and not any(each.samples for each in self.works):
            fit = max(fit, 1)  # an answer that ends early says more than none
        names = self._contenders(work)
        if fit < (len(names) if self.only else 1) or not names:
            return False
        names = names[:fit]
        samples = self.race(work, work.prompts[work.rounds % len(work.prompts)], names)
        work.failed |= {*names} - {*samples} if samples else set()
        self._keep(work, work.rounds, samples)
        return True

    def _keep(self, work: KindOfWork, number: int, samples: Mapping[str, Sample]) -> None:
        for name, sample in samples.items():
            work.samples.setdefault(name, {})[number] = sample
            if runs := [run for each in self.works for run in each.runs(name) if run.predicted]:
                self._scales[name] = geometric_mean(run.speed / run.predicted for run in runs)
        work.rounds = max(work.rounds, number + 1)

    def _contenders(self, work: KindOfWork) -> list[str]:
        """Return what should race on the next prompt of a kind: the best so far, also by the other kinds before it was
        tried, those that may be even faster, and the best one for mixed work."""
        if self.only is not None:
            return [*self.only[work.name]] if work.rounds < len(work.prompts) else []
        if work.decided:
            return []
        values = {name: work.value(name) or self.mean(name) for name in self._names if name not in work.failed}
        candidates = [*filter(values.__getitem__, values)]
        if not candidates:
            return [family[-1] for family in self.families.values() if family[-1] not in work.failed]
        best = max(candidates, key=values.__getitem__)
        rivals = sorted(candidates, key=lambda name: work.most(name, values[name]), reverse=True)
        mixed = [name for name in [self.leader(ran=False)] if name in values]
        return [*dict.fromkeys([best, *rivals[:RIVALS], *mixed])]
