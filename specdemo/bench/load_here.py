"""Lane under load on the local engine. Concurrent requests are the rows of a batch.

Batches are static: all requests of a batch start together, and the next batch starts when the longest has ended. The
prompts of a batch are truncated at the start to one length; batches alternate between the lengths of the suite's texts.
Times are measured by the lane's clock.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from specdemo.bench.load_options import LENGTHS, LoadOptions
from specdemo.bench.load_points import Answer, Measure, MeasuredLane, Point
from specdemo.bench.measure import Totals, Way
from specdemo.bench.sweeps import first_lane, room, tokenizer
from specdemo.core.protocol import Target
from specdemo.core.trace import StepEvent, step_ms
from specdemo.engine.comparison import Lane
from specdemo.engine.loop import generate
from specdemo.engine.session import environment
from specdemo.engine.warm_up import warm_up
from specdemo.models.text import encode
from specdemo.presets.files import preset
from specdemo.servers import engines
from specdemo.servers.counters import ServerStats
from specdemo.servers.engines.base import Schedule
from specdemo.servers.process import ReportFunction


@dataclass(frozen=True, slots=True)
class Here:
    """Backend that runs plain decoding and the preset's first lane on the local engine."""

    suite: LoadOptions
    target: Target
    lane: Lane
    plain: Way
    drafting: Way
    prompts: Sequence[Sequence[Sequence[int]]]  # grouped by length

    @classmethod
    def of(cls, suite: LoadOptions) -> "Here":
        """Raises ValueError with one line."""
        target, ways = first_lane(suite, suite.preset_id)
        plain, drafting = ways.values()
        texts = [encode(tokenizer(target), text, room(target, suite)) for text in suite.texts]
        lengths = 1 if suite.prompts else len(LENGTHS)
        groups = [texts[i::lengths] for i in range(lengths)]
        prompts = [[ids[-min(map(len, group)) :] for ids in group] for group in groups]
        return cls(suite, target, preset(suite.preset_id).lanes[0], plain, drafting, prompts)

    def environment(self) -> dict[str, object]:
        """Return the facts for the result file."""
        return environment(self.target)

    def together(self, lanes: int) -> bool:
        """Return True: all lanes share the target."""
        return True

    @contextmanager
    def up(self, lanes: Sequence[MeasuredLane], report: ReportFunction) -> Iterator[list[Measure]]:
        """Yield one measuring function per lane; no server is started."""
        yield [partial(self._measure, self._way(lane.k)) for lane in lanes]

    def no_advice(self) -> str:
        """Return why no k can be recommended, which on this engine never happens."""
        return ""

    def paste(self, schedule: Schedule) -> list[str]:
        """Return a hint: a schedule measured on this engine does not apply to servers."""
        return [f"For a schedule for servers, measure a server: bench load --engine {engines.DEFAULT}."]

    def _way(self, k: int) -> Way:
        if not k:
            return self.plain
        budget = self.lane.model_copy(update={"k": k}).budget
        return replace(self.drafting, config=replace(self.drafting.config, budget=budget))

    def _measure(self, way: Way, load: float, is_warm_up: bool) -> Point:
        batches = self._batches(int(load))
        if is_warm_up:
            batches = batches[: len(self.prompts)]
            warm_up(self.target, way.drafter, batches[-1][1], way.config, way.accept)
        totals, answers, ms = Totals(), list[Answer](), 0.0
        for indices, prompt in batches:
            events = list(generate(self.target, way.drafter, prompt, way.config, accept=way.accept))
            totals.add(events)
            answers += [self._answer(events, row, number) for row, number in enumerate(indices)]
            ms += sum(map(step_ms, events))
        stats = ServerStats({"acceptance_rate": totals.acceptance_rate, "tokens_per_step": totals.tokens_per_pass})
        return Point(answers, ms / 1000.0, stats)

    def _batches(self, rows: int) -> list[tuple[list[int], Tensor]]:
        """Return batches as the indices of the prompts in the texts, and their ids [B, T]. Batches alternate between
        lengths.
        """
        batches = []
        for batch in range(-(-self.suite.count(rows, False) // rows)):
            length = batch % len(self.prompts)
            group = self.prompts[length]
            first = batch // len(self.prompts) * rows
            taken = [(first + row) % len(group) for row in range(rows)]
            ids = torch.tensor([group[one] for one in taken], device=self.target.device)
            batches.append(([one * len(self.prompts) + length for one in taken], ids))
        return batches

    def _answer(self, events: Sequence[StepEvent], row: int, index: int) -> Answer:
        ids = [token for event in events for token in event.emitted[row]]
        ends = [at for at, event in zip(accumulate(map(step_ms, events)), events, strict=True) if event.emitted[row]]
        text = str(tokenizer(self.target).decode(ids))
        return Answer(index, text, len(ids), ends[0], [round(b - a, 4) for a, b in pairwise(ends)])
