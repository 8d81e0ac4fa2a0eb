"""Parts of one-line messages: suggestions, counts and short values."""

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

DEVICES = "auto, cpu, mps, cuda, cuda:N, xpu or xpu:N"
EMPTY = "is empty; write at least one word"  # of a prompt
MAX_LISTED = 24  # longest list of names; a longer one is cut to half of this


def suggest(name: str, choices: Iterable[str], heads: Iterable[str] = ()) -> str:
    """Return `did you mean 'x'?`, or a list of the choices. heads: choices for a drafter only, not
    listed."""
    names, drafters = list(choices), list(heads)
    close = get_close_matches(name, [*names, *drafters], n=1)
    if close:
        return f"did you mean {'the head ' if close[0] in drafters else ''}{close[0]!r}?"
    if len(names) > MAX_LISTED:
        names = [*names[: MAX_LISTED // 2], f"... ({len(names)} in total)"]
    return f"choose one of {', '.join(names)}" if names else "none is available"


def counted(number: object, noun: str) -> str:
    """Return a number with its noun: `1 thread`, `2 threads`."""
    return f"{number:,}".removesuffix(".0") + f" {noun}{'' if number == 1 else 's'}"


def short_repr(value: object) -> str:
    """Return the repr of a value, short enough for one line."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python limits the digits of a printed integer
        return f"a number of {value.bit_length()} bits"
    text = repr(value[:60]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 48 else text[:45] + "..."


def program() -> str:
    """Return the command that starts specdemo, in the form in which this process was started."""
    return "specdemo" if Path(sys.argv[0]).stem == "specdemo" else "python -m specdemo"
