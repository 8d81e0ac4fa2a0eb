"""What a file of JSON from a stranger may hold, judged before it is parsed: a parser takes seconds and gigabytes to see
that it is too much. Needs no torch."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

SQUARE: Final = bytes.maketrans(b"{}", b"[]")
IDLE: Final = bytes(set(range(256)) - set(b'"[]{},:'))
CHUNK: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Bounds:
    """values: commas and opening brackets, one of which stands before every value but the first. keys: colons, which
    cost a parser most. depth: of brackets."""

    bytes: int
    values: int
    keys: int
    depth: int = 32


FILE: Final = Bounds(16_000_000, 2_000_000, 600_000)
PUBLIC_FILE: Final = Bounds(2_000_000, 200_000, 60_000)  # parsed in less than 0.2 s, in which nobody else is served


def judge(text: bytes, bounds: Bounds, what: str) -> None:
    """Raises ValueError with one line that names the bound `text` is beyond. Of what is no JSON, the part that a parser
    reads before it sees that is within them too."""
    if len(text) > bounds.bytes:
        raise ValueError(f"{what} may hold {bounds.bytes / 1e6:g} MB at most")
    marks = _marks(text)
    opened, closed = marks.count(b"["), marks.count(b"]")
    if max(opened, closed) + marks.count(b",") > bounds.values:
        raise ValueError(f"{what} may hold {bounds.values:,} values at most")
    if marks.count(b":") > bounds.keys:
        raise ValueError(f"{what} may hold {bounds.keys:,} keys at most")
    brackets = marks.translate(None, b",:") + b"]" * (opened - closed)
    for _ in range(bounds.depth):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise ValueError(f"{what} may nest {bounds.depth} brackets at most, each closed by its own")


@contextmanager
def parsing() -> Iterator[None]:
    """No search for garbage meanwhile: a parser makes none, but so many objects that all the process holds would be
    searched again and again, for seconds in which nobody else is served."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _marks(text: bytes) -> bytes:
    """The commas, colons and brackets outside strings, all brackets square."""
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(SQUARE, IDLE)
    outside, inside = [], 0
    for start in range(0, len(bare), CHUNK):
        parts = bare[start : start + CHUNK].split(b'"')
        outside.append(b"".join(parts[inside::2]))
        inside ^= 1 - len(parts) % 2
    return b"".join(outside)
