"""Load: many requests at a time on servers that draft k tokens, and what k is best at which load.

Clocks are the client's. A request's first piece of text is its TTFT, the gaps between its pieces are its inter-token
latencies (ITL), of which one may hold several tokens, and its whole time over its tokens is its ms/token ("normalized
latency", Kwon et al. 2309.06180), which does not depend on how a server bunches what it sends. Goodput counts the
requests that keep both bounds (Zhong et al. 2401.09670): on TTFT and on ms/token.
"""

import asyncio
import json
import os
import random
import shlex
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, groupby
from statistics import quantiles
from typing import Any

import httpx

from specdemo.bench.base import Axis, Report
from specdemo.bench.load_options import CONCURRENCY, LoadOptions
from specdemo.bench.prompts import PROMPTS
from specdemo.bench.result import LATENCY, Result, Spread
from specdemo.core.protocol import GenerationConfig
from specdemo.core.tally import ratio
from specdemo.core.trace import LaneTrace, Remote, step_ms
from specdemo.engine.loop import never
from specdemo.engine.session import environment
from specdemo.methods import BASELINE
from specdemo.methods.flags import vllm_config
from specdemo.models.hub import embedded_folder
from specdemo.presets.files import Preset, preset
from specdemo.presets.serve import CONFIG, Program, Served, on_free_ports, served
from specdemo.servers.address import allow, host
from specdemo.servers.answer import Heard, Piece
from specdemo.servers.client import Client, Refused
from specdemo.servers.counters import Told, between
from specdemo.servers.flags import Engine, known_engine
from specdemo.servers.lane import KEY, METRICS_BYTES, Form, RemoteLane
from specdemo.servers.started import Tell

LENGTHS = (1, 2, 4)  # of the suite's texts, one behind the other
ROUNDS = 4  # requests for each that is at work at a time, unless told
FEWEST = 8
SHARES = (50, 99)
GOODPUT = "good requests/s"
BUNCHED = 0.1  # of the time of a token
PLAIN, SCHEDULED = "Baseline", "schedule"
COUNTED = (
    "Times in ms, on the client: to the first piece of text (TTFT), between pieces, which may hold several tokens"
    " (ITL), and of a whole request over its tokens (ms/token)."
)
SCHEDULE = "num_speculative_tokens_per_batch_size"  # vLLM's name; config/speculative.py

Row = dict[str, Any]
Schedule = Sequence[Sequence[int]]  # [from, to, k]: of batch sizes
Points = dict[float, list["Point"]]  # load -> one per repeat
Ask = Callable[[int], Awaitable["Answer"]]  # the number of the request


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's; times in ms."""

    asked: int  # the prompt's place
    text: str
    tokens: int
    ttft: float
    gaps: Sequence[float]

    @property
    def per_token(self) -> float:
        """The whole time over the tokens."""
        return (self.ttft + sum(self.gaps)) / max(self.tokens, 1)


@dataclass(frozen=True, slots=True)
class Point:
    """One load, once."""

    answers: Sequence[Answer]
    seconds: float
    told: Told

    @property
    def throughput(self) -> float:
        """Tokens a second, of all requests together."""
        return sum(answer.tokens for answer in self.answers) / self.seconds

    def goodput(self, ttft: float | None, itl: float | None) -> float:
        """Requests a second that keep the bounds, in ms; None: there is none."""
        good = (a for a in self.answers if (ttft is None or a.ttft <= ttft) and (itl is None or a.per_token <= itl))
        return sum(1 for _ in good) / self.seconds


