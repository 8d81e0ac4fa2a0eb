"""Races of `tune`: candidates against plain decoding on one prompt, in this process or on servers."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import inf

from specdemo.bench.base import Progress, Stop
from specdemo.bench.candidates import race_link, settings_to_copy, with_lengths
from specdemo.bench.replay import replayed_speed
from specdemo.bench.report import sentence
from specdemo.bench.search import Sample, Search
from specdemo.core.protocol import Drafter, Target
from specdemo.core.tally import summarise
from specdemo.core.trace import RunTrace
from specdemo.costs.passes import pass_ratio, pass_rows
from specdemo.costs.step import fit_cost_model
from specdemo.engine.comparison import Lane
from specdemo.engine.session import Session, environment
from specdemo.methods import BASELINE, build_drafter, method
from specdemo.models.errors import Cancelled
from specdemo.models.local_models import DrafterFit
from specdemo.models.pass_cost import checking_note, measure_passes
from specdemo.presets.files import Preset
from specdemo.presets.serve import Program, Served, served
from specdemo.servers.address import host
from specdemo.servers.process import free_port

CURVES = 3  # measurements of the costs of passes, because another program may take the cores during one
LEAST_TOKENS = 8  # a shorter answer says little about speed
DIFFERENT = ("differs", "text differs")  # verdicts
SOME_PROMPTS = "some prompts"  # in the notes on what is left out
TOO_WIDE = "a pass over its tree takes longer than plain decoding of all that it can accept"


class Racer:
    """Runs candidates, and collects what the user should know of them. tick: called about every second of a race, and
    with a text while a model loads or a server starts. rest: returns the seconds that are left. pass_ms: slots -> time
    of a pass of the target; empty on servers. serve: makes a candidate ready, where only one is at a time; returns
    False if that failed. fits: the drafters of the target.
    """

    serve: Callable[[str], bool] | None = None
    engine = ""
    fits: Sequence[DrafterFit] = ()
    difference = "differed from plain decoding by more than rounding"

    def __init__(self, spec: Preset, cancelled: Stop) -> None:
        self.lanes: dict[str, Lane] = {}
        self.pass_ms: Mapping[int, float] = {}
        self.tick: Callable[..., None] = lambda what="": None
        self.rest: Callable[[], float] = lambda: inf
        self._session, self._spec, self._cancelled = Session(), spec, cancelled
        self._notes: dict[str, str] = {}  # candidate -> why it is left out
        self._families: dict[str, list[str]] = {}
        self._replayed: dict[str, Drafter] = {}  # candidate -> a drafter that makes no passes
        self._target: Target | None = None
        self._differs = 0
        self._explained: set[str] = set()  # candidates whose text was compared with that of plain decoding
        self._ticked = 0.0

    def follow(self, search: Search) -> None:
        """Report the progress of a search, and keep to its time."""
        self.tick, self.rest = search.progress, lambda: search.rest

    def load(self, report: Progress) -> None:
        """Load the target, and keep the threads that were chosen for it. Raises ValueError with one line, and Cancelled
        if it was stopped, as `usable` does."""
        self.tick = lambda what="": report(0.0, what)
        self._session.load(self._spec, lambda _, what: self._loading(what))
        self._target = target = self._session.target()
        self.pass_ms = target.pass_ms
        self._spec = self._spec.model_copy(update={"threads": target.threads})

    def close(self) -> None:
        """End what was started for the races."""

    def _loading(self, what: str, share: float = 0.0, part: str = "") -> None:
        """Report what is loaded or started, and the share of it that is done."""
        if self._cancelled():
            raise Cancelled("stopped")
        self.tick(f"{what}, {100.0 * share:.0f} %" if part else what)

    def usable(self, drafters: Mapping[str, Lane], named: Sequence[str]) -> dict[str, list[str]]:
        """Load every drafter, and measure the costs of passes in between; return the names of the candidates of those
        that fit. Raises ValueError for a named one that does not."""
        fit = {}
        for turn, (name, lane) in enumerate(drafters.items(), start=1):
            self._loading(f"loading {name}")
            try:
                lanes = self._spec.model_copy(update={"lanes": [lane]})
                self._session.load(lanes, partial(self._loading, f"loading {name}"))
                fit[name] = lane
            except Cancelled:
                raise
            except ValueError as error:
                if lane.model in named:
                    raise
                self._notes[name] = str(error)
            if turn < CURVES:
                measure_passes(self._session.target(), again=True)
        candidates = {name: with_lengths(name, lane, self.pass_ms) for name, lane in fit.items()}
        self._notes |= {name: TOO_WIDE for name, lanes in candidates.items() if not lanes}
        families = self._named({name: lanes for name, lanes in candidates.items() if lanes})
        for name, lane in self.lanes.items():
            chain = lane.k and not lane.tree_nodes
            if chain and method(str(lane.options.get("drafter", lane.method))).looks_up:
                self._replayed[name] = build_drafter(lane.method, self._session.target(), lane.model, lane.parsed)
        return families

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
            trace = self._session.run(self._spec.model_copy(update={"prompt": prompt, "lanes": lanes}), self._stop)
        except Cancelled:
            return {}
        except ValueError as error:
            self._notes[SOME_PROMPTS] = str(error)
            return {}
        plain, ran = trace.lanes[0], zip([SOME_PROMPTS, *names], trace.lanes, strict=True)
        self._notes |= {name: str(lane.note) for name, lane in ran if lane.finish == "error"}
        if plain.finish == "error" or len(plain.token_ids) < LEAST_TOKENS:
            return {}
        samples = {name: self._sample(trace, place) for place, name in enumerate(names, start=1)}
        usable = {name: sample for name, sample in samples.items() if sample}
        for name, predicted in self._predictions(trace, usable) if self.pass_ms else ():
            if predicted and (name in usable or name not in names):
                usable[name] = replace(usable.get(name, Sample(0.0)), predicted=predicted)
        return usable

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
        over = self._cancelled() or self.rest() <= 0.0
        self._session.explains &= not over  # reading the texts again takes seconds
        return over

    def _sample(self, trace: RunTrace, place: int) -> Sample | None:
        plain, lane = trace.lanes[0], trace.lanes[place]
        speed = trace.comparison[place - 1]["speedup"]
        short = lane.finish == "cancelled" and len(lane.token_ids) < LEAST_TOKENS
        if lane.finish == "error" or short or not isinstance(speed, float) or not speed:
            return None
        self._differs += trace.comparison[place - 1]["verdict"] in DIFFERENT
        k = lane.options.get("k")
        costs = fit_cost_model([plain.events], [lane.events], k if isinstance(k, int) else 0)
        return Sample(speed, summarise(lane), costs)

    def environment(self) -> dict[str, object]:
        """Return the facts about machine and model."""
        return environment(self._target)

    @property
    def failure(self) -> str:
        """Return why the last prompt failed that did; empty if none did."""
        return self._notes.get(SOME_PROMPTS, "")

    def remarks(self) -> list[str]:
        """Return how passes run here, what was left out and why, and whether a text differed."""
        notes = [f"Left out: {name}, {why.rstrip('.')}." for name, why in self._notes.items()]
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

    difference = "differed from the plain server's; `check-server` tells whether that is more than rounding"

    def __init__(self, spec: Preset, cancelled: Stop, program: Program | None, servers: Sequence[str]) -> None:
        """program: the engine; None: `servers` run already, the plain one first. Raises ValueError with one line."""
        super().__init__(spec, cancelled)
        self._program, self._servers = program, servers
        self._plain, self._candidate = ExitStack(), ExitStack()
        self.serve = self._start if program else lambda name: True
        self.engine = program.engine.name if program else ""

    def load(self, report: Progress) -> None:
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
        families = {}
        for name, lane in drafters.items():
            candidates = with_lengths(name, lane, {})
            refusals = [self._program.refusal(self._served(candidate)) for candidate in candidates]
            if lanes := [lane for lane, refusal in zip(candidates, refusals, strict=True) if not refusal]:
                families[name] = lanes
                continue
            self._notes[name] = refusals[-1]
            if lane.model in named:
                raise ValueError(f"{name} does not run on {self._program.engine.title}: {self._notes[name]}")
        return self._named(families)

    def environment(self) -> dict[str, object]:
        return environment(None) | ({"device": self._program.title} if self._program else {})

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
            self._notes[name] = f"its server does not start: {str(error).rpartition(' / ')[2]}"  # the end of its log
            return False
        return True

    def _lane(self, name: str) -> Lane:
        return self._running if self._program else self.lanes[name]
