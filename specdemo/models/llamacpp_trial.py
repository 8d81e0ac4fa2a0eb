"""Trial of llama.cpp in a process of its own, because a crash in it ends the process that called it.

A library and a file are tried before they are first used together: the child loads the file and decodes two batches.
Its survival is remembered per library and file in the user's cache folder. Imports little, for a fast start of the
child.
"""

import json
import os
import platform
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from specdemo.core.atomic_io import cache_folder, json_text, write_text
from specdemo.models.llamacpp_layers import layer_inputs_agree, prediction_runs
from specdemo.models.packaged import LoadProgress, follow

REBUILD = 'CMAKE_ARGS="-DGGML_NATIVE=OFF" pip install --force-reinstall --no-cache-dir llama-cpp-python'
CPU = Path("/proc/cpuinfo")
CELLS = 256
BATCH_TOKENS = (5, 1)  # tokens of the batches
WINDOWS = {0xC0000005: "SIGSEGV", 0xC000001D: "SIGILL", 3: "SIGABRT"}  # exit codes there
CAUSES = {
    "SIGILL": "the library was probably built for another CPU",
    "SIGABRT": "the file is probably broken, or needs a newer llama.cpp",
}
AMX = "this CPU has AMX, for which gcc 12 compiles _tile_loadconfig wrongly"
UNKNOWN = "the library was probably built for another CPU, or the file is broken"
GOOD_LIBRARY = "the same library runs other files, so this one is probably broken; fetch it again"
NO_MEMORY = ("SIGKILL", "SIGTERM")  # from outside, mostly for want of memory

REASON = re.compile(r"GGML_ASSERT.*|what\(\):.*")  # in the log

# library and settings, file, its size and time -> how the child ended; empty: it survived
_ends: dict[tuple[str, str, str], str] = {}


class Trial(NamedTuple):
    """Input of the child. file: empty to try the library alone. layers: numbers of GPU layers to try, most first.
    layer_inputs: the child aborts where they cannot be read. rollback: tokens that recurrent layers can take back.
    prediction: also read with the prediction layer; only: the file has nothing else."""

    package: str
    file: str = ""
    layers: Sequence[int] = ()
    flash: bool = False
    layer_inputs: bool = False
    rollback: int = 0
    prediction: Literal["", "also", "only"] = ""


def check_llamacpp(trial: Trial, parts: Sequence[Path] = (), report: LoadProgress | None = None) -> None:
    """Raise ValueError, one line, if llama.cpp ends the process that runs it.

    Survivals are remembered in files, crashes only in this process, so that a mended machine is tried again. parts:
    all files of the model. report: called while the child runs.
    """
    library, name = _identity(trial), sha256(trial.file.encode()).hexdigest()
    stamp = " ".join(f"{info.st_size} {info.st_mtime_ns}" for info in (part.stat() for part in parts))
    known = _survivals(library)
    if not library or known.get(name) == stamp:
        return
    key = library, name, stamp
    end = _ends[key] if key in _ends else _run(trial, report)
    signal_name = end.partition(":")[0]
    if signal_name not in NO_MEMORY:
        _ends[key] = end
    if end:
        raise ValueError(f"{_subject(trial)} ended with {end}; {_advice(signal_name, any(known.keys() - {name}))}")
    for survived in (library, _identity(trial._replace(layer_inputs=False))):
        _ends[survived, name, stamp] = ""
        with suppress(OSError, ValueError, RuntimeError):
            trials_folder(survived).mkdir(parents=True, exist_ok=True)
            write_text(trials_folder(survived) / name, stamp)


def _subject(trial: Trial) -> str:
    return f"llama.cpp, tried with {Path(trial.file).name}," if trial.file else "llama.cpp"


def _advice(end: str, library_works: bool) -> str:
    """Return the likely cause, and the fix."""
    if end in NO_MEMORY:
        return "memory was probably too small; choose a smaller model or quantisation"
    if library_works:
        return GOOD_LIBRARY
    cause = CAUSES.get(end) or (AMX if "amx_tile" in _processor() else UNKNOWN)
    return f"{cause}; build the library for every CPU: {REBUILD}"


def _identity(trial: Trial) -> str:
    """Return what a result depends on besides the file; empty if the library is not installed."""
    spec = find_spec(trial.package)
    if spec is None or not spec.origin:
        return ""
    origin = Path(spec.origin)
    files = [origin, *sorted(origin.parent.glob("lib/*"))]
    try:
        release = version("llama-cpp-python")
    except PackageNotFoundError:
        release = ""
    described = [str(origin), release, *(f"{file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)]
    text = json_text([*described, _processor(), list(trial.layers), *trial[3:]])
    return sha256(text.encode()).hexdigest()


def _processor() -> str:
    """Return the kind of CPU with its features: a home folder may be shared by several machines."""
    try:
        lines = CPU.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU ")))


def _run(trial: Trial, report: LoadProgress | None) -> str:
    """Return the signal that ended the child, with the reason if llama.cpp gave one; empty if it survived."""
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-P", "-c", f"from {__name__} import try_out; try_out()", json_text(trial)]

    def trying() -> None:
        if report is not None:
            report(0.0, f"trying llama.cpp with {Path(trial.file).name} in another process, for the first time")

    return _end(*follow(command, trying, PYTHONPATH=paths, GGML_NO_BACKTRACE="1"))


def _end(status: int, log: str) -> str:
    """Return the name of the signal of an exit status, and the reason in the log; empty for an ordinary end."""
    if status >= 0:
        name = WINDOWS.get(status, "") if sys.platform == "win32" else ""
    else:
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-status, f"signal {-status}")
    return ": ".join([name, *REASON.findall(log)[:1]])[:300] if name else ""


def trials_folder(library: str) -> Path:
    """Return the folder that remembers survivals: one file for each file that the library has survived."""
    return cache_folder() / "llamacpp-trials" / library


def _survivals(library: str) -> dict[str, str]:
    """Return the hash of each file that the library has survived, with its size and time; none if unreadable."""
    with suppress(OSError, ValueError, RuntimeError):
        return {file.name: file.read_text(encoding="utf-8") for file in trials_folder(library).iterdir()}
    return {}


def try_out() -> None:
    """Run the trial of the command line in this process, which llama.cpp may end."""
    trial = Trial(*json.loads(sys.argv[1]))
    _no_core_dump()
    llama = import_module(trial.package)
    llama.llama_backend_init()
    model = None
    for count in trial.layers:
        parameters = llama.llama_model_default_params()
        parameters.n_gpu_layers, parameters.load_mtp = count, bool(trial.prediction)
        model = model or llama.llama_model_load_from_file(trial.file.encode(), parameters)
    if not model:
        return
    parameters = llama.llama_context_default_params()
    parameters.n_ctx, parameters.flash_attn_type = CELLS, int(-trial.flash)  # -1: where the device supports it
    parameters.n_rs_seq = trial.rollback
    context = None if trial.prediction == "only" else llama.llama_init_from_model(model, parameters)
    for width in BATCH_TOKENS if context else ():
        llama.llama_decode(context, llama.llama_batch_get_one((llama.llama_token * width)(), width))
    if context and trial.layer_inputs and not layer_inputs_agree(llama, model, context):
        os.abort()
    if trial.prediction:
        parameters.ctx_type, parameters.n_rs_seq = llama.LLAMA_CONTEXT_TYPE_MTP, 0
        if not prediction_runs(llama, model, llama.llama_init_from_model(model, parameters)):
            os.abort()
    os._exit(0)  # without freeing it


def _no_core_dump() -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
