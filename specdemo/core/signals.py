"""Handling of Ctrl-C and SIGTERM: leave a block as an exception does, or delay the signal to its end.

Previous handlers are restored afterwards. Outside the main thread, where handlers cannot be set, nothing changes.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

KILLED = 128  # plus the signal's number: the exit code, as in a shell


@contextmanager
def tidy() -> Iterator[None]:
    """Make SIGTERM raise SystemExit with code 143, so that open files are closed."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(KILLED + number)

    with _handling(leave, signal.SIGTERM):
        yield


@contextmanager
def held() -> Iterator[list[int]]:
    """Yield a list that receives the first SIGINT or SIGTERM, so that the block can finish. The signal takes effect
    after the block; a second one takes effect immediately."""
    noted: list[int] = []
    with ExitStack() as handlers:

        def note(number: int, frame: FrameType | None) -> None:
            noted.append(number)
            handlers.close()

        handlers.enter_context(_handling(note, signal.SIGINT, signal.SIGTERM))
        yield noted
    if noted:
        signal.raise_signal(noted[0])
        raise KeyboardInterrupt  # the handler returned, but the block was interrupted


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers} if here else {}
    # keep ignored signals ignored; None: not set by Python, which could not restore it
    before = {number: was for number, was in before.items() if was not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)
