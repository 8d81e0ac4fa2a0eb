"""What leaves the engine: one StepEvent per target pass, collected into LaneTrace and RunTrace (JSON, schema 1).

Times are milliseconds of device time, as `environment["clock"]` names it: of CUDA events, of the thread that decoded,
or else of wall clock. Derived numbers are defined in `definitions`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import chain, pairwise
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from specdemo.core import noise
from specdemo.core.bounds import FILE, Bounds, judge, parsing
from specdemo.core.estimate import Estimate, Runs, Timed, speedup

SCHEMA: Final = 1
LISTS: Final = ("accept_histogram", "accept_by_position")  # of a summary; its other values are single ones
MAX_TEXT = 50_000  # characters of a lane on a server: three such lanes, whatever they say, open on a public page
MAX_DEPTH = 1024  # entries of such a list, of which the page draws every one

Finish = Literal["stop", "length", "cancelled", "error"]
Kind = Literal["target", "accepted", "corrected", "bonus", "unknown"]
Span = Literal["ttft_ms", "decode_ms"]
Counter = Literal["steps", "drafted", "accepted", "acceptance_rate", "tokens_per_step"]
Number = int | float | None
_strict = ConfigDict(extra="forbid", allow_inf_nan=False)
_FAST = FailFast()  # a hostile file gets one error per list, not millions
_Ids = Annotated[list[int], _FAST]
_Rows = Annotated[list[_Ids], _FAST]
_ProbRows = Annotated[list[Annotated[list[float | None], _FAST]], _FAST]
_Ms = Annotated[float, Field(ge=0)]
_SHORT = Field(max_length=64)


def _small(entries: object) -> object:
    if isinstance(entries, dict) and len(entries) > 64:  # before an error is made for every one of them
        raise ValueError("holds more than 64 entries")
    return entries


_SMALL = BeforeValidator(_small)
_Reasons = Annotated[list[Annotated[str, Field(max_length=2000)]], Field(max_length=64)]
_Compared = Annotated[dict[str, Number | bool | str | _Reasons], _SMALL]


@checked(frozen=True, slots=True, config=_strict)
class StepEvent:
    """One target pass over B rows. The first event is the prefill: nothing drafted, one token emitted.

    On a server (LaneTrace.remote) an event is a piece of text as it arrived: nothing is known of its passes.
    """

    index: int
    drafted: _Rows  # [B][N] token ids, -1 absent
    parents: _Rows  # [B][N] parent slot of each node
    path: _Rows  # [B][...] kept slots from the root (0) down; empty: which tokens were drafted is unknown
    emitted: _Rows  # [B][...] after trimming at stop token and length
    draft_probs: _ProbRows  # [B][N] the drafter's probability of each node; None: it has none
    target_probs: _ProbRows  # [B][N] the target's probability of each node at that place
    ms: Annotated[dict[str, _Ms], _SMALL]  # prefill | draft verify accept commit observe | stream
    notes: Annotated[dict[str, float], _SMALL] = field(default_factory=dict)  # the drafter's; prefill: tokens kept
    wall_ms: _Ms | None = None  # where `ms` is the thread's own time: with what it waited for the processor


def kinds(event: StepEvent, row: int = 0) -> list[Kind]:
    """What each emitted token of a row is: accepted drafts, then one token of the target's own.

    That one is `bonus` when the path ended where nothing more was drafted, `corrected` when it ended above drafts that
    were all refused, and `target` when nothing was drafted at all. On a server every token is `unknown`.
    """
    if not event.path[row]:
        return ["unknown"] * len(event.emitted[row])
    drafted = [
        (n + 1, p) for n, (t, p) in enumerate(zip(event.drafted[row], event.parents[row], strict=True)) if t >= 0
    ]
    path = event.path[row]
    if not drafted:
        last: Kind = "target"
    elif any(parent == path[-1] for _, parent in drafted):
        last = "corrected"
    else:
        last = "bonus"
    accepted: list[Kind] = ["accepted"] * (len(path) - 1)
    return [*accepted, last][: len(event.emitted[row])]


@checked(frozen=True, slots=True, config=_strict)
class Remote:
    """The server a lane ran on, and what it told of the run. Times are wall times of arrival, the network included."""

    server: str  # host:port
    model: str  # its name there
    endpoint: str  # which of the server's interfaces was used
    tokens: int | None = None  # of the whole text, as the server counted them
    counted: bool = False  # an emitted entry is a token; otherwise a piece of text, of unknown length
    counters: Annotated[dict[Counter, Number], _SMALL] = field(default_factory=dict)  # what it tells of a summary
    accept_by_position: Annotated[list[Number], _FAST] = field(default_factory=list)
    source: str = ""  # how the server defines its counters, and whom they count
    times: Annotated[dict[Span, _Ms], _SMALL] = field(default_factory=dict)  # of this request, by the server's clock


@checked(slots=True, config=_strict)
class LaneTrace:
    """One lane of a run. `pieces[i]` is the text token i added, so `"".join(pieces) == text`.

    token_ids of a remote lane are -1 where the server did not tell them; its prompt_ids and options are empty, and its
    method is what the server was meant to run.
    """

    name: str
    method: str
    options: dict[str, object]
    exact: bool
    prompt_ids: _Ids
    token_ids: _Ids = field(default_factory=list)
    text: str = ""
    finish: Finish = "cancelled"
    events: Annotated[list[StepEvent], _FAST] = field(default_factory=list)
    summary: Annotated[dict[str, Number | list[Number]], _SMALL] = field(default_factory=dict)
    pieces: Annotated[list[str], _FAST] = field(default_factory=list)
    note: str | None = None  # why the lane failed or runs otherwise than asked
    messages: Annotated[list[dict[str, str]], _FAST] = field(default_factory=list)  # the chat so far; of a text none
    remote: Remote | None = None  # None: decoded here
    repeats: Annotated[list[Annotated[list[StepEvent], _FAST]], _SHORT] = field(
        default_factory=list
    )  # runs before, without probabilities
    defaults: Annotated[list[str], _FAST, _SHORT] = field(default_factory=list)  # the options that nobody set


@checked(slots=True, config=_strict)
class RunTrace:
    """A whole comparison; replays with no model. `vocabulary`: id (as a string) of a drafted token -> its text."""

    preset: str
    config: dict[str, object]
    environment: dict[str, object]
    schedule: Literal["race", "sequential"]
    lanes: Annotated[list[LaneTrace], _FAST, _SHORT]
    comparison: Annotated[list[_Compared], _FAST, _SHORT] = field(default_factory=list)
    prompt: str = ""
    vocabulary: dict[str, str] = field(default_factory=dict)
    schema: Literal[1] = SCHEMA
    notes: _Reasons = field(default_factory=list)  # what a reader should know of the run, one sentence each


_adapter = TypeAdapter(RunTrace)


def to_json(trace: RunTrace, indent: int | None = None, bounds: Bounds = FILE) -> str:
    """What `from_json` opens. A trace that would be beyond the bounds has no indentation, and if that does not do, no
    probabilities: `draft_probs` and `target_probs` are then empty."""
    text = _adapter.dump_json(trace, indent=indent)
    if indent is not None and not _fits(text, bounds):
        text = _adapter.dump_json(trace)
    if not _fits(text, bounds):
        lanes = [replace(ln, events=bare(ln.events), repeats=[*map(bare, ln.repeats)]) for ln in trace.lanes]
        text = _adapter.dump_json(replace(trace, lanes=lanes))
    return text.decode()


def _fits(text: bytes, bounds: Bounds) -> bool:
    try:
        judge(text, bounds, "a trace")
    except ValueError:
        return False
    return True


def bare(events: Iterable[StepEvent]) -> list[StepEvent]:
    """Without probabilities, of which a trace has most."""
    return [replace(event, draft_probs=[], target_probs=[]) for event in events]


def _with_probabilities(event: StepEvent) -> StepEvent:
    """Those that were left out are unknown."""
    if event.draft_probs or event.target_probs:
        return event
    unknown: list[list[float | None]] = [[None] * len(tokens) for tokens in event.drafted]
    return replace(event, draft_probs=unknown, target_probs=unknown)


def from_json(text: str | bytes, bounds: Bounds = FILE) -> RunTrace:
    """Parse and check a trace. Raises ValueError with one clear line."""
    text = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    judge(text, bounds, "a trace")
    try:
        with parsing():
            trace = _adapter.validate_json(text)
    except ValidationError as error:
        raise ValueError(_reason(error)) from None
    if not trace.lanes:
        raise ValueError("not a specdemo trace: it has no lanes")
    if len({len(lane.repeats) for lane in trace.lanes}) > 1:
        raise ValueError("not a specdemo trace: its lanes were not repeated equally often")
    try:
        json.dumps([trace.config, trace.environment, *(lane.options for lane in trace.lanes)], allow_nan=False)
    except ValueError:
        raise ValueError("not a specdemo trace: config, environment or options hold what is no finite number") from None
    for lane in trace.lanes:
        lane.events = [_with_probabilities(event) for event in lane.events]
        for problem in _problems(lane):
            raise ValueError(f"not a specdemo trace: lane {lane.name!r}: {problem}")
    _estimate_again(trace)
    return trace


def _estimate_again(trace: RunTrace) -> None:
    """How far the speed-ups of an older trace can be trusted."""
    for row, lane in zip(trace.comparison, trace.lanes[1:], strict=False):
        value = row.get("speedup")
        if "speedup_low" not in row and isinstance(value, int | float):
            row.update(_trust(trace.lanes[0], lane, value, trace.schedule))


def _reason(error: ValidationError) -> str:
    if error.error_count() > 1000:  # a listing of millions of errors would take gigabytes
        return f"not a specdemo trace: {error.error_count():,} fields are wrong"
    errors = error.errors(include_url=False, include_context=False)
    schema = next((e for e in errors if e["loc"] == ("schema",)), None)
    if schema:
        return f"this trace has schema {schema['input']!r:.20}; this version reads schema {SCHEMA}"
    where = " ".join(".".join(map(str, errors[0]["loc"])).split())  # a key may hold line breaks
    return f"not a specdemo trace: {where[:100] or 'the file'}: {errors[0]['msg']}"


def _problems(lane: LaneTrace) -> Iterator[str]:
    """What types cannot say: rows agree with each other."""
    for event in chain(lane.events, *lane.repeats):
        if not _holds_together(_with_probabilities(event), lane.remote is not None):
            yield f"step {event.index} does not hold together"
    if [t for e in lane.events for t in e.emitted[0]] != lane.token_ids:
        yield "token_ids differ from what its events emitted"
    if len(lane.pieces) != len(lane.token_ids) or "".join(lane.pieces) != lane.text:
        yield "pieces and text disagree"
    lists = {name: value for name, value in lane.summary.items() if isinstance(value, list)}
    wrong = [name for name in lane.summary if (name in lists) != (name in LISTS)]
    wrong += [name for name, value in lane.options.items() if isinstance(value, list | dict)]
    yield from (f"{name!r:.60} has a value of the wrong type" for name in wrong)
    if lane.remote:
        lists["remote.accept_by_position"] = lane.remote.accept_by_position
    yield from (f"{n!r} has more than {MAX_DEPTH:,} entries" for n, value in lists.items() if len(value) > MAX_DEPTH)


def _holds_together(event: StepEvent, remote: bool) -> bool:
    """Rows and columns agree, parents come first, a path goes from parent to child over drafted nodes.

    Of a remote event neither drafts nor path are known.
    """
    per_node = (event.drafted, event.parents, event.draft_probs, event.target_probs)
    if not event.path or {len(event.path)} != {len(field) for field in (*per_node, event.emitted)}:
        return False
    if remote:
        return not any(cells for rows in (*per_node, event.path) for cells in rows)
    for tokens, parents, path, emitted, *probs in zip(
        event.drafted, event.parents, event.path, event.emitted, event.draft_probs, event.target_probs, strict=True
    ):
        same_width = len(tokens) == len(parents) == len(probs[0]) == len(probs[1])
        if not same_width or path[:1] != [0] or len(emitted) > len(path):
            return False
        if not all(0 <= parent <= node for node, parent in enumerate(parents)):
            return False
        if not all(0 < s <= len(tokens) and tokens[s - 1] >= 0 and parents[s - 1] == up for up, s in pairwise(path)):
            return False
    return True


def timed(lane: LaneTrace, whole: bool = False) -> Runs:
    """The decoding of every run of a lane, without the prefill or, from the request on, with it. A lane on a server is
    always timed so."""
    return [_timed(lane, events, whole or lane.remote is not None) for events in (*lane.repeats, lane.events)]


def _timed(lane: LaneTrace, events: Sequence[StepEvent], whole: bool) -> Timed:
    run = timed_events(events)
    if not whole or not events:
        return run
    tokens = run.tokens + len(events[0].emitted[0])
    if lane.remote and not lane.remote.counted:
        tokens = lane.remote.tokens or 0
    return replace(run, tokens=tokens, first_ms=step_ms(events[0]))


def timed_events(events: Sequence[StepEvent]) -> Timed:
    """What decoding took, all rows together; the prefill is left out. Of a server's pieces sizes are in tokens."""
    steps, waited = [], []
    for event in events[1:]:
        drafted = sum(token >= 0 for row in event.drafted for token in row)
        steps.append((drafted if event.path[0] else len(event.emitted[0]), step_ms(event)))
        if event.wall_ms is not None:
            waited.append(event.wall_ms - step_ms(event))
    tokens = sum(len(row) for event in events[1:] for row in event.emitted)
    return Timed(steps, tokens, waited_ms=max(sum(waited), 0.0) if waited else None)


