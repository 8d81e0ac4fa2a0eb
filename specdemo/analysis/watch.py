"""Live view of a running server: acceptance, throughput and diagnosis, from its metrics every few seconds. A terminal
shows a table that is redrawn, other outputs one line per reading. No request for text is sent. Needs no torch.
"""

import asyncio
import os
from collections import deque
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from time import monotonic
from typing import NamedTuple

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from specdemo.analysis.diagnose import Diagnosis, diagnose
from specdemo.analysis.observation import Observation, values_of
from specdemo.analysis.parts import READING, Part, contrast, trend
from specdemo.analysis.readers.answers import never_drafted
from specdemo.core.atomic_io import finite, json_text
from specdemo.servers.client import METRICS_BYTES, METRICS_PATH, METRICS_S, Client, Patience, StatusError, connect
from specdemo.servers.counters import Samples, ServerStats, delta, gauge, parse
from specdemo.servers.engines import engines, stats_between
from specdemo.servers.engines.base import ReportingEngine
from specdemo.servers.lane import KEY

MAX_READINGS = 720  # readings that are shown; an hour of one every five seconds
METRICS_HINT = "llama-server needs --metrics and SGLang --enable-metrics"
SHOWN_POSITIONS = 4  # of the acceptance by position that are shown
Row = dict[str, float | None]


class Reading(NamedTuple):
    """Metrics of a server. at: time of the reading, in seconds of any clock. samples: the counters of output tokens and
    the gauges of running requests."""

    at: float
    text: str
    samples: Samples


@dataclass(slots=True)
class Watch:
    """Readings of one server and what they show.

    server: address. plain_tokens_per_s: of the same server and load without speculation, None if unknown. k: draft
    length, None if unknown; vLLM's and llama.cpp's metrics give it. rows: one per
    pair of readings, the last MAX_READINGS: time in s since the first reading, tokens/s, running (requests at a time),
    accepted (rate), tokens/pass and `accepted at N` (share of the steps that accepted the draft tokens up to N). A
    value is None if the engine does not report it, or if nothing was generated in between.
    """

    server: str
    plain_tokens_per_s: float | None = None
    k: int | None = None
    rows: deque[Row] = field(default_factory=lambda: deque(maxlen=MAX_READINGS))
    engine: ReportingEngine | None = None
    _first: Reading | None = None
    _last: Reading | None = None
    _tokens: float = 0.0
    _busy_s: float = 0.0  # time between readings in which tokens were generated
    _running: list[float] = field(default_factory=list)
    _parts: list[Part] = field(default_factory=list)

    def add(self, at: float, text: str) -> None:
        """Take a reading of the metrics. Raises ValueError, one line, for metrics of no known engine."""
        names = {name for engine in engines() for name in (engine.generated, engine.running)}
        reading, last = Reading(at, text, parse(text, names)), self._last
        self.engine = next((engine for engine in engines() if (engine.generated, None) in reading.samples), None)
        if self.engine is None:
            titles = ", ".join(engine.title for engine in engines() if engine.generated)
            raise ValueError(f"{self.server} has no metrics of {titles}; {METRICS_HINT}")
        if last is None or delta(last.samples, reading.samples, self.engine.generated) is None:  # it has restarted
            self._first, self._tokens, self._busy_s = reading, 0.0, 0.0
            self._running.clear()
            self._parts.clear()
        else:
            self.rows.append(self._row(last, reading))
        self._last = reading

    def _row(self, last: Reading, new: Reading) -> Row:
        assert self.engine is not None and self._first is not None
        seconds = new.at - last.at
        tokens = delta(last.samples, new.samples, self.engine.generated) or 0.0
        running = gauge(new.samples, self.engine.running)
        stats = stats_between(last.text, new.text) if tokens else ServerStats()
        if tokens:
            self._tokens, self._busy_s = self._tokens + tokens, self._busy_s + seconds
            self._running += [running] if running else []
        speed = round(tokens / seconds, 1) if seconds > 0 else None
        length = stats.counters.get("tokens_per_step")
        if length:
            steps = tokens / length
            drafted, accepted = stats.counters.get("drafted") or steps, stats.counters.get("accepted")
            drafts = stats.drafting_steps or steps
            self._parts.append(Part(drafted, tokens - steps if accepted is None else accepted, drafts, speed))
        row: Row = {"time": round(new.at - self._first.at, 1), "tokens/s": speed, "running": running or 0.0}
        row |= {"accepted": stats.counters.get("acceptance_rate"), "tokens/pass": stats.counters.get("tokens_per_step")}
        shown = enumerate(stats.accept_by_position[:SHOWN_POSITIONS], start=1)
        return row | {f"accepted at {position}": share for position, share in shown}

    def observation(self) -> Observation | None:
        """Return what all readings together show; None if nothing was drafted."""
        if self._first is None or self._last is None or self.engine is None or not self._tokens:
            return None
        texts = self._first.text, self._last.text
        return Observation(
            engine=self.engine.name,
            source=f"metrics of {self.server}",
            k=self.k,
            **values_of(stats_between(*texts)) | never_drafted(*texts),
            contrast=contrast(self._parts, READING),
            notes=trend(self._parts),
            batch_size=fmean(self._running) if self._running else None,
            tokens_per_s=self._tokens / self._busy_s if self._busy_s else None,
            plain_tokens_per_s=self.plain_tokens_per_s,
        )

    def diagnosis(self) -> Diagnosis | None:
        """Return the diagnosis of all readings together; None if there is nothing to diagnose yet."""
        try:
            observation = self.observation()
            return None if observation is None else diagnose(observation)
        except ValueError:  # counters that contradict each other, as of a server whose engines restarted
            return None

    def sentence(self) -> str:
        """Return the state in one sentence."""
        if self.engine is None:
            return f"Reading the metrics of {self.server}."
        diagnosis = self.diagnosis()
        if diagnosis is None or diagnosis.observation.accepted_length is None:
            idle = "no tokens yet" if not self._tokens else "the metrics contain no draft tokens"
            return f"{self.engine.title}: {idle}."
        return diagnosis.sentence


