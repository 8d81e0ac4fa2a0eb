"""Host names of the page, trusted proxies, and the address of a visitor.

If a page accepted every host name, any site could read it: the site points its own name at this machine, and a
visitor's browser takes the page for a part of the site (DNS rebinding).
"""

import os
import re
import socket
from collections.abc import Collection, Iterable
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = ("localhost", "127.0.0.1", "::1")
WILDCARDS = ("0.0.0.0", "::")
HOST = re.compile(r"(\[[^\[\]]+\]|[a-z0-9._-]+?)\.?(:\d*)?")  # Host header in lower case
PLATFORM = (  # addresses of the proxies of a Space
    "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1/128", "fc00::/7",
)  # fmt: skip

_proxies: list[IPv4Network | IPv6Network] = []


class Hosts:
    """ASGI middleware that rejects requests for other host names."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else LOOPBACK[0]
        if canonical(host) in {*self._names, canonical(_local(scope))}:
            await self._app(scope, receive, send)
            return
        line = f"this page does not answer to the host {host[:100]!r}; start it with --allow-host NAME to allow a name"
        await PlainTextResponse(line, 403)(scope, receive, send)


def own_names(bound: str, allowed: Iterable[str] = ()) -> set[str]:
    """Return the host names of a page that is bound to an address.

    They are those of this machine, that of the Space, and `allowed`. The address that a connection came in on is always
    accepted, so it is not listed. Raises ValueError for an invalid name.
    """
    names = {*LOOPBACK, bound, *os.environ.get("SPACE_HOST", "").split(",")}
    if bound in WILDCARDS:
        machine = socket.gethostname()
        short = machine.partition(".")[0]
        names |= {machine, short, f"{short}.local"}
    for name in allowed:
        if not canonical(name):
            raise ValueError(f"--allow-host takes a host name such as demo.example.org, not {name!r:.100}")
    return {canonical(name) for name in (*names, *allowed)} - {""}


def canonical(host: str) -> str:
    """Return a host without its port, in lower case, an IP address in its usual form; empty if it is not a host."""
    name = host.strip().lower()
    match = HOST.fullmatch(name)
    with suppress(ValueError):
        address = ip_address((match[1] if match else name).strip("[]").partition("%")[0])
        return str(getattr(address, "ipv4_mapped", None) or address)
    return match[1] if match and "[" not in name else ""


def trust_proxies(addresses: Iterable[str]) -> None:
    """Trust the X-Forwarded-For header of these proxies, given as addresses or networks; without any, of a Space's own.

    Raises ValueError for an invalid address.
    """
    listed = [part for given in addresses for part in given.split(",")]
    try:
        networks = [ip_network(address.strip(), strict=False) for address in listed]
    except ValueError as error:
        example = "the address or network of a proxy, such as 127.0.0.1 or 10.0.0.0/8"
        raise ValueError(f"--behind-proxy takes {example}: {str(error)[:200]}") from None
    platform = [ip_network(network) for network in PLATFORM] if os.environ.get("SPACE_ID") else []
    _proxies[:] = networks or platform


def address(request: HTTPConnection) -> str:
    """Return the address of the visitor who sent a request.

    Without a trusted proxy it is the peer's. A trusted proxy appends the address that it received the request from to
    X-Forwarded-For; the visitor may have invented the earlier ones.
    """
    seen = canonical(request.client.host) if request.client else ""
    hops = ",".join(request.headers.getlist("x-forwarded-for")).split(",")
    for hop in map(canonical, reversed(hops)):
        if not (_is_proxy(seen) and _is_address(hop)):
            break
        seen = hop
    return seen


def _is_proxy(host: str) -> bool:
    return _is_address(host) and any(ip_address(host) in network for network in _proxies)


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ip_address(host))
    return False


def _local(scope: Scope) -> str:
    """Return the address of this machine that a request came in on."""
    server = scope.get("server") or ("", None)
    return str(server[0])
