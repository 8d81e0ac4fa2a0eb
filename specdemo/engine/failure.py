"""A lane that fails ends alone: what it says of it, and what must not stay in memory."""

from pathlib import Path
from traceback import walk_tb

LONGEST = 500  # characters of a reason


def reason(error: Exception) -> str:
    """One line: the message where it stands for itself, else with the error's type and where it was raised."""
    line = str(error).strip().partition("\n")[0][:LONGEST].encode("utf-8", "replace").decode()
    if line and isinstance(error, RuntimeError | ValueError):
        return line
    *_, (frame, number) = walk_tb(error.__traceback__)
    said = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return f"{said} ({Path(frame.f_code.co_filename).name}:{number})"


def let_go(error: BaseException | None) -> None:
    """Free what its frames hold, such as a lane's caches, however long somebody keeps the error."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
