"""Results of a run: one StepEvent per target pass, collected into LaneTrace and RunTrace (JSON, schema 1).

Times are milliseconds of device time, measured by `environment["clock"]`: CUDA events, time of the decoding thread, or
wall time. Derived numbers are defined in `definitions`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from math import isfinite
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, FailFast, Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from specdemo.core import timing_spread
from specdemo.core.estimate import Estimate, Runs, RunTiming, speedup
from specdemo.core.safe_io import FILE_BYTES, validated

LISTS: Final = ("accept_histogram", "accept_by_position")  # the entries of a summary that are lists
MAX_TEXT = 50_000  # characters of a lane on a server; a public page can open a trace with three such lanes
UNREPORTED: Final = -2  # id of a draft token that a server counts but does not name
BASELINE_LANE = "Baseline"  # name of lane 0, plain decoding
MAX_DEPTH = 1024  # entries of a list in a summary; the page draws every one

Finish = Literal["stop", "length", "cancelled", "error"]
# of a draft token: accepted, forced (accepted, and drafted by a grammar), rejected, not reached; of the token that the
# target adds: corrected, bonus, or target where nothing was drafted; unknown: of a server that does not tell its steps
Outcome = Literal["accepted", "forced", "rejected", "not reached", "corrected", "bonus", "target", "unknown"]
Timing = Literal["steps", "requests"]
Span = Literal["ttft_ms", "decode_ms"]
Counter = Literal["steps", "drafted", "accepted", "unverified", "acceptance_rate", "tokens_per_step"]
LARGEST: Final = (1 << 63) - 1  # largest valid integer: the largest seed; larger ones could overflow a float
Int = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Number = Int | float | None
_strict = ConfigDict(extra="forbid", allow_inf_nan=False)
_FAST = FailFast()  # a hostile file gets one error per list, not millions
_Ids = Annotated[list[Int], _FAST]
_Rows = Annotated[list[_Ids], _FAST]
_ProbRows = Annotated[list[Annotated[list[float | None], _FAST]], _FAST]
_TopTokens = Annotated[list[Annotated[list[tuple[Int, float]], _FAST, Field(max_length=4)]], _FAST]
_Ms = Annotated[float, Field(ge=0)]
_SHORT = Field(max_length=64)


def _small(entries: object) -> object:
    if isinstance(entries, dict) and len(entries) > 64:  # before pydantic creates an error for every entry
        raise ValueError("has more than 64 entries")
    return entries


_SMALL = BeforeValidator(_small)
_Reasons = Annotated[list[Annotated[str, Field(max_length=2000)]], Field(max_length=64)]
ComparisonRow = dict[str, Any]  # of a lane and the baseline, see `compare`
_Compared = Annotated[dict[str, Number | bool | str | _Reasons], _SMALL]


@dataclass(frozen=True, slots=True)  # checked where a file is read: checking takes as long as an argmax, every step
class StepEvent:
    """One target pass over B rows. The first event is the prefill: nothing drafted, one token emitted.

    An event of a lane whose steps are unknown is a piece of text as it arrived. Its path is empty.
    """

    index: Int
    drafted: _Rows  # [B][N] token ids, -1 absent, -2 drafted but not reported
    parents: _Rows  # [B][N] parent slot of each node
    path: _Rows  # [B][...] accepted slots from the root (0) down; empty: unknown which tokens were drafted
    emitted: _Rows  # [B][...] output tokens, cut at the stop token and the length limit
    draft_probs: _ProbRows  # [B][N] the drafter's probability of each node; None: unknown
    target_probs: _ProbRows  # [B][N] the target's probability of each node after its parent
    ms: Annotated[dict[str, _Ms], _SMALL]  # prefill | draft verify accept commit observe | stream
    # from the drafter; "waited_ms": other programs took the cores, and the step waited so long for them (only from 5 %
    # of its time); "joules": energy of the device since the step before, of a lane that runs alone, where it can be
    # read; "unverified": draft tokens left out; of a prefill "kept": tokens reused from the last text; of a
    # mixture of experts "experts": per layer, used by the tokens of the pass, "experts_per_token" and "experts_in_all"
    notes: Annotated[dict[str, float], _SMALL] = field(default_factory=dict)
    wall_ms: _Ms | None = None  # wall time, if `ms` is the time of the thread
    # row 0: for each slot of the path the target's most likely tokens with their probabilities, and the output token;
    # empty: unknown
    top: _TopTokens = field(default_factory=list)
    forced: _Rows = field(default_factory=list)  # [B][...] slots of draft tokens that a grammar forced


def is_drafted(token: int) -> bool:
    """Return whether an entry of `drafted` is a draft token."""
    return token >= 0 or token == UNREPORTED


def draft_outcomes(event: StepEvent, row: int = 0) -> list[Outcome | None]:
    """Return the outcome of every draft token of a row; None for absent ones.

    Siblings are tried in order until one is accepted. Later siblings, nodes below a rejected one and nodes after the
    end of the text are not verified.
    """
    emitted = len(event.emitted[row])
    path = event.path[row][: emitted + 1]
    ended = emitted < len(event.path[row])  # with the last accepted token, whose children were not tried
    tried = path[:-1] if ended else path
    forced = event.forced[row] if event.forced else []
    served: set[int] = set()  # accepted slots with an accepted child
    outcomes: list[Outcome | None] = []
    for slot, (token, parent) in enumerate(zip(event.drafted[row], event.parents[row], strict=True), start=1):
        if not is_drafted(token):
            outcomes.append(None)
        elif slot in path:
            outcomes.append("forced" if slot in forced else "accepted")
            served.add(parent)
        else:
            outcomes.append("rejected" if parent in tried and parent not in served else "not reached")
    return outcomes


def output_outcomes(event: StepEvent, row: int = 0) -> list[Outcome]:
    """Return the outcome of every emitted token of a row: those of the accepted draft tokens, then that of the token
    from the target.

    That is `bonus` if the draft ended with the path, `corrected` if all draft tokens after the path were rejected, and
    `target` if nothing was drafted.
    """
    path, emitted = event.path[row], len(event.emitted[row])
    if not path:
        return ["unknown"] * emitted
    drafts = draft_outcomes(event, row)
    parents = {up for up, outcome in zip(event.parents[row], drafts, strict=True) if outcome}
    last: Outcome = "target" if not parents else "corrected" if path[-1] in parents else "bonus"
    accepted = [outcome for slot in path[1:] if (outcome := drafts[slot - 1])]
    return [*accepted, last][:emitted]


@checked(frozen=True, slots=True, config=_strict)
class Remote:
    """Server of a lane, and its own figures, which count where the steps are unknown."""

    server: str  # host:port
    model: str  # name of the model on the server
    endpoint: str
    tokens: Int | None = None  # length of the text, as counted by the server
    counted: bool = False  # an emitted entry is a token; otherwise a piece of text of unknown length
    counters: Annotated[dict[Counter, Number], _SMALL] = field(default_factory=dict)  # summary values from the server
    accept_by_position: Annotated[list[Number], _FAST] = field(default_factory=list)
    source: str = ""  # definition of the server's counters, and the requests they cover
    times: Annotated[dict[Span, _Ms], _SMALL] = field(default_factory=dict)  # of this request, by the server's clock
    accept_histogram: Annotated[list[Number], _FAST] = field(default_factory=list)


_HERE: Final = Remote("", "", "", counted=True)  # the service of a lane that this program decoded


@checked(slots=True, config=_strict)
class LaneTrace:
    """One lane of a run. `pieces[i]` is the text that token i added, so `"".join(pieces) == text`.

    The prompt_ids and options of a lane on a server are empty, its token_ids are -1 if the server did not send them,
    and its method is the one that the server was meant to run.
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
    note: str | None = None  # why the lane failed, differs from its settings, or drafts less than they allow
    messages: Annotated[list[dict[str, str]], _FAST] = field(default_factory=list)  # chat so far; empty for plain text
    remote: Remote | None = None  # None: decoded by this program; see `service`
    # runs before, without probabilities
    repeats: Annotated[list[Annotated[list[StepEvent], _FAST]], _SHORT] = field(default_factory=list)
    defaults: Annotated[list[str], _FAST, _SHORT] = field(default_factory=list)  # options left at their default

    @property
    def steps_known(self) -> bool:
        """Return whether it is known of every token whether it was drafted. Of a server without events it is not."""
        return all(any(event.path) for event in self.events) and bool(self.events or self.timing == "steps")

    @property
    def timing(self) -> Timing:
        """Return what was timed: steps, by the device's clock, or requests with their prompt, by the arrival of text.

        The time of a request cannot be split.
        """
        return "steps" if self.remote is None else "requests"

    @property
    def service(self) -> Remote:
        """Return the server with its figures; without a name, times and counters where this program decoded."""
        return self.remote or _HERE


