"""Load test: many concurrent requests at every draft length k, and the best k at each load.

Times are measured by the client or, for the local engine, by the lane's clock. TTFT is the time to the first piece of
text. ITL is the gap between pieces, which may contain several tokens. ms/token is the time of a request divided by its
tokens ("normalized latency", Kwon et al. 2309.06180); it does not depend on how a server groups tokens. Goodput counts
the requests that meet both limits, on TTFT and on ms/token (Zhong et al. 2401.09670).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import quantiles

from specdemo.bench.base import Axis, Progress, Report, Stop
from specdemo.bench.load_here import Here
from specdemo.bench.load_options import CONCURRENCY, LoadOptions
from specdemo.bench.load_points import Journal, Measure, MeasuredLane, Point, Round
from specdemo.bench.load_servers import Fleet
from specdemo.bench.measure import Tick, repeated
from specdemo.bench.result import LATENCY, THOROUGH, Result, Row
from specdemo.bench.sweeps import Partial
from specdemo.core import noise
from specdemo.core.atomic_io import json_text
from specdemo.core.estimate import Estimate, over_repeats
from specdemo.core.tally import ratio
from specdemo.presets.files import preset
from specdemo.servers.engines.base import Schedule

SHARES = (50, 99)
GOODPUT = "good requests/s"
BUNCHED = 0.1  # share of the time per token
NO_GAIN = (
    "is clearly faster than plain decoding at any of these loads: serve without speculation, or measure again with more"
    f" repeats ({THOROUGH} or more give intervals)."
)
PLAIN, SCHEDULED = "Baseline", "schedule"
Site = Here | Fleet  # backends that run the lanes
COUNTED = (
    "Times in ms: TTFT until the first piece of text, ITL between pieces, which may contain several tokens, and"
    " ms/token, the time of a request divided by its tokens."
)


def load(suite: LoadOptions, report: Report, cancelled: Stop) -> Result:
    """Measure every k at every load. Lanes alternate if all servers can run together; otherwise they run one after the
    other.
    """
    ks = sorted({0, *suite.ks})
    site = Here.of(suite) if suite.here else Fleet.of(suite, ks)
    config = suite.config(preset(suite.preset_id).target)
    journal = Journal(suite.journal, config)
    lanes = [MeasuredLane(f"k = {k}" if k else PLAIN, k) for k in ks]
    share = 0.5 if suite.schedule else 1.0
    progress = Partial(suite, preset(suite.preset_id).target, report, suite.over.column)
    first = InterleavedLanes(
        suite,
        site,
        journal,
        "first",
        lambda done, what: progress(share * done, what),
        cancelled,
        lambda: progress.show(lambda: _rows(suite, lanes)),
    )
    done, remarks = first.measure(lanes)
    rows = _rows(suite, lanes)
    schedule = schedule_of(rows) if suite.over is CONCURRENCY else []
    remarks += _gains(rows, suite.over)
    advice = _advice(rows, schedule, site)
    if suite.schedule and any(k for *_, k in schedule):
        again = InterleavedLanes(
            suite, site, journal, "again", lambda done, what: report(0.5 + 0.5 * done, what), cancelled
        )
        own, notes = again.confirm(rows, schedule)
        remarks += notes
        if all(row["speed-up"].label != "faster" for row in own):
            advice = [f"No part of the schedule {NO_GAIN}"]
        rows = sorted([*rows, *own], key=lambda row: float(row[suite.over.column]))
    remarks += advice
    if not site.together(len(ks)):
        remarks.append("The servers ran one after the other, each with all GPUs, so the lanes did not take turns.")
    if suite.lengths is not None:
        remarks.append(f"Draft tokens were accepted at random with the mean accepted lengths of {suite.lengths.title}.")
    remarks += [*bunched(rows), COUNTED]
    return Result(suite.name, done, config, site.environment(), rows, remarks, suite.over.column)


@dataclass(frozen=True, slots=True)
class InterleavedLanes:
    """Lanes measured in turns at every load and repeat. stage: label of the rounds in the journal."""

    suite: LoadOptions
    site: Site
    journal: Journal
    stage: str
    report: Progress
    cancelled: Stop
    show: Callable[[], None] = lambda: None  # called after every round

    def measure(self, lanes: Sequence[MeasuredLane]) -> tuple[int, list[str]]:
        """Write the points of every lane: the repeats that were finished, and a remark if not all were."""
        groups = [[*lanes]] if self.site.together(len(lanes)) else [[lane] for lane in lanes]
        finished, remarks = self.suite.repeats, list[str]()
        for number, group in enumerate(groups):

            def report(share: float, what: str, number: int = number) -> None:
                self.report((number + share) / len(groups), what)

            done, remarks = self._group(group, report)
            finished = min(finished, done)
        for lane in lanes:
            lane.points = {load: points[:finished] for load, points in lane.points.items()}
        return finished, remarks

    def _group(self, group: Sequence[MeasuredLane], report: Progress) -> tuple[int, list[str]]:
        names = [lane.lane for lane in group]
        keys = [self._key(group, load, n) for load in self.suite.loads for n in range(self.suite.repeats)]
        stored = [self.journal.get(key, names) for key in keys]
        missing = [*group] if None in stored else []
        warm: set[float] = set()
        with self.site.up(missing, lambda what: report(0.0, what)) as measures:

            def once(repeat: int, tick: Tick) -> list[Round]:
                rounds = []
                for place, load in enumerate(self.suite.loads):
                    tick(place / len(self.suite.loads))
                    key = self._key(group, load, repeat)
                    if (found := self.journal.get(key, names)) is None:
                        found = _round(group, measures, load, load in warm)
                        warm.add(load)
                        self.journal.put(key, found)
                    rounds.append(found)
                    for lane in group:
                        lane.points.setdefault(load, []).append(found[lane.lane])
                    self.show()
                tick(1.0)
                return rounds

            done, remarks = repeated(self.suite.repeats, report, self.cancelled, once)
        return len(done), remarks

    def _key(self, group: Sequence[MeasuredLane], load: float, repeat: int) -> str:
        return f"{self.stage}: {', '.join(lane.lane for lane in group)} at {load:g}, repeat {repeat}"

    def confirm(self, rows: Sequence[Row], schedule: Schedule) -> tuple[list[Row], list[str]]:
        """Measure the schedule, interleaved with plain decoding and the best single k; return its rows and remarks."""
        fixed = _fixed(rows)
        lanes = [MeasuredLane(PLAIN, 0), MeasuredLane(f"k = {fixed}", fixed)]
        lanes.append(MeasuredLane(SCHEDULED, max(k for *_, k in schedule), schedule))
        self.measure(lanes)
        own = [row for row in _rows(self.suite, lanes) if row["lane"] == SCHEDULED]
        per_lane = []
        for lane in lanes[:-1]:
            gains = [_gain(lanes[-1].points[load], lane.points[load]).format() for load in self.suite.loads]
            per_lane.append(f"of {lane.lane} {' | '.join(gains)}")
        return own, [f"Measured with the schedule, in turns: {'; '.join(per_lane)}."]


def _round(group: Sequence[MeasuredLane], measures: Sequence[Measure], load: float, warm: bool) -> Round:
    if not warm:
        for measure in measures:
            measure(load, True)
    return {lane.lane: measure(load, False) for lane, measure in zip(group, measures, strict=True)}


def _gain(own: Sequence[Point], plain: Sequence[Point]) -> Estimate:
    return over_repeats([p.throughput / b.throughput for p, b in zip(own, plain, strict=True)])


def _rows(suite: LoadOptions, lanes: Sequence[MeasuredLane]) -> list[Row]:
    """Return a row per measured load and lane; the last repeat may be unfinished."""
    plain = lanes[0].points
    first = [answer for load in suite.loads for point in plain.get(load, ()) for answer in point.answers]
    texts = {answer.asked: answer.text for answer in reversed(first)}
    return [
        _row(suite, lane, load, points, plain[load][: len(points)], texts)
        for load in suite.loads
        for lane in lanes
        if (points := lane.points.get(load))
    ]


def _row(
    suite: LoadOptions,
    lane: MeasuredLane,
    load: float,
    points: Sequence[Point],
    plain: Sequence[Point],
    texts: Mapping[int, str],
) -> Row:
    answers = [answer for point in points for answer in point.answers]
    gaps = [gap for answer in answers for gap in answer.gaps]
    first = [answer.ttft for answer in answers]
    counters, speed = points[-1].told.counters, _gain(points, plain)
    different = sum(answer.text != texts.get(answer.asked, answer.text) for answer in answers)
    return {
        "lane": lane.lane,
        "k": lane.k,
        suite.over.column: load,
        "tokens/s": over_repeats([point.throughput for point in points]),
        "speed-up": replace(speed, reasons=tuple(noise.wide_interval(speed))),
        GOODPUT: over_repeats([point.goodput(suite.slo_ttft, suite.slo_itl) for point in points]),
        LATENCY: over_repeats([point.per_token for point in points]),
        **{f"TTFT p{share}": _percentile(first, share) for share in SHARES},
        **{f"ITL p{share}": _percentile(gaps, share) for share in SHARES},
        "accepted": counters.get("acceptance_rate"),
        "tokens/pass": counters.get("tokens_per_step"),
        "output": f"{different} of {len(answers)} differ" if different else "identical",
    }


def _percentile(values: Sequence[float], share: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return round(quantiles(values, n=100, method="inclusive")[share - 1], 2)


def schedule_of(rows: Sequence[Row]) -> list[list[int]]:
    """Return the chosen k of every concurrency as vLLM's [[from, to, k], ...] of batch sizes: each from its own load up
    to the next."""
    chosen = {at: row["k"] for at, row in _chosen(rows).items()}
    ends = [at - 1 for at in [*chosen][1:]] + [max(chosen)]
    ranges: list[list[int]] = []
    for k, same in groupby(zip(chosen.values(), ends, strict=True), key=lambda pair: pair[0]):
        *_, (_, end) = same
        ranges.append([ranges[-1][1] + 1 if ranges else 1, end, k])
    return ranges


def _chosen(rows: Sequence[Row]) -> dict[int, Row]:
    """Return the row of every load to recommend: plain decoding unless a k has a clear gain, and the k that is best for
    all loads together unless another k is clearly better at this load."""
    fixed, chosen = _fixed(rows), {}
    for at, group in groupby(rows, key=lambda row: int(row["concurrency"])):
        by_k = {row["k"]: row for row in group}
        plain = by_k[0]
        better = {k: row for k, row in by_k.items() if k and (_pays(row, plain) or _above(row, plain))}
        best = max(better.values(), key=_rank, default=plain)
        chosen[at] = better[fixed] if fixed in better and not _above(best, better[fixed]) else best
    return chosen


def _pays(row: Row, plain: Row) -> bool:
    """Return whether a lane writes clearly more tokens a second than plain decoding, at no less goodput."""
    return bool(row["speed-up"].label == "faster" and row[GOODPUT].value >= plain[GOODPUT].value)


def _above(row: Row, other: Row) -> bool:
    """Return whether the intervals of goodput are apart; no goodput at all needs no interval."""
    low, high = row[GOODPUT].low, other[GOODPUT].high if other[GOODPUT].value else 0.0
    return low is not None and high is not None and bool(low > high)


def _rank(row: Row) -> tuple[float, float]:
    """Return what the best row has most of: goodput, and at equal goodput tokens a second."""
    return row[GOODPUT].value, row["tokens/s"].value


def _best(rows: Sequence[Row]) -> dict[int, Row]:
    by_load = groupby(rows, key=lambda row: int(row["concurrency"]))
    return {at: max(them, key=_rank) for at, them in by_load}


def _fixed(rows: Sequence[Row]) -> int:
    """Return the single k that comes closest to the best over all loads."""
    best = {at: row[GOODPUT].value for at, row in _best(rows).items()}
    shares: dict[int, float] = {}
    for row in rows:
        share = ratio(row[GOODPUT].value, best[int(row["concurrency"])]) or 0.0
        shares[row["k"]] = shares.get(row["k"], 0.0) + share
    return max((k for k in shares if k), key=shares.__getitem__)


def _gains(rows: Sequence[Row], over: Axis) -> list[str]:
    """Return one line per lane: the loads at which it gains and the load from which it loses."""
    lines = []
    for lane in dict.fromkeys(row["lane"] for row in rows if row["lane"] != PLAIN):
        words = [(row["speed-up"].label, f"{row[over.column]:g}") for row in rows if row["lane"] == lane]
        at = {word: [load for by_word, load in words if by_word == word] for word, _ in words}
        slower = f"; slower at {', '.join(at['slower'])}" if "slower" in at else ""
        lines.append(f"{lane}: faster at {over.title} {', '.join(at.get('faster', ['none of these']))}{slower}.")
    return lines


def _advice(rows: Sequence[Row], schedule: Schedule, site: Site) -> list[str]:
    """Return the schedule, ready to paste, and its goodput."""
    if not schedule:
        return []
    if not any(k for *_, k in schedule):
        return [f"No k {NO_GAIN}"]
    if reason := site.no_advice():
        return [reason]
    best = {at: row[GOODPUT].value for at, row in _chosen(rows).items()}
    goods = {(row["k"], int(row["concurrency"])): row[GOODPUT].value for row in rows}

    def against(k: int) -> str:
        return ", ".join(f"{ratio(best[at], goods[k, at]) or 0.0:.2f}x" for at in best)

    loads, fixed = ", ".join(map(str, best)), _fixed(rows)
    return [
        f"Schedule {json_text(schedule)}: goodput at concurrency {loads} is {against(0)} that of {PLAIN},"
        f" {against(fixed)} that of k = {fixed}, the best single k.",
        *site.paste(schedule),
    ]


def bunched(rows: Sequence[Row]) -> list[str]:
    """Return a note if most gaps are zero, because TTFT then includes decoding."""
    lanes = dict.fromkeys(row["lane"] for row in rows if (row["ITL p50"] or 0.0) < BUNCHED * row[LATENCY].value)
    return (
        [f"Text arrived in bunches ({', '.join(lanes)}): TTFT and ITL are not meaningful; ms/token is."]
        if lanes
        else []
    )
