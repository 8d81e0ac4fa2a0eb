"""Servers for the lanes of a preset: their command lines, and running servers."""

import os
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from specdemo.core.settings import to_values
from specdemo.core.suggest import program
from specdemo.engine.comparison import Comparison, Lane
from specdemo.methods import BASELINE
from specdemo.presets.files import Preset
from specdemo.servers.address import address, admit
from specdemo.servers.engines import serving_engine
from specdemo.servers.engines.base import Installed, ServerConfig, ServingEngine, UnsupportedByEngine
from specdemo.servers.process import ReportFunction, Server, free_port, run_server

FIRST_PORT = 8000


@dataclass(frozen=True, slots=True)
class Served:
    """A lane on a server of its own: the command that starts it, or why there is none. note: what the command needs."""

    name: str
    server: str
    command: list[str]
    refusal: str = ""
    note: str = ""


def served(preset: Comparison, engine: str, gpus: int = 1) -> Iterator[Served]:
    """Yield the baseline and every lane. gpus: GPUs per server. Raises ValueError for an unknown engine."""
    served_by = serving_engine(engine)
    plain = Lane(method=BASELINE, server=preset.server)
    for place, lane in enumerate((plain, *preset.lanes)):
        server = lane.server or f"http://127.0.0.1:{FIRST_PORT + place}"
        name = f"lane {place}: {lane.method}" if place else "baseline"
        config = ServerConfig(
            target=preset.target,
            address=server,
            dtype=preset.dtype,
            quantization=preset.quantization,
            gpus=gpus,
            method=lane.method,
            model=None if lane.model == preset.target else lane.model,  # None: heads inside the target
            k=lane.budget.depth,
            options=to_values(lane.parsed),
        )
        try:
            entry = Served(name, server, served_by.command(config), note=served_by.note(config))
        except UnsupportedByEngine as reason:
            entry = Served(name, server, [], str(reason))
        yield entry


def serve_commands(preset: Preset, engine: str, gpus: int = 1) -> list[str]:
    """Return shell lines: the command of every lane, then the command that races them. A lane that cannot be served
    gives a comment with the reason.
    """
    lines = [f"# {preset.title}; with --gpus N each server uses N GPUs"]
    if preset.quantization and preset.quantization not in serving_engine(engine).quantization:
        lines.append(f"# {preset.quantization} is omitted: serve a checkpoint that is already quantised")
    same_bits = serving_engine(engine).same_bits
    lines += [f"# {same_bits}"] if same_bits else []
    lanes = list(served(preset, engine, gpus))
    for lane in lanes:
        if lane.refusal:
            lines.append(f"# {lane.name}: not served, {lane.refusal}")
        else:
            lines += [f"# {lane.name}{lane.note and f'; {lane.note}'}", shlex.join(lane.command)]
    if not any(lane.refusal for lane in lanes):
        server_options = " ".join(f"--server {address(lane.server)}" for lane in lanes)
        lines += ["# then", f"{program()} run {preset.id} {server_options}"]
    return lines


@dataclass(frozen=True, slots=True)
class Program:
    """An installed engine. gpus: per server; installed: None if unknown; command: its program, None: the default."""

    engine: ServingEngine
    gpus: int
    installed: Installed | None
    command: str | None = None

    @classmethod
    def find(cls, engine: str, command: str | None = None, gpus: int = 1) -> "Program":
        """Find an installed engine. Raises ValueError, with the command that installs it, if there is none."""
        server_engine = serving_engine(engine)
        return cls(server_engine, gpus, server_engine.probe(server_engine.find(command)), command)

    @property
    def title(self) -> str:
        """Return the engine and its version, if that is known."""
        return f"{self.engine.title} {self.installed.version}" if self.installed else self.engine.title

    def refusal(self, lane: Served) -> str:
        """Return why the engine cannot serve a lane, an empty text if it can."""
        return lane.refusal or self.engine.rejection(lane.command, self.installed)

    def check(self, lane: Served) -> None:
        """Raise ValueError, with the reason, for a lane that the engine cannot serve."""
        if reason := self.refusal(lane):
            raise ValueError(f"{lane.name} is not served: {reason}; choose another method, or run it without a server")

    @contextmanager
    def serve(self, lane: Served, report: ReportFunction, place: int = 0, servers: int = 1) -> Iterator[Server]:
        """Run a lane's server, number `place` of `servers`, until the block ends.

        Raises ValueError with the end of its log if it does not start.
        """
        self.check(lane)
        line = [*([self.command] if self.command else lane.command[:1]), *lane.command[1:]]
        line, own = self.engine.fit(line, self.installed, place, servers, self.gpus)
        environment = {**self.engine.environment, **os.environ, **own}
        with admit(lane.server), run_server(line, lane.server, environment) as server:
            seconds = server.wait(lambda message: report(f"{lane.name}, {message}"))
            report(f"{lane.name} is ready at {lane.server} after {seconds:.0f} s")
            yield server


@contextmanager
def serving(
    preset: Preset, engine: str, report: ReportFunction, command: str | None = None, gpus: int = 1
) -> Iterator[tuple[Preset, list[Server]]]:
    """Start a server for the baseline and for each lane, one after the other, until the block ends.

    Yields the preset with its lanes on the servers, and the servers. command: the engine's program, where it is not on
    PATH. Raises ValueError as `Program.serve` does.
    """
    program = Program.find(engine, command, gpus)
    onto = on_free_ports(preset, program.engine.served_name(preset.target))
    lanes = list(served(onto, engine, gpus))
    for lane in lanes:
        program.check(lane)
    with ExitStack() as running:
        starts = (program.serve(lane, report, place, len(lanes)) for place, lane in enumerate(lanes))
        yield onto, [running.enter_context(start) for start in starts]


def on_free_ports(preset: Preset, served_model: str | None = None) -> Preset:
    """Return the preset with the baseline and every lane on a free port of this machine."""
    return preset.on_servers([f"http://127.0.0.1:{free_port()}" for _ in range(len(preset.lanes) + 1)], served_model)