def step_ms(event: StepEvent) -> float:
    """Device time of a whole step."""
    return sum(event.ms.values())


def compare(
    baseline: LaneTrace, lane: LaneTrace, greedy: bool, margin: float | None = None, schedule: str = "race"
) -> dict[str, Any]:
    """A speculative lane against lane 0; the numbers are defined in `definitions`.

    identical: the same token ids (over the common length when one was cancelled); None under sampling, where only
    distributions agree. first_divergence: index of the first other token. divergence_margin: there, the gap between the
    target's two best logits in a one-token pass, when it was measured. Where a server did not tell the ids, identical
    compares the texts, and first_divergence is unknown.
    The session adds verdict: identical | rounding | differs (greedy), same distribution (sampling), lossy; and with a
    server same text | text differs (greedy); unknown where a lane failed or a server does not tell.
    """
    a: Sequence[Any] = baseline.token_ids
    b: Sequence[Any] = lane.token_ids
    known = not any(t < 0 for ids in (a, b) for t in ids)
    if not known:
        a, b = baseline.text, lane.text
    if "cancelled" in (baseline.finish, lane.finish):
        a, b = a[: len(b)], b[: len(a)]
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if first is None and len(a) != len(b):
        first = min(len(a), len(b))
    value = _ratio(baseline, lane)
    return {
        "lane": lane.name,
        "speedup": value,
        **_trust(baseline, lane, value, schedule),
        "identical": first is None if greedy else None,
        "first_divergence": first if greedy and known else None,
        "divergence_margin": margin if greedy else None,
    }


