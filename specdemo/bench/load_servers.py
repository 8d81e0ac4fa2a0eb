"""Lanes under load on servers, which are started for the suite or already run."""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import TypeVar

import httpx

from specdemo.bench.load_options import CONCURRENCY, LoadOptions
from specdemo.bench.load_points import Answer, Measure, MeasuredLane, Point
from specdemo.bench.prompts import PROMPTS
from specdemo.core.protocol import GenerationConfig
from specdemo.core.trace import LaneTrace, Remote, step_ms
from specdemo.engine.loop import never_cancelled
from specdemo.engine.session import environment
from specdemo.methods import BASELINE
from specdemo.presets.files import Preset, preset
from specdemo.presets.serve import Program, Served, on_free_ports, served
from specdemo.servers.address import allow, host
from specdemo.servers.client import Client, StatusError, connected
from specdemo.servers.engines import ENGINES, metrics_paths, stats_between
from specdemo.servers.engines.base import Schedule, ServingEngine
from specdemo.servers.lane import KEY, Form, RemoteLane
from specdemo.servers.process import ReportFunction
from specdemo.servers.stream import Piece, StreamParser

T = TypeVar("T")
RequestFunction = Callable[[int], Awaitable[Answer]]  # index of a request -> its answer


@dataclass(frozen=True, slots=True)
class Fleet:
    """Backend of servers, one per draft length k: started with an engine's program, or already running."""

    suite: LoadOptions
    chosen: Preset  # with one lane
    engine: ServingEngine
    program: Program | None
    running: Mapping[int, str]
    models: dict[str, str] = field(default_factory=dict)  # "host:port" -> model reported by the server

    @classmethod
    def of(cls, suite: LoadOptions, ks: Sequence[int]) -> "Fleet":
        """Create the backend of a suite. Raises ValueError with one line."""
        chosen = preset(suite.preset_id).with_changes(temperature=0.0, dtype=suite.dtype)
        chosen = chosen.model_copy(update={"lanes": chosen.lanes[:1]})
        engine = suite.serving_engine
        if not suite.servers:
            return cls(suite, chosen, engine, Program.find(engine.name, suite.command, suite.gpus), {})
        if len(suite.servers) != len(ks):
            raise ValueError(f"{len(suite.servers)} servers for k = {', '.join(map(str, ks))}; give one --server per k")
        allow(suite.servers)
        return cls(suite, chosen, engine, None, dict(zip(ks, suite.servers, strict=True)))

    def environment(self) -> dict[str, object]:
        """Return the facts for the result's file. device: the engine and its version, or the models that the servers
        report and their addresses."""
        version = self.program.installed.version if self.program and self.program.installed else ""
        hosts = map(host, self.running.values())
        named = ", ".join(f"{self.models[at]} at {at}" if at in self.models else at for at in hosts)
        title = f"{self.engine.name} {version}".strip() if self.program else named
        return environment(None) | {"device": title, "dtype": self.chosen.dtype, "served_models": self.models}

    def together(self, lanes: int) -> bool:
        """Return False if the servers have to share GPUs, or may have to."""
        if self.program is None:
            return True
        installed = self.program.installed
        return installed is not None and not 0 < installed.gpus < lanes * self.program.gpus

    @contextmanager
    def up(self, lanes: Sequence[MeasuredLane], report: ReportFunction) -> Iterator[list[Measure]]:
        """Start one server per lane, or use the running ones; yield one measuring function per lane."""
        with ExitStack() as running:
            lane_specs = [self.lane(lane.k, lane.schedule) for lane in lanes] if self.program else []
            for place, one in enumerate(lane_specs):
                assert self.program is not None
                running.enter_context(self.program.serve(one, report, place, len(lane_specs)))
            servers = [one.server for one in lane_specs] or [self.running[lane.k] for lane in lanes]
            yield [partial(_measure, self.suite, server, self._greet(server)) for server in servers]

    def lane(self, k: int, schedule: Schedule = (), engine: ServingEngine | None = None) -> Served:
        """Return how to start a server with k draft tokens, or with a schedule of at most k."""
        onto = on_free_ports(self.chosen.with_changes(k=k) if k else self.chosen)
        gpus = self.program.gpus if self.program else 1
        engine = engine or self.engine
        lane = list(served(onto, engine.name, gpus))[bool(k)]
        command = engine.with_schedule(lane.command, schedule)
        if k and not schedule and self.suite.lengths is not None:
            command = engine.with_length(command, self.suite.lengths.length(k))
        return replace(lane, command=command)

    def no_advice(self) -> str:
        """Return why no k can be recommended, an empty text if it can."""
        if self.program or self.suite.preset:
            return ""
        return "No recommendation: without --preset the drafter of these servers is unknown."

    def paste(self, schedule: Schedule) -> list[str]:
        """Return flags with the schedule for each engine; a schedule with one k is that k alone."""
        most = max(k for *_, k in schedule)
        schedule = schedule if len({k for *_, k in schedule}) > 1 else ()
        engines = [engine for engine in ENGINES.values() if engine.concurrent]
        hints = [engine.schedule_hint(self.lane(most, engine=engine).command, schedule) for engine in engines]
        return [*filter(None, hints)]

    def _greet(self, server: str) -> Remote:
        """Return the server's name for the model and its endpoint. Raises ValueError if it does not answer."""
        trace = LaneTrace("load", BASELINE, {}, True, [])
        config = GenerationConfig(min(self.suite.new_tokens, 8))
        forms: tuple[Form, ...] = ("completions", "chat/completions")
        try:
            for _ in RemoteLane(trace, server, None, self.chosen.target, PROMPTS[0], config, forms).events(
                never_cancelled
            ):
                pass
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        assert trace.remote is not None
        self.models[trace.remote.server] = trace.remote.model
        return trace.remote


