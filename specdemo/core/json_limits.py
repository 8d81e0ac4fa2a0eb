"""Limits on untrusted JSON, checked before parsing: a parser needs seconds and gigabytes to reject an excessive file.
Needs no torch."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

TO_SQUARE: Final = bytes.maketrans(b"{}", b"[]")
NOT_STRUCTURE: Final = bytes(set(range(256)) - set(b'"[]{},:'))
CHUNK_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Limits of a JSON text. values: commas and opening brackets, one of which precedes every value but the first.
    keys: colons, the most expensive part for a parser. depth: nesting of brackets."""

    bytes: int
    values: int
    keys: int
    depth: int = 32


FILE_LIMITS: Final = JsonLimits(16_000_000, 2_000_000, 600_000)
PUBLIC_FILE_LIMITS: Final = JsonLimits(
    2_000_000,
    200_000,
    60_000,  # parsed in less than 0.2 s; parsing blocks other requests
)


def check_json_limits(text: bytes, limits: JsonLimits, what: str) -> None:
    """Raise ValueError with one line that names the exceeded limit. For invalid JSON, the part before the error is
    within the limits too."""
    if len(text) > limits.bytes:
        raise ValueError(f"{what} may hold {limits.bytes / 1e6:g} MB at most")
    marks = _structure(text)
    opened, closed = marks.count(b"["), marks.count(b"]")
    if max(opened, closed) + marks.count(b",") > limits.values:
        raise ValueError(f"{what} may hold {limits.values:,} values at most")
    if marks.count(b":") > limits.keys:
        raise ValueError(f"{what} may hold {limits.keys:,} keys at most")
    brackets = marks.translate(None, b",:") + b"]" * (opened - closed)
    for _ in range(limits.depth):
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise ValueError(f"{what} may nest {limits.depth} brackets at most, and each must be closed")


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection. Parsing creates millions of objects but no garbage, and repeated collections take
    seconds."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _structure(text: bytes) -> bytes:
    """Return the commas, colons and brackets outside strings, with all brackets square."""
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"").translate(TO_SQUARE, NOT_STRUCTURE)
    outside, inside = [], 0
    for start in range(0, len(bare), CHUNK_BYTES):
        parts = bare[start : start + CHUNK_BYTES].split(b'"')
        outside.append(b"".join(parts[inside::2]))
        inside ^= 1 - len(parts) % 2
    return b"".join(outside)
