"""Search for the fastest candidate of every kind of work with few runs: successive halving (Jamieson & Talwalkar,
1502.07943). Needs no torch.

First, every drafter runs once per kind at its longest draft length, and the cost model predicts its other lengths. Then
the candidates that may still be the fastest run on one prompt after the other, with plain decoding in every run, and
after each prompt the slower half leaves. A speed-up is the geometric mean over prompts; its interval contains the
differences between texts. The first look only chooses candidates: it counts where nothing else was measured.

On servers, where a candidate takes long to start, one runs after the other: each on the same prompts, one of every kind
after the other, until its share of the time is over or it is clearly behind in every kind.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, exp, log, sqrt
from statistics import fmean
from typing import Any

from specdemo.core.estimate import Estimate, over_repeats, t_quantile
from specdemo.engine.cost import CostModel
from specdemo.models.errors import Cancelled

HOPEFUL = 0.9  # least predicted speed of a candidate after the first look, in that of the best one
FAMILY, FAMILIES = 0.6, 3  # the same for the best candidate of a drafter, since one text says little; drafters at most
MOST = 5  # candidates after the first look
NEAR = 0.92  # share of the best speed from which a candidate of the slower half stays
LEAST_ROUNDS = 4  # prompts per kind of work, if there is time; fewer prompts than that are used again
NARROW = 0.02  # half width of the interval at which a single candidate left is known well enough


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a candidate. speed: its tokens/s in those of plain decoding in the same run. numbers: summary of the
    lane (core.tally.summarise)."""

    speed: float
    numbers: Mapping[str, Any]
    costs: CostModel | None = None


Measure = Callable[[str, Sequence[str]], Mapping[str, Sample]]  # prompt, candidates -> one run of each that worked
Progress = Callable[[float, str], None]


@dataclass(slots=True)
class KindOfWork:
    """One kind of work. samples: candidate -> round -> run; round 0 is the first look."""

    name: str
    prompts: Sequence[str]
    samples: dict[str, dict[int, Sample]] = field(default_factory=dict)
    guesses: dict[str, float] = field(default_factory=dict)  # predicted speed-ups
    left: list[str] = field(default_factory=list)  # candidates that may still be the fastest
    rounds: int = 0
    seconds: float = 0.0  # of the last run, per lane

    def runs(self, name: str) -> list[Sample]:
        """Return the runs of a candidate that count."""
        found = self.samples.get(name, {})
        return [run for number, run in found.items() if number] or [*found.values()]

    def speed(self, name: str) -> Estimate | None:
        """Return the speed-up of a candidate; None if it was not measured."""
        runs = self.runs(name)
        return over_repeats([run.speed for run in runs]) if runs else None

    def value(self, name: str) -> float:
        """Return the measured or else the predicted speed-up; 0 if neither is known."""
        speed = self.speed(name)
        return speed.value if speed else self.guesses.get(name, 0.0)

    def ranked(self) -> list[str]:
        """Return the measured candidates, the fastest first; those with the most runs before all others. The first look
        counts like one run."""
        counts = {name: max(sum(map(bool, runs)), 1) for name, runs in self.samples.items()}
        most = max((counts.get(name, 0) for name in self.left), default=0)
        complete = {name for name, count in counts.items() if count >= most}
        return sorted(self.samples, key=lambda name: (name not in complete, -self.value(name)))

    def against(self, name: str, other: str) -> Estimate:
        """Return the speed of a candidate in that of another one, over the prompts that both ran on."""
        own, others = (self.samples.get(one, {}) for one in (name, other))
        both = [number for number in own if number in others and number]
        return over_repeats([own[n].speed / others[n].speed for n in both]) if both else Estimate(1.0)

    def hopeful(self, name: str, share: float) -> bool:
        """Return True if a candidate reaches this share of the best speed so far, plain decoding included."""
        return self.value(name) >= share * max([1.0, *map(self.value, self.samples)])

    def halve(self) -> None:
        """Drop the slower half, but none near the best, and all that are clearly slower than it."""
        ranked = sorted(self.left, key=self.value, reverse=True)
        stay = max(2, ceil(len(ranked) / 2))
        near = NEAR * max(map(self.value, ranked), default=0.0)
        kept = [name for place, name in enumerate(ranked) if place < stay or self.value(name) >= near]
        self.left = [name for name in kept if self.against(name, ranked[0]).label != "slower"]

    @property
    def decided(self) -> bool:
        """Return True if further runs cannot change the answer much."""
        if not self.left or self.rounds > max(len(self.prompts) - 1, LEAST_ROUNDS):
            return True
        best = self.speed(self.left[0])
        if best is None or best.high is None:
            return False
        return best.high < 1.0 or (len(self.left) == 1 and (best.width or 1.0) <= NARROW)


