"""Races of `tune`: candidates against plain decoding on one prompt, in this process or on servers."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise, takewhile
from math import inf
from operator import eq
from statistics import fmean
from time import perf_counter
from types import MappingProxyType

import torch
from torch import Generator

from specdemo.bench.base import Stop
from specdemo.bench.candidates import FIRST, race_link, settings_to_copy, with_lengths
from specdemo.bench.report import sentence
from specdemo.bench.search import Sample, Search
from specdemo.core.estimate import Estimate
from specdemo.core.protocol import Budget, Drafter, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tally import summarise
from specdemo.core.trace import LaneTrace, RunTrace, estimates, step_ms
from specdemo.costs.passes import interpolate, pass_ratio, pass_rows
from specdemo.costs.step import fit_cost_model
from specdemo.engine.comparison import Lane
from specdemo.engine.messages import RunMessage, StepRow
from specdemo.engine.session import Session, environment
from specdemo.methods import BASELINE, build_drafter, method
from specdemo.methods.facts import PARALLEL
from specdemo.models.errors import Cancelled
from specdemo.models.local_models import DrafterFit
from specdemo.models.pass_cost import checking_note, measure_passes
from specdemo.models.sources import LoadProgress
from specdemo.presets.files import Preset
from specdemo.presets.pair import LOOKUPS
from specdemo.presets.serve import Program, Served, served
from specdemo.servers.address import host
from specdemo.servers.process import free_port

STAGES = LOADING, PASSES, DRAFTERS, RACING = "loading the model", "measuring passes", "loading drafters", "racing"
LOADING_SHARE = 1 / 3  # of the time, for drafters
CHARACTERS = 4  # of a token
READ_WIDTH = 8  # slots of a pass; a token of a prompt takes at most its share of one
LEAST_TOKENS = 8  # a shorter answer says little about speed
DIFFERENT = ("differs", "text differs")  # verdicts
SOME_PROMPTS = "some prompts"  # in the notes on what is left out
NO_TIME = "no time"
EXCLUDED = "a step takes longer than plain decoding of what it yields, even if nearly all drafts are accepted"
SURE_K = 4  # draft length for which the cost of drafting is computed


class Racer:
    """Runs candidates, and collects what the user should know of them. tick: called about every second of a race, and
    with a text while a model loads or a server starts. rest: returns the seconds that are left. pass_ms: slots -> time
    of a pass of the target; empty on servers. serve: makes a candidate ready, where only one is at a time; returns
    False if that failed. after: see `Search`. fits: the drafters of the target. notes: drafter or candidate -> why it
    is left out. rates: tokens/s of the candidates in the current race so far, and of plain decoding, "".
    """

    stages: tuple[str, ...] = STAGES
    serve: Callable[[str], bool] | None = None
    after: Mapping[str, Sequence[str]] = MappingProxyType({})
    engine = ""
    fits: Sequence[DrafterFit] = ()
    difference = "differed from plain decoding by more than rounding"

    def __init__(self, spec: Preset, cancelled: Stop) -> None:
        self.lanes: dict[str, Lane] = {}
        self.pass_ms: Mapping[int, float] = {}
        self.tick: Callable[..., None] = lambda what="": None
        self.rest: Callable[[], float] = lambda: inf
        self._session, self._spec, self._cancelled = Session(), spec, cancelled
        self._begun: dict[str, float] = {}  # stage -> time of its start
        self.notes: dict[str, str] = {}
        self.rates: dict[str, float] = {}
        self._families: dict[str, list[str]] = {}
        self._replayed: dict[str, Drafter] = {}  # candidate -> a drafter that makes no passes
        self._target: Target | None = None
        self._differs = 0
        self._explained: set[str] = set()  # candidates whose text was compared with that of plain decoding
        self._ticked = 0.0

    def follow(self, search: Search) -> None:
        """Report the progress of a search, and keep to its time."""
        self.tick, self.rest = search.progress, lambda: search.rest

    def begin(self, stage: str) -> None:
        """Begin one of the stages."""
        self._begun[stage] = time.monotonic()

    def load(self, report: LoadProgress) -> None:
        """Load the target, and keep the threads that were chosen for it. Raises ValueError with one line, and Cancelled
        if it was stopped, as `usable` does."""
        self.begin(LOADING)
        self.tick = lambda what="": report(0.0, what)
        self._session.place_models(self._spec, lambda _, what: self._loading(what))
        self._session.keeps_threads = True
        self._target = self._session.target()

    def measure_costs(self) -> None:
        """Measure the costs of the target's passes."""
        if self._target is not None:
            self.begin(PASSES)
            self._loading(PASSES)
            self.pass_ms = measure_passes(self._target)

    def lane_s(self, prompt: str) -> float:
        """Return the seconds that a lane may take to read a prompt and to answer; 0 if unknown."""
        one, eight = (interpolate(self.pass_ms, width) for width in (1, READ_WIDTH))
        return (self._spec.max_new_tokens * one + len(prompt) / CHARACTERS * eight / READ_WIDTH) / 1000.0

    def close(self) -> None:
        """End what was started for the races."""

    def _loading(self, what: str, share: float = 0.0, part: str = "") -> None:
        """Report what is loaded or started, and the share of it that is done."""
        if self._cancelled():
            raise Cancelled("stopped")
        self.tick(f"{what}, {100.0 * share:.0f} %" if part else what)

    def usable(self, drafters: Mapping[str, Lane], named: Sequence[str]) -> dict[str, list[str]]:
        """Load the drafters, those that the costs of passes do not exclude, in LOADING_SHARE of the time; return the
        names of the candidates of those that fit. The last of LOOKUPS is always among them, and is the first. Raises
        ValueError for a named drafter that does not fit."""
        self.begin(DRAFTERS)
        families, least = dict[str, list[Lane]](), (1.0 - LOADING_SHARE) * self.rest()
        for name, lane in sorted(drafters.items(), key=lambda each: each[1].method != LOOKUPS[-1]):
            try:
                families[name] = self._candidates(name, lane, least)
            except Cancelled:
                if self._cancelled():
                    raise
                self.notes[name] = NO_TIME
            except ValueError as error:
                if lane.model in named:
                    raise
                self.notes[name] = str(error)
        self.notes |= {name: EXCLUDED for name, lanes in families.items() if not lanes}
        named_families = self._named({name: lanes for name, lanes in families.items() if lanes})
        for name, lane in self.lanes.items():
            chain = lane.k and not lane.tree_nodes
            if chain and method(str(lane.options.get("drafter", lane.method))).looks_up:
                self._replayed[name] = build_drafter(lane.method, self._session.target(), lane.model, lane.parsed)
        return named_families

    def _candidates(self, name: str, lane: Lane, least: float) -> list[Lane]:
        """Load a drafter and return its candidates, none if it is excluded. Raises Cancelled where less than `least`
        seconds are left."""

        def loading(share: float = 0.0, part: str = "") -> None:
            if lane.model and self.rest() < least:
                raise Cancelled(NO_TIME)
            self._loading(f"loading {name}", share, part)

        candidates = with_lengths(name, lane, self.pass_ms)
        if not candidates and lane.method == LOOKUPS[-1]:
            candidates = [lane.model_copy(update={"name": f"{name}, k=1", "k": 1})]
        if not candidates:
            return []
        loading()
        spec = self._spec.model_copy(update={"lanes": [lane]})
        self._session.load(spec, loading)
        if not (lane.model and self.pass_ms):
            return candidates
        target = self._session.target()
        drafter = build_drafter(lane.method, target, self._session.drafter(lane, spec), lane.parsed)
        share = drafter.read_bytes(SURE_K) / SURE_K / max(target.facts.pass_bytes or target.weight_bytes, 1)
        return with_lengths(name, lane, self.pass_ms, share)

    def _named(self, families: Mapping[str, Sequence[Lane]]) -> dict[str, list[str]]:
        self.lanes = {lane.name: lane for lanes in families.values() for lane in lanes}
        self._families = {name: [lane.name for lane in lanes] for name, lanes in families.items()}
        return self._families

    def measure(self, prompt: str, names: Sequence[str]) -> Mapping[str, Sample]:
        """Race candidates against plain decoding on a prompt; return those that worked and predictions of others, none
        for a short answer, a prompt that is too long, or where plain decoding failed. The answers end where the time
        ends or the user stops, and count as far as they came. Raises Cancelled if it was stopped before.
        """
        if self._cancelled():
            raise Cancelled("stopped")
        # what learns keeps its place, because a session knows by that what it has learned
        names = sorted(names, key=lambda name: not method(self.lanes[name].method).learns)
        lanes = [self._lane(name) for name in names]
        # where rounding may differ, the reason costs as much as the race
        exact = self._target is not None and self._target.facts.same_bits
        self._session.explains = exact or not self._explained.issuperset(names)
        self._explained.update(names)
        try:
            trace = self._race(self._spec.model_copy(update={"prompt": prompt, "lanes": lanes}), ["", *names])
        except Cancelled:
            return {}
        except ValueError as error:
            self.notes[SOME_PROMPTS] = str(error)
            return {}
        plain, ran = trace.lanes[0], zip([SOME_PROMPTS, *names], trace.lanes, strict=True)
        self.notes |= {name: str(lane.note) for name, lane in ran if lane.finish == "error"}
        if plain.finish == "error" or len(plain.token_ids) < LEAST_TOKENS:
            return {}
        samples = {name: self._sample(trace, place) for place, name in enumerate(names, start=1)}
        usable = {name: sample for name, sample in samples.items() if sample}
        for name, predicted in self._predictions(trace, usable) if self.pass_ms else ():
            if predicted and (name in usable or name not in names):
                usable[name] = replace(usable.get(name, Sample(0.0)), predicted=predicted)
        return usable

    def _race(self, spec: Preset, names: Sequence[str]) -> RunTrace:
        def keep_rate(message: RunMessage) -> None:
            if isinstance(message, StepRow) and isinstance(rate := message.so_far.get("tokens_per_s"), float):
                self.rates[names[message.lane]] = rate

        self._raced_from = time.monotonic()
        try:
            return self._session.run(spec, self._stop, show=keep_rate)
        finally:
            self.rates.clear()

    def _predictions(self, trace: RunTrace, samples: Mapping[str, Sample]) -> Iterator[tuple[str, float]]:
        """Yield candidates with their predicted speed-ups: of drafters without passes from the text, of others from
        the longest drafts of the same drafter in this race."""
        for name, drafter in self._replayed.items():
            k, most = self.lanes[name].k, self._spec.max_new_tokens
            yield name, replayed_speed(drafter, k, trace.lanes[0], most, partial(pass_ratio, self.pass_ms))
        chooses = {name: method(lane.method).chooses_length for name, lane in self.lanes.items()}
        for family in self._families.values():
            own = next((n for n in reversed(family) if n in samples and samples[n].costs and not chooses[n]), "")
            costs = samples[own].costs if own and own not in self._replayed else None
            if costs is None or costs.tree_nodes is not None:
                continue
            curve = costs.with_probe(self.pass_ms)
            scale = samples[own].speed / curve.speedup(self.lanes[own].k)
            speeds = {name: scale * curve.speedup(self.lanes[name].k) for name in family if not chooses[name]}
            # one that chooses its length does as well as the best length
            yield from ((name, speeds.get(name, max(speeds.values()))) for name in family if name != own)

    def _lane(self, name: str) -> Lane:
        return self.lanes[name]

    def _stop(self) -> bool:
        if (now := time.monotonic()) - self._ticked > 1.0:
            self._ticked = now
            self.tick()
        over, rest = self._cancelled(), self.rest()
        self._session.explains &= not over and rest > now - self._raced_from  # reading the texts takes as long again
        return over or rest <= 0.0

    def _sample(self, trace: RunTrace, place: int) -> Sample | None:
        plain, lane = trace.lanes[0], trace.lanes[place]
        speed = estimates(trace)[place - 1]
        short = lane.finish == "cancelled" and len(lane.token_ids) < LEAST_TOKENS
        if lane.finish == "error" or short or speed is None:
            return None
        self._differs += trace.comparison[place - 1]["verdict"] in DIFFERENT
        k = lane.options.get("k")
        costs = fit_cost_model([plain.events], [lane.events], k if isinstance(k, int) else 0, lane.method in PARALLEL)
        return Sample(speed.value, summarise(lane), costs, interval=(speed.low, speed.high))

    def so_far(self, name: str) -> Estimate | None:
        """Return the speed-up of a candidate in the current race so far; None outside of one."""
        plain, own = (self.rates.get(each, 0.0) for each in ("", name))
        return Estimate(round(own / plain, 4)) if name and plain and own else None

    def environment(self) -> dict[str, object]:
        """Return the facts about machine and model, and the seconds of every stage, 0.0 before it begins."""
        times = pairwise([*self._begun.items(), ("", time.monotonic())])
        stages = dict.fromkeys(self.stages, 0.0) | {
            stage: max(round(end - begin, 1), 0.1) for (stage, begin), (_, end) in times
        }
        return environment(self._target) | {"stages": stages}

    @property
    def failure(self) -> str:
        """Return why the last prompt failed that did; empty if none did."""
        return self.notes.get(SOME_PROMPTS, "")

    @property
    def left_out(self) -> dict[str, str]:
        """Return the drafters without candidates, with the reason."""
        return {name: why for name, why in self.notes.items() if name not in (SOME_PROMPTS, *self.lanes)}

    def remarks(self) -> list[str]:
        """Return how passes run here, what was left out and why, and whether a text differed."""
        notes = [f"Left out: {name}, {why.rstrip('.')}." for name, why in self.notes.items()]
        notes += [f"{self._differs} texts {self.difference}."] if self._differs else []
        if self._target is None:
            return notes
        rows = dict(pass_rows(self.environment()))
        facts = [f"{title}: {rows[title]}." for title in ("CPU threads", "Weights", "Passes") if title in rows]
        return [" ".join(facts), f"{sentence(checking_note(self._target))}.", *notes]

    def link(self, name: str, prompt: str) -> str:
        """Return the query of a link to the race of a candidate on a prompt; empty for a server that runs already."""
        return "" if self.lanes[name].server else race_link(self._spec.target, self.lanes[name], prompt)

    def settings(self, name: str) -> list[str]:
        """Return the settings to copy of a candidate; none for a server that runs already."""
        lane = self.lanes[name].model_copy(update={"name": ""})
        preset = self._spec.model_copy(update={"lanes": [lane]})
        return [] if lane.server else settings_to_copy(preset, self.engine)


