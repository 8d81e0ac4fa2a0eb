"""The result of a comparison in words, for the page, the command line and the API: the headline, and of each lane how
its text compares with the baseline's. Needs no torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specdemo.core.estimate import Estimate, fastest
from specdemo.core.suggest import counted
from specdemo.core.trace import LaneTrace, RunTrace, estimates, run_timings, same_prompt, whole_requests

PLAIN_DECODING = "plain decoding"
MIN_PROMPT_SHARE = 0.10  # share of a lane's time in its prompt from which the speed-up in all is reported too
SO_FAR = "so far"  # replaces the verdict of a run that was stopped
LOOPS = "the text repeats itself, so this gain is not typical"
LOOP_TOKENS = 32  # a text loops if it ends in at least so many tokens, and LOOP_TURNS rounds, of one repeated sequence
LOOP_TURNS = 4
BIT_FOR_BIT = "identical, bit for bit"  # the logits are the same bits in passes of every width, not only the tokens
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
    finished = all(side.finish in ("stop", "length") for side in (trace.lanes[0], lane))
    return finished and not any(side.finish == "cancelled" for side in trace.lanes)


def headline(trace: RunTrace, times: str = "x") -> Headline | None:
    """Return the result of a run, None if no speed-up was measured.

    Lanes whose 95 % intervals overlap are reported as not clearly different. Lanes that failed are left out. A run that
    was stopped has no winner. times: the unit of a speed-up.
    """
    stopped = any(lane.finish == "cancelled" for lane in trace.lanes)
    numbered_lanes = enumerate(zip(trace.lanes[1:], estimates(trace), strict=True), start=1)
    speeds = {index: speed for index, (lane, speed) in numbered_lanes if speed and (stopped or settled(trace, lane))}
    if not speeds and not all(same_prompt(trace.lanes[0], lane) for lane in trace.lanes):
        reason = "No verdict, because the lanes answered different prompts"
        return Headline(1, "", reason, f"{reason}.")
    if not speeds:
        return None
    return _so_far(trace, speeds, times) if stopped else _verdict(trace, speeds, times)


def loops(tokens: Sequence[int]) -> bool:
    """Return whether a text ends in one sequence of tokens over and over; False where ids are unknown (-1)."""
    if -1 in tokens:
        return False
    longest = len(tokens) // LOOP_TURNS
    lengths = ((period, max(LOOP_TOKENS, LOOP_TURNS * period)) for period in range(1, longest + 1))
    return any(
        length <= len(tokens) and tokens[-length:-period] == tokens[len(tokens) - length + period :]
        for period, length in lengths
    )


def price_words(row: Mapping[str, object]) -> str:
    """Return the price of a lossy rule from a lane's row of `comparison`; empty if it is unknown."""
    changed, likelihood, plain = (
        row.get(name) for name in ("tokens_changed", "log_likelihood", "baseline_log_likelihood")
    )
    words = [f"{counted(changed, 'token')} changed"] if isinstance(changed, int) else []
    if isinstance(likelihood, int | float) and isinstance(plain, int | float):
        words.append(f"log-likelihood {likelihood:.2f} per token, baseline {plain:.2f}")
    return "; ".join(words)


def parting_words(baseline: LaneTrace, lane: LaneTrace, row: Mapping[str, object]) -> str:
    """Return the two tokens where the texts part, and the gap between them in words; empty if they do not part."""
    index, margin = row.get("first_divergence"), row.get("divergence_margin")
    if not isinstance(index, int) or index < 0:  # a stored trace may contain any number
        return ""
    pieces = [side.pieces[index][:30] if index < len(side.pieces) else "" for side in (baseline, lane)]
    alike = pieces[0].strip() == pieces[1].strip()
    words = [(piece if alike else piece.strip(), piece) for piece in pieces]
    tokens = [f"“{word}”" if word else "a line break" if piece else "the end" for word, piece in words]
    if not isinstance(margin, int | float):
        return " or ".join(tokens)
    gap = f"{margin:.2g} between {' and '.join(tokens)}"
    if row.get("verdict") == "rounding":
        return f"a near-tie: {gap}"
    return f"{gap}, {'accepted by the lossy rule' if not lane.exact else 'more than rounding explains'}"


def output_words(row: Mapping[str, object]) -> str:
    """Return how a lane's text compares with the baseline's, from its row of `comparison`; empty if it was not
    compared."""
    verdict = str(row.get("verdict", ""))
    return BIT_FOR_BIT if row.get("bit_for_bit") is True else WORDS.get(verdict, verdict)