@checked(slots=True, config=_strict)
class RunTrace:
    """A full run; can be replayed without a model. `vocabulary`: id (as a string) of a draft token -> its text."""

    preset: str
    config: dict[str, object]
    environment: dict[str, object]
    schedule: Literal["race", "sequential"]
    lanes: Annotated[list[LaneTrace], _FAST, _SHORT]
    comparison: Annotated[list[_Compared], _FAST, _SHORT] = field(default_factory=list)
    prompt: str = ""
    vocabulary: dict[str, str] = field(default_factory=dict)
    schema: Literal[1] = 1
    notes: _Reasons = field(default_factory=list)  # remarks on the run, one sentence each

    def _repr_markdown_(self) -> str:
        """Return the speeds as a table, which notebooks show."""
        rows = [f"| {self.lanes[0].name} | {_tokens_per_s(self.lanes[0])} | 1 |"]
        for lane, speed in zip(self.lanes[1:], estimates(self), strict=True):
            rows.append(f"| {lane.name} | {_tokens_per_s(lane)} | {speed.format() if speed else ''} |")
        return "\n".join(["| lane | tokens/s | speed-up (95 % interval) |", "|---|---|---|", *rows])


_adapter = TypeAdapter(RunTrace)


def to_json(trace: RunTrace, indent: int | None = None, limits: int = FILE_BYTES) -> str:
    """Write a trace that `from_json` can read. A trace that exceeds the limits is written without indentation and, if
    needed, without probabilities: `draft_probs`, `target_probs` and `top` are then empty."""
    text = _adapter.dump_json(trace, indent=indent)
    if indent is not None and len(text) > limits:
        text = _adapter.dump_json(trace)
    if len(text) > limits:
        lanes = [
            replace(ln, events=without_probabilities(ln.events), repeats=[*map(without_probabilities, ln.repeats)])
            for ln in trace.lanes
        ]
        text = _adapter.dump_json(replace(trace, lanes=lanes))
    return text.decode()


