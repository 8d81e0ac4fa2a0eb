"""Addresses of servers that lanes may use: only those that the operator has listed
(`SPECDEMO_SERVERS=host:port,https://host`).
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

LISTED = "SPECDEMO_SERVERS"
_started: set[str] = set()  # addresses of the servers that this process started


def address(text: str) -> str:
    """Normalise `host:port` or a URL, with or without /v1, to `http://host:port`. Raises ValueError: `must ...`."""
    wrong = ValueError(f"must have the form http://host:port, not {text[:80]!r}")
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not contain a user or password; put the key into SPECDEMO_API_KEY")
    plain = not (parts.query or parts.fragment or any(c.isspace() for c in text))
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
        raise wrong
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{path}"


def host(server: str) -> str:
    """Return host and port of an address, for display."""
    return urlsplit(server).netloc


def machine(server: str | None) -> str:
    """Names the machine an address leads to; no address, and a loopback one, is this machine."""
    name = urlsplit(server).hostname if server else None
    return "this machine" if name in (None, "localhost", "127.0.0.1", "::1") else str(name)


def listed() -> tuple[str, ...]:
    """Return the listed addresses. Raises ValueError if one of them is invalid."""
    texts = map(str.strip, os.environ.get(LISTED, "").split(","))
    return tuple(dict.fromkeys(_checked(text) for text in texts if text))


def allow(servers: Iterable[str]) -> None:
    """List these too, in the environment of this process. Raises ValueError when one is no address."""
    os.environ[LISTED] = ",".join([*listed(), *map(_checked, servers)])


@contextmanager
def admit(server: str) -> Iterator[None]:
    """Allow a server that was started here until the block ends, without offering it to anyone."""
    _started.add(server)
    try:
        yield
    finally:
        _started.discard(server)


def check_listed(server: str) -> str:
    """Return the server's address. Raises ValueError if the operator has not listed it."""
    requested = _checked(server)
    if requested not in listed() and requested not in _started:
        raise ValueError(
            f"server {requested} is not allowed; the operator can allow it with --server {requested} or {LISTED}"
        )
    return requested


def _checked(text: str) -> str:
    try:
        return address(text)
    except ValueError as error:
        raise ValueError(f"a server {error}") from None
