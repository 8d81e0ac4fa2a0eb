"""The page: `build` creates it, `serve` starts its server.

The view is one component whose value is an append-only log (views.py), drawn by race.js.
"""

import asyncio
import gc
import json
import math
import os
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing, closing, suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from specdemo.core.deployment import FILES, public, zero_gpu

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "100")  # summarised after every event
if public() and not zero_gpu():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # visitors must not trigger downloads on a public machine


import gradio as gr
from starlette.routing import Route

from specdemo.bench.result import recorded_suite
from specdemo.core.atomic_io import json_text
from specdemo.engine.messages import STAGES
from specdemo.engine.session import session
from specdemo.methods import method, usable
from specdemo.presets import limits
from specdemo.presets.files import DEFAULT, Preset, preset, recorded
from specdemo.presets.pair import TASKS
from specdemo.ui import assets, controls, lab, security, space, sweep, tune, whatif
from specdemo.ui.controls import Controls, wire_save, wire_share
from specdemo.ui.job import ENGINE, QUIET, UPLOADED, Start, Store, named, stop_all, wire
from specdemo.ui.race import Log, Races, replayed
from specdemo.ui.setup import changed

PLACES = 200  # waiting calls
UPDATE_S = 1.0  # between two messages about their places
FIGURE_STEPS = 14  # of the recorded race in "How it works"
SESSIONS = 64  # sessions whose components Gradio stores, 0.3 MB each
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif"]
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]


def build(start: str = DEFAULT, allow_any_model: bool = False) -> gr.Blocks:
    """Create the page with a preset selected. Raises ValueError for an unknown preset, and if a public page would
    accept any model.
    """
    if allow_any_model and public():
        raise ValueError("a public page accepts only listed models; remove --allow-any-model")
    for name in usable():  # now: the lazy modules of transformers break when threads of visitors import them together
        method(name)
    first = limits.fit(preset(start))
    store = Store()
    races = Races(first, allow_any_model, store)
    cache = security.WINDOW_S // 2, security.WINDOW_S
    page = security.Page(title=assets.TITLE, analytics_enabled=False, delete_cache=cache)
    with page:
        gr.HTML(assets.text("title.html"), elem_id="title")
        # "menu" hides tabs that fit whenever it measures them before the page has its width
        with gr.Tabs(overflow_behavior="wrap"):
            with gr.Tab("Race", id="race"):
                form = _race_tab(page, races, first, allow_any_model)
                # clicked by buttons of the result, in race.js; those of another tab exist only once it was opened
                estimate_button = gr.Button("Estimate on an H100", elem_id="estimate")
                search_button = gr.Button("Find what pays", elem_id="search")
            with gr.Tab("Find what pays", id="pays") as tab:
                tune.draw(form, tab, search_button, store)
                sweep.draw(page, form, tab, store)
            with gr.Tab("Other machines", id="machines") as tab:
                whatif.draw(tab, estimate_button, whatif.Questions(races.on_show, allow_any_model))
            with gr.Tab("How it works", id="how") as tab:
                _figures()
                with gr.Column(elem_classes="card"):
                    lab.draw_losslessness(tab, store)
            # opened by the links in the footer; style.css hides their tabs
            with gr.Tab("Training", id="training") as tab, gr.Column(elem_classes="card"):
                lab.draw_training(page, form, tab, store)
            with gr.Tab("Reference", id="reference") as tab:
                reference = gr.Markdown(elem_id="reference", header_links=True)
            tab.select(assets.reference, None, reference, **QUIET)  # not part of what every visitor loads
        gr.HTML(assets.text("footer.html"), elem_id="footer")
        _endpoints(allow_any_model)
        page.unload(store.forget_later)
    page.queue(status_update_rate=UPDATE_S, api_open=False, max_size=PLACES)
    return page


