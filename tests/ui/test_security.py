"""The host names that the page accepts, and the address of a visitor."""

import asyncio

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from specdemo.__main__ import main
from specdemo.ui import page, security
from specdemo.ui.security import RequestFilter, canonical, own_names, trust_proxies


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    for name in ("SPACE_ID", "SPACE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "")
    monkeypatch.setattr(security.socket, "gethostname", lambda: "Box.lan")


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:7860", "localhost"),
        ("LOCALHOST.", "localhost"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("[::1]:7860", "::1"),
        ("::1", "::1"),
        ("[::ffff:10.0.0.1]", "10.0.0.1"),
        ("[fe80::1%eth0]:7860", "fe80::1"),
        ("my_demo.hf.space", "my_demo.hf.space"),
        ("", ""),
        ("http://demo.example.org", ""),
        ("evil.example@localhost", ""),
        ("[::1]evil.example", ""),
        ("localhost:80:80", ""),
        ("[localhost]", ""),
        ("*", ""),
    ],
)
def test_a_host_is_compared_without_its_port(host, name):
    assert canonical(host) == name


def status(names, host, local="127.0.0.1", path="/", root=""):
    sent = []

    async def send(message):
        sent.append(message)

    headers = [] if host is None else [(b"host", host.encode())]
    scope = {"type": "http", "method": "GET", "headers": headers, "server": (local, 7860)}
    scope |= {"path": path, "root_path": root}
    asyncio.run(RequestFilter(PlainTextResponse("the page"), names, most=0)(scope, None, send))
    return sent[0]["status"]


@pytest.mark.parametrize(
    ("bound", "host", "expected"),
    [
        ("127.0.0.1", "localhost:7860", 200),
        ("127.0.0.1", "evil.example", 403),
        ("127.0.0.1", "box.lan", 403),
        ("127.0.0.1", "192.168.1.5", 403),
        ("127.0.0.1", None, 403),
        ("192.168.1.5", "192.168.1.5:7860", 200),
        ("demo.lan", "demo.lan", 200),
        ("0.0.0.0", "box.lan:7860", 200),
        ("0.0.0.0", "box", 200),
        ("0.0.0.0", "box.local", 200),
        ("0.0.0.0", "evil.example", 403),
        ("::", "box.lan", 200),
    ],
)
def test_a_page_answers_to_its_own_names(bound, host, expected):
    assert status(own_names(bound), host) == expected


@pytest.mark.parametrize("root", ["", "/demo"])
def test_a_page_has_its_own_paths_only(root):
    paths = ("/", "/config", "/gradio_api/queue/join", "/monitoring", "/gradio_api/dev/reload", "/configs", "/assets")
    found = [status(own_names("127.0.0.1"), "localhost", path=root + path, root=root) for path in paths]
    assert found == [200, 200, 200, 404, 404, 404, 404]


def test_a_page_answers_to_the_address_that_a_connection_came_in_on():
    names = own_names("0.0.0.0")
    assert status(names, "192.168.1.5:7860", local="192.168.1.5") == 200
    assert status(names, "[fd00::5]:7860", local="fd00::5") == 200
    assert status(names, "192.168.1.6", local="192.168.1.5") == 403


def test_a_space_answers_to_its_host_and_an_operator_may_allow_more(monkeypatch):
    monkeypatch.setenv("SPACE_HOST", "me-demo.hf.space,demo.example.org")
    names = own_names("0.0.0.0", ["Other.example.org"])
    assert [status(names, host) for host in ("me-demo.hf.space", "demo.example.org", "other.example.org")] == [200] * 3
    assert status(names, "you-demo.hf.space") == 403


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--allow-host=http://demo", "--allow-host takes a host name such as demo.example.org, not 'http://demo'"),
        ("--behind-proxy=nginx", "--behind-proxy takes the address or network of a proxy, such as 127.0.0.1"),
        ("--preset=embeded-draft", "unknown preset 'embeded-draft'; did you mean 'embedded-draft'?"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line(capsys, option, line):
    assert main(["ui", option]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


def visitor(hops, peer="10.0.0.1"):
    """Return the address that the server takes for the visitor's."""
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["client"][0])

    headers = [(b"x-forwarded-for", line.encode()) for line in hops]
    config = uvicorn.Config(app)
    config.load()
    asyncio.run(config.loaded_app({"type": "http", "headers": headers, "client": (peer, 1)}, None, None))
    return seen[0]


@pytest.mark.parametrize(
    ("hops", "where"),
    [
        ([], "10.0.0.1"),
        (["8.8.8.8"], "8.8.8.8"),
        (["1.1.1.1, 8.8.8.8"], "8.8.8.8"),  # the first address was sent by the visitor
        (["1.1.1.1", "8.8.8.8"], "8.8.8.8"),  # a proxy may add a header instead
        (["8.8.8.8, 10.3.0.9"], "8.8.8.8"),
        (["8.8.8.8:1234"], "8.8.8.8"),
    ],
)
def test_the_address_is_what_the_outermost_trusted_proxy_saw(monkeypatch, hops, where):
    monkeypatch.setenv("SPACE_ID", "me/demo")
    trust_proxies([])
    assert visitor(hops) == where
    monkeypatch.delenv("SPACE_ID")
    trust_proxies([])
    assert visitor(hops) == "10.0.0.1"  # without a proxy anyone could send the header
    monkeypatch.setenv("SPECDEMO_PUBLIC", "1")
    assert visitor(hops) == "10.0.0.1"


def test_only_declared_proxies_are_believed():
    trust_proxies(["127.0.0.1, 192.168.0.0/16"])
    assert visitor(["8.8.8.8"], peer="127.0.0.1") == visitor(["8.8.8.8"], peer="192.168.3.4") == "8.8.8.8"
    assert visitor(["10.1.1.1"], peer="127.0.0.1") == "10.1.1.1"
    assert visitor(["8.8.8.8"], peer="10.0.0.1") == "10.0.0.1"


class UnstartedPage:
    """A page that is not started. link: its public address; None if Gradio's servers cannot be reached."""

    local_url = "http://127.0.0.1:7860/"

    def __init__(self, link):
        self.link, self.share_url = link, None

    def launch(self, *, share, **settings):
        self.share_url = self.link if share else None


@pytest.mark.parametrize(
    ("share", "link", "expected"),
    [(True, "https://1a2b.gradio.live", 200), (True, None, 403), (False, "https://1a2b.gradio.live", 403)],
)
def test_a_page_answers_to_its_public_link_only_if_it_is_shared(share, link, expected, monkeypatch, capsys):
    names = own_names("127.0.0.1")
    monkeypatch.setattr(page, "build", lambda *_: UnstartedPage(link))
    monkeypatch.setattr(page, "_warm", lambda chosen: None)
    monkeypatch.setattr(security, "own_names", lambda *_: names)
    page.serve(share=share, block=False)
    assert status(names, "1a2b.gradio.live") == expected
    assert status(names, "other.gradio.live") == 403
    assert ("https://1a2b.gradio.live;" in capsys.readouterr().out) == (expected == 200)


@pytest.mark.parametrize(
    ("bound", "allowed", "proxies", "expected"),
    [
        ("127.0.0.1", (), (), True),
        ("::1", (), (), True),
        ("0.0.0.0", (), (), False),
        ("127.0.0.1", ("demo.example.org",), (), False),
        ("127.0.0.1", (), ("10.0.0.1",), False),
    ],
)
def test_a_page_is_that_of_this_machine_alone_unless_others_reach_it(bound, allowed, proxies, expected):
    assert security.only_here(bound, allowed, proxies) is expected
