"""The page: `build` creates it, `serve` starts its server.

The view is one component whose value is an append-only log (views.py), drawn by race.js. Some events share the
engine: one runs, the others wait in line and see their place (turns.py). Code that needs torch is imported through
`lazy_imports.live`, so that the page appears before torch is loaded.
"""

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from functools import lru_cache, partial
from urllib.parse import urlsplit

from specdemo.presets import limits
from specdemo.ui import space

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "100")  # summarised after every event
os.environ["FORWARDED_ALLOW_IPS"] = ""  # uvicorn would believe X-Forwarded-For of any local peer
if limits.public() and not space.zero_gpu():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # visitors must not trigger downloads on a public machine


import gradio as gr
from starlette.middleware import Middleware

from specdemo.core.trace import RunTrace, to_json
from specdemo.engine.comparison import Comparison
from specdemo.presets.files import DEFAULT, Preset, load_presets, preset
from specdemo.presets.link import from_query, is_link, is_sweep, to_query
from specdemo.presets.recorded import recorded
from specdemo.presets.runnable import why_not
from specdemo.ui import answers, assets, controls, how, lab, security, space, sweep, whatif
from specdemo.ui.controls import Controls, address, fill, fill_untouched, wire_share
from specdemo.ui.failures import Page, quiet
from specdemo.ui.job import (
    LOST_S,
    QUEUED,
    QUIET,
    Jobs,
    Start,
    Store,
    Values,
    at_end,
    follow,
    named,
    rejoining,
    stop_all,
    wire,
)
from specdemo.ui.lazy_imports import live
from specdemo.ui.log import Log, notes, open_trace, replayed, waiting
from specdemo.ui.setup import changed, from_values, key, to_values
from specdemo.ui.turns import ENGINE, PLACES, UPDATE_S
from specdemo.ui.views import tokens_csv

POOLED = 3  # runs of "Repeat"
SESSIONS = 64  # sessions whose components Gradio stores, 0.3 MB each
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif"]
MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]


class Race(Log):
    """The log of a run that a visitor started."""

    UNREAD_S = LOST_S

    def stream(self) -> Generator[str, None, None]:
        self._unread.clear()
        try:
            yield from live().run(self.spec, self)
        finally:
            self._unread.set()