def _race_tab(page: gr.Blocks, races: Races, first: Preset, allow_any_model: bool) -> Controls:
    form = controls.draw(first, allow_any_model)
    view = assets.view("view.html", *assets.RACE, elem_id="view", lanes=len(first.lanes), stages=STAGES)
    with view:
        with gr.Row(elem_id="exports"):
            share = gr.Button("Share", size="sm", elem_id="share", elem_classes="unfolding")
            opened = gr.UploadButton("Open a trace", file_types=[".json"], size="sm", elem_id="open-trace")
        with gr.Row(elem_id="share-panel"):  # view.html has the buttons of the pictures behind it
            where = None if os.environ.get("SPACE_ID") else "Opens it in the specdemo of who follows it"
            copied: dict[str, Any] = {"buttons": ["copy"], "interactive": False}
            link = gr.Textbox(label="Link to this comparison", visible=False, info=where, elem_id="link", **copied)
            command = gr.Textbox(label="Command", info="Races it in a terminal", elem_id="command", **copied)
            wire_save(gr.Button("Save trace", size="sm", elem_id="save-json"), races.save)
    # clicked by the badge of a noisy run, in tiles.js, and at the end of a text that was cut, in lanes.js
    repeat, extend = gr.Button("Repeat", elem_id="repeat"), gr.Button("Continue", elem_id="extend")
    form.wire(page)
    run, again, row, message = (form.parts[name] for name in ("run", "continue", "follow", "message"))
    chosen, inputs = form.parts["setup"].submit, {"message": message}
    starts: list[Start] = [
        ([run.click], races.race, form.inputs),
        ([again.click, message.submit], races.next_turn, inputs),
        ([repeat.click], races.repeat, {}),
        ([extend.click], races.next_turn, {}),
    ]
    script, fold = assets.text("wait_for_link.js"), assets.text("share_panel.js")
    for racing in wire(races, starts, {"view": view}, form.parts["stop"], [run, opened, again, repeat, extend], script):
        named(racing.success, races.offer, inputs, {"row": row, **inputs}, **QUIET)
    named(share.click, races.command, form.inputs, {"command": command}, **QUIET)
    wire_share(share, races.share, form.inputs, link)
    share.click(None, None, None, js=fold.replace("FOLD", "toggle"), **QUIET)
    # those of a visitor: values that an event sets arrive later, maybe after Share was pressed
    edits = [part.input for part in form.inputs.values() if not isinstance(part, gr.State)]
    edits += [form.parts[name].click for name in ("add", "remove", *(f"task-{task}" for task in TASKS))]
    gr.on([*edits, chosen], None, None, None, js=fold.replace("FOLD", "remove"), **QUIET)
    named(opened.upload, races.open, {"file": opened}, {"view": view}, **UPLOADED)
    _show_selection(page, races, form, view)
    return form


def _show_selection(page: gr.Blocks, races: Races, form: Controls, view: gr.HTML) -> None:
    """Connect the events that show the recorded race of a preset, or the comparison of a link."""
    shown = {**form.parts, "view": view}
    linked = named(page.load, races.open_link, form.drawn, shown, **QUIET)
    chosen = named(form.parts["setup"].submit, races.open_query, form.drawn, shown, data="query", **QUIET)
    more = {"query": form.parts["more"], **form.drawn}
    for event in (linked, chosen, named(form.parts["more"].input, races.open_query, more, shown, **QUIET)):
        form.describe(event.then)
        form.offer(event.then)
        for after in (event.success, event.failure):  # which `then` leaves out; Run waits for it
            after(None, None, None, js=assets.text("link_applied.js"), **QUIET)


def _endpoints(allow_any_model: bool) -> None:
    """Create `/race` and `/compare`; Gradio's API page shows their docstrings."""

    def changed_run(preset_id: str, overrides: dict[str, object] | None) -> Log:
        try:
            return Log(spec=changed(preset_id, overrides, allow_any_model))
        except ValueError as error:
            raise gr.Error(str(error)) from None

    async def race(preset_id: str = DEFAULT, overrides: dict[str, object] | None = None) -> AsyncIterator[str]:
        """Run a comparison and stream it. Every output is the complete log so far: one JSON object per line.

        preset_id: a preset, e.g. "embedded-draft". overrides: settings to change, e.g. {"k": 7, "temperature": 0.8}.
        """
        log = await asyncio.to_thread(changed_run, preset_id, overrides)
        async with aclosing(log.follow()) as texts:
            async for text in texts:
                yield text

    async def compare(preset_id: str = DEFAULT, overrides: dict[str, object] | None = None) -> dict[str, object]:
        """Run a comparison and return one dict: environment, every lane's summary and text, and the comparison.

        preset_id: a preset, e.g. "embedded-draft". overrides: settings to change, e.g. {"k": 7, "temperature": 0.8}.
        """
        log = await asyncio.to_thread(changed_run, preset_id, overrides)
        async with aclosing(log.follow()) as texts:
            async for _ in texts:
                pass
        try:
            return log.result()
        except ValueError as error:
            raise gr.Error(str(error)) from None

    gr.api(race, api_name="race", **ENGINE)
    gr.api(compare, api_name="compare", **ENGINE)


def _figures() -> None:
    """Draw five interactive figures from runs that ship with the project."""
    value = json_text({"lines": _first_steps(), "batch": _gain_by_batch()})
    assets.view("how.html", *assets.HOW, elem_id="how", value=value, later=True)