def _measure(suite: LoadOptions, server: str, remote: Remote, place: float, warm_up: bool) -> Point:
    point = _point(suite, server, remote, place, warm_up)
    try:
        with ThreadPoolExecutor(1) as alone:  # the caller may run an event loop, as notebooks do
            return alone.submit(asyncio.run, point).result()
    except (StatusError, ConnectionError, httpx.HTTPError, ValueError) as error:
        message = str(error).replace(os.environ.get(KEY) or "\0", "***")  # a server may repeat the key in its message
        reason = " ".join(message.split())[:300] or type(error).__name__
        raise ValueError(f"{host(server)} failed under load: {reason}") from None


async def _point(suite: LoadOptions, server: str, remote: Remote, place: float, warm_up: bool) -> Point:
    texts = suite.texts
    count = suite.count(place, warm_up)
    async with connected(server, os.environ.get(KEY)) as http:

        async def request(number: int) -> Answer:
            return await _request(http, remote, number % len(texts), texts[number % len(texts)], suite.new_tokens)

        before, start = await http.metrics(metrics_paths()), perf_counter()
        answers = await _traffic(suite, request, place, count)
        seconds = perf_counter() - start
        return Point(answers, seconds, stats_between(before, await http.metrics(metrics_paths())))


async def _traffic(suite: LoadOptions, request: RequestFunction, place: float, count: int) -> list[Answer]:
    """Send `count` requests: `place` concurrently, each after the previous answer, or at random times with that
    rate.
    """
    if suite.over is CONCURRENCY:
        todo = iter(range(count))

        async def worker() -> list[Answer]:
            return [await request(number) for number in todo]

        return [a for answers in await _together(worker() for _ in range(int(place))) for a in answers]
    chance = random.Random(0)  # the same arrivals for every k

    async def later(number: int, seconds: float) -> Answer:
        await asyncio.sleep(seconds)
        return await request(number)

    arrivals = accumulate(chance.expovariate(place) for _ in range(count))
    return await _together(later(number, at) for number, at in enumerate(arrivals))


async def _together(asking: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Return all results. If one call fails, the others are cancelled before its error is raised."""
    tasks = [asyncio.create_task(one) for one in asking]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _request(http: Client, remote: Remote, index: int, text: str, tokens: int) -> Answer:
    """Send one greedy request. Raises the errors of Client and StreamParser, and ConnectionError if the response ends
    early.
    """
    chat = remote.endpoint.endswith("chat/completions")
    put: dict[str, object] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    how = {"model": remote.model, "max_tokens": tokens, "temperature": 0.0, "top_p": 1.0, "stream": True}
    pieces: list[Piece] = []
    parser = StreamParser(pieces.append, tokens)
    await parser.read_stream(http, remote.endpoint, {**put, **how, "stream_options": {"include_usage": True}})
    if not pieces:
        raise ConnectionError("the response ended early")
    first, *gaps = (step_ms(event) for event, _ in pieces)
    return Answer(index, "".join(piece for _, piece in pieces), parser.reported_tokens or parser.tokens, first, gaps)
