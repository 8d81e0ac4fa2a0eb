"""The page without a browser: rendering, links, opened files, scripts and headers."""

import gzip
import json
import re
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import brotli
import gradio as gr
import pytest
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from specdemo.core.definitions import DEFINITIONS, table
from specdemo.core.trace import from_json
from specdemo.engine.messages import LOADING, RunStage, replay
from specdemo.models.ref import ModelRef
from specdemo.presets.files import preset
from specdemo.servers.process import free_port
from specdemo.ui import assets, race
from specdemo.ui.assets import COMMENT, HERE
from specdemo.ui.controls import DRAWN
from specdemo.ui.race import Log, Races
from specdemo.ui.setup import key, to_values
from specdemo.ui.views import Failed, Loading
from tests.processes import run, start
from tests.traces import hostile_trace
from tests.ui.stand_ins import lines, played


def test_the_page_has_a_recorded_race_and_the_places_of_links_and_draws_options_of_lanes_one_at_a_time():
    """While Gradio drew the options of several lanes at once, one could fail: a dict changed while it was iterated."""
    code = """
import sys
from types import SimpleNamespace
from specdemo.ui import page
built = page.build()
drawn = [(f.queue, f.concurrency_id, f.concurrency_limit) for f in built.fns.values() if f.renderable]
names = {getattr(one, name, None) for one in built.blocks.values() for name in ("elem_id", "id")}
assert not {*sys.argv[1:]} - names, {*sys.argv[1:]} - names
assert drawn == [(True, "options", 1)] * 3, drawn
visitor = SimpleNamespace(session_hash="a", request=None, query_params={})
shown = page.Races(page.preset("embedded-draft"), False).open_link(visitor, {})["view"]
sys.exit('"type":"end"' not in shown)
"""
    places = re.findall(r"^ *[\w\"-]+: \[\"([\w-]+)\", \"([\w-]+)\"\]", assets.text("address.js"), re.MULTILINE)
    assert {tab for tab, _ in places} == {"pays", "machines", "training", "how"}
    named = [name for place in places for name in place]  # tabs and elements that old links open
    done = run("-c", code, *named)
    assert done.returncode == 0, done.stderr


def test_no_folder_of_this_machine_leaves_the_page():
    target, draft = "/home/ann/models/big.gguf", "C:\\Users\\ann\\small.gguf"
    trace = hostile_trace()
    trace.config["target"], trace.lanes[1].options["model"] = target, draft
    trace.lanes[1].options["drafts"] = "/Users/ann/other.gguf, ngram"
    trace.notes.append(f"{target} has no flash attention")
    spec = preset("embedded-draft").model_copy(update={"target": ModelRef(target)})
    log, visits = Log(spec=spec), Races(preset("embedded-draft"), False)
    visitor = SimpleNamespace(session_hash="a", request=None)
    log.add([Loading(0.5, f"loading {target}"), *replay(trace)])
    visits.keep(visitor, log)
    saved = visits.save(visitor)["text"]
    for shown in (log.text, saved, json.dumps(log.result())):
        assert "big.gguf" in shown and "small.gguf" in shown and "ann" not in shown.lower()
    assert from_json(saved).lanes[0].token_ids == trace.lanes[0].token_ids


def test_the_same_comparison_has_the_same_key():
    values = to_values(preset("embedded-draft"))
    assert key(values) == key(values | {"k-1": 4.0, "preset": "embedded-ngram"})  # a browser sends 4.0
    assert key(values) == key(values | {"k-3": 9})  # a hidden lane
    assert len({key(values), key(values | {"k-1": 5}), key(values | {"prompt": "Another"})}) == 3


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("app.py", "--port", port)
    line = f"error: port {port} of 127.0.0.1 is not available; choose another with --port or --host"
    assert (done.returncode, done.stderr.strip()) == (2, line)


def test_a_page_whose_first_answer_is_late_starts():
    """Gradio asks its own address once, for three seconds, which a busy machine needs to draw the page."""
    code = """
import runpy
import httpx

def late(*_, **settings):
    raise httpx.ReadTimeout("timed out")

httpx.head = late
runpy.run_path("app.py", run_name="__main__")
"""
    with start("-c", code, "--port", free_port(), stdout=subprocess.PIPE, text=True) as page:
        assert page.stdout.readline().startswith("specdemo is on http://127.0.0.1:")
        page.terminate()


def test_on_a_space_a_link_is_the_public_address(monkeypatch):
    monkeypatch.setenv("SPACE_ID", "someone/specdemo")
    link = Races(preset("embedded-draft"), False).share(to_values(preset("embedded-draft")))
    assert link == "https://huggingface.co/spaces/someone/specdemo?preset=embedded-draft"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a specdemo trace: its content is not JSON, or only a part of it; open a trace that specdemo saved"),
        (b'{"schema": 99}', "reads schema 1"),
    ],
)
def test_non_traces_are_rejected_in_one_line(tmp_path, content, message):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    visits = Races(preset("embedded-draft"), False)
    _, error = visits.open(SimpleNamespace(session_hash="a"), {"file": str(path)})["view"].splitlines()
    assert '"type":"error"' in error and message in error and json.loads(error)["file"]


