"""The append-only text of a view, one line of JSON per message (views.py). Needs no torch."""

from collections.abc import Iterable, Sequence

from specdemo.core.safe_io import FILE_BYTES, read_limited
from specdemo.core.trace import RunTrace, from_json, to_json
from specdemo.engine.comparison import Comparison
from specdemo.engine.messages import Finished, Note, Started, replay
from specdemo.ui.job import ENTRY, Job, Packed, opening, to_line
from specdemo.ui.views import Failed, Shown, models_of, summary, view, without_folders


class Log(Job):
    """The text of a run.

    `trace` is the visible run once it has ended; until this one starts, it is the run of the log `before`. `recorded`:
    the run was not made for this log. `still`: it is shown finished and moves only when it is replayed. `key`: of the
    settings that led to it. `spec`: the comparison that runs.
    """

    def __init__(
        self,
        recorded: bool = False,
        before: "Log | None" = None,
        still: bool = False,
        key: str = "",
        spec: Comparison | None = None,
    ) -> None:
        super().__init__(opening(recorded=recorded, still=still, **({"key": key} if key else {})))
        self._trace: Packed | None = before._trace if before else None
        self.recorded, self.still, self.key, self.spec = recorded, still, key, spec
        self.started = self.is_chat = False
        self._models = {spec.target, *(name for lane in spec.lanes for name in lane.models)} if spec else set()
        self._own_before = before is not None and before.own
        self.failure = ""  # reason of the failure, if any

    @property
    def trace(self) -> RunTrace | None:
        """Return the trace of the finished run."""
        return from_json(self._trace.text) if self._trace else None

    @property
    def shared_trace(self) -> RunTrace | None:
        """Return the trace of the finished run as it may leave this machine: model files without their folders."""
        trace = self.trace
        return from_json(without_folders(to_json(trace), models_of(trace))) if trace else None

    @property
    def size(self) -> int:
        return ENTRY if self.still else super().size + (self._trace.size if self._trace else 0)

    @property
    def own(self) -> bool:
        """Return whether the visitor requested what is shown, a run or a file, as opposed to a preset's recorded
        race.
        """
        begins = self.started or not (self.failure or self.stopped)
        return not self.still and (begins or self._own_before)

    def add(self, messages: Iterable[Shown]) -> str:
        for message in messages:
            if isinstance(message, Started):
                self._models = models_of(message.trace)
            self.text += without_folders(to_line(view(message)), self._models)
            match message:
                case Started():
                    self.started, self._trace = True, None
                case Failed(text):
                    self.failure = text
                case Finished(trace):
                    self._trace, self.ended = Packed(to_json(trace)), True
                    self.is_chat = not self.recorded and bool(trace.lanes[0].messages)
        return self.text

    def result(self) -> dict[str, object]:
        """Return the finished run without its steps. Raises ValueError with one line if it did not finish."""
        trace = self.shared_trace
        if trace is None or self.recorded:
            raise ValueError(self.failure or "the run did not finish; try again")
        return summary(trace)

    def fall_back(self, why: str, trace: RunTrace) -> str:
        """Start again with a stored run, in place of one that could not start."""
        self.text, self.recorded = opening(recorded=True), True
        return self.add([Note(why), *replay(trace)])

    def request_stop(self) -> str:
        return self.text  # `stop` is fast

    def stop(self) -> str:
        """End the run and the log, with the last messages of the engine if it can be reached."""
        self.end_worker()
        if self.engine is not None:
            self.add(self.engine.finish())
        if not self.ended:
            self.text += to_line({"type": "end", "finish": "cancelled", "comparison": []})
        return self.text


def waiting(lanes: Sequence[str], obstacle: str = "") -> str:
    """Return a log with the names of the lanes and the reason why they cannot run here."""
    return Log(still=True).text + to_line({"type": "idle", "lanes": list(lanes), "obstacle": obstacle})


def notes(texts: Iterable[str]) -> str:
    """Return a log with notes only; empty without any."""
    texts = list(texts)
    return Log(recorded=True).add(Note(text) for text in texts) if texts else ""  # no run that a reload could rejoin


def replayed(trace: RunTrace, still: bool = False, key: str = "") -> Log:
    """Return a complete stored run as a log. Needs no model."""
    log = Log(recorded=True, still=still, key=key)
    log.add(replay(trace))
    return log


def open_trace(path: str, bounds: int = FILE_BYTES) -> Log:
    """Return a stored run as a log, or a log with the reason why the file cannot be read."""
    try:
        return replayed(from_json(read_limited(path, bounds), bounds))
    except ValueError as error:
        log = Log()
        log.add([Failed(f"{error}; open a trace that specdemo saved")])
        return log