def _so_far(trace: RunTrace, speeds: Speeds, times: str) -> Headline:
    best = max(speeds, key=lambda index: speeds[index].value)
    lanes = listed([_with_speed(trace, index, speeds, times) for index in speeds])
    sentence = f"No verdict, because not all lanes finished; {SO_FAR}: {lanes}."
    value = f"{speeds[best].value:.2f}{times}"
    return Headline(best, "", f"{_name(trace, best)} is {value} as fast as {PLAIN_DECODING} {SO_FAR}", sentence)


def _verdict(trace: RunTrace, speeds: Speeds, times: str) -> Headline:
    best = max(speeds, key=lambda index: speeds[index].value)
    lanes = [0, *speeds]
    first, *tied = (lanes[place] for place in fastest([Estimate(1.0, 1.0, 1.0), *speeds.values()]))
    output = _output(trace, speeds)
    looping = f"; {LOOPS}" if speeds[best].label == "faster" and loops(trace.lanes[0].token_ids) else ""
    if tied:
        result = f"No clear difference between {listed([_with_speed(trace, i, speeds, times) for i in (first, *tied)])}"
        if all(index and speeds[index].label == "faster" for index in (first, *tied)):
            result += f"; {'all' if len(tied) > 1 else 'both'} are faster than {PLAIN_DECODING}"
        return _result(best, "", (result, "", looping), output)
    word = "fastest" if len(speeds) > 1 else "faster"
    speed, name = speeds[best], _name(trace, best)
    total = _in_all(trace.lanes[0], trace.lanes[best])
    more = (f", {total:.2f}{times} in all with the prompt" if total else "") + looping
    value = f"{speed.value:.2f}{times} as fast"
    if not first:
        result = f"{PLAIN_DECODING.capitalize()} is {word}: {name} is {value}"
        return _result(best, "bad", (result, speed.interval(), more), output)
    lane = f"{name} is {word}:" if len(speeds) > 1 else f"{name} is"
    return _result(best, "gain", (f"{lane} {value} as {PLAIN_DECODING}", speed.interval(), more), output)


def _in_all(baseline: LaneTrace, lane: LaneTrace) -> float | None:
    """Return the speed-up of the baseline's number of tokens with the time of the prompt. None where that is small,
    where the speed-up contains it already, and where one lane had read more of the prompt in the last turn of a chat.
    """
    kept = {side.events[0].notes.get("kept", 0.0) if side.events else 0.0 for side in (baseline, lane)}
    tokens, drafted_tokens = (sum(run.tokens for run in run_timings(side)) for side in (baseline, lane))
    if len(kept) > 1 or whole_requests(baseline, lane) or not drafted_tokens:
        return None
    timed = [run_timings(side, include_prefill=True) for side in (baseline, lane)]
    prompts = [sum(run.first_ms for run in runs) for runs in timed]
    steps = [sum(run.steps_ms for run in runs) for runs in timed]
    totals = [prompts[0] + steps[0], prompts[1] + steps[1] * tokens / drafted_tokens]
    shares = [prompt / total for prompt, total in zip(prompts, totals, strict=True) if total]
    return totals[0] / totals[1] if max(shares, default=0.0) > MIN_PROMPT_SHARE else None


def _result(lane: int, tone: Literal["gain", "bad", ""], result: tuple[str, str, str], output: str) -> Headline:
    """Return a headline. result: the statement, its interval and an addition, if any. output: empty if no outputs were
    compared."""
    statement, interval, more = result
    word = "outputs:" if ", " in output.replace(BIT_FOR_BIT, "") else "output"
    caption = statement + (f" ({interval})" if interval else "") + more + (f", {word} {output}" if output else "")
    full = statement + (f" (95 % interval {interval})" if interval else "") + more
    return Headline(lane, tone, caption, f"{full}." + (f" Output: {output}." if output else ""))


def _with_speed(trace: RunTrace, index: int, speeds: Speeds, times: str) -> str:
    name = _name(trace, index)
    return f"{name} ({speeds[index].value:.2f}{times})" if index else name


def _name(trace: RunTrace, index: int) -> str:
    """Return the name of a lane, with its number if another lane has the same name."""
    if not index:
        return PLAIN_DECODING
    name = trace.lanes[index].name
    return name if Counter(lane.name for lane in trace.lanes)[name] == 1 else f"{name} (lane {index})"


def _output(trace: RunTrace, speeds: Speeds) -> str:
    """Return how the texts of the lanes compare with the baseline's; empty if they were not compared."""
    rows = enumerate(trace.comparison, start=1)
    verdicts = {index: output_words(row) for index, row in rows if index in speeds and "verdict" in row}
    if len({*verdicts.values()}) < 2:
        return "".join({*verdicts.values()})
    return ", ".join(f"{_name(trace, index)} {verdict}" for index, verdict in verdicts.items())


def listed(words: Sequence[str]) -> str:
    """Return `a, b and c`."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
