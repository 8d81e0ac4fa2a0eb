"""Servers for lanes of the page. If a lane's server is the name of an engine, such as `vllm`, a server is started for
it and reused by the next run.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from specdemo.engine.comparison import Comparison
from specdemo.models.errors import Cancelled
from specdemo.models.sources import LoadProgress
from specdemo.presets.serve import Program, Served, served
from specdemo.servers.address import check_listed, startable
from specdemo.servers.engines import ENGINES
from specdemo.servers.process import ReportFunction, Server, free_port

Key = tuple[object, ...]  # equal for servers with the same command


@dataclass(frozen=True, slots=True)
class _EngineRequest:
    """A server that has to be up: number `number` of `servers`."""

    program: Program
    lane: Served
    number: int
    servers: int

    @property
    def key(self) -> Key:
        port = self.lane.server.rpartition(":")[2]
        return self.number, self.servers, self.program.command, *(word for word in self.lane.command if word != port)


class Engines:
    """Servers that lanes were started on. Each stays up until a run wants others in its place, or `end`."""

    def __init__(self) -> None:
        self._up: dict[Key, tuple[Server, ExitStack]] = {}

    def onto(self, spec: Comparison, report: LoadProgress, cancelled: Callable[[], bool]) -> Comparison:
        """Return the comparison with every engine's name replaced by the address of a running server.

        If all lanes run on one engine, so does the baseline, unless it has a server. Raises ValueError for an engine
        that is not allowed or does not start, and Cancelled if the start was cancelled.
        """
        requests = _engine_requests(spec)
        if requests:
            self._keep({want.key for want in requests.values()})
        lanes = [*spec.all_lanes]
        for place, want in requests.items():

            def report_start(message: str, want: _EngineRequest = want) -> None:
                what = f"{want.program.engine.title}, {want.number + 1} of {want.servers}"
                if cancelled():
                    raise Cancelled(f"stopped while {what} was starting")
                report(want.number / want.servers, f"starting {what}: {message}")

            name = want.program.engine.served_name(spec.target) or lanes[place].served_model
            running = {"server": self._server(want, report_start).address, "served_model": name}
            lanes[place] = lanes[place].model_copy(update=running)
        baseline = {"server": lanes[0].server, "served_model": lanes[0].served_model}
        return spec.model_copy(update={**baseline, "lanes": lanes[1:]})

    def end(self) -> int:
        """End all servers and return their number."""
        ended = len(self._up)
        self._keep(set())
        return ended

    def _keep(self, needed: set[Key]) -> None:
        """End servers that are not needed, and forget those that have exited."""
        for key, (server, running) in [*self._up.items()]:
            if key not in needed or server.process.poll() is not None:
                self._up.pop(key, None)  # a stopped run may remove it at the same time
                running.close()

    def _server(self, want: _EngineRequest, report: ReportFunction) -> Server:
        if want.key not in self._up:
            with ExitStack() as starting:
                server = starting.enter_context(want.program.serve(want.lane, report, want.number, want.servers))
                self._up[want.key] = server, starting.pop_all()
        return self._up[want.key][0]


def _engine_requests(spec: Comparison) -> dict[int, _EngineRequest]:
    """Return the requested servers by lane index. Raises ValueError for an engine that is not allowed or cannot serve
    its lane.
    """
    places = [lane.server for lane in spec.all_lanes]
    if places[0] is None and len({*places[1:]}) == 1:
        places[0] = places[1]
    named = {place: check_listed(name) for place, name in enumerate(places) if name in ENGINES}
    requests = {}
    for number, (place, name) in enumerate(named.items()):
        lane = [*served(_on(spec, f"http://127.0.0.1:{free_port()}"), name)][place]
        requests[place] = _EngineRequest(Program.find(name, startable[name]), lane, number, len(named))
        requests[place].program.check(lane)
    return requests


def _on(spec: Comparison, server: str) -> Comparison:
    lanes = [lane.model_copy(update={"server": server}) for lane in spec.lanes]
    return spec.model_copy(update={"server": server, "lanes": lanes})
