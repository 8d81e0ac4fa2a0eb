"""Data of the page for a run: one JSON line per message.

A log consists of such lines and is append-only. Its first line names the run, so that a reader can distinguish a new
run from a longer one. `reference.md` documents the lines for API users.
"""

from dataclasses import asdict, dataclass

from specdemo.analysis.lanes import LaneResult, break_even, results
from specdemo.core.definitions import by_key
from specdemo.core.headline import headline, parting_words, price_words
from specdemo.core.rules import draws_by_position
from specdemo.core.trace import LaneTrace, RunTrace
from specdemo.costs.passes import SAME_BITS, cost_points, pass_rows
from specdemo.engine.messages import Finished, LaneDone, Note, Restarted, RunMessage, RunStage, Started, StepRow
from specdemo.methods import BASELINE, MODEL_OPTIONS
from specdemo.methods.facts import FACTS, PREDICTED
from specdemo.models.ref import ModelRef
from specdemo.presets.files import load_presets
from specdemo.presets.link import OWN
from specdemo.presets.pair import kind_of_work
from specdemo.ui.model_menus import model_card


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of loading the models or of a sweep, 0..1. so_far: result of a sweep so far."""

    share: float
    text: str
    so_far: object = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Reason why there is no run, in one line."""

    text: str


Shown = RunMessage | Loading | Failed


def view(message: Shown) -> dict[str, object]:
    """Convert a message to the dict of its line."""
    match message:
        case Started(trace):
            return _start(trace)
        case RunStage(name):
            return {"type": "stage", "name": name}
        case StepRow():
            return {"type": "step", **asdict(message)}
        case LaneDone(lane, trace):
            return {"type": "done", "lane": lane, "remote": _remote(trace)} | _named(trace, "finish", "note", "summary")
        case Restarted(lane):
            return {"type": "restart", "lane": lane}
        case Finished(trace):
            end = {"type": "end", "finish": finish(trace), "comparison": _comparison(trace)}
            return end | {"passes": cost_points(trace)} | {"headline": _headline(trace, "×"), **model_card(trace)}
        case Note(text, lane):
            return {"type": "note", "lane": lane, "text": text}
        case Loading(share, text):
            return {"type": "loading", "share": round(share, 3), "text": text}
        case Failed(text):
            return {"type": "error", "text": text}


def finish(trace: RunTrace) -> str:
    """Return the worst end of any lane: error, cancelled, or done."""
    ends = {lane.finish for lane in trace.lanes}
    return next((end for end in ("error", "cancelled") if end in ends), "done")


def summary(trace: RunTrace) -> dict[str, object]:
    """Return the run without its steps, as `/compare` returns it."""
    return _named(trace, "preset", "schedule", "config", "environment", "notes") | {
        "finish": finish(trace),
        "lanes": [_lane(lane) | _named(lane, "finish", "text", "summary") for lane in trace.lanes],
        "comparison": _comparison(trace),
        "headline": _headline(trace, "x"),
        "definitions": by_key(),
    }


def _named(of: object, *names: str) -> dict[str, object]:
    """Return attributes by name."""
    return {name: getattr(of, name) for name in names}


def models_of(trace: RunTrace) -> set[ModelRef]:
    """Return the names of the models of a run."""
    in_options = (lane.options.get(option) for lane in trace.lanes for option in ("model", *MODEL_OPTIONS))
    listed = [trace.config.get("target"), *(name for names in in_options if names for name in str(names).split(","))]
    return {ModelRef(name.strip()) for name in listed if isinstance(name, str) and name.strip()}