class Visits(Jobs[Log]):
    """Events of the Race tab for all visitors."""

    def __init__(self, start: Preset, allow_any_model: bool, store: Store | None = None) -> None:
        super().__init__("race", store)
        self._start = start
        self._any = allow_any_model

    def race(self, values: Values, last: Log | None) -> Log:
        """Return the job of a run. Raises ValueError with one line, as do the next two functions, if there can be no
        run.
        """
        spec = from_values(values, self._any)
        return Race(before=last, key=key(values), spec=spec)

    def repeat(self, _: Values, last: Log | None) -> Log:
        """Return the job that repeats the visible run three times and pools the runs."""
        if last is None or last.spec is None:
            raise ValueError("no run to repeat; press Run first")
        return Race(before=last, key=last.key, spec=last.spec.model_copy(update={"repeats": POOLED}))

    def follow(self, values: Values, last: Log | None) -> Log:
        """Return the job of the chat's next turn."""
        if last is None or last.spec is None or last.trace is None or last.recorded:
            raise ValueError("no chat to continue; press Run first")
        base = limits.fit(preset(last.spec.id))
        message = limits.admit(base.with_changes(prompt=values["message"])).prompt
        return Race(before=last, spec=live().follow_up(last.spec, last.trace, message))

    def offer(self, request: gr.Request, values: Values) -> Values:
        """Show the follow-up prompt if the visible run is a chat of this page; empty after its message is answered."""
        log = self.last(request)
        shown: Values = {"row": gr.update(visible=log is not None and log.is_chat)}
        if log is None or log.spec is None or not log.ended or log.spec.prompt != values["message"]:
            return shown
        return shown | {"message": ""}

    def open(self, request: gr.Request, values: Values) -> Values:
        """Return the log of a stored run, or a log with the reason why the file cannot be read."""
        log = open_trace(values["file"], space.bounds())
        if log.ended:
            self.keep(request, log)
        return log.final_updates()

    def first(self, request: gr.Request) -> object:
        """Return the initial view: the recorded race of the preset, unless a link was opened."""
        return gr.skip() if is_link(request.query_params) else self.select(request, self._start.id)

    def select(self, request: gr.Request, preset_id: str | None) -> object:
        """Return the recorded race of the chosen preset, or else its empty lanes, if no other run is visible."""
        shown = _recorded(preset_id or DEFAULT)  # may take a second; another event may change the view meanwhile
        last = self.last(request)
        if last is not None and last.own:
            return gr.skip()
        if shown:
            self.keep(request, shown)
            return shown.text
        self.keep(request, Log(still=True))  # hide the recorded race of the previous preset
        return _lanes(limits.fit(preset(preset_id or DEFAULT)))

    def on_show(self, request: gr.Request) -> tuple[RunTrace, bool] | None:
        """Return the finished run that a visitor sees, and whether it is the visitor's own."""
        log = self.last(request)
        trace = log.trace if log else None
        return (trace, log.own) if log and trace else None

    def save(self, request: gr.Request, kind: str) -> dict[str, str]:
        """Return the file name and the text of the latest run."""
        log = self.last(request)
        trace = log.shared_trace if log else None
        if trace is None:
            raise gr.Error(_nothing_to_save(log), print_exception=False)
        text = to_json(trace, 1, space.bounds()) if kind == "json" else tokens_csv(trace)
        return {"name": f"specdemo-{trace.preset}.{kind}", "text": text}

    def share(self, values: Values) -> str:
        """Return the link that opens the comparison again. Raises ValueError with one line."""
        chosen = live().session().with_chosen_lengths(from_values(values, self._any))
        return address(to_query(chosen, preset(chosen.id)))

    def read_link(self, request: gr.Request) -> tuple[Preset, list[str]] | None:
        """Return the comparison of the page's address, and notes on what was ignored."""
        if not is_link(request.query_params) or is_sweep(request.query_params):
            return None
        return self._read_query(request.query_params)

    def restore(self, request: gr.Request, values: Values) -> Values:
        """Return the controls of the page's address, except those that the visitor has changed by now, and a log.
        Nothing runs.
        """
        if values["asked"] is None:
            return {}
        chosen, refused = values["asked"]
        return fill_untouched(chosen, self._start, values) | {"view": self._show(request, chosen, refused)}

    def open_query(self, request: gr.Request, values: Values) -> Values:
        """Return the controls and a log for the query of another address, after a visitor has chosen a preset or gone
        back.
        """
        chosen, refused = self._read_query(str(values["query"]))
        return fill(chosen, values) | {"view": self._show(request, chosen, refused)}

    def _read_query(self, query: Mapping[str, object] | str) -> tuple[Preset, list[str]]:
        """Return the comparison of a query, and notes on what was ignored. On a cold server this takes seconds."""
        live()
        chosen, refused = from_query(query, load_presets(), self._any, self._start)
        fitting = limits.fit(chosen)
        if fitting != chosen and chosen != preset(chosen.id):
            more = f"the link exceeds the limits of this public page; {limits.HOME}"
            refused.append(limits.PRIVATE if limits.shares(chosen) else more)
        return fitting, refused

    def _show(self, request: gr.Request, chosen: Preset, refused: Sequence[str]) -> object:
        """Return a log: the notes on what was ignored, the recorded race of an unchanged preset, or empty lanes."""
        if refused:
            return notes(refused)
        return self.select(request, chosen.id) if chosen == limits.fit(preset(chosen.id)) else _lanes(chosen)


def _nothing_to_save(log: Log | None) -> str:
    if log is None or not log.started:
        return "no run to save yet; press Run first"
    if log.failure:
        return "the run failed, so there is nothing to save; press Run again"
    return "the run has not finished; press Stop to save the steps so far"


async def _free_memory(request: gr.Request) -> None:
    if limits.public():
        raise gr.Error("all visitors of a public page share the models, so they stay loaded", print_exception=False)
    with ENGINE.line(request) as call:
        await call.turn.wait()
        gr.Info(await asyncio.to_thread(lambda: live().free_memory()))


def _lanes(chosen: Preset) -> str:
    full = preset(chosen.id)
    obstacle = why_not(full) if chosen.target == full.target else ""
    return waiting([live().lane_name(lane) for lane in chosen.lanes], obstacle)


@lru_cache
def _recorded(preset_id: str) -> Log | None:
    """Return the recorded race of a preset as a still log; the same for all visitors."""
    chosen = preset(preset_id)
    trace = recorded(chosen.id)
    return replayed(trace, still=True, key=key(to_values(limits.fit(chosen)))) if trace else None


