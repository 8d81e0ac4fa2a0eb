"""Servers for the lanes of a preset: their command lines, and running servers."""

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from specdemo.core.suggest import program
from specdemo.engine.comparison import Comparison, Lane
from specdemo.methods import BASELINE, validate_options
from specdemo.methods import method as class_of
from specdemo.methods.flags import AT, REMOVED, Flags, UnsupportedByEngine
from specdemo.models.hub import embedded_folder
from specdemo.models.resolve import config_folder, is_gguf
from specdemo.presets.files import EMBEDDED, Preset
from specdemo.servers.address import TITLES, Engine, address, admitted
from specdemo.servers.process import Installed, ReportFunction, Server, engine_program, free_port, installed, started

FIRST_PORT = 8000
PARALLEL = {"vllm": "--tensor-parallel-size", "sglang": "--tp-size"}
# no prefix caching: all lanes read the same prompt, and a cached one costs nothing
UNCACHED = {"vllm": "--no-enable-prefix-caching", "sglang": "--disable-radix-cache"}
LLAMAS = "llama.cpp runs Llama models without bias and RoPE scaling, and GGUF files"
CONFIG, ATTENTION = "--speculative-config", "--attention-backend"
GPU_SHARE = 0.9  # share of a GPU's memory for all servers on it; vLLM's default for one server


@dataclass(frozen=True, slots=True)
class Served:
    """A lane on a server of its own: the command that starts it, or why there is none. note: what the command needs."""

    name: str
    server: str
    command: list[str]
    refusal: str = ""
    note: str = ""


def served(preset: Comparison, engine: Engine, gpus: int = 1) -> Iterator[Served]:
    """Yield the baseline and every lane. gpus: GPUs per server."""
    plain = Lane(method=BASELINE, server=preset.server)
    for place, lane in enumerate((plain, *preset.lanes)):
        server = lane.server or f"http://127.0.0.1:{FIRST_PORT + place}"
        name = f"lane {place}: {lane.method}" if place else "baseline"
        model = None if lane.model == preset.target else _path(lane.model)  # heads inside the target
        try:
            if gpus > 1 and engine not in PARALLEL:
                raise UnsupportedByEngine(f"specdemo starts {TITLES[engine]} on the CPU; omit --gpus")
            drafting = _drafting(engine, lane, model)
            note = _check_llamacpp(preset, lane.model) if engine == "llamacpp" else _needs(drafting)
        except UnsupportedByEngine as reason:
            yield Served(name, server, [], str(reason))
            continue
        spread = [PARALLEL[engine], str(gpus)] if gpus > 1 else []
        yield Served(name, server, [*_start(preset, engine, server), *spread, *drafting], note=note)


def serve_commands(preset: Preset, engine: Engine, gpus: int = 1) -> list[str]:
    """Return shell lines: the command of every lane, then the command that races them. A lane that cannot be served
    gives a comment with the reason.
    """
    lines = [f"# {preset.title}; with --gpus N each server uses N GPUs"]
    if preset.quantization and not _quantises(preset, engine):
        lines.append(f"# {preset.quantization} is omitted: serve a checkpoint that is already quantised")
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


def _start(preset: Comparison, engine: Engine, server: str) -> list[str]:
    where = urlsplit(server)
    at = ["--host", where.hostname or "127.0.0.1", "--port", str(where.port or FIRST_PORT)]
    at = at if is_gguf(preset.target) else ["--dtype", preset.dtype, *at]  # a GGUF file has its own dtype
    if engine == "llamacpp":
        return [sys.executable, "-m", "specdemo.servers.llamacpp", preset.target, *at]
    name, _, revision = preset.target.partition(AT)
    target = _path(name) or name
    start = ["vllm", "serve", target] if engine == "vllm" else ["python", "-m", "sglang.launch_server"]
    flags = [] if engine == "vllm" else ["--model-path", target, "--enable-metrics"]
    if preset.target != target:
        flags += ["--served-model-name", preset.target]
    flags += ["--revision", revision] if revision else []
    flags += ["--quantization", "bitsandbytes"] if _quantises(preset, engine) else []
    return [*start, *flags, UNCACHED[engine], *at]


def _drafting(engine: Engine, lane: Lane, model: str | None) -> Flags:
    """Return the server flags of the lane's method; none for plain decoding. Raises UnsupportedByEngine.

    model: None if the target contains the heads.
    """
    if lane.method == BASELINE:
        return []
    serves = class_of(lane.method).serves
    if engine not in serves:
        able = "specdemo starts it only with a draft model or prompt lookup" if engine == "llamacpp" else ""
        raise UnsupportedByEngine(able or f"{TITLES[engine]} does not support this method")
    return serves[engine](model, lane.k, validate_options(lane.method, lane.options))


def _needs(flags: Flags) -> str:
    """Return which versions of vLLM take the flags, an empty text if all known ones do."""
    removed = REMOVED.get(_vllm_method(flags))
    return f"needs vLLM before {removed}, which removed {_vllm_method(flags)}" if removed else ""