@dataclass(slots=True)
class Measured:
    """A lane: its points at every load, one per repeat, and the plain ones that took turns with them."""

    lane: str
    k: int
    schedule: Schedule = ()
    points: Points = field(default_factory=lambda: defaultdict(list))
    plain: Points = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Where the lane of a preset is served with k drafts: by an engine's program that is started for it, or at servers
    that run already, one for every k."""

    chosen: Preset  # of one lane
    engine: Engine
    program: Program | None
    running: Mapping[int, str]

    @classmethod
    def of(cls, suite: LoadOptions, ks: Sequence[int]) -> "Fleet":
        """Raises ValueError with one line."""
        chosen = preset(suite.preset).with_changes(temperature=0.0)
        chosen = chosen.model_copy(update={"lanes": chosen.lanes[:1]})
        engine = known_engine(suite.engine or "vllm")
        if not suite.servers:
            return cls(chosen, engine, Program.find(engine, suite.command, suite.gpus), {})
        if len(suite.servers) != len(ks):
            raise ValueError(f"{len(suite.servers)} servers for k = {', '.join(map(str, ks))}; name one for each")
        allow(suite.servers)
        return cls(chosen, engine, None, dict(zip(ks, suite.servers, strict=True)))

    @property
    def title(self) -> str:
        """What serves, for people."""
        version = self.program.there.version if self.program and self.program.there else ""
        return f"{self.engine} {version}".strip() if self.program else ", ".join(map(host, self.running.values()))

    def together(self, lanes: int) -> bool:
        """Whether so many servers can be up at a time without taking each other's memory: not where they share GPUs,
        or may."""
        if self.program is None:
            return True
        there = self.program.there
        return there is not None and not 0 < there.gpus < lanes * self.program.gpus

    @contextmanager
    def up(self, lanes: Sequence[Measured], tell: Tell) -> Iterator[list[str]]:
        """The addresses of the lanes' servers."""
        if self.program is None:
            yield [self.running[lane.k] for lane in lanes]
            return
        asked = [self.lane(lane.k, lane.schedule) for lane in lanes]
        with ExitStack() as running:
            for place, one in enumerate(asked):
                running.enter_context(self.program.serve(one, tell, place, len(asked)))
            yield [one.server for one in asked]

    def lane(self, k: int, schedule: Schedule = ()) -> Served:
        """How a server that drafts k tokens, or by a schedule k at most, is started."""
        onto = on_free_ports(self.chosen.with_changes(k=k) if k else self.chosen)
        gpus = self.program.gpus if self.program else 1
        lane = list(served(onto, self.engine, embedded_folder(), gpus))[bool(k)]
        if not schedule or CONFIG not in lane.command:
            return lane
        at = lane.command.index(CONFIG) + 1
        _, config = vllm_config(**json.loads(lane.command[at]), **{SCHEDULE: schedule})
        return replace(lane, command=[*lane.command[:at], config, *lane.command[at + 1 :]])


