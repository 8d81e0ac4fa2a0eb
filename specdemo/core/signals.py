"""Handling of Ctrl-C and SIGTERM: leave a block as an exception does, or delay the signal to its end.

Previous handlers are restored afterwards. Outside the main thread, where handlers cannot be set, nothing changes.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

SIGNAL_EXIT_CODE = 128  # plus the signal's number: the exit code, as in a shell


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Make SIGTERM raise SystemExit with code 143, so that open files are closed."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(SIGNAL_EXIT_CODE + number)

    with _handling(leave, signal.SIGTERM):
        yield


@contextmanager
def defer_signals() -> Iterator[list[int]]:
    """Yield a list that receives the first SIGINT or SIGTERM, so that the block can finish. The signal takes effect
    after the block; a second one takes effect immediately."""
    received: list[int] = []
    with ExitStack() as handlers:

        def receive(number: int, frame: FrameType | None) -> None:
            received.append(number)
            handlers.close()

        handlers.enter_context(_handling(receive, signal.SIGINT, signal.SIGTERM))
        yield received
    if received:
        signal.raise_signal(received[0])
        raise KeyboardInterrupt  # the handler returned, but the block was interrupted


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = {number: signal.getsignal(number) for number in numbers} if in_main_thread else {}
    # keep ignored signals ignored; None: not set by Python, which could not restore it
    previous = {
        number: previous_handler
        for number, previous_handler in previous.items()
        if previous_handler not in (None, signal.SIG_IGN)
    }
    try:
        for number in previous:
            signal.signal(number, handler)
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)
