"""What Ctrl-C and a polite kill do: end a program tidily, or wait until what is in hand is kept.

The handlers of before are back behind every block. Outside the main thread, where none can be set, nothing changes.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

KILLED = 128  # and the signal's number: the exit code, as a shell gives it


@contextmanager
def tidy() -> Iterator[None]:
    """SIGTERM leaves the block as an exception does, so that what is open is closed on the way; exit code 143."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(KILLED + number)

    with _handling(leave, signal.SIGTERM):
        yield


@contextmanager
def held() -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM goes into the list, so that the block can end in its own time, and does behind the
    block what it is there for; the second does so at once."""
    noted: list[int] = []
    with ExitStack() as handlers:

        def note(number: int, frame: FrameType | None) -> None:
            noted.append(number)
            handlers.close()

        handlers.enter_context(_handling(note, signal.SIGINT, signal.SIGTERM))
        yield noted
    if noted:
        signal.raise_signal(noted[0])
        raise KeyboardInterrupt  # a handler that comes back has not made the block whole


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers} if here else {}
    # what was ignored stays so; None: set by no Python, and Python could not put it back
    before = {number: was for number, was in before.items() if was not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)
