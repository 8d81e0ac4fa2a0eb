"""The result of a whole comparison in one sentence, for the page, the command line and the API. Needs no torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specdemo.core.estimate import Estimate, fastest
from specdemo.core.trace import LaneTrace, RunTrace, estimates

PLAIN = "plain decoding"
SO_FAR = "so far"  # replaces the verdict of a run that was stopped
WORDS = {"rounding": "differs by rounding"}  # for verdicts whose names are not words for a sentence

Speeds = dict[int, Estimate]  # speed-up by lane; that of the baseline, lane 0, is exactly 1


@dataclass(frozen=True, slots=True)
class Headline:
    """The result of a run.

    lane: the speculative lane with the greatest speed-up. tone: gain if that lane is clearly the fastest of all lanes,
    bad if plain decoding is. caption: the result in one line without a period. sentence: the result in full.
    """

    lane: int
    tone: Literal["gain", "bad", ""]
    caption: str
    sentence: str


def settled(trace: RunTrace, lane: LaneTrace) -> bool:
    """Return whether a lane can be compared with the baseline: both finished and no lane was stopped."""
    finished = all(one.finish in ("stop", "length") for one in (trace.lanes[0], lane))
    return finished and not any(one.finish == "cancelled" for one in trace.lanes)


def headline(trace: RunTrace, times: str = "x") -> Headline | None:
    """Return the result of a run, None if no speed-up was measured.

    Lanes whose 95 % intervals overlap are reported as not clearly different. Lanes that failed are left out. A run that
    was stopped has no winner. times: the unit of a speed-up.
    """
    stopped = any(lane.finish == "cancelled" for lane in trace.lanes)
    numbered_lanes = enumerate(zip(trace.lanes[1:], estimates(trace), strict=True), start=1)
    speeds = {index: speed for index, (lane, speed) in numbered_lanes if speed and (stopped or settled(trace, lane))}
    if not speeds:
        return None
    return _so_far(trace, speeds, times) if stopped else _verdict(trace, speeds, times)


def price_words(row: Mapping[str, object]) -> str:
    """Return the price of a lossy rule from a lane's row of `comparison`; empty if it is unknown."""
    changed, likelihood, plain = (
        row.get(name) for name in ("tokens_changed", "log_likelihood", "baseline_log_likelihood")
    )
    words = [f"{changed} token{'' if changed == 1 else 's'} changed"] if isinstance(changed, int) else []
    if isinstance(likelihood, int | float) and isinstance(plain, int | float):
        words.append(f"log-likelihood {likelihood:.2f} per token, baseline {plain:.2f}")
    return "; ".join(words)


def _so_far(trace: RunTrace, speeds: Speeds, times: str) -> Headline:
    best = max(speeds, key=lambda index: speeds[index].value)
    listed = _and([_with_speed(trace, index, speeds, times) for index in speeds])
    sentence = f"No verdict, because not all lanes finished; {SO_FAR}: {listed}."
    value = f"{speeds[best].value:.2f}{times}"
    return Headline(best, "", f"{_name(trace, best)} is {value} as fast as {PLAIN} {SO_FAR}", sentence)


def _verdict(trace: RunTrace, speeds: Speeds, times: str) -> Headline:
    best = max(speeds, key=lambda index: speeds[index].value)
    lanes = [0, *speeds]
    first, *tied = (lanes[place] for place in fastest([Estimate(1.0, 1.0, 1.0), *speeds.values()]))
    output = _output(trace, speeds)
    if tied:
        result = f"No clear difference between {_and([_with_speed(trace, i, speeds, times) for i in (first, *tied)])}"
        if all(index and speeds[index].label == "faster" for index in (first, *tied)):
            result += f"; {'all' if len(tied) > 1 else 'both'} are faster than {PLAIN}"
        return _result(best, "", (result, ""), output)
    word = "fastest" if len(speeds) > 1 else "faster"
    speed, name = speeds[best], _name(trace, best)
    value = f"{speed.value:.2f}{times} as fast"
    if not first:
        return _result(best, "bad", (f"{PLAIN.capitalize()} is {word}: {name} is {value}", speed.interval()), output)
    lane = f"{name} is {word}:" if len(speeds) > 1 else f"{name} is"
    return _result(best, "gain", (f"{lane} {value} as {PLAIN}", speed.interval()), output)


def _result(lane: int, tone: Literal["gain", "bad", ""], result: tuple[str, str], output: str) -> Headline:
    """Return a headline. result: the statement and its interval, if any. output: empty if no outputs were compared."""
    statement, interval = result
    caption = statement + (f" ({interval})" if interval else "") + (f", output {output}" if output else "")
    full = statement + (f" (95 % interval {interval})" if interval else "")
    return Headline(lane, tone, caption, f"{full}." + (f" Output: {output}." if output else ""))


def _with_speed(trace: RunTrace, index: int, speeds: Speeds, times: str) -> str:
    name = _name(trace, index)
    return f"{name} ({speeds[index].value:.2f}{times})" if index else name


def _name(trace: RunTrace, index: int) -> str:
    """Return the name of a lane, with its number if another lane has the same name."""
    if not index:
        return PLAIN
    name = trace.lanes[index].name
    return name if Counter(lane.name for lane in trace.lanes)[name] == 1 else f"{name} (lane {index})"


def _output(trace: RunTrace, speeds: Speeds) -> str:
    """Return how the texts of the lanes compare with the baseline's; empty if they were not compared."""
    rows = enumerate(trace.comparison, start=1)
    verdicts = {index: str(row["verdict"]) for index, row in rows if index in speeds and "verdict" in row}
    verdicts = {index: WORDS.get(verdict, verdict) for index, verdict in verdicts.items()}
    if len({*verdicts.values()}) < 2:
        return "".join({*verdicts.values()})
    return ", ".join(f"{_name(trace, index)} {verdict}" for index, verdict in verdicts.items())


def _and(words: Sequence[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
