"""Runs of the page, on the engine of this process or of a process that has a GPU for a limited time."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator

from specdemo.core.trace import RunTrace
from specdemo.engine.comparison import Comparison
from specdemo.engine.lanes import lane_name
from specdemo.engine.session import follow_up, session
from specdemo.models.devices import best_device
from specdemo.presets import limits
from specdemo.presets.files import EMBEDDED, Preset
from specdemo.presets.recorded import recorded
from specdemo.ui import space
from specdemo.ui.job import Engine, Messages, Work
from specdemo.ui.log import Log
from specdemo.ui.views import Failed

__all__ = ["follow_up", "free_memory", "lane_name", "no_gpu", "preload", "run", "session", "with_engine_lock"]

ELSEWHERE = space.zero_gpu()  # the engine runs in another process
INSTEAD = "Showing the recorded run of this preset instead, with the preset's settings."


def with_engine_lock(work: Work) -> Work:
    """Run work while no other work uses the engine."""

    def alone(cancelled: Callable[[], bool], report: Callable[[float, str], None]) -> Iterator[object]:
        with session().lock:
            yield from work(cancelled, report)

    return alone


@space.on_zero_gpu(lambda spec, log: space.seconds(spec))
def _play(spec: Comparison, log: Log | None) -> Generator[Messages, None, None]:
    """Yield the new messages of a run 15 times a second. `log` gets the engine if both are in one process."""

    def work(cancelled: Callable[[], bool], loading: Callable[[float, str], None]) -> Iterator[object]:
        if limits.public():
            session().forget_learned()  # a draft that learned from one visitor's text must not be used for another
        return session().stream(spec, cancelled, loading)

    engine = Engine(work, space.seconds(spec) - space.BACK_S if ELSEWHERE else None)
    if log is not None:
        log.engine = engine
    with contextlib.closing(engine.batches()) as batches:
        yield from batches


def run(spec: Comparison, log: Log) -> Iterator[str]:
    """Yield the log so far, 15 times a second. Closing the iterator stops the engine.

    A run that gets no GPU ends as the recorded run of its preset, if there is one, with a note.
    """
    log.spec = spec
    reason = no_gpu(spec)
    if reason and limits.public():  # trying anyway would block a shared machine
        log.add([Failed(reason)])
    else:
        try:
            with contextlib.closing(_play(spec, None if ELSEWHERE else log)) as batches:
                for new in batches:
                    yield log.add(new)
        except Exception as error:  # errors of the GPU scheduler; the engine reports its own failures
            message = getattr(error, "message", None) or str(error) or type(error).__name__
            reason = f"{'the GPU was taken away' if log.started else 'no GPU for this run'}: {message}"
            log.add([Failed(reason)])
    if log.failure:
        trace = _stand_in(spec) if reason and not log.started else None
        yield log.fall_back(f"{log.failure.rstrip('.')}. {INSTEAD}", trace) if trace else log.text


def no_gpu(spec: Comparison) -> str:
    """Return why an external model may be too large for this machine; "" if there is a GPU."""
    if spec.target in EMBEDDED or spec.all_remote or best_device().type != "cpu":
        return ""
    return f"{spec.target} needs a GPU and this machine has none"


def _stand_in(spec: Comparison) -> RunTrace | None:
    """Return the recorded run of the preset, unless the comparison has another target or is the next turn of a chat."""
    trace = recorded(spec.id)
    return trace if trace and trace.config.get("target") == spec.target and not spec.history else None


def free_memory() -> str:
    """Drop all loaded models and return their names."""
    loaded = session().loaded()
    session().unload()
    names = ", ".join(name for name, _ in loaded)
    return f"unloaded {names} ({sum(size for _, size in loaded) / 1e6:.0f} MB)" if loaded else "no models were loaded"


def preload(presets: Iterable[Preset]) -> None:
    """Load the models while the visitor reads. Errors are shown when Run is pressed."""
    for chosen in presets:
        with contextlib.suppress(Exception):
            session().place_models(chosen)
