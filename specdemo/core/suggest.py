"""What the one line of a refusal shows and suggests."""

from collections.abc import Iterable
from difflib import get_close_matches

DEVICES = "auto, cpu, mps, cuda, cuda:N, xpu or xpu:N"  # that a run may be told to take
LISTED = 18  # names; of a longer list half as many


def suggest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` or what there is to choose from."""
    names = list(known)
    close = get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    if len(names) > LISTED:
        names = [*names[: LISTED // 2], f"... ({len(names)} in all)"]
    return f"choose one of {', '.join(names)}" if names else "there is none"


def shown(value: object) -> str:
    """The value, short enough for one line."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to write out what is much longer
        return f"a number of {value.bit_length()} bits"
    text = repr(value[:60]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 48 else text[:45] + "..."
