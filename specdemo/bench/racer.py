"""Races of `tune`: candidates against plain decoding on one prompt, in this process."""

import time
from collections.abc import Callable, Mapping, Sequence

from specdemo.bench.base import Report, Stop
from specdemo.bench.candidates import race_link, settings_to_copy, with_lengths
from specdemo.bench.report import sentence
from specdemo.bench.search import Sample
from specdemo.core.passes import pass_rows
from specdemo.core.protocol import Target
from specdemo.core.tally import summarise
from specdemo.core.trace import RunTrace
from specdemo.engine.comparison import Lane
from specdemo.engine.cost import fit_cost_model
from specdemo.engine.session import Session, environment
from specdemo.models.errors import Cancelled
from specdemo.models.pass_cost import checking_note, measure_passes, pass_ratio
from specdemo.models.text import encode
from specdemo.presets.files import Preset

CURVES = 3  # measurements of the costs of passes, because another program may take the cores during one
LEAST_TOKENS = 8  # a shorter answer says little about speed
TEMPLATE = 64  # tokens that a chat template may add to a prompt


class Racer:
    """Runs candidates, and collects what the user should know of them. tick: called about every second of a race."""

    def __init__(self, spec: Preset, cancelled: Stop) -> None:
        self.lanes: dict[str, Lane] = {}
        self.tick: Callable[[], None] = lambda: None
        self._session, self._spec, self._cancelled = Session(), spec, cancelled
        self._notes: dict[str, str] = {}  # candidate -> why it is left out
        self._differs = 0
        self._ticked = 0.0

    def load(self, report: Report) -> Target:
        """Load the target, and keep the threads that were chosen for it. Raises ValueError with one line."""
        self._session.load(self._spec, lambda share, what: report(0.0, what))
        self._target = self._session.target()
        self._spec = self._spec.model_copy(update={"threads": self._target.threads})
        return self._target

    def usable(self, drafters: Mapping[str, Lane], named: Sequence[str], report: Report) -> dict[str, list[str]]:
        """Load every drafter, and measure the costs of passes in between; return the names of the candidates of those
        that fit. Raises ValueError for a named one that does not."""
        fit = {}
        for turn, (name, lane) in enumerate(drafters.items(), start=1):
            report(0.0, f"loading {name}")
            try:
                self._session.load(self._spec.model_copy(update={"lanes": [lane]}))
                fit[name] = lane
            except ValueError as error:
                if lane.model in named:
                    raise
                self._notes[name] = str(error)
            if turn < CURVES:
                measure_passes(self._target, again=True)
        found = {name: with_lengths(name, lane, self._target.pass_ms) for name, lane in fit.items()}
        self.lanes = {lane.name: lane for lanes in found.values() for lane in lanes}
        return {name: [lane.name for lane in lanes] for name, lanes in found.items()}

    def fitting(self, kinds: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Return the prompts that leave room for an answer. Raises ValueError if there are none."""
        tokenizer = self._session.models.tokenizer
        room = self._target.max_length - self._spec.max_new_tokens - TEMPLATE
        if tokenizer is None:
            raise ValueError(f"{self._spec.target} has no tokenizer; put its tokenizer.json into the same folder")
        fit = {kind: [t for t in texts if len(encode(tokenizer, t, 1 << 30)) <= room] for kind, texts in kinds.items()}
        if missing := sum(map(len, kinds.values())) - sum(map(len, fit.values())):
            self._notes[f"{missing} prompts"] = f"too long for the model, which reads {self._target.max_length} tokens"
        if not any(fit.values()):
            raise ValueError("every prompt is too long for the model; give shorter ones or fewer --new-tokens")
        return {kind: texts for kind, texts in fit.items() if texts}

    def measure(self, prompt: str, names: Sequence[str]) -> Mapping[str, Sample]:
        """Race candidates against plain decoding on a prompt; return those that worked, none for a short answer.

        Raises Cancelled if it was stopped, and ValueError if plain decoding failed.
        """
        lanes = [self.lanes[name] for name in names]
        trace = self._session.run(self._spec.model_copy(update={"prompt": prompt, "lanes": lanes}), self._stop)
        if self._cancelled():
            raise Cancelled("stopped")
        plain = trace.lanes[0]
        if plain.finish == "error":
            raise ValueError(f"plain decoding failed: {plain.note}")
        for name, lane in zip(names, trace.lanes[1:], strict=True):
            if lane.finish == "error":
                self._notes[name] = str(lane.note)
        if len(plain.token_ids) < LEAST_TOKENS:
            return {}
        found = {name: self._sample(trace, place) for place, name in enumerate(names, start=1)}
        return {name: sample for name, sample in found.items() if sample}

    def _stop(self) -> bool:
        if (now := time.monotonic()) - self._ticked > 1.0:
            self._ticked = now
            self.tick()
        return self._cancelled()

    def _sample(self, trace: RunTrace, place: int) -> Sample | None:
        plain, lane = trace.lanes[0], trace.lanes[place]
        speed = trace.comparison[place - 1]["speedup"]
        if lane.finish == "error" or not isinstance(speed, float) or not speed:
            return None
        self._differs += trace.comparison[place - 1]["verdict"] == "differs"
        k = lane.options.get("k")
        costs = fit_cost_model([plain.events], [lane.events], k if isinstance(k, int) else 0)
        return Sample(speed, summarise(lane), costs)

    def environment(self) -> dict[str, object]:
        """Return the facts about machine and model."""
        return environment(self._target)

    def pass_ratio(self, slots: int) -> float:
        """Return the time of a pass over so many tokens, in that of one over a single token."""
        return pass_ratio(self._target.pass_ms, slots)

    def remarks(self) -> list[str]:
        """Return how passes run here, what was left out and why, and whether a text differed."""
        passes = dict(pass_rows(self.environment())).get("Passes", "")
        notes = [f"Passes: {passes}.", f"{sentence(checking_note(self._target))}."]
        notes += [f"Left out: {name}, {why.rstrip('.')}." for name, why in self._notes.items()]
        if self._differs:
            notes.append(f"{self._differs} texts differed from plain decoding by more than rounding.")
        return notes

    def link(self, name: str, prompt: str) -> str:
        """Return the query of a link to the race of a candidate on a prompt."""
        return race_link(self._spec.target, self.lanes[name], prompt)

    def settings(self, name: str) -> list[str]:
        """Return the settings to copy of a candidate."""
        lane = self.lanes[name].model_copy(update={"name": ""})
        return settings_to_copy(self._spec.model_copy(update={"lanes": [lane]}))