class ServerRacer(Racer):
    """Runs candidates on servers that run already, or on those of an engine: a plain one that stays, and next to it one
    candidate after the other."""

    stages = (LOADING, RACING)
    difference = "differed from the plain server's; `check-server` tells whether that is more than rounding"

    def __init__(self, spec: Preset, cancelled: Stop, program: Program | None, servers: Sequence[str]) -> None:
        """program: the engine; None: `servers` run already, the plain one first. Raises ValueError with one line."""
        super().__init__(spec, cancelled)
        self._program, self._servers = program, servers
        self._plain, self._candidate = ExitStack(), ExitStack()
        self.serve = self._start if program else lambda name: True
        self.engine = program.engine.name if program else ""

    def load(self, report: LoadProgress) -> None:
        self.begin(LOADING)
        self.tick = lambda what="": report(0.0, what)
        address = self._servers[0] if self._servers else f"http://127.0.0.1:{free_port()}"
        self._spec = self._spec.changed(server=address)
        if self._program:
            self._spec = self._spec.changed(served_model=self._program.engine.served_name(self._spec.target))
            self._plain.enter_context(self._program.serve(self._served(), self._loading, 0, 2))

    def close(self) -> None:
        self._candidate.close()
        self._plain.close()

    def usable(self, drafters: Mapping[str, Lane], named: Sequence[str]) -> dict[str, list[str]]:
        if self._program is None:  # their methods are unknown
            model = self._spec.served_model
            names = {f"server {host(server)}": server for server in self._servers[1:]}
            lanes = [Lane(method=BASELINE, name=n, server=server, served_model=model) for n, server in names.items()]
            return self._named({lane.name: [lane] for lane in lanes})
        families, self.after = {}, {}
        for name, lane in drafters.items():
            candidates = with_lengths(name, lane, {})
            refusals = [self._program.refusal(self._served(candidate)) for candidate in candidates]
            if lanes := [lane for lane, refusal in zip(candidates, refusals, strict=True) if not refusal]:
                families[name] = lanes
                chain = [each.name for each in lanes if (each.method, each.options) == (lane.method, lane.options)]
                self.after |= {long: chain[:place] for place, long in enumerate(chain) if place >= FIRST}
                continue
            self.notes[name] = refusals[-1]
            if lane.model in named:
                raise ValueError(f"{name} does not run on {self._program.engine.title}: {self.notes[name]}")
        return self._named(families)

    def environment(self) -> dict[str, object]:
        return super().environment() | ({"device": self._program.title} if self._program else {})

    def _served(self, lane: Lane | None = None) -> Served:
        """Return the server of a lane, or the plain one."""
        assert self._program
        spec = self._spec.model_copy(update={"lanes": [lane] if lane else []})
        return [*served(spec, self._program.engine.name, self._program.gpus)][-1]

    def _start(self, name: str) -> bool:
        assert self._program
        self._candidate.close()
        at = {"server": f"http://127.0.0.1:{free_port()}", "served_model": self._spec.served_model}
        self._running = self.lanes[name].model_copy(update=at)
        try:
            self._candidate.enter_context(self._program.serve(self._served(self._running), self._loading, 1, 2))
        except Cancelled:
            raise
        except ValueError as error:
            self.notes[name] = f"its server does not start: {str(error).rpartition(' / ')[2]}"  # the end of its log
            return False
        return True

    def _lane(self, name: str) -> Lane:
        return self._running if self._program else self.lanes[name]