def _vllm_method(command: Sequence[str]) -> str:
    """Return the method in vLLM's `--speculative-config`, an empty text without one."""
    return str(json.loads(command[command.index(CONFIG) + 1])["method"]) if CONFIG in command else ""


def _check_llamacpp(preset: Comparison, draft: str | None) -> str:
    """Raise NotServed if llama.cpp cannot be given a lane's models. Return a note if their configs are not known."""
    from specdemo.models.gguf import check_pair  # needs torch

    for name in (preset.target, draft):
        try:
            if name and not is_gguf(name):
                config_folder(name)
        except ValueError:
            return f"not checked, since the config of {name} is not on this machine; {LLAMAS}"
    try:
        check_pair(preset.target, draft, preset.dtype)
    except ValueError as error:
        raise UnsupportedByEngine(str(error)) from None
    return ""


def _quantises(preset: Comparison, engine: Engine) -> bool:
    """Return whether the server can quantise while loading, as the preset requires."""
    return engine == "vllm" and preset.quantization == "4bit"


def _path(model: str | None) -> str | None:
    """Return the folder of an embedded model, because servers do not know its name; other names unchanged."""
    return str(embedded_folder() / model) if model in EMBEDDED else model


@dataclass(frozen=True, slots=True)
class Program:
    """An installed engine. command: its program, None: the default; gpus: per server."""

    command: str | None
    gpus: int
    there: Installed | None

    @classmethod
    def find(cls, engine: Engine, command: str | None = None, gpus: int = 1) -> "Program":
        """Find an installed engine. Raises ValueError, with the command that installs it, if there is none."""
        path = engine_program(engine, command)
        return cls(command, gpus, installed(path) if engine == "vllm" else None)

    def check(self, lane: Served) -> None:
        """Raise ValueError, with the reason, for a lane that the engine cannot serve."""
        if reason := lane.refusal or self._unknown(lane.command):
            raise ValueError(f"{lane.name} is not served: {reason}; choose another method, or run it without a server")

    @contextmanager
    def serve(self, lane: Served, report: ReportFunction, place: int = 0, servers: int = 1) -> Iterator[Server]:
        """Run a lane's server, number `place` of `servers`, until the block ends.

        Raises ValueError with the end of its log if it does not start.
        """
        self.check(lane)
        line = [*([self.command] if self.command else lane.command[:1]), *lane.command[1:]]
        line, environment = self._fitted(line, place, servers)
        with admitted(lane.server), started(line, lane.server, environment) as server:
            seconds = server.wait(lambda said: report(f"{lane.name}, {said}"))
            report(f"{lane.name} is ready at {lane.server} after {seconds:.0f} s")
            yield server

    def _unknown(self, command: Sequence[str]) -> str:
        """Return why the installed version cannot run the command, if it lists its methods."""
        method = _vllm_method(command)
        if self.there is None or not method or method in self.there.methods:
            return ""
        cure = f"; install vllm<{REMOVED[method]}" if method in REMOVED else ""
        return f"vLLM {self.there.version} has no method {method!r}{cure}"

    def _fitted(self, command: list[str], place: int, servers: int) -> tuple[list[str], dict[str, str]]:
        """Return the command of server `place` adapted to this machine, and its environment.

        Every server gets separate GPUs if there are enough of them, otherwise a share of the memory of the first ones.
        On a CPU only one attention backend works.
        """
        if self.there is None:
            return command, {}
        if not self.there.gpus:
            place = command.index(ATTENTION) if ATTENTION in command else len(command)
            return command[:place] + command[place + 2 :], {}
        if self.there.gpus >= servers * self.gpus:
            own = range(place * self.gpus, (place + 1) * self.gpus)
            return command, {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}
        return [*command, "--gpu-memory-utilization", f"{GPU_SHARE / servers:.2f}"], {}


@contextmanager
def serving(
    preset: Preset, engine: Engine, report: ReportFunction, command: str | None = None, gpus: int = 1
) -> Iterator[tuple[Preset, list[Server]]]:
    """Start a server for the baseline and for each lane, one after the other, until the block ends.

    Yields the preset with its lanes on the servers, and the servers. command: the engine's program, where it is not on
    PATH. Raises ValueError as `Program.serve` does.
    """
    program = Program.find(engine, command, gpus)
    onto = on_free_ports(preset)
    lanes = list(served(onto, engine, gpus))
    for lane in lanes:
        program.check(lane)
    with ExitStack() as running:
        starts = (program.serve(lane, report, place, len(lanes)) for place, lane in enumerate(lanes))
        yield onto, [running.enter_context(start) for start in starts]


def on_free_ports(preset: Preset) -> Preset:
    """Return the preset with the baseline and every lane on a free port of this machine."""
    return preset.on_servers([f"http://127.0.0.1:{free_port()}" for _ in range(len(preset.lanes) + 1)])
