"""Runs of the page, on the engine of this process or of a process that has a GPU for a limited time."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial

from specdemo.engine.comparison import Comparison
from specdemo.engine.lanes import lane_name
from specdemo.engine.messages import Started
from specdemo.engine.session import follow_up, session
from specdemo.models.checkpoints import PICKLED
from specdemo.models.devices import best_device, device_kind
from specdemo.models.gguf_files import missing_bytes
from specdemo.models.sources import size_text
from specdemo.presets import limits
from specdemo.presets.files import Preset
from specdemo.ui import space
from specdemo.ui.job import Messages, Work, Worker, reason
from specdemo.ui.views import Failed, Shown

__all__ = ["follow_up", "lane_name", "no_gpu", "preload", "question", "run", "session", "with_engine_lock"]

ELSEWHERE = space.zero_gpu()  # the engine runs in another process


def with_engine_lock(work: Work) -> Work:
    """Run work while no other work uses the engine."""

    def alone(cancelled: Callable[[], bool], report: Callable[..., None]) -> Iterator[object]:
        with session().lock:
            yield from work(cancelled, report)

    return alone


def run(spec: Comparison, cancelled: Callable[[], bool], report: Callable[..., None]) -> Iterator[Shown]:
    """Yield the messages of a run, or why there is none."""
    started = False
    if limits.public() and (lacking := no_gpu(spec)):  # trying anyway would block a shared machine
        yield Failed(lacking)
        return
    try:
        for message in _on_borrowed_gpu(spec, cancelled) if ELSEWHERE else _stream(spec, cancelled, report):
            started = started or isinstance(message, Started)
            yield message
    except Exception as error:
        words = getattr(error, "message", None) or str(error) or type(error).__name__
        scheduler = f"{'the GPU was taken away' if started else 'no GPU for this run'}: {words}"
        yield Failed(scheduler if ELSEWHERE else reason(error))  # those of the engine are messages there


def _stream(spec: Comparison, cancelled: Callable[[], bool], report: Callable[..., None]) -> Iterator[Shown]:
    if limits.public():
        session().forget_learned()  # a draft that learned from one visitor's text must not be used for another
    return session().stream(spec, cancelled, report)


def _on_borrowed_gpu(spec: Comparison, cancelled: Callable[[], bool]) -> Iterator[Shown]:
    with contextlib.closing(_play(spec)) as batches:
        for batch in batches:
            if cancelled():
                return
            yield from batch


@space.on_zero_gpu(space.seconds)
def _play(spec: Comparison) -> Generator[Messages, None, None]:
    """Yield the new messages of a run 15 times a second."""
    worker = Worker(partial(_stream, spec), space.left_s(spec))
    with contextlib.closing(worker.batches()) as batches:
        yield from batches


def no_gpu(spec: Comparison) -> str:
    """Return why an external model may be too large for this machine; "" if there is a GPU."""
    needless = spec.target.embedded or spec.all_remote or not device_kind(best_device()).host
    return "" if needless else f"{spec.target} needs a GPU and this machine has none"


def question(spec: Preset) -> str:
    """Return what a run would download first, and how to agree; empty if nothing. Asks the hub for sizes."""
    sizes = {}
    for name in () if spec.all_remote or limits.public() else dict.fromkeys(spec.models):
        with contextlib.suppress(ValueError):  # the run says why there is no such model
            sizes[name] = missing_bytes(name, PICKLED)
    absent = " and ".join(name for name, size in sizes.items() if size)
    size = size_text(sum(sizes.values()))
    return f"this run downloads {absent} first: {size}; press Run again to download and run" if absent else ""


def preload(presets: Iterable[Preset]) -> None:
    """Load the models while the visitor reads. Errors are shown when Run is pressed."""
    for chosen in presets:
        with contextlib.suppress(Exception):
            session().place_models(chosen)
