"""The lines of the append-only texts that the page's scripts draw: one JSON object each."""

import json
import math
import secrets
import zlib


def to_line(fields: dict[str, object]) -> str:
    """JSON knows no NaN: a number that is not known yet is left out. Raises ValueError where one is deeper inside."""
    known = {k: v for k, v in fields.items() if not isinstance(v, float) or math.isfinite(v)}
    return json.dumps(known, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"


def opening(**fields: object) -> str:
    """A text's first line, unlike that of any other. What is `recorded` is played when it comes, unless it is to stand
    `still` until someone asks."""
    return to_line({"type": "run", "run": secrets.token_hex(6), "recorded": False, "still": False, **fields})


class Packed:
    """A text kept small."""

    def __init__(self, text: str) -> None:
        self._bytes = zlib.compress(text.encode(), level=1)

    @property
    def size(self) -> int:
        """Bytes it takes."""
        return len(self._bytes)

    @property
    def text(self) -> str:
        """The text as it was."""
        return zlib.decompress(self._bytes).decode()