def replayed_speed(drafter: Drafter, k: int, plain: LaneTrace, new_tokens: int, ratio: Callable[[int], float]) -> float:
    """Return the predicted speed-up of a drafter of chains that makes no passes; 0 for a text of one token. Greedy
    decoding with it writes the text of plain decoding, so its steps are known, and their time is the drafter's own and
    that of the passes.

    plain: greedy decoding of at most `new_tokens`. ratio: slots -> time of a pass in that of one over one token.
    """
    text, done = plain.token_ids, 1
    steps = [(step_ms(step), step.ms.get("verify", 0.0)) for step in plain.events[1:]] or [(0.0, 0.0)]
    plain_ms, pass_ms = map(fmean, zip(*steps, strict=True))
    drafter.start(1, Sampling(), Generator())
    drafter.observe(_progress(plain.prompt_ids, [*plain.prompt_ids[1:], *text[:1]]))
    total = 0.0
    while done < len(text):
        depth = min(k, new_tokens - done - 1)
        begin = perf_counter()
        draft = drafter.propose(Budget(depth, depth)).tokens[0].tolist()
        accepted = sum(takewhile(bool, map(eq, draft, text[done:])))
        step = text[done - 1 : done + accepted + 1]  # the root, what was accepted, and one more
        drafter.observe(_progress(step[:-1], step[1:]))
        drafting = 1000.0 * (perf_counter() - begin)
        verifying = pass_ms * ratio(len(draft) + 1)
        drafter.on_step_timed({"draft": drafting, "verify": verifying})
        total += drafting + verifying + plain_ms - pass_ms
        done += len(step) - 1
    return plain_ms * (len(text) - 1) / total if total else 0.0


def _progress(inputs: list[int], outputs: list[int]) -> Progress:
    return Progress(torch.tensor([inputs]), torch.tensor([outputs]), [len(inputs)])
