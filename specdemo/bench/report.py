"""Numbers -> text for a terminal and JSON for a file. Everything is derived from events; nothing is measured here."""

from typing import Any

from specdemo.bench.result import Result, Spread, write_result
from specdemo.bench.table import table
from specdemo.core.tally import summarise
from specdemo.core.trace import LaneTrace, RunTrace
from specdemo.engine.cost import prediction

__all__ = ["bench_report", "race_report", "texts", "visible", "write_result"]

NONE = "-"


def race_report(trace: RunTrace) -> str:
    """The result of one comparison: conditions, a row per lane, and what each speed-up or slow-down is made of."""
    plain, *lanes = [(lane, summarise(lane)) for lane in trace.lanes]
    header = ("lane", "tokens", "tokens/s", "speed-up", "accepted", "tokens/pass", "TTFT ms", "output")
    rows = [_race_row(*plain, plain[1], NONE)]
    rows += [_race_row(lane, numbers, plain[1], _output(trace, index)) for index, (lane, numbers) in enumerate(lanes)]
    told = zip(trace.lanes[1:], prediction(trace), strict=True)
    sentences = [f"{lane.name}: {_why(lane, predicted['sentence'])}" for lane, predicted in told]
    if plain[0].finish == "error":
        sentences.insert(0, f"{plain[0].name}: {plain[0].note}")
    return visible("\n".join([_conditions(trace), "", table(header, rows), "", *sentences]))


def texts(trace: RunTrace) -> str:
    """What the lanes wrote, texts that are equal once."""
    groups: dict[str, list[str]] = {}
    for lane in trace.lanes:
        groups.setdefault(lane.text, []).append(lane.name)
    return visible("\n\n".join(f"[{', '.join(names)}]\n{trace.prompt}{text}" for text, names in groups.items()))


def visible(text: str) -> str:
    """Control characters written out: a model's text, or a stranger's trace, must not steer the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _race_row(lane: LaneTrace, numbers: dict[str, Any], plain: dict[str, Any], output: str) -> tuple[str, ...]:
    speeds = numbers["tokens_per_s"], plain["tokens_per_s"]
    return (
        lane.name,
        _number(numbers["tokens"], "{}"),
        _number(speeds[0], "{:.1f}"),
        _number(speeds[0] / speeds[1] if all(speeds) else None, "{:.2f}x"),
        _number(numbers["acceptance_rate"], "{:.0%}"),
        _number(numbers["tokens_per_step"], "{:.2f}"),
        _number(numbers["ttft_ms"], "{:.1f}"),
        output if lane.finish in ("stop", "length") else lane.finish,
    )


def _why(lane: LaneTrace, sentence: str) -> str:
    if lane.note and lane.finish == "error":
        return lane.note
    return f"{sentence} Note: {lane.note}." if lane.note else sentence


def _output(trace: RunTrace, index: int) -> str:
    return str(trace.comparison[index].get("verdict", NONE)) if index < len(trace.comparison) else NONE


def _conditions(trace: RunTrace) -> str:
    environment, config = trace.environment, trace.config
    threads = environment.get("threads")
    temperature = config.get("temperature")
    parts = [
        trace.preset,
        f"target {config.get('target', '?')}",
        str(environment.get("dtype", "?")),
        str(environment.get("device", "?")) + (f", {threads} thread{'s' * (threads != 1)}" if threads else ""),
        "greedy" if not temperature else f"temperature {temperature}",
        trace.schedule,
    ]
    return " | ".join(parts)


def bench_report(result: Result) -> str:
    """A row per lane: medians, and the middle half of the repeats in brackets."""
    names = list(dict.fromkeys(name for row in result.rows for name in row))
    rows = [[_cell(row.get(name)) for name in names] for row in result.rows]
    environment = result.environment
    threads = environment["threads"] and f"{environment['threads']} thread(s)"
    where = ", ".join(filter(None, (environment["device"], threads, environment["dtype"])))
    title = f"{result.suite} | {where} | {result.repeats} repeats, median [quartiles]"
    return "\n".join([title, "", table(names, rows), "", *result.remarks])


def _cell(value: Any) -> str:
    if isinstance(value, Spread):
        return f"{value.median:.4g} [{value.q1:.4g} {value.q3:.4g}]"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return NONE if value is None else str(value)


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)