def test_a_stopped_log_ends_even_when_its_engine_is_elsewhere():
    assert '"finish":"cancelled"' in Log(spec=preset("embedded-draft")).stop()


class Session:
    """A session that runs the hand-made trace once; after that its models fail to load, or its first step fails."""

    def __init__(self, late):
        self.runs, self.late = 0, late

    def stream(self, spec, cancelled, loading):
        self.runs += 1
        messages = list(replay(hostile_trace()))
        if self.runs > 1:
            yield from messages[: self.late]
            raise ValueError("no such file; name another model")
        yield from messages


@pytest.mark.parametrize("late", [0, 1])
def test_a_run_that_fails_while_loading_leaves_the_one_on_show_exportable(monkeypatch, late):
    session, visitor = Session(late), SimpleNamespace(session_hash="a", request=None)
    monkeypatch.setattr(race, "session", lambda: session)
    visits, values = Races(preset("embedded-draft"), False), to_values(preset("embedded-draft"))
    list(played(visits, visits.race, visitor, values))
    before = visits.save(visitor)
    assert "no such file" in list(played(visits, visits.race, visitor, values))[-1]["view"]
    if late:  # the run had started, so it replaces the previous one
        with pytest.raises(gr.Error, match="no finished run to save"):
            visits.save(visitor)
    else:
        assert visits.save(visitor) == before
        assert visits.stop(visitor) == {}  # it has ended


def test_a_visitor_sees_recorded_races_until_there_is_one_of_their_own(monkeypatch):
    monkeypatch.setattr(race, "session", lambda: Session(0))
    visits, visitor = (
        Races(preset("embedded-draft"), False),
        SimpleNamespace(session_hash="a", request=None, query_params={}),
    )
    first, other = visits.open_link(visitor, {})["view"], visits.select(visitor, "embedded-ngram")
    assert '"still":true' in first.partition("\n")[0] and first != other
    assert visits.save(visitor)["name"] == "specdemo-embedded-ngram.json"
    lanes = visits.select(visitor, "embedded-dflash")  # there is no recording
    assert json.loads(lanes.splitlines()[1]) == {"type": "idle", "lanes": ["DFlash"], "obstacle": ""}
    with pytest.raises(gr.Error, match="no finished run to save"):  # the run is no longer shown
        visits.save(visitor)
    list(played(visits, visits.race, visitor, to_values(preset("embedded-draft"))))
    assert visits.select(visitor, "embedded-ngram") == gr.skip()


@pytest.mark.parametrize(
    ("query", "shown", "notes"),
    [
        ("preset=embedded-ngram", True, 0),
        ("preset=embedded-ngram&k=3", False, 0),
        ("preset=embedded-ngram&k=99", True, 1),  # ignored
        ("preset=embedded-ngram&k=99&seed=3", False, 1),
    ],
)
def test_link_shows_only_a_matching_recorded_race(query, shown, notes):
    start = preset("embedded-draft")
    visits = Races(start, False)
    visitor = SimpleNamespace(
        session_hash="a", request=None, query_params=dict(pair.split("=") for pair in query.split("&"))
    )
    opened = visits.open_link(visitor, dict.fromkeys(DRAWN, 0))
    assert ('"preset":"embedded-ngram"' in opened["view"]) is shown
    first, *following = lines(opened["view"])
    assert first["type"] == "run" and [line["type"] for line in following[:2]].count("note") == notes
    assert opened["preset"]["value"] == "embedded-ngram" and opened["drawn-1"] == 1


def test_the_menu_of_all_presets_left_without_a_choice_changes_nothing():
    visits, visitor = Races(preset("embedded-draft"), False), SimpleNamespace(session_hash="a", request=None)
    assert visits.open_query(visitor, {"query": None}) == {}


def test_a_page_keeps_its_preset_under_an_address_that_names_none():
    visits = Races(preset("embedded-ngram"), False)
    visitor = SimpleNamespace(session_hash="a", request=None, query_params={"__theme": "dark", "view": "api"})
    assert '"preset":"embedded-ngram"' in visits.open_link(visitor, {})["view"]
    visitor.query_params = {"__theme": "dark", "seed": "5"}
    assert visits.read_query(visitor.query_params) == (preset("embedded-ngram").with_changes(seed=5), [])


class ChatSession:
    """A session that answers in a chat and records the comparisons."""

    def __init__(self):
        self.comparisons = []

    def stream(self, spec, cancelled, loading):
        self.comparisons.append(spec)
        trace = hostile_trace()
        for lane in trace.lanes:
            lane.messages, lane.finish = [*spec.history, {"role": "user", "content": spec.prompt}], "length"
        trace.lanes[1].pieces[-1] = " other"
        trace.lanes[1].text = "".join(trace.lanes[1].pieces)
        yield from replay(trace)