def load(suite: LoadOptions, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Every k at every load. The servers take turns where all can be up at a time, else they come one by one."""
    ks = sorted({0, *suite.ks})
    fleet = Fleet.of(suite, ks)
    lanes = [Measured(f"k = {k}" if k else PLAIN, k) for k in ks]
    share = 0.5 if suite.schedule else 1.0
    _measure(suite, fleet, lanes, lambda done, what: report(share * done, what), cancelled)
    schedule = schedule_of(_rows(suite, lanes)) if suite.over is CONCURRENCY else []
    most = max((k for *_, k in schedule), default=0)
    if suite.schedule and most:
        again = [Measured(PLAIN, 0), Measured(SCHEDULED, most, schedule)]
        _measure(suite, fleet, again, lambda done, what: report(0.5 + 0.5 * done, what), cancelled)
        lanes.append(again[1])
    rows = _rows(suite, lanes)
    remarks = [*_gains(rows, suite.over), *_advice(rows, schedule, fleet), *bunched(rows)]
    if not fleet.together(len(ks)):
        remarks.append("The servers were up one by one, each with all GPUs to itself, and did not take turns.")
    where = environment(None) | {"device": fleet.title, "dtype": fleet.chosen.dtype}
    config = suite.config(fleet.chosen.target)
    return Result(suite.name, suite.repeats, config, where, rows, [*remarks, COUNTED], suite.over.column)


def _measure(
    suite: LoadOptions, fleet: Fleet, lanes: Sequence[Measured], report: Report, cancelled: Callable[[], bool]
) -> None:
    """Write the points of every lane. The first lane is the plain one."""
    groups = [[*lanes]] if fleet.together(len(lanes)) else [[lane] for lane in lanes]
    for done, group in enumerate(groups):

        def tell(share: float, what: str, done: int = done) -> None:
            if cancelled():
                raise ValueError("stopped before every k was measured: nothing can be compared")
            report((done + share) / len(groups), what)

        with fleet.up(group, partial(tell, 0.0)) as servers:
            _take_turns(suite, fleet.chosen, dict(zip(servers, group, strict=True)), tell)
    for lane in lanes:
        lane.plain = lanes[0].points


def _take_turns(suite: LoadOptions, chosen: Preset, lanes: Mapping[str, Measured], tell: Report) -> None:
    """Every load on every server: once off the clock, then as often as asked."""
    texts = _texts(suite)
    told = {server: _greet(server, chosen, suite.new_tokens) for server in lanes}
    turns = [(n, place, server) for n in range(suite.repeats + 1) for place in suite.loads for server in lanes]
    for number, (repeat, place, server) in enumerate(turns):
        what = f"repeat {repeat} of {suite.repeats}" if repeat else "warm-up"
        tell(number / len(turns), f"{lanes[server].lane}, {suite.over.title} {place:g}, {what}")
        point = _point(suite, server, told[server], texts, place, warm_up=not repeat)
        try:
            with ThreadPoolExecutor(1) as alone:  # whoever asks may have a loop of its own, as notebooks do
                measured = alone.submit(asyncio.run, point).result()
        except (Refused, ConnectionError, httpx.HTTPError, ValueError) as error:
            said = str(error).replace(os.environ.get(KEY) or "\0", "***")  # a server may quote the key back
            reason = " ".join(said.split())[:300] or type(error).__name__
            raise ValueError(f"{host(server)} failed under load: {reason}") from None
        if repeat:
            lanes[server].points[place].append(measured)


def _greet(server: str, chosen: Preset, tokens: int) -> Remote:
    """What the server calls the model, and where it takes a text. Raises ValueError where it does not answer."""
    trace = LaneTrace("load", BASELINE, {}, True, [])
    config = GenerationConfig(min(tokens, 8))
    forms: tuple[Form, ...] = ("completions", "chat/completions")
    try:
        for _ in RemoteLane(trace, server, None, chosen.target, PROMPTS[0], config, forms).events(never):
            pass
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    assert trace.remote is not None
    return trace.remote


def _texts(suite: LoadOptions) -> Sequence[str]:
    """The prompts given, else the suite's own in several lengths."""
    ring = [*PROMPTS, *PROMPTS]
    return suite.prompts or [" ".join(ring[i : i + n]) for i in range(len(PROMPTS)) for n in LENGTHS]


async def _point(
    suite: LoadOptions, server: str, remote: Remote, texts: Sequence[str], place: float, warm_up: bool
) -> Point:
    at_once = int(place) if suite.over is CONCURRENCY else FEWEST
    count = at_once if warm_up else suite.requests or max(FEWEST, ROUNDS * at_once)
    async with Client(server, os.environ.get(KEY)) as http:

        async def ask(number: int) -> Answer:
            return await _ask(http, remote, number % len(texts), texts[number % len(texts)], suite.new_tokens)

        before, began = await _metrics(http), time.perf_counter()
        answers = await _traffic(suite, ask, place, count)
        seconds = time.perf_counter() - began
        return Point(answers, seconds, between(before, await _metrics(http)))


async def _traffic(suite: LoadOptions, ask: Ask, place: float, count: int) -> list[Answer]:
    """So many requests: each after the answer before it, `place` at a time, or as many a second by chance."""
    if suite.over is CONCURRENCY:
        todo = iter(range(count))

        async def worker() -> list[Answer]:
            return [await ask(number) for number in todo]

        return [a for answers in await asyncio.gather(*(worker() for _ in range(int(place)))) for a in answers]
    chance = random.Random(0)  # the same arrivals for every k

    async def later(number: int, seconds: float) -> Answer:
        await asyncio.sleep(seconds)
        return await ask(number)

    arrivals = accumulate(chance.expovariate(place) for _ in range(count))
    return [*await asyncio.gather(*(later(number, at) for number, at in enumerate(arrivals)))]


async def _ask(http: Client, remote: Remote, asked: int, text: str, tokens: int) -> Answer:
    """One request, greedy. Raises what Client and Heard raise, and ConnectionError for an answer without an end."""
    chat = remote.endpoint.endswith("chat/completions")
    put: dict[str, object] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    how = {"model": remote.model, "max_tokens": tokens, "temperature": 0.0, "top_p": 1.0, "stream": True}
    pieces: list[Piece] = []
    heard = Heard(pieces.append, tokens)
    heard.begin()
    question = {**put, **how, "stream_options": {"include_usage": True}}
    async with aclosing(http.events(remote.endpoint, question, tokens)) as said:
        async for chunk, arrived in said:
            heard.hear(chunk, arrived)
    if heard.finish is None or not pieces:
        raise ConnectionError("an answer broke off")
    first, *gaps = (step_ms(event) for event, _ in pieces)
    return Answer(asked, "".join(piece for _, piece in pieces), heard.told or heard.tokens, first, gaps)


async def _metrics(http: Client) -> str | None:
    """The text of /metrics. None: there is none."""
    try:
        return (await http.read("/metrics", METRICS_BYTES)).decode(errors="replace")
    except (Refused, httpx.HTTPError, ValueError):
        return None


def _rows(suite: LoadOptions, done: Sequence[Measured]) -> list[Row]:
    first = [answer for place in suite.loads for point in done[0].points[place] for answer in point.answers]
    texts = {answer.asked: answer.text for answer in reversed(first)}
    return [_row(suite, lane, texts, place) for place in suite.loads for lane in done]


def _row(suite: LoadOptions, lane: Measured, texts: Mapping[int, str], place: float) -> Row:
    points, beside = lane.points[place], lane.plain[place]
    answers = [answer for point in points for answer in point.answers]
    gaps = [gap for answer in answers for gap in answer.gaps]
    first = [answer.ttft for answer in answers]
    told = points[-1].told.counters
    unlike = sum(answer.text != texts.get(answer.asked, answer.text) for answer in answers)
    return {
        "lane": lane.lane,
        "k": lane.k,
        suite.over.column: place,
        "tokens/s": Spread.of([point.throughput for point in points]),
        "speed-up": Spread.of([p.throughput / b.throughput for p, b in zip(points, beside, strict=True)]),
        GOODPUT: Spread.of([point.goodput(suite.slo_ttft, suite.slo_itl) for point in points]),
        LATENCY: Spread.of([answer.per_token for answer in answers]),
        **{f"TTFT p{share}": _percentile(first, share) for share in SHARES},
        **{f"ITL p{share}": _percentile(gaps, share) for share in SHARES},
        "accepted": told.get("acceptance_rate"),
        "tokens/pass": told.get("tokens_per_step"),
        "output": f"{unlike} of {len(answers)} differ" if unlike else "identical",
    }


def _percentile(values: Sequence[float], share: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return round(quantiles(values, n=100, method="inclusive")[share - 1], 2)


def schedule_of(rows: Sequence[Row]) -> list[list[int]]:
    """The k of most goodput at every concurrency, as vLLM's [[from, to, k], ...] of batch sizes: each from its own load
    up to the next. Where goodput is alike throughput decides, then the shorter draft."""
    best = {at: row["k"] for at, row in _best(rows).items()}
    ends = [at - 1 for at in [*best][1:]] + [max(best)]
    ranges: list[list[int]] = []
    for k, same in groupby(zip(best.values(), ends, strict=True), key=lambda pair: pair[0]):
        *_, (_, end) = same
        ranges.append([ranges[-1][1] + 1 if ranges else 1, end, k])
    return ranges


def _best(rows: Sequence[Row]) -> dict[int, Row]:
    by_load = groupby((row for row in rows if row["lane"] != SCHEDULED), key=lambda row: int(row["concurrency"]))
    return {at: max(them, key=lambda row: (row[GOODPUT].median, row["tokens/s"].median)) for at, them in by_load}


def _gains(rows: Sequence[Row], over: Axis) -> list[str]:
    """Where each lane's gain is."""
    gains: dict[str, list[str]] = {row["lane"]: [] for row in rows if row["lane"] != PLAIN}
    for row in rows:
        if row["speed-up"].q1 > 1.0:
            gains[row["lane"]].append(f"{row[over.column]:g}")
    none = "none of these"
    return [f"{lane}: faster at {over.title} {', '.join(at) or none}." for lane, at in gains.items()]


def _advice(rows: Sequence[Row], schedule: Schedule, fleet: Fleet) -> list[str]:
    """The schedule, ready to paste, and what it gives."""
    if not schedule:
        return []
    most = max(k for *_, k in schedule)
    if not most:
        return ["No k beats plain decoding at any of these loads: serve without speculation."]
    best = {at: row[GOODPUT].median for at, row in _best(rows).items()}
    goods: dict[str, dict[int, float]] = {}
    for row in rows:
        goods.setdefault(row["lane"], {})[int(row["concurrency"])] = row[GOODPUT].median

    def against(lane: str, own: Mapping[int, float]) -> str:
        return f"{', '.join(f'{ratio(own[at], goods[lane][at]) or 0.0:.2f}x' for at in own)} of {lane}"

    fixed = max(
        (lane for lane in goods if lane not in (PLAIN, SCHEDULED)),
        key=lambda lane: sum(ratio(goods[lane][at], best[at]) or 0.0 for at in best),
    )
    loads = ", ".join(map(str, best))
    told = [
        f"Schedule {json.dumps(schedule)}: goodput at {loads} at a time {against(PLAIN, best)},"
        f" {against(fixed, best)}, which is the best of one k."
    ]
    if again := [f"{row['speed-up'].median:.2f}x" for row in rows if row["lane"] == SCHEDULED]:
        told.append(f"Measured with the schedule, in turns with {PLAIN}: {', '.join(again)}.")
    command = fleet.lane(most, schedule).command
    if CONFIG in command:
        told.append(f"For vLLM: {shlex.join(command[command.index(CONFIG) :][:2])}")
    return told


def bunched(rows: Sequence[Row]) -> list[str]:
    """Whether most gaps are none: then a TTFT holds the decoding."""
    lanes = dict.fromkeys(row["lane"] for row in rows if (row["ITL p50"] or 0.0) < BUNCHED * row[LATENCY].median)
    return [f"Text arrived in bunches ({', '.join(lanes)}): TTFT and ITL say little, ms/token holds."] if lanes else []