async def read(watch: Watch, client: Client) -> None:
    """Read the metrics once. Raises ValueError, one line, if the server has none or does not become ready; a later
    reading that fails is left out."""
    at, text = monotonic(), await client.metrics()
    if text is None and watch.engine is None:
        await _until_ready(watch.server, client)
        at, text = monotonic(), await client.metrics()
    if text is not None:
        watch.add(at, text)
    elif watch.engine is None:
        raise ValueError(f"{watch.server} does not answer, or has no metrics; {METRICS_HINT}")


async def _until_ready(server: str, client: Client) -> None:
    """Wait while a server loads its model. Raises ValueError, one line, if it takes too long."""
    try:
        await Patience().answer(lambda: asyncio.wait_for(client.read(METRICS_PATH, METRICS_BYTES), METRICS_S))
    except StatusError as error:
        if error.patience_s:
            raise ValueError(f"{server} is not ready (status {error.status}); try again later") from None
    except (httpx.TransportError, TimeoutError, ValueError):
        pass  # the next reading tells


TABLE_ROWS = 12  # rows of the table
FORMATS = {"time": "{:.0f} s", "tokens/s": "{:.1f}", "running": "{:.1f}", "tokens/pass": "{:.2f}"}
TITLES = {"running": "running requests", "accepted": "acceptance rate", "tokens/pass": "mean accepted length"}


def show_live(watch: Watch, every_s: float, readings: int, as_json: bool) -> None:
    """Show every reading until Ctrl-C, or until there are `readings` of them; then print the diagnosis.

    Raises ValueError, one line, if the server has no metrics.
    """
    console = Console(highlight=False, markup=False)
    screen = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None

    async def follow() -> None:
        async with connect(watch.server, os.environ.get(KEY)) as client:
            for number in count(1):
                began = monotonic()
                await read(watch, client)
                if screen is not None:
                    screen.update(Group(table(watch), watch.sentence()), refresh=True)
                elif watch.rows and number > 1:
                    row = watch.rows[-1]
                    print(json_text(finite(row)) if as_json else line(row), flush=True)
                if number == readings:
                    return
                await asyncio.sleep(max(0.0, every_s - (monotonic() - began)))

    with screen or nullcontext(), suppress(KeyboardInterrupt):  # Ctrl-C is the usual end
        asyncio.run(follow())
    _conclude(watch, console, as_json)


def _conclude(watch: Watch, console: Console, as_json: bool) -> None:
    diagnosis = watch.diagnosis()
    if as_json:
        print(json_text({"server": watch.server, "diagnosis": diagnosis and diagnosis.as_dict()}))
        return
    more = (*diagnosis.limits(), *diagnosis.recommendations, *diagnosis.notes) if diagnosis else ()
    console.print("\n".join([watch.sentence(), *more]), soft_wrap=True)


def table(watch: Watch) -> Table:
    """Return the last readings as a table."""
    rows = [*watch.rows][-TABLE_ROWS:]
    title = f"{watch.engine.title} at {watch.server}" if watch.engine else watch.server
    rich_table = Table(title=title, title_justify="left")
    names = [*dict.fromkeys(name for row in rows for name in row)]
    for name in names:
        rich_table.add_column(TITLES.get(name, name), justify="right")
    for row in rows:
        rich_table.add_row(*(_cell(name, row.get(name)) for name in names))
    return rich_table


def line(row: Row) -> str:
    """Return a reading as one line of text."""
    return ", ".join(f"{TITLES.get(name, name)}: {_cell(name, value)}" for name, value in row.items())


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return FORMATS[name].format(value) if name in FORMATS else f"{100 * value:.0f} %"