def _ratio(baseline: LaneTrace, lane: LaneTrace) -> float | None:
    """Of a lane here beside one on a server there is no speed from the request on in its summary."""
    if (baseline.remote is None) != (lane.remote is None):
        seen = speedup(timed(baseline, True), timed(lane, True), shared=False)
        return round(seen.value, 4) if seen else None
    ours, theirs = (_number(one.summary.get("tokens_per_s")) for one in (lane, baseline))
    return round(ours / theirs, 4) if ours and theirs else None


def _trust(baseline: LaneTrace, lane: LaneTrace, value: float | None, schedule: str) -> dict[str, Any]:
    seen = None if value is None else judged(baseline, lane, schedule)
    if value is None or seen is None:
        return {"speedup_low": None, "speedup_high": None, "noisy": False, "reasons": []}
    low, high = (None if end is None else round(value * end / seen.value, 4) for end in (seen.low, seen.high))
    return {"speedup_low": low, "speedup_high": high, "noisy": seen.noisy, "reasons": [*seen.reasons]}


def judged(baseline: LaneTrace, lane: LaneTrace, schedule: str) -> Estimate | None:
    """The speed-up as the steps alone say it, and why it should be measured again."""
    outside = baseline.remote is not None or lane.remote is not None
    runs = timed(baseline, outside), timed(lane, outside)
    seen = speedup(*runs, shared=schedule == "race" and not outside)
    if seen is None:
        return None
    if not outside:
        return replace(seen, reasons=noise.reasons(*runs, seen))
    named = (("the baseline", baseline), ("this lane", lane))
    servers = [(name, timed(one), one.remote.times.values()) for name, one in named if one.remote]
    told = (why for server in servers for why in noise.of_server(*server))
    return replace(seen, reasons=(*told, *noise.wide(seen)))


def estimates(trace: RunTrace) -> list[Estimate | None]:
    """The speed-up of every lane beside lane 0, from its row of `comparison` where it has one."""
    rows = [*trace.comparison, *[{}] * len(trace.lanes)]
    return [
        _stored(row) if "speedup" in row else judged(trace.lanes[0], lane, trace.schedule)
        for lane, row in zip(trace.lanes[1:], rows, strict=False)
    ]


def _stored(row: Mapping[str, object]) -> Estimate | None:
    value, low, high = (_number(row.get(name)) for name in ("speedup", "speedup_low", "speedup_high"))
    why = row.get("reasons")
    return Estimate(value, low, high, tuple(why) if isinstance(why, list) else ()) if value else None


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None