def without_probabilities(events: Iterable[StepEvent]) -> list[StepEvent]:
    """Return the events without probabilities, which are the largest part of a trace."""
    return [replace(event, draft_probs=[], target_probs=[], top=[]) for event in events]


def _with_probabilities(event: StepEvent) -> StepEvent:
    """Replace omitted probabilities by None."""
    if event.draft_probs or event.target_probs:
        return event
    unknown: list[list[float | None]] = [[None] * len(tokens) for tokens in event.drafted]
    return replace(event, draft_probs=unknown, target_probs=unknown)


def from_json(text: str | bytes, limits: int = FILE_BYTES) -> RunTrace:
    """Parse and validate a trace. Raises ValueError with one line."""
    trace = validated(_adapter, text, limits, "trace")
    if not trace.lanes:
        raise ValueError("not a specdemo trace: it has no lanes")
    if len({len(lane.repeats) for lane in trace.lanes}) > 1:
        raise ValueError("not a specdemo trace: its lanes have different numbers of runs")
    try:
        _check_numbers([trace.config, trace.environment, *(lane.options for lane in trace.lanes)])
    except ValueError as error:
        raise ValueError(f"not a specdemo trace: config, environment or options contain {error}") from None
    for lane in trace.lanes:
        lane.events = [_with_probabilities(event) for event in lane.events]
        for problem in _problems(lane):
            raise ValueError(f"not a specdemo trace: lane {lane.name!r}: {problem}")
    _correct_comparison(trace)
    return trace


def _check_numbers(value: object) -> None:
    """Raise ValueError for NaN, Infinity or an integer beyond `LARGEST` in a JSON value."""
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            _check_numbers(entry)
    elif isinstance(value, float) and not isfinite(value):
        raise ValueError("NaN or infinity")
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError("an integer of more than 63 bits")


def _correct_comparison(trace: RunTrace) -> None:
    """Add intervals of the speed-ups to traces that have none, and drop comparisons of different prompts."""
    for row, lane in zip(trace.comparison, trace.lanes[1:], strict=False):
        if not same_prompt(trace.lanes[0], lane):
            row.update(_not_compared())
            continue
        value = row.get("speedup")
        if "speedup_low" not in row and isinstance(value, int | float):
            speed = estimate_speedup(trace.lanes[0], lane, trace.schedule)
            row.update(_interval_fields(speed, value))