def build(start: str = DEFAULT, allow_any_model: bool = False) -> gr.Blocks:
    """Create the page with a preset selected. Raises ValueError for an unknown preset, and if a public page would
    accept any model.
    """
    if allow_any_model and limits.public():
        raise ValueError("a public page accepts only listed models; remove --allow-any-model")
    first = limits.fit(preset(start))
    store = Store()
    visits = Visits(first, allow_any_model, store)
    kept = int(security.WINDOW_S)  # seconds that uploads are kept
    page = Page(title=answers.TITLE, analytics_enabled=False, delete_cache=(kept // 2, kept))
    with page:
        gr.HTML(assets.text("title.html"), elem_id="title")
        # "menu" hides tabs that fit whenever it measures them before the page has its width
        with gr.Tabs(overflow_behavior="wrap"):
            with gr.Tab("Race", id="race"):
                form = _race_tab(page, visits, first, allow_any_model)
                estimate_button = gr.Button(
                    "Estimate on an H100", elem_id="estimate"
                )  # clicked by the button below the results, in race.js
            with gr.Tab("Sweep", id="sweep") as tab:
                suite = sweep.draw(page, tab, store)
            with gr.Tab("What if", id="what-if") as tab:
                whatif.draw(tab, estimate_button, whatif.Questions(visits.on_show, allow_any_model))
            with gr.Tab("Lab", id="lab") as tab:
                lab.draw(page, form, suite, tab, store)
            with gr.Tab("How it works", id="how"):
                how.draw()
            with gr.Tab("Reference", id="reference") as tab:
                reference = gr.Markdown(elem_id="reference", header_links=True)
            tab.select(assets.reference, None, reference, **QUIET)  # not part of what every visitor loads
        _endpoints(allow_any_model)
        page.unload(ENGINE.forget)
        page.unload(store.forget_later)
    page.queue(status_update_rate=UPDATE_S, api_open=False, max_size=PLACES, default_concurrency_limit=None)
    return page


def _race_tab(page: gr.Blocks, visits: Visits, first: Preset, allow_any_model: bool) -> Controls:
    form = controls.draw(first, allow_any_model)
    view = assets.view("view.html", *assets.RACE, elem_id="view")
    with view, gr.Row(visible=False, elem_id="follow-row") as row:
        message = gr.Textbox(
            label="Next message",
            placeholder="Next message to all lanes",
            max_length=limits.here().prompt,
            elem_id="message",
            scale=5,
        )
        again = gr.Button("Continue", variant="primary", elem_id="continue", min_width=180)
    with gr.Row(elem_id="exports"):
        share = gr.Button("Share", size="sm", elem_id="share")
        _saves(visits)
        opened = gr.UploadButton("Open a trace", file_types=[".json"], size="sm", elem_id="open-trace")
        free = gr.Button("Unload models", size="sm", elem_id="free-memory", visible=not limits.public())
        free.click(_free_memory, **QUEUED)
    link = gr.Textbox(label="Link to this comparison", visible=False, buttons=["copy"], elem_id="link")
    repeat = gr.Button("Repeat", elem_id="repeat")  # clicked by the badge of a noisy run, in tiles.js
    form.wire(page)
    run, inputs = form.parts["run"], {"message": message}
    starts: list[Start] = [
        ([run.click], visits.race, form.inputs),
        ([again.click, message.submit], visits.follow, inputs),
        ([repeat.click], visits.repeat, {}),
        rejoining("race"),  # clicked by link_applied.js
    ]
    actions = [run, opened, again, repeat]
    script = assets.text("wait_for_link.js")
    for racing in wire(visits, starts, {"view": view}, form.parts["stop"], actions, script):
        named(racing.success, visits.offer, inputs, {"row": row, **inputs}, **QUIET)
    wire_share(share, visits.share, form.inputs, link)
    gr.on(form.edits, lambda: gr.update(visible=False), None, link, trigger_mode="once", **QUIET)
    named(opened.upload, visits.open, {"file": opened}, {"view": view}, **QUIET)
    _show_what_is_chosen(page, visits, form, view)
    return form


def _saves(visits: Visits) -> None:
    file = gr.JSON(visible=False)
    for kind, words in (("json", "Save trace (JSON)"), ("csv", "Save tokens (CSV)")):
        button = gr.Button(words, size="sm", elem_id=f"save-{kind}")
        saved = button.click(visits.save, gr.State(kind), file, **QUIET)
        saved.success(None, file, None, js=assets.text("save.js"), **QUIET)


def _show_what_is_chosen(page: gr.Blocks, visits: Visits, form: Controls, view: gr.HTML) -> None:
    """Connect the events that show the recorded race of a preset, or the comparison of a link."""
    page.load(visits.first, None, view, **QUIET)
    shown = {**form.parts, "view": view}
    opened = named(form.parts["setup"].submit, visits.open_query, form.drawn, shown, data="query", **QUIET)
    form.describe(opened.then)
    requested = gr.State()
    linked = page.load(visits.read_link, None, requested, **QUIET)
    given = {"asked": requested, **form.inputs, **form.drawn}
    restored = named(linked.success, visits.restore, given, shown, **QUIET)
    form.offer(restored.then)
    form.offer(opened.then)
    for after in (linked.failure, *at_end(restored), *at_end(opened)):  # Run waits for it
        after(None, None, None, js=assets.text("link_applied.js"), **QUIET)


def _endpoints(allow_any_model: bool) -> None:
    """Create `/race` and `/compare`; Gradio's API page shows their docstrings."""

    async def race(
        request: gr.Request, preset_id: str = DEFAULT, overrides: dict[str, object] | None = None
    ) -> AsyncIterator[str]:
        """Run a comparison and stream it. Every output is the complete log so far: one JSON object per line.

        preset_id: a preset, e.g. "embedded-draft". overrides: settings to change, e.g. {"k": 7, "temperature": 0.8}.
        """
        with ENGINE.line(request) as call:
            log = Race(spec=await asyncio.to_thread(_changed, preset_id, overrides, allow_any_model))
            async with aclosing(follow(call, log)) as texts:
                async for text in texts:
                    yield text

    async def compare(
        request: gr.Request, preset_id: str = DEFAULT, overrides: dict[str, object] | None = None
    ) -> dict[str, object]:
        """Run a comparison and return one dict: environment, every lane's summary and text, and the comparison.

        preset_id: a preset, e.g. "embedded-draft". overrides: settings to change, e.g. {"k": 7, "temperature": 0.8}.
        """
        with ENGINE.line(request) as call:
            log = Race(spec=await asyncio.to_thread(_changed, preset_id, overrides, allow_any_model))
            async for _ in follow(call, log):
                pass
        try:
            return log.result()
        except ValueError as error:
            raise gr.Error(str(error), print_exception=False) from None

    gr.api(race, api_name="race")
    gr.api(compare, api_name="compare")


def _changed(preset_id: str, overrides: dict[str, object] | None, allow_any_model: bool) -> Comparison:
    try:
        return changed(preset_id, overrides, allow_any_model)
    except ValueError as error:
        raise gr.Error(str(error), print_exception=False) from None


def theme() -> gr.themes.Base:
    """Return the theme. It has system fonts only, because a web font would be downloaded. White on 500 to 700 and the
    subdued text reach a contrast of 4.5:1.
    """
    blue = "#eef7fd #d8ebf8 #b5d9f1 #8cc4ea #3f9ad4 #0072b2 #00669f #005889 #00466d #003755 #002438".split()
    hue = gr.themes.Color(*blue)
    base = gr.themes.Default(primary_hue=hue, neutral_hue="slate", font=FONTS, font_mono=MONO, radius_size="md")
    return base.set(body_text_color_subdued="*neutral_500", slider_color_dark="*primary_400", layout_gap="*spacing_xl")


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
    page = build(start, allow_any_model)
    if space.zero_gpu():  # models must be in place before the first call; the first one shown is loaded last
        live().preload([*(p for p in limits.at_hand() if p.id != preset(start).id), preset(start)])
    outer = security.outermost(quiet, partial(security.Hosts, names=names), security.guarded)
    layers = [Middleware(answers.Answers), Middleware(security.Guard, space.bounds())]
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
        app_kwargs={"middleware": layers, "lifespan": outer},
        theme=theme(),
        css_paths=[assets.HERE / "chart.css", assets.HERE / "style.css"],
        favicon_path=assets.HERE / "favicon.svg",
    )
    print(f"specdemo is on {page.local_url}", flush=True)
    if share:
        _accept_link(page.share_url, names)
    if not space.zero_gpu():
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
    if link is None:
        print(
            "there is no public link, because Gradio's servers cannot be reached; allow connections to them", flush=True
        )
        return
    names.add(security.canonical(urlsplit(link).netloc))
    print(f"specdemo is shared on {link}; everyone who has this link can use this machine for races", flush=True)


def _warm(chosen: Preset) -> None:
    """Import the engine, and load the models if they are on this machine already."""
    runs = live()
    if chosen.embedded:
        runs.preload([chosen])
    gc.freeze()  # exclude the current objects, because collecting them would delay every visitor
