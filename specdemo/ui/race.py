"""The Race tab: the logs of runs (views.py), and the events of its visitors. A run is on the engine of this process, or
of one that has a GPU for a limited time."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import ClassVar, Self

import gradio as gr

from specdemo.core.safe_io import FILE_BYTES, read_limited
from specdemo.core.trace import RunTrace, from_json, to_json
from specdemo.engine.comparison import Comparison
from specdemo.engine.messages import LOADING, Finished, Note, RunStage, Started, replay
from specdemo.engine.session import follow_up, session
from specdemo.models.gguf_files import missing_bytes
from specdemo.models.sources import PICKLED, size_text
from specdemo.presets import limits
from specdemo.presets.files import DEFAULT, Preset, load_presets, preset, recorded
from specdemo.presets.link import from_query, is_link, is_sweep, to_command, to_query, without_folders
from specdemo.presets.runnable import nearest_runnable, why_not
from specdemo.ui import space
from specdemo.ui.controls import address, fill
from specdemo.ui.job import ENTRY, LOST_S, Job, Jobs, Messages, Store, Values, Worker, opening, reason, refusal, to_line
from specdemo.ui.setup import from_values, key, to_values
from specdemo.ui.views import Failed, Shown, models_of, summary, view


def run(spec: Comparison, cancelled: Callable[[], bool], report: Callable[..., None]) -> Iterator[Shown]:
    """Yield the messages of a run, or why there is none."""
    started = False
    if limits.public() and (lacking := space.no_gpu(spec)):  # trying anyway would block a shared machine
        yield Failed(lacking)
        return
    try:
        for message in _on_borrowed_gpu(spec, cancelled) if space.zero_gpu() else _stream(spec, cancelled, report):
            started = started or isinstance(message, Started)
            yield message
    except Exception as error:
        words = getattr(error, "message", None) or str(error) or type(error).__name__
        scheduler = f"{'the GPU was taken away' if started else 'no GPU for this run'}: {words}"
        yield Failed(scheduler if space.zero_gpu() else reason(error))  # those of the engine are messages there


def _stream(spec: Comparison, cancelled: Callable[[], bool], report: Callable[..., None]) -> Iterator[Shown]:
    if limits.public():
        session().forget_learned()  # a draft that learned from one visitor's text must not be used for another
    return session().stream(spec, cancelled, report)


def _on_borrowed_gpu(spec: Comparison, cancelled: Callable[[], bool]) -> Iterator[Shown]:
    with contextlib.closing(_play(spec)) as batches:
        for batch in batches:
            if cancelled():
                return
            yield from batch


@space.on_zero_gpu(space.seconds)
def _play(spec: Comparison) -> Generator[Messages, None, None]:
    """Yield the new messages of a run eight times a second."""
    worker = Worker(partial(_stream, spec), space.left_s(spec))
    with contextlib.closing(worker.batches()) as batches:
        yield from batches


def download_question(spec: Preset) -> str:
    """Return what a run would download first, and how to agree; empty if nothing. Asks the hub for sizes."""
    sizes = {}
    for name in () if spec.all_remote or limits.public() else dict.fromkeys(spec.models):
        with contextlib.suppress(ValueError):  # the run says why there is no such model
            sizes[name] = missing_bytes(name, PICKLED)
    absent = " and ".join(name for name, size in sizes.items() if size)
    size = size_text(sum(sizes.values()))
    return f"this run downloads {absent} first: {size}; press Run again to download and run" if absent else ""


class Log(Job):
    """The text of a run.

    `trace` is the visible run once it has ended; until this one starts, it is the run of the log `before`. `recorded`:
    the run was not made for this log. `still`: it is shown finished and moves only when it is replayed. `key`: of the
    settings that led to it. `spec`: the comparison that runs.
    """

    STOPPING: ClassVar[Values] = {}  # its steps are short
    grace_s = 0.4

    def __init__(self, before: Self | None = None, key: str = "", spec: Comparison | None = None, **kind: bool) -> None:
        """kind: `recorded` and `still`, False by default."""
        work = partial(run, spec) if spec else None
        super().__init__(opening(key, **kind), work)
        self.recorded, self.still = kind.get("recorded", False), kind.get("still", False)
        self.unread_s = LOST_S
        self._trace: str = before._trace if before else ""  # as JSON
        self.key, self.spec = key, spec
        self.started = self.finished = self.is_chat = False
        self._models = {spec.target, *(name for lane in spec.lanes for name in lane.models)} if spec else set()
        self._own_before = before is not None and before.own
        self.failure = ""  # reason of the failure, if any
        self._loading = False  # models are being loaded

    @property
    def trace(self) -> RunTrace | None:
        """Return the trace of the finished run."""
        return from_json(self._trace) if self._trace else None

    @property
    def shared_trace(self) -> RunTrace | None:
        """Return the trace of the finished run as it may leave this machine: model files without their folders."""
        trace = self.trace
        return from_json(without_folders(to_json(trace), models_of(trace))) if trace else None

    @property
    def size(self) -> int:
        return ENTRY if self.still else super().size + len(self._trace)

    @property
    def own(self) -> bool:
        """Return whether the visitor requested what is shown, a run or a file, as opposed to a preset's recorded
        race.
        """
        return not self.still and (self.started or not (self.failure or self.stopped) or self._own_before)

    def add(self, messages: Iterable[Shown]) -> str:
        for message in messages:
            if isinstance(message, Started):
                self._models = models_of(message.trace)
            more = self._after_failure() if isinstance(message, Failed) else {}
            self.text += without_folders(to_line(view(message) | more), self._models)
            match message:
                case RunStage(name):
                    self._loading = name == LOADING
                case Started():
                    self.started, self._trace = True, ""
                case Failed(text):
                    self.failure = text
                case Finished(trace):
                    self._trace, self.finished = to_json(trace), True
                    self.is_chat = not self.recorded and bool(trace.lanes[0].messages)
        return self.text

    def _after_failure(self) -> Values:
        """Return that the visitor stopped the run before its first step, or else id and title of a preset that runs
        here in place of one whose models could not be loaded."""
        if self.stopped or self.spec is None or not self._loading:
            return {"stopped": True} if self.stopped else {}
        other = nearest_runnable(preset(self.spec.id), failed=True)
        return {"instead": [other.id, other.chip or other.title]}

    def result(self) -> dict[str, object]:
        """Return the finished run without its steps. Raises ValueError with one line if it did not finish."""
        trace = self.shared_trace
        if trace is None or self.recorded:
            raise ValueError(self.failure or "the run did not finish; try again")
        return summary(trace)

    def stopped_line(self) -> str:
        return "" if self.finished else to_line({"type": "end", "finish": "cancelled", "comparison": []})


def with_notes(text: object, notes: Iterable[str]) -> object:
    """Return a log with notes before its run; one with notes only in place of an update that changes nothing."""
    log = text if isinstance(text, str) else opening(recorded=True)  # no run that a reload could rejoin
    first, end, rest = log.partition("\n")
    added = "".join(to_line(view(Note(note))) for note in notes)
    return f"{first}{end}{added}{rest}" if added else text


def replayed(trace: RunTrace, still: bool = False, key: str = "") -> Log:
    """Return a complete stored run as a log. Needs no model."""
    log = Log(recorded=True, still=still, key=key)
    log.add(replay(trace))
    return log


def open_trace(path: str, bounds: int = FILE_BYTES) -> Log:
    """Return a stored run as a log. Raises ValueError with one line if the file cannot be read."""
    try:
        return replayed(from_json(read_limited(path, bounds), bounds))
    except ValueError as error:
        raise ValueError(f"{error}; open a trace that specdemo saved") from None


class Races(Jobs[Log]):
    """Events of the Race tab for all visitors."""

    def __init__(self, start: Preset, allow_any_model: bool, store: Store | None = None) -> None:
        super().__init__("race", store)
        self._start = start
        self._any = allow_any_model

    def key(self, values: Values) -> str:
        return key(values) if "count" in values else ""

    def race(self, values: Values, last: Log | None) -> Log:
        """Return the job of a run, or a log that asks for a download first. Raises ValueError with one line, as do the
        next two functions, if there can be no run.
        """
        comparison = from_values(values, self._any)
        question = download_question(comparison)
        if not question or (last is not None and last.failure == question):  # asked before: pressed again
            return Log(before=last, key=key(values), spec=comparison)
        log = Log(before=last)
        log.add([Failed(question)])
        return log

    def repeat(self, _: Values, last: Log | None) -> Log:
        """Return the job that repeats the visible run and pools the runs. Raises ValueError if it does not fit into a
        visitor's GPU time.
        """
        if last is None or last.spec is None:
            raise ValueError("no run to repeat; press Run first")
        repeated = last.spec.model_copy(update={"repeats": space.pooled_runs(last.spec)})
        return Log(before=last, key=last.key, spec=repeated)

    def next_turn(self, values: Values, last: Log | None) -> Log:
        """Return the job of the chat's next turn; without a message, that of the texts that were cut."""
        if last is None or last.spec is None or last.trace is None:
            raise ValueError("nothing to continue; press Run first")
        spec = follow_up(last.spec, last.trace, values.get("message"))
        limits.admit(limits.fit(preset(spec.id)).with_changes(prompt=spec.prompt))
        return Log(before=last, spec=spec)

    def offer(self, request: gr.Request, values: Values) -> Values:
        """Show the follow-up prompt if the visible run is a chat of this page; empty after its message is answered."""
        log = self.last(request)
        shown: Values = {"row": gr.update(visible=log is not None and log.is_chat)}
        answered = log and log.finished and log.spec and log.spec.prompt == values["message"]
        return shown | {"message": ""} if answered else shown

    def open(self, request: gr.Request, values: Values) -> Values:
        """Return the log of a stored run, or a log with the reason why the file cannot be read."""
        try:
            return self.keep(request, open_trace(values["file"], space.bounds())).final_updates()
        except ValueError as error:
            return {"view": refusal(error, file=True)}

    def select(self, request: gr.Request, preset_id: str | None) -> object:
        """Return the recorded race of the chosen preset, or else its empty lanes, if no other run is visible."""
        shown = _recorded(preset_id or DEFAULT)  # may take a second; another event may change the view meanwhile
        last = self.last(request)
        if last is not None and last.own:
            return gr.skip()
        if shown:
            return self.keep(request, shown).text
        self.keep(request, Log(still=True))  # hide the recorded race of the previous preset
        return _lanes(limits.fit(preset(preset_id or DEFAULT)))

    def on_show(self, request: gr.Request) -> tuple[RunTrace, bool] | None:
        """Return the finished run that a visitor sees, and whether it is the visitor's own."""
        log = self.last(request)
        trace = log.trace if log else None
        return (trace, log.own) if log and trace else None

    def save(self, request: gr.Request) -> dict[str, str]:
        """Return the file name and the text of the latest run."""
        log = self.last(request)
        trace = log.shared_trace if log else None
        if trace is None:
            raise gr.Error("no finished run to save; press Run, or Stop to keep the steps so far")
        return {"name": f"specdemo-{trace.preset}.json", "text": to_json(trace, 1, space.bounds())}

    def share(self, values: Values) -> str:
        """Return the link that opens the comparison again. Raises ValueError with one line."""
        comparison = session().with_chosen_lengths(from_values(values, self._any))
        return address(to_query(comparison, preset(comparison.id)))

    def command(self, _: gr.Request, values: Values) -> Values:
        """Return the command that races the comparison; empty for settings that are not valid, as the link says."""
        with contextlib.suppress(ValueError):
            comparison = from_values(values, self._any)
            return {"command": to_command(comparison, preset(comparison.id))}
        return {"command": ""}

    def open_link(self, request: gr.Request, values: Values) -> Values:
        """Return the controls and a log for the page's address, without one the recorded race of the page's preset.
        Nothing runs.
        """
        query = request.query_params
        if not is_link(query):
            return {"view": self.select(request, self._start.id)}
        return {} if is_sweep(query) else self.open_query(request, values | {"query": query})

    def open_query(self, request: gr.Request, values: Values) -> Values:
        """Return the controls, and a log with notes on what was ignored, the recorded race of an unchanged preset, or
        empty lanes. The query is that of a link, or of another address after a visitor has chosen a preset or gone
        back; None of a menu that is left without a choice.
        """
        if values["query"] is None:
            return {}
        comparison, refused = self.read_query(values["query"])
        unchanged = comparison == limits.fit(preset(comparison.id))
        shown = self.select(request, comparison.id) if unchanged else _lanes(comparison)
        return fill(comparison, values) | {"view": with_notes(shown, refused)}

    def read_query(self, query: Mapping[str, object] | str) -> tuple[Preset, list[str]]:
        """Return the comparison of a query, and notes on what was ignored."""
        comparison, refused = from_query(query, load_presets(), self._any, self._start)
        fitting = limits.fit(comparison)
        if fitting != comparison and comparison != preset(comparison.id):
            more = f"the link exceeds the limits of this public page; {limits.HOME}"
            refused.append(limits.PRIVATE if limits.shares(comparison) else more)
        return fitting, refused


def _lanes(comparison: Preset) -> str:
    """Return a log with the names of the lanes, and the reason why they cannot run here."""
    full = preset(comparison.id)
    obstacle = why_not(full) if comparison.target == full.target else ""
    shown: Values = {"type": "idle", "lanes": comparison.lane_names[1:], "obstacle": obstacle}
    return Log(still=True).text + to_line(shown)


@lru_cache
def _recorded(preset_id: str) -> Log | None:
    """Return the recorded race of a preset as a still log; the same for all visitors."""
    comparison = preset(preset_id)
    trace = recorded(comparison.id)
    return replayed(trace, still=True, key=key(to_values(limits.fit(comparison)))) if trace else None
