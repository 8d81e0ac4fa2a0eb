"""Safe reading of small untrusted files: read completely, or rejected with one line first.

Only regular files are opened, because reading a device or a pipe may never end.
"""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

JsonObject = dict[str, Any]
Value = TypeVar("Value")
FILE_BYTES: Final = 16_000_000
PUBLIC_FILE_BYTES: Final = 2_000_000  # of a public page, where parsing blocks the requests of others
CONFIG_BYTES: Final = 64_000_000  # twice the largest public tokenizer or weight index
TOO_LARGE = "does not fit into the memory of this process; choose a smaller model"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error. The allocators of torch raise RuntimeError with these words."""
    message = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in message or "out of memory" in message


def check_size(text: bytes, limit: int, what: str) -> None:
    """Raise ValueError, one line, for a text of more bytes."""
    if len(text) > limit:
        raise ValueError(f"{what} may hold {limit / 1e6:g} MB at most")


def validated(adapter: TypeAdapter[Value], text: str | bytes, limit: int, kind: str) -> Value:
    """Return a checked value from untrusted JSON of schema 1. kind: trace or result. Raises ValueError, one line."""
    text = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    check_size(text, limit, f"a {kind}")
    try:
        with gc_paused():
            return adapter.validate_json(text)
    except ValidationError as error:
        raise ValueError(_reason(error, kind)) from None


def _reason(error: ValidationError, kind: str) -> str:
    if error.error_count() > 1000:  # listing millions of errors would take gigabytes
        return f"not a specdemo {kind}: {error.error_count():,} fields are wrong"
    errors = error.errors(include_url=False, include_context=False)
    schema = next((e for e in errors if e["loc"] == ("schema",) and e["type"] == "literal_error"), None)
    if schema:
        return f"this {kind} has schema {schema['input']!r:.20}; this version reads schema 1"
    if errors[0]["type"] == "json_invalid" and "recursion" not in errors[0]["msg"]:
        return f"not a specdemo {kind}: its content is not JSON, or only a part of it"
    location = " ".join(".".join(map(str, errors[0]["loc"])).split())  # a key may hold line breaks
    return f"not a specdemo {kind}: {location[:100] or 'the file'}: {errors[0]['msg']}"


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


def check_regular(path: str | Path, limit: int | None = None) -> None:
    """Raise ValueError unless it is a regular file of at most `limit` bytes (None: any size), OSError if it does not
    exist."""
    status = Path(path).stat()
    if not S_ISREG(status.st_mode) and not S_ISDIR(status.st_mode):  # opening a folder raises a clear error
        raise ValueError(f"{path} is a device or a pipe; copy its content into a file first")
    if limit is not None and status.st_size > limit:
        raise ValueError(f"{path} has {status.st_size:,} bytes; the limit is {limit:,}")


def read_bytes(path: str | Path, limit: int, hint: str = "choose another file") -> bytes:
    """Read a file. Raises ValueError, one line with the file's name."""
    try:
        check_regular(path, limit)
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}; {hint}") from None


def read_text(path: str | Path, limit: int, hint: str = "choose another file") -> str:
    """Read UTF-8 text; line ends become \\n. Raises ValueError, one line with the file's name."""
    try:
        text = read_bytes(path, limit, hint).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; convert it first") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_limited(path: str | Path, limit: int) -> bytes:
    """Read at most one byte more than the limit, so that the caller can see that a file is too large. Raises OSError,
    and ValueError for a path that is not a regular file."""
    check_regular(path)
    with Path(path).open("rb") as file:
        return file.read(limit + 1)


def read_json(path: str | Path, limit: int = CONFIG_BYTES) -> JsonObject:
    """Read a JSON object. Raises ValueError, one line with the file's name, also if it is larger than the limit."""
    text = read_text(path, limit)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged; delete it and fetch it again")
    return value
