"""A preset -> the lines that start its lanes on servers."""

import shlex
from pathlib import Path
from urllib.parse import urlsplit

from specdemo.engine.comparison import Lane
from specdemo.methods import BASELINE, validate_options
from specdemo.methods.flags import NotServed
from specdemo.presets.files import EMBEDDED, Preset
from specdemo.servers.address import address
from specdemo.servers.flags import Engine, speculation_flags

FIRST_PORT = 8000
PARALLEL = {"vllm": "--tensor-parallel-size", "sglang": "--tp-size"}


def serve_commands(preset: Preset, engine: Engine, models: Path | None = None) -> list[str]:
    """Shell lines: the baseline's, every lane's, then how to race them. A lane that cannot be served says why.

    models: the folder of the embedded models, whose names no server knows.
    """
    plain = Lane(method=BASELINE, server=preset.server)
    lines = [f"# {preset.title}; over N GPUs add {PARALLEL[engine]} N to a line"]
    if preset.quantization and not _quantises(preset, engine):
        lines.append(f"# {preset.quantization} is left out: serve a checkpoint that is quantised already")
    servers = []
    for place, lane in enumerate((plain, *preset.lanes)):
        server = lane.server or f"http://127.0.0.1:{FIRST_PORT + place}"
        name = f"lane {place}: {lane.method}" if place else "baseline"
        model = None if lane.model == preset.target else _path(lane.model, models)  # heads inside the target
        options = validate_options(lane.method, lane.options)
        try:
            drafting = speculation_flags(engine, lane.method, model, lane.k, options)
        except NotServed as reason:
            lines.append(f"# {name}: not served, {reason}")
            continue
        lines += [f"# {name}", shlex.join([*_start(preset, engine, server, models), *drafting])]
        servers.append(server)
    asked = " ".join(f"--server {address(server)}" for server in servers)
    if len(servers) == len(preset.lanes) + 1:
        lines += ["# then", f"specdemo run {preset.id} {asked}"]
    return lines


def _start(preset: Preset, engine: Engine, server: str, models: Path | None) -> list[str]:
    target = _path(preset.target, models) or preset.target
    start = ["vllm", "serve", target] if engine == "vllm" else ["python", "-m", "sglang.launch_server"]
    flags = [] if engine == "vllm" else ["--model-path", target, "--enable-metrics"]
    if preset.target != target:
        flags += ["--served-model-name", preset.target]
    flags += ["--dtype", preset.dtype]
    if _quantises(preset, engine):
        flags += ["--quantization", "bitsandbytes"]
    where = urlsplit(server)
    return [*start, *flags, "--host", where.hostname or "127.0.0.1", "--port", str(where.port or FIRST_PORT)]


def _quantises(preset: Preset, engine: Engine) -> bool:
    """Whether the server can quantise while it loads, as the preset wants."""
    return engine == "vllm" and preset.quantization == "4bit"


def _path(model: str | None, models: Path | None) -> str | None:
    return str(models / model) if models and model in EMBEDDED else model