def _first_steps() -> list[str]:
    trace = recorded(DEFAULT)
    lines = {line: json.loads(line) for line in replayed(trace).text.splitlines()} if trace else {}
    return [line for line, of in lines.items() if of["type"] == "start" or of.get("index", math.inf) <= FIGURE_STEPS]


def _gain_by_batch() -> dict[str, object]:
    result = recorded_suite("batch")
    assert result is not None
    points = [[row["batch"], row["speed-up"].value] for row in result.rows if row["accepted"] is not None]
    return {"points": points, "where": result.environment.get("device", "")}


def theme() -> gr.themes.Base:
    """Return the theme. It has system fonts only, because a web font would be downloaded, and no colour of its own:
    colours are those of lanes and tokens (chart.css).
    """
    base = gr.themes.Default(primary_hue="slate", neutral_hue="slate", font=FONTS, font_mono=MONO, radius_size="md")
    boxes = {"checkbox_border_color": "*neutral_500", "checkbox_border_color_dark": "*neutral_400"}
    texts = {"body_text_color_subdued": "*neutral_500", "slider_color_dark": "*primary_400"}
    run = {"button_primary_background_fill": "*neutral_800", "button_primary_background_fill_hover": "*neutral_700"}
    run |= {f"{name}_dark": fill for name, fill in zip(run, ("*neutral_200", "*neutral_300"), strict=True)}
    return base.set(**boxes, **texts, **run, button_primary_text_color_dark="*neutral_900", layout_gap="*spacing_xl")


def serve(
    start: str = DEFAULT,
    host: str = "127.0.0.1",
    port: int = 7860,
    allow_any_model: bool = False,
    block: bool = True,
    allow_hosts: Sequence[str] = (),
    proxies: Sequence[str] = (),
    share: bool = False,
) -> gr.Blocks:
    """Start the page; the models of the preset are loaded meanwhile.

    allow_hosts: host names that the page accepts in addition to its own. proxies: addresses or networks of reverse
    proxies. share: also open a public link through Gradio's servers. Raises ValueError with one line, and OSError for
    the port.
    """
    security.trust_proxies(proxies)
    names = security.own_names(host, allow_hosts)
    if share or not security.only_here(host, allow_hosts, proxies):
        os.environ[FILES] = "0"
    page = build(start, allow_any_model)
    if zero_gpu():  # models must be in place before the first call; the first one shown is loaded last
        preload([*(p for p in limits.at_hand() if p.id != preset(start).id), preset(start)])
    lifespan = security.outermost(partial(security.RequestFilter, names=names, most=space.bounds()))
    page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        quiet=True,
        ssr_mode=False,
        share=share,
        footer_links=["api"],
        run_history=False,
        max_file_size=space.bounds() + security.ENVELOPE,  # the limit of the guard, which leaves nothing on disk
        state_session_capacity=SESSIONS,
        max_threads=2 * PLACES,  # calls in progress, nearly all of which wait in line without a thread
        app_kwargs={"routes": [Route("/scripts/{name}", assets.script)], "lifespan": lifespan},
        theme=theme(),
        _frontend=False,  # no question to its own address, to which a busy machine answers too late
        css=assets.text("chart.css") + assets.text("style.css"),
        favicon_path=assets.HERE / "favicon.svg",
    )
    print(f"specdemo is on {page.local_url}", flush=True)
    if share:
        _accept_link(page.share_url, names)
    if not zero_gpu():
        # no daemon: torch's code, ended in the middle with the interpreter, aborts the process
        threading.Thread(target=_warm, args=(preset(start),), name="preload").start()
    if block:
        with closing(page):
            try:
                threading.Event().wait()
            finally:
                stop_all()
    return page


def _accept_link(link: str | None, names: set[str]) -> None:
    """Let the page answer to the host of its public link, and print the link."""
    words = "there is no public link, because Gradio's servers cannot be reached; allow connections to them"
    if link is not None:
        names.add(security.canonical(urlsplit(link).netloc))
        words = f"specdemo is shared on {link}; everyone who has this link can use this machine for races"
    print(words, flush=True)


def preload(presets: Iterable[Preset]) -> None:
    """Load the models while the visitor reads. Errors are shown when Run is pressed."""
    for race in presets:
        with suppress(Exception):
            session().place_models(race)


def _warm(race: Preset) -> None:
    """Load the models if they are on this machine already."""
    preload([race] if race.embedded else [])
    gc.freeze()  # exclude the current objects, because collecting them would delay every visitor