def _problems(lane: LaneTrace) -> Iterator[str]:
    """Yield inconsistencies that types cannot express."""
    for event in chain(lane.events, *lane.repeats):
        if not _is_consistent(_with_probabilities(event), lane.timing):
            yield f"step {event.index} is inconsistent"
    if [t for e in lane.events for t in e.emitted[0]] != lane.token_ids:
        yield "token_ids differ from the emitted tokens of its events"
    if len(lane.pieces) != len(lane.token_ids) or "".join(lane.pieces) != lane.text:
        yield "pieces differ from text"
    lists = {name: value for name, value in lane.summary.items() if isinstance(value, list)}
    wrong = [name for name in lane.summary if (name in lists) != (name in LISTS)]
    wrong += [name for name, value in lane.options.items() if isinstance(value, list | dict)]
    yield from (f"{name!r:.60} has a value of the wrong type" for name in wrong)
    lists["remote.accept_by_position"] = lane.service.accept_by_position
    lists["remote.accept_histogram"] = lane.service.accept_histogram
    yield from (f"{n!r} has more than {MAX_DEPTH:,} entries" for n, value in lists.items() if len(value) > MAX_DEPTH)


def _is_consistent(event: StepEvent, timing: Timing) -> bool:
    """Return True if rows and columns have equal sizes, parents come first, and the path goes from parent to child.

    The draft and the path of a piece of a request are empty if its step is unknown.
    """
    per_node = (event.drafted, event.parents, event.draft_probs, event.target_probs)
    if not event.path or {len(event.path)} != {len(field) for field in (*per_node, event.emitted)}:
        return False
    if timing == "requests" and not any(event.path):
        return not event.top and not any(cells for rows in per_node for cells in rows)
    if event.top and len(event.top) != len(event.path[0]):
        return False
    if event.forced and len(event.forced) != len(event.path):
        return False
    forced_rows = zip(event.forced, event.drafted, strict=False)
    if not all(0 < slot <= len(tokens) for forced, tokens in forced_rows for slot in forced):
        return False
    for tokens, parents, path, emitted, *probs in zip(
        event.drafted, event.parents, event.path, event.emitted, event.draft_probs, event.target_probs, strict=True
    ):
        same_width = len(tokens) == len(parents) == len(probs[0]) == len(probs[1])
        if not same_width or path[:1] != [0] or len(emitted) > len(path):
            return False
        if not all(0 <= parent <= node for node, parent in enumerate(parents)):
            return False
        if not all(0 < s <= len(tokens) and is_drafted(tokens[s - 1]) for s in path[1:]):
            return False
        if not all(parents[s - 1] == up for up, s in pairwise(path)):
            return False
    return True


def run_timings(lane: LaneTrace, include_prefill: bool = False) -> Runs:
    """Return the timing of every run of a lane, without the prefill unless `include_prefill`. Requests always include
    it."""
    include_prefill |= lane.timing == "requests"
    return [_run_timing(lane, events, include_prefill) for events in (*lane.repeats, lane.events)]


def _run_timing(lane: LaneTrace, events: Sequence[StepEvent], include_prefill: bool) -> RunTiming:
    run = decode_timing(events, lane.timing)
    if not include_prefill or not events:
        return run
    tokens = run.tokens + len(events[0].emitted[0]) if lane.service.counted else lane.service.tokens or 0
    return replace(run, tokens=tokens, first_ms=step_ms(events[0]))


def decode_timing(events: Sequence[StepEvent], timing: Timing = "steps") -> RunTiming:
    """Return the decode time of all rows together, without the prefill. The size of a step is its draft tokens, that of
    a piece of a request its tokens."""
    steps, waited_ms = [], []
    disturbed = frozenset(index for index, event in enumerate(events[1:]) if "waited_ms" in event.notes)
    for event in events[1:]:
        drafted = sum(is_drafted(token) for row in event.drafted for token in row)
        steps.append((len(event.emitted[0]) if timing == "requests" else drafted, step_ms(event)))
        if event.wall_ms is not None:
            waited_ms.append(event.wall_ms - step_ms(event))
    tokens = sum(len(row) for event in events[1:] for row in event.emitted)
    return RunTiming(steps, tokens, 0.0, max(sum(waited_ms), 0.0) if waited_ms else None, disturbed)


def step_ms(event: StepEvent) -> float:
    """Return the device time of a step."""
    return sum(event.ms.values())


def same_prompt(baseline: LaneTrace, lane: LaneTrace) -> bool:
    """Return True if two lanes read one prompt, so that their times and texts can be compared. The lanes of a chat in
    traces of specdemo 3 continue their own answers."""
    ids_known = not whole_requests(baseline, lane)
    return baseline.messages == lane.messages and (not ids_known or baseline.prompt_ids == lane.prompt_ids)


