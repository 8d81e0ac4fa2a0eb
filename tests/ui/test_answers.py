"""Answers of the server: compression and headers."""

import gzip

import brotli
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from specdemo.ui import assets

LONG = "x" * 2000


@pytest.fixture
def client():
    def page(_):
        return HTMLResponse(f"<head><title>{LONG}</title></head><script>1</script>")

    def answer(_):
        return JSONResponse({"data": LONG})

    def short(_):
        return JSONResponse({})

    routes = [Route(f"/{route.__name__}", route) for route in (page, answer, short)]
    return TestClient(Starlette(routes=routes, middleware=[Middleware(assets.Answers)]))


def fetch(client, path, accepted):
    with client.stream("GET", path, headers={"accept-encoding": accepted}) as response:
        return response.headers, b"".join(response.iter_raw())


@pytest.mark.parametrize("path", ["/page", "/answer"])
@pytest.mark.parametrize(
    ("accepted", "used", "decompress"),
    [("gzip, deflate, br, zstd", "br", brotli.decompress), ("gzip, deflate", "gzip", gzip.decompress)],
)
def test_pages_and_answers_are_compressed(client, path, accepted, used, decompress):
    found, body = fetch(client, path, accepted)
    assert found["content-encoding"] == used and "accept-encoding" in found["vary"].lower()
    assert int(found["content-length"]) == len(body) < 1500
    assert LONG.encode() in decompress(body)


def test_short_and_unaccepted_answers_are_sent_as_they_are(client):
    assert fetch(client, "/short", "gzip")[1] == b"{}"
    assert LONG.encode() in fetch(client, "/page", "identity")[1]


def test_page_has_its_style_before_its_scripts_arrive(client):
    assert b"<style>" in fetch(client, "/page", "")[1]