class Search:
    """Measures until time is up, every kind is decided, or the user stops it."""

    def __init__(
        self,
        works: Mapping[str, Sequence[str]],
        families: Mapping[str, Sequence[str]],
        measure: Measure,
        seconds: float,
        report: Progress = lambda share, what: None,
        now: Callable[[], float] = time.monotonic,
        serve: Callable[[str], bool] | None = None,
    ) -> None:
        """families: drafter -> its candidates; the last one has the longest drafts, and 0 as length means that the
        drafter chooses it. measure: runs candidates on a prompt, each against plain decoding. serve: makes a candidate
        ready, where they run one after the other; False if that failed. Its time does not count."""
        self.works = [KindOfWork(name, prompts) for name, prompts in works.items()]
        self.families, self.stopped = families, False
        self._measure, self._report, self._now, self._serve = measure, report, now, serve
        self._start, self._seconds = now(), seconds
        self._current, self._running = self.works[0], ""

    def run(self, lengths: Mapping[str, int], pass_ms: Mapping[int, float]) -> None:
        """Search. lengths: candidate -> draft length. Ctrl-C ends it early. Raises ValueError if that was before the
        first run was complete."""
        try:
            if self._serve:
                self._one_by_one([name for family in self.families.values() for name in family])
            else:
                self._first_look(lengths, pass_ms)
                while sum(map(self._round, self.works)):
                    pass
        except (KeyboardInterrupt, Cancelled):
            self.stopped = True
        if self.stopped and not any(work.samples for work in self.works):
            raise ValueError("stopped before the first run was complete, so nothing was measured")

    def progress(self, loading: str = "") -> None:
        """Report what runs or is loaded, the best candidate so far, and the time that is left."""
        work = self._current
        used, best = self._now() - self._start, self.leader()
        known = f", best so far {best} {self.mixed(best).value:.2f}x" if best else ""
        rest = max(self.rest, 0.0)
        doing = loading or f"{work.name}, {self._running}"
        self._report(min(used / self._seconds, 1.0), f"{doing}{known}, {rest:.0f} s left")

    def leader(self) -> str:
        """Return the candidate with the highest speed-up over all kinds together, of those with an interval if any has
        one; empty before the first look."""
        known = [work for work in self.works if work.guesses or work.samples]
        names = [name for family in self.families.values() for name in family]
        names = [name for name in names if known and all(work.value(name) for work in known)]
        mixed = {name: self.mixed(name) for name in names}
        return max(names, key=lambda name: (mixed[name].low is not None, mixed[name].value), default="")

    def mixed(self, name: str) -> Estimate:
        """Return the geometric mean of a candidate's speed-ups over the kinds. Its interval takes the spread within a
        kind as equal in all of them, so that few prompts of each are enough."""
        known = [work for work in self.works if work.value(name)]
        value = round(exp(fmean(log(work.value(name)) for work in known)), 4)
        logs = [[log(run.speed) for run in work.runs(name)] for work in known]
        freedom = sum(map(len, logs)) - len(logs)
        if not all(logs) or freedom < max(len(logs), 2):
            return Estimate(value)
        spread = sum((one - fmean(kind)) ** 2 for kind in logs for one in kind) / freedom
        half = t_quantile(freedom) * sqrt(spread * sum(1 / len(kind) for kind in logs)) / len(logs)
        return Estimate(value, round(value * exp(-half), 4), round(value * exp(half), 4))

    @property
    def rest(self) -> float:
        """Return the seconds that are left."""
        return self._start + self._seconds - self._now()

    def confirm(self, held: Mapping[str, Sequence[str]], seconds: float) -> dict[str, list[Mapping[str, Sample]]]:
        """Run the two best of each kind on other prompts, in turn, while there is time; return their runs by kind.

        held: kind -> prompts. seconds: further time.
        """
        self._seconds += seconds
        works = [work for work in self.works if len(work.ranked()) > 1 and work.name in held]
        runs: dict[str, dict[str, dict[str, Sample]]] = {work.name: {} for work in works}
        most = max((len(held[work.name]) for work in works), default=0)
        turns = [(work, prompt) for n in range(most) for work in works for prompt in held[work.name][n : n + 1]]
        races = [(work, prompt, work.ranked()[:2]) for work, prompt in turns]
        if self._serve and turns:  # as many turns as both candidates of each have time for
            fit = int(self.rest / max(4.0 * fmean(work.seconds for work in works), 1e-3))
            races = [(work, prompt, [name]) for work, prompt, names in races[:fit] for name in names]
            races.sort(key=lambda race: race[2])
        served = ""
        try:
            for work, prompt, names in races if not self.stopped else ():
                if self._serve and served != names[0]:
                    served = names[0]
                    self._ready(served)
                if self.rest > (len(names) + 1) * work.seconds:
                    runs[work.name].setdefault(prompt, {}).update(self.race(work, prompt, names))
        except (KeyboardInterrupt, Cancelled):
            self.stopped = True
        return {name: [*found.values()] for name, found in runs.items()}

    def race(self, work: KindOfWork, prompt: str, names: Sequence[str]) -> Mapping[str, Sample]:
        """Run candidates on a prompt, and note how long it took."""
        self._current = work
        self._running = names[0] if len(names) == 1 else f"{len(names)} candidates"
        self.progress()
        begin = self._now()
        found = self._measure(prompt, names)
        work.seconds = (self._now() - begin) / (len(names) + 1)
        return found

    def _ready(self, name: str) -> bool:
        """Serve a candidate, in time that does not count; return False if that failed."""
        assert self._serve
        begin = self._now()
        ready = self._serve(name)
        self._seconds += self._now() - begin
        return ready

    def _one_by_one(self, names: Sequence[str]) -> None:
        """Run one candidate after the other, each in an equal share of the time that is left."""
        most = max(len(work.prompts) for work in self.works)
        for place, name in enumerate(names):
            if not self._ready(name):
                continue
            end = self._now() + max(self.rest, 0.0) / (len(names) - place)
            for number in range(1, most + 1):
                for work in self.works:
                    if self._now() < end and number <= len(work.prompts):
                        for found in self.race(work, work.prompts[number - 1], [name]).values():
                            work.samples.setdefault(name, {})[number] = found
                            work.rounds = max(work.rounds, number)
                share = FAMILY if number == 1 else HOPEFUL
                if len(names) > 1 and not any(work.hopeful(name, share) for work in self.works):
                    break

    def _first_look(self, lengths: Mapping[str, int], pass_ms: Mapping[int, float]) -> None:
        longest = [family[-1] for family in self.families.values()]
        for work in self.works:
            if self.rest < 0.0:
                break
            for prompt in work.prompts[:2]:  # the answer to a prompt may be too short
                found = self.race(work, prompt, longest)
                work.samples = {name: {0: sample} for name, sample in found.items()}
                if found:
                    break
            self._shortlist(work, lengths, pass_ms)

    def _shortlist(self, work: KindOfWork, lengths: Mapping[str, int], pass_ms: Mapping[int, float]) -> None:
        """Predict every draft length from the first look, and keep the hopeful candidates."""
        for family in self.families.values():
            if not (seen := work.samples.get(family[-1])):
                continue
            sample, own = seen[0], family[-1]
            costs = sample.costs and sample.costs.with_probe(pass_ms)
            for name in family if costs and costs.tree_nodes is None else [own]:
                speed = costs.speedup(lengths[name]) / costs.speedup(lengths[own]) if costs and lengths[name] else 1.0
                work.guesses[name] = sample.speed * speed
            for name in family:  # one that chooses its length does as well as the best length
                if not lengths[name]:
                    work.guesses[name] = max(work.guesses.get(other, 0.0) for other in family)
        ranked = sorted(work.guesses, key=lambda name: -work.guesses[name])
        if not ranked:
            return
        share = {name: work.guesses[name] / work.guesses[ranked[0]] for name in ranked}
        firsts = [next((name for name in ranked if name in family), "") for family in self.families.values()]
        tops = sorted((name for name in firsts if share.get(name, 0.0) >= FAMILY), key=lambda name: -share[name])
        hopeful = [name for name in ranked if share[name] >= HOPEFUL]
        work.left = [*dict.fromkeys([*tops[:FAMILIES], *hopeful, *ranked[:2]])][:MOST]

    def _round(self, work: KindOfWork) -> bool:
        """Run what is left of a kind on its next prompt; return False if it is decided or there is no time. At the end,
        the fastest candidates use the time that is left."""
        names = [*dict.fromkeys([*sorted(work.left, key=work.value, reverse=True), self.leader()])]
        if not work.rounds:
            work.rounds = 1
        fit = int(self.rest / max(work.seconds, 1e-3)) - 1
        if work.decided or fit < 1:
            return False
        names = names[:fit]
        found = self.race(work, work.prompts[work.rounds % len(work.prompts)], names)
        for name, sample in found.items():
            work.samples.setdefault(name, {})[work.rounds] = sample
        work.rounds += 1
        work.left = [name for name in work.left if name in found or not found]
        work.halve()
        return True