def test_a_chat_continues_from_the_baselines_answer(monkeypatch):
    session, visitor = ChatSession(), SimpleNamespace(session_hash="a", request=None)
    monkeypatch.setattr(race, "session", lambda: session)
    visits = Races(preset("embedded-draft"), False)
    assert "press Run first" in list(played(visits, visits.next_turn, visitor, {"message": "Why?"}))[-1]["view"]
    assert visits.offer(visitor, {"message": ""})["row"]["visible"] is False
    list(played(visits, visits.race, visitor, to_values(preset("embedded-draft"))))
    assert visits.offer(visitor, {"message": ""})["row"]["visible"] is True
    assert "is empty" in list(played(visits, visits.next_turn, visitor, {"message": "  "}))[-1]["view"]
    assert "message" not in visits.offer(visitor, {"message": "  "})  # a rejected message stays in the input
    for message in ("Why?", "And then?"):
        list(played(visits, visits.next_turn, visitor, {"message": message}))
        assert visits.offer(visitor, {"message": message})["message"] == ""
    prompts = [spec.prompt for spec in session.comparisons]
    assert prompts[1:] == ["Why?", "And then?"]
    answer = hostile_trace().lanes[0].text
    contents = [message["content"] for message in session.comparisons[-1].history]
    assert contents == [prompts[0], answer, "Why?", answer]
    list(played(visits, visits.next_turn, visitor, {}))  # the stand-in's answers are cut
    assert session.comparisons[-1].prompt == answer
    assert [message["content"] for message in session.comparisons[-1].history] == [*contents, "And then?"]


SCRIPT = """// One.
/**
 * Two. */
function f(x) {
  // three
  const url = "http://a"; // four
  const path = "// five // six"; // the page's
  /** @type {HTMLElement} */ (x).click();
  return x; /* five */
}
"""


def test_comments_and_indentation_are_removed_and_no_text():
    assert COMMENT.sub("", SCRIPT) == (
        'function f(x) {\nconst url = "http://a";\nconst path = "// five // six"; // the page\'s\n'
        "/** @type {HTMLElement} */ (x).click();\nreturn x; /* five */\n}\n"
    )


def test_no_template_literal_spans_lines():
    """Its indentation would be removed."""
    for path in HERE.glob("*.js"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert line.count("`") % 2 == 0, (path.name, line)


def test_a_link_to_the_page_shows_the_projects_card_and_not_gradios():
    page = b"""<head><meta property="og:title" content="Gradio" />
    <meta
        name="twitter:image" content="https://elsewhere" /><title>x</title></head>"""
    carded = assets.page_with_card(page).decode()
    assert "Gradio" not in carded and "elsewhere" not in carded and "<title>x</title>" in carded
    assert f'<meta property="og:title" content="{assets.TITLE}">' in carded and 'rel="icon"' in carded


LONG = "x" * 4000


@pytest.fixture
def client():
    def page(_):
        return HTMLResponse(f"<head><title>{LONG}</title></head><script>1</script>")

    def answer(_):
        return JSONResponse({"data": LONG})

    def short(_):
        return JSONResponse({})

    app = Starlette(routes=[Route(f"/{route.__name__}", route) for route in (page, answer, short)])

    async def served(scope, receive, send):
        await app(scope, receive, assets.compressor(scope, send))

    return TestClient(served)


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
    assert int(found["content-length"]) == len(body) < 2000
    assert LONG.encode() in decompress(body)


def test_short_and_unaccepted_answers_are_sent_as_they_are(client):
    assert fetch(client, "/short", "gzip")[1] == b"{}"
    assert LONG.encode() in fetch(client, "/page", "identity")[1]


def test_a_browser_can_paint_the_skeleton_before_it_reads_a_script():
    """Scripts keep their order, and so do styles, whose last rule counts."""
    scripts, style = ("<script>first</script>", '<script src="s.js"></script>'), '<link rel="stylesheet" href="s.css">'
    head = f"{scripts[0]}\n{style}{scripts[1]}"
    page = assets.page_with_card(f"<head>{head}</head><body><gradio-app></gradio-app></body>".encode()).decode()
    parts = style, "<style>", "</head>", "<gradio-app>", '<div id="skeleton"', *scripts, "</body>"
    places = [page.index(part) for part in parts]
    assert places == sorted(places) and all(page.count(part) == 1 for part in parts)


def test_the_docs_show_the_table_and_the_page_its_short_words():
    root = Path(__file__).parents[2]
    assert table() in (root / "docs/measurements.md").read_text(encoding="utf-8")
    page = assets.markup("view.html")
    shown = [definition.tile for definition in DEFINITIONS.values() if definition.tile]
    assert re.findall(r'data-tile="([\w-]+)"', page) == [tile.id for tile in shown]
    assert all(f"<p>{tile.text}</p>" in page for tile in shown) and "@" not in page.replace("@children", "")
    reference = assets.reference()
    anchors = {"h-" + title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", reference, re.M)}
    assert table() in reference and {*re.findall(r"\(#(h-[\w-]+)\)", reference)} == anchors


def test_a_run_that_is_stopped_while_it_loads_has_not_failed_and_offers_no_other():
    for stops in (False, True):
        log = Log(spec=preset("smollm2-chat"))
        log.add([RunStage(LOADING)])
        if stops:
            log.stop()
        assert ('"instead"' in log.add([Failed("the file is damaged")])) == (not stops)