def _start(trace: RunTrace) -> dict[str, object]:
    lanes = [
        _lane(lane) | {"predictable": predictable(trace, lane), "details": _details(trace, lane)}
        for lane in trace.lanes
    ]
    return _named(trace, "preset", "schedule", "environment", "prompt") | {
        "type": "start",
        "greedy": trace.config.get("temperature", 0.0) == 0.0,
        "limit": trace.config.get("max_new_tokens"),
        "target": trace.config.get("target"),
        "title": ModelRef(trace.config.get("target") or "").short_name,
        "work": kind_of_work(trace.preset, trace.prompt),
        "same_bits": trace.environment.get("exactness") == SAME_BITS,
        "passes": cost_points(trace),
        "lanes": lanes,
    }


def _details(trace: RunTrace, lane: LaneTrace) -> list[tuple[str, str]]:
    """Return facts about a lane: the full names of its method and its model, its draft length, its random numbers, and
    how the target's passes run. Of a server they are unknown."""
    if lane.timing == "requests":
        return []
    rows = pass_rows(trace.environment)
    if "k" in lane.defaults:
        rows.insert(0, ("Draft length", f"{lane.options.get('k')}, chosen from the costs of passes"))
    model = trace.config.get("target") if lane is trace.lanes[0] else lane.options.get("model")
    methods = [name for name in (lane.method, lane.options.get("drafter")) if name in FACTS and name != BASELINE]
    named = {"Method": " with ".join(FACTS[name].title for name in methods), "Model": str(model or "")}
    rows = [*((name, text) for name, text in named.items() if text), *rows]
    if draws_by_position(lane.options) and trace.config.get("temperature"):
        rows.append(("Sampling", "a token's random numbers depend on seed and position only, so lanes write one text"))
    return rows


def predictable(trace: RunTrace, lane: LaneTrace) -> bool:
    """Return whether the lane can be predicted on other machines: its method has a cost, its models a config.json,
    or are the GGUF files of this page."""
    known = lane.exact and lane.timing == "steps" and lane.method in PREDICTED
    files = [name for name in models_of(trace) if name.gguf]
    return known and (not files or (OWN in load_presets() and {*files} <= {*load_presets()[OWN].models}))


def _lane(lane: LaneTrace) -> dict[str, object]:
    own = _named(lane, "name", "method", "options", "defaults", "exact", "note", "messages", "timing")
    return own | {"remote": _remote(lane)}


def _remote(lane: LaneTrace) -> dict[str, object] | None:
    """Return the server of a lane and the source of its numbers; None where this program decoded."""
    return _named(lane.remote, "server", "model", "endpoint", "source") if lane.remote else None


def _comparison(trace: RunTrace) -> list[dict[str, object]]:
    """Return the rows with `break_even` and texts: `interval`, `word`, `why` the lane is faster or slower, its `cause`
    in short, `price` of a lossy rule, the tokens where the texts part, `parting`, and a draft length that is predicted
    to be clearly faster, `advice`; unknown ones are left out."""
    return [result.row | _texts(trace, result) for result in results(trace, "×")[: len(trace.comparison)]]


def _texts(trace: RunTrace, result: LaneResult) -> dict[str, object]:
    interval = {"interval": result.speed.interval()} if result.speed else {}
    parting = parting_words(trace.lanes[0], result.lane, result.row)
    texts = {"word": result.word, "price": price_words(result.row), "parting": parting, "cause": result.cause}
    rate = break_even(result.lane.summary, result.speed)
    end = {"why": result.why, "break_even": None if rate is None else round(rate, 4)}
    advice = {"advice": found} if (found := _advice(result)) else {}
    return {**interval, **advice, **{name: text for name, text in texts.items() if text}, **end}


def _advice(result: LaneResult) -> dict[str, object]:
    """Return another draft length `k` with its predicted speed-up; empty if none is clearly faster."""
    found = result.diagnosis
    if found is None or found.speed_at_best is None or all(cause.name != "draft length" for cause in found.causes):
        return {}
    return {"k": found.best_k, "speed": f"{found.speed_at_best.value:.2f}×"}


def _headline(trace: RunTrace, times: str) -> dict[str, object] | None:
    result = headline(trace, times)
    return asdict(result) if result else None
