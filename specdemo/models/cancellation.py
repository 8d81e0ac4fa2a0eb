"""Cancellation of long forward passes: the generation loop passes its `cancelled` to the targets that read a text."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_cancelled: ContextVar[Callable[[], bool]] = ContextVar("cancelled", default=lambda: False)


@contextmanager
def cancel_passes_if(cancelled: Callable[[], bool]) -> Iterator[None]:
    """Let passes inside the block raise `Cancelled` soon after `cancelled()` is true."""
    token = _cancelled.set(cancelled)
    try:
        yield
    finally:
        _cancelled.reset(token)


def pass_cancelled() -> Callable[[], bool]:
    """Return the function that reports, in any thread, whether to stop the current pass."""
    return _cancelled.get()
