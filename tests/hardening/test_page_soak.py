"""Memory of a page over many visitors, which must stay bounded for any visitor names."""

import secrets
from pathlib import Path

import psutil
import pytest

from tests.hardening.public import visitors
from tests.processes import served

RECORDED = sorted(Path("presets/recorded").glob("*.json"))


def refused(caller):
    assert caller.call(caller.fn("race"), ["embeded-draft", None])[-2]["success"] is False


def run(caller):
    fn = caller.after(caller.fn("click", "run"))
    assert caller.call(fn, caller.values(fn, max_new_tokens=8))[-2]["success"]


def opened(caller, trace):
    shown = caller.now(caller.fn("upload", "open-trace"), [caller.upload("t.json", trace)]).json()["data"][0]
    assert '"type":"end"' in shown


@pytest.mark.release
def test_memory_stays_where_it_was_after_the_first_visitors():
    trace = max(RECORDED, key=lambda path: path.stat().st_size).read_bytes()
    with served(SPECDEMO_PUBLIC="1", SPECDEMO_BEHIND_PROXY="127.0.0.1") as (server, page), visitors(page) as visit:
        caller, memory = visit(), psutil.Process(server.pid).memory_info

        def send_requests(refusals, runs, traces):
            for times, act in ((refusals, refused), (runs, run), (traces, lambda caller: opened(caller, trace))):
                for _ in range(times):
                    caller.session = secrets.token_hex(6)
                    # Few files per visitor.
                    caller.client.headers["X-Forwarded-For"] = f"8.8.8.{secrets.randbelow(250)}"
                    act(caller)
                print(times, act.__name__, memory().rss // 1_000_000, "MB", flush=True)

        send_requests(20, 20, 20)
        before = memory().rss
        send_requests(1000, 200, 100)
        assert memory().rss < 1.05 * before
