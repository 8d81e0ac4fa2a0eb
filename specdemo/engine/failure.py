"""Failure of a single lane: its one-line reason, and freeing its memory."""

from pathlib import Path
from traceback import walk_tb

MAX_LENGTH = 500  # characters of a reason


def reason(error: Exception) -> str:
    """Return one line: the message if it is meant for users, else with the error's type and location."""
    line = str(error).strip().partition("\n")[0][:MAX_LENGTH].encode("utf-8", "replace").decode()
    if line and isinstance(error, RuntimeError | ValueError):
        return line
    *_, (frame, number) = walk_tb(error.__traceback__)
    text = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return f"{text} ({Path(frame.f_code.co_filename).name}:{number})"


def clear_traceback(error: BaseException | None) -> None:
    """Clear the traceback, so that its frames and their KV caches can be freed."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