def whole_requests(*lanes: LaneTrace) -> bool:
    """Return whether requests were timed in any of the lanes, so that all are compared with their prompts."""
    return any(lane.timing == "requests" for lane in lanes)


def _not_compared() -> ComparisonRow:
    """Return the entries of a row of `comparison` for lanes with different prompts."""
    unknown = ("speedup", "speedup_low", "speedup_high", "identical", "first_divergence", "divergence_margin")
    return {**dict.fromkeys(unknown), "noisy": False, "reasons": [], "verdict": "unknown"}


def compare(
    baseline: LaneTrace, lane: LaneTrace, greedy: bool, margin: float | None = None, schedule: str = "race"
) -> ComparisonRow:
    """Compare a speculative lane with lane 0; the numbers are defined in `definitions`.

    greedy: also for sampling by position (rule `coupled`), which is greedy decoding of logits plus noise. identical:
    the same token ids (over the common length if one was cancelled); None for other sampling, where only distributions
    can be compared. first_divergence: index of the first different token. divergence_margin: difference there between
    the target's best logit and the lower one of the two tokens, if measured. If a server sends no ids, identical
    compares the texts and first_divergence is unknown. The session adds verdict: identical | rounding | differs
    (greedy), same distribution (other sampling), lossy; for servers same text | text differs (greedy); unknown if a
    lane failed, the server sends too little, or the lanes have different prompts, which are not compared.
    """
    if not same_prompt(baseline, lane):
        return {"lane": lane.name, **_not_compared()}
    a: Sequence[object] = baseline.token_ids
    b: Sequence[object] = lane.token_ids
    ids_known = min(*baseline.token_ids, *lane.token_ids, 0, 0) >= 0
    if not ids_known:
        a, b = baseline.text, lane.text
    if "cancelled" in (baseline.finish, lane.finish):
        a, b = a[: len(b)], b[: len(a)]
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if first is None and len(a) != len(b):
        first = min(len(a), len(b))
    speed = estimate_speedup(baseline, lane, schedule)
    value = round(speed.value, 4) if speed else None
    return {
        "lane": lane.name,
        "speedup": value,
        **_interval_fields(speed, value),
        "identical": first is None if greedy else None,
        "first_divergence": first if greedy and ids_known else None,
        "divergence_margin": margin if greedy else None,
    }


def _interval_fields(speed: Estimate | None, value: float | None) -> ComparisonRow:
    if value is None or speed is None:
        return {"speedup_low": None, "speedup_high": None, "noisy": False, "reasons": []}
    low, high = (None if end is None else round(value * end / speed.value, 4) for end in (speed.low, speed.high))
    return {"speedup_low": low, "speedup_high": high, "noisy": speed.noisy, "reasons": [*speed.reasons]}


def estimate_speedup(baseline: LaneTrace, lane: LaneTrace, schedule: str) -> Estimate | None:
    """Estimate the speed-up from the steps, with the reasons to measure it again. None: unknown, or two prompts."""
    if not same_prompt(baseline, lane):
        return None
    requests = whole_requests(baseline, lane)
    runs = run_timings(baseline, requests), run_timings(lane, requests)
    estimate = speedup(*runs, shared=schedule == "race" and not requests)
    if estimate is None:
        return None
    if not requests:
        return replace(estimate, reasons=timing_spread.reasons(*runs, estimate))
    sides = (("the baseline", baseline), ("this lane", lane))
    servers = [(name, run_timings(side), side.service.times.values()) for name, side in sides if whole_requests(side)]
    server_reasons = (why for server in servers for why in timing_spread.server_warnings(*server))
    return replace(estimate, reasons=(*server_reasons, *timing_spread.wide_interval(estimate)))


def _tokens_per_s(lane: LaneTrace) -> str:
    speed = _number(lane.summary.get("tokens_per_s"))
    return "" if speed is None else f"{speed:.1f}"


def estimates(trace: RunTrace) -> list[Estimate | None]:
    """Return the speed-up of every lane over lane 0, from its row of `comparison` if present."""
    rows = [*trace.comparison, *[{}] * len(trace.lanes)]
    return [
        _stored(row) if "speedup" in row else estimate_speedup(trace.lanes[0], lane, trace.schedule)
        for lane, row in zip(trace.lanes[1:], rows, strict=False)
    ]


def _stored(row: Mapping[str, object]) -> Estimate | None:
    value, low, high = (_number(row.get(name)) for name in ("speedup", "speedup_low", "speedup_high"))
    why = row.get("reasons")
    return Estimate(value, low, high, tuple(why) if isinstance(why, list) else ()) if value else None


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None
