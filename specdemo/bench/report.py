"""Reports of runs, results, predictions and diagnoses as text for a terminal. Needs no torch."""

from collections.abc import Iterator, Sequence

from specdemo.analysis.diagnose import SMALLEST_RATE, Diagnosis, least_k, percent
from specdemo.analysis.lanes import Summary, break_even, results
from specdemo.analysis.predict import Prediction
from specdemo.bench.result import ALL, Result, Row, best, intervals, is_baseline, noisy
from specdemo.core.estimate import Estimate
from specdemo.core.headline import headline, price_words
from specdemo.core.suggest import counted, program
from specdemo.core.tally import summarise
from specdemo.core.trace import LaneTrace, RunTrace

NONE = "-"
RACE_COLUMNS = (
    "lane", "tokens", "tokens/s", "speed-up", "accepted", "break-even", "tokens/pass", "TTFT ms", "waited", "output",
)  # fmt: skip
# columns of the table in docs/measurements.md besides the acceptance rate, which may be missing
LANE_COLUMNS = ("lane", "tokens/s", "speed-up", "tokens/pass")
SHOWN_POSITIONS = 16  # positions of which the acceptance is shown
NEARLY_ALL = 0.98  # share of steps with a draft; the last step of a request often has none
NOTHING = "Nothing has to change."


def race_report(trace: RunTrace) -> str:
    """Return the report of a comparison: conditions, a row per lane, and an explanation of every speed-up."""
    plain, lanes = trace.lanes[0], results(trace)
    numbers = summarise(plain)
    rows = [_race_row(plain, numbers, Estimate(1.0) if numbers["tokens_per_s"] else None, NONE)]
    for result in lanes:
        verdict = str(result.row.get("verdict", NONE))
        rows.append(_race_row(result.lane, summarise(result.lane), result.speed, verdict))
    columns, energies = [*RACE_COLUMNS], [_energy(summarise(lane)) for lane in trace.lanes]
    if any(energies):
        columns.insert(-1, "J/token")
        rows = [(*row[:-1], energy or NONE, row[-1]) for row, energy in zip(rows, energies, strict=True)]
    winner = headline(trace)
    sentences = [winner.sentence] if winner else []
    if why := _why(plain, ""):
        sentences.append(f"{plain.name}: {why}")
    for result in lanes:
        if why := _why(result.lane, result.why):
            sentences.append(f"{result.lane.name}: {why}")
        if price := price_words(result.row):
            sentences.append(f"{result.lane.name}: lossy, {price}.")
    noisy = [
        f"Noisy machine, run again ({result.lane.name}): {'; '.join(result.speed.reasons)}."
        for result in lanes
        if result.speed and result.speed.noisy
    ]
    notes = [f"Note: {note}." for note in trace.notes]
    return visible(
        "\n".join([_conditions(trace), *_servers(trace), "", table(columns, rows), "", *sentences, *noisy, *notes])
    )


def texts(trace: RunTrace) -> str:
    """Return the outputs of the lanes; equal outputs appear once."""
    groups: dict[str, list[str]] = {}
    for lane in trace.lanes:
        groups.setdefault(lane.text, []).append(lane.name)
    # a message, or a text to continue
    prompt = f"{trace.prompt.rstrip()}\n\n" if trace.lanes[0].messages else trace.prompt
    return visible("\n\n".join(f"[{', '.join(names)}]\n{prompt}{text}" for text, names in groups.items()))


def visible(text: str) -> str:
    """Escape control characters, because model text or a foreign trace must not control the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _energy(numbers: Summary) -> str:
    """Return the joules per token with their interval; empty if they were not read."""
    value, low, high = (numbers.get(f"joules_per_token{end}") for end in ("", "_low", "_high"))
    return Estimate(value, low, high).format("") if value else ""


def _race_row(lane: LaneTrace, numbers: Summary, speed: Estimate | None, output: str) -> tuple[str, ...]:
    return (
        lane.name,
        _number(numbers["tokens"], "{}"),
        _number(numbers["tokens_per_s"], "{:.1f}"),
        speed.format() if speed else NONE,
        _number(numbers["acceptance_rate"], "{:.0%}"),
        _number(break_even(numbers, speed), "{:.0%}"),
        _number(numbers["tokens_per_step"], "{:.2f}"),
        _number(numbers["ttft_ms"], "{:.1f}"),
        _number(numbers["waited_share"], "{:.0%}"),
        output if lane.finish in ("stop", "length") else lane.finish,
    )


def _why(lane: LaneTrace, sentence: str) -> str:
    if lane.note and lane.finish == "error":
        return lane.note
    return f"{sentence} Note: {lane.note.rstrip('.')}.".lstrip() if lane.note else sentence


def _servers(trace: RunTrace) -> list[str]:
    """Return a line with the model that each server reports; no line without servers that answered."""
    services = [(lane.name, lane.service) for lane in trace.lanes if lane.service.model]
    served = [f"{name}: {service.model} at {service.server}" for name, service in services]
    return [f"served models | {' | '.join(served)}"] if served else []


def _target(trace: RunTrace) -> str:
    """Return the name of the target; where all lanes ran on servers, the names that the servers report."""
    reported = [lane.service.model for lane in trace.lanes if lane.service.model]
    names = dict.fromkeys(reported) if len(reported) == len(trace.lanes) else [trace.config.get("target", "?")]
    return " and ".join(map(str, names))


def _conditions(trace: RunTrace) -> str:
    environment, config = trace.environment, trace.config
    threads = environment.get("threads")
    temperature = config.get("temperature")
    parts = [
        trace.preset,
        f"target {_target(trace)}",
        str(environment.get("dtype", "?")),
        str(environment.get("device", "?")) + (f", {counted(threads, 'thread')}" if threads else ""),
        "greedy" if not temperature else f"temperature {temperature}",
        trace.schedule,
        str(environment.get("clock", "wall time")),
    ]
    runs = len(trace.lanes[0].repeats) + 1
    return " | ".join([*parts, f"{runs} runs"] if runs > 1 else parts)


def bench_report(result: Result) -> str:
    """Return the report of a suite: a row per lane with the numbers of all repeats and their intervals."""
    names = list(dict.fromkeys(name for row in result.rows for name in row))
    rows = [[_cell(row.get(name)) for name in names] for row in result.rows]
    environment = result.environment
    threads = environment["threads"] and counted(environment["threads"], "thread")
    where = ", ".join(filter(None, (environment["device"], threads, environment["dtype"])))
    title = f"{result.suite} | {where} | {conditions(result)}"
    stages = environment.get("stages")
    times = [f"{stage} {seconds:.0f} s" for stage, seconds in stages.items()] if isinstance(stages, dict) else []
    last = map(sentence, filter(None, (best(result), noisy(result), f"{', '.join(times)}." if times else "")))
    return "\n".join([title, "", *([table(names, rows), ""] if rows else []), *map(visible, result.remarks), *last])


def markdown(result: Result) -> str:
    """Return the result as a Markdown table after the conditions of the measurement: LANE_COLUMNS, fastest lane first,
    if every row has them, else all columns."""
    where = result.environment
    versions = where.get("versions", {})
    counts = {"prompts": "prompt", "new_tokens": "new token"}
    counts_text = [counted(result.config[name], noun) for name, noun in counts.items() if name in result.config]
    parts = [
        str(where["device"]),
        counted(where["threads"], "thread") if where.get("threads") else None,
        str(where["dtype"]),
        f"torch {versions['torch']}" if "torch" in versions else None,
        where.get("date"),
        f"commit `{str(where['commit'])[:7]}`" if where.get("commit") else None,
        *counts_text,
        conditions(result),
    ]
    sentences = [", ".join(filter(None, parts)) + ".", *result.remarks, *filter(None, [noisy(result)])]
    return "\n".join([" ".join(sentences), "", *_markdown_table(result)])


def _markdown_table(result: Result) -> list[str]:
    rows = [row for row in result.rows if row.get("category", ALL) == ALL]
    complete = all(row.get(name) is not None for row in rows for name in LANE_COLUMNS)
    if complete and len({row["lane"] for row in rows}) == len(rows):
        rows = sorted(rows, key=lambda row: -row["speed-up"].value)
        head = "| lane | tokens/s | speed-up | acceptance rate | mean accepted length |"
        return [head, "|---|---|---|---|---|", *map(_in_markdown, rows)]
    names = list(dict.fromkeys(name for row in result.rows for name in row))
    lines = [[_cell(row.get(name)).replace("|", "\\|") for name in names] for row in result.rows]
    return [f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *lines)]


def _in_markdown(row: Row) -> str:
    acceptance = f"{row['accepted']:.0%}" if row.get("accepted") is not None else ""
    speed = "1" if is_baseline(row["speed-up"]) else row["speed-up"].format()
    rate = row["tokens/s"].format("", 0)
    return f"| {row['lane']} | {rate} | {speed} | {acceptance} | {row['tokens/pass']:.2f} |"


def conditions(result: Result) -> str:
    """Return the repeats, none where rows count prompts, the clock, and the meaning of the brackets."""
    repeats = "" if any("prompts" in row for row in result.rows) else counted(result.repeats, "repeat")
    clock = result.environment.get("clock")
    return ", ".join(filter(None, [repeats, clock, "95 % intervals" if intervals(result) else ""]))


def sentence(text: str) -> str:
    """Capitalise the first letter."""
    return text[:1].upper() + text[1:]


def _cell(value: object) -> str:
    if isinstance(value, Estimate):
        has_interval = value.low is not None and value.high is not None
        return f"{value.value:.4g}" + (f" [{value.low:.4g} {value.high:.4g}]" if has_interval else "")
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return NONE if value is None else visible(str(value)).replace("\n", "\\n").replace("\t", "\\t")


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table: first and last column left-aligned, the others right-aligned."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_line(cells, widths) for cells in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    middle = [cell.rjust(width) for cell, width in zip(cells[1:-1], widths[1:-1], strict=True)]
    return "  ".join([cells[0].ljust(widths[0]), *middle, cells[-1]]).rstrip()


def what_if_report(predictions: Sequence[Prediction]) -> str:
    """Return all draft lengths for a single machine and batch size, or the best draft length for each of several."""
    lines = [*dict.fromkeys(note for case in predictions for note in case.notes)]
    lines += [case.sentence for case in predictions]
    lines += ["", _loads(predictions)]
    if len(predictions) == 1:
        lines += ["", _lengths(predictions[0])]
    profiles = [case.scenario.device.profile for case in predictions]
    if unmeasured := ", ".join(sorted({profile.title for profile in profiles if not profile.passes})):
        lines += ["", f"From the datasheet only: {unmeasured}; `{program()} profile` measures a machine."]
    return "\n".join(lines)


def _lengths(case: Prediction) -> str:
    header = ["k", "tokens a pass", "c", "v", "step ms", "tokens/s", "speed-up", "95 %", "limited by"]
    rows = []
    for row in case.rows:
        costs = f"{row.c:.3f}", f"{row.v:.3f}", f"{row.step_ms:.2f}"
        speed = f"{row.tokens_per_s.value:.0f}", f"{row.speedup.value:.2f}x", row.speedup.interval()
        rows.append([str(row.k), f"{row.tokens.value:.2f}", *costs, *speed, row.limit])
    return table(header, rows)


def _loads(predictions: Sequence[Prediction]) -> str:
    priced = any(case.scenario.price is not None for case in predictions)
    header = ["device", "batch", "plain tokens/s", "best k", "tokens/s", "speed-up", "95 %", "memory GB"]
    header += ["a million", "plain"] * priced + [""]
    return table(header, [_load(case, priced) for case in predictions])


def _load(case: Prediction, priced: bool) -> list[str]:
    best = case.best
    rate = best.tokens_per_s if case.best_k else case.plain_tokens_per_s
    speed = best.speedup if case.best_k else Estimate(1.0)
    cells = [case.scenario.device.profile.name, str(case.scenario.batch), f"{case.plain_tokens_per_s.value:.0f}"]
    cells += [str(case.best_k or "off"), f"{rate.value:.0f}", f"{speed.value:.2f}x", speed.interval()]
    cells += [f"{case.memory_gb:.1f}"]
    costs = [case.per_million(value.value) for value in (rate, case.plain_tokens_per_s)] if priced else []
    return [*cells, *["" if cost is None else f"{cost:.3f}" for cost in costs], "" if case.fits else "does not fit"]


def why_report(diagnosis: Diagnosis) -> str:
    """Return the verdict, the numbers, the causes in order, what to change, and what was missing."""
    rows = [f"{name:<22}{value:<6}{remark}".rstrip() for name, value, remark in numbers(diagnosis)]
    changed = changes(diagnosis)
    parts = [[diagnosis.sentence], rows, diagnosis.limits()]
    parts += [changed if changed == [NOTHING] else _titled("What to change", changed), [*diagnosis.notes]]
    missing = ", ".join(diagnosis.missing)
    parts += [[f"Unknown, and would make this more certain: {missing}."]] if missing else []
    return visible("\n\n".join("\n".join(lines) for lines in parts if lines))


def numbers(diagnosis: Diagnosis) -> Iterator[tuple[str, str, str]]:
    """Yield the numbers of a diagnosis: name, value, and a remark that may be empty."""
    run = diagnosis.observation
    if run.source:
        yield "source", run.source, ""
    if run.method:
        yield "method", run.method, ""
    if run.accepted_length is not None and (run.k or run.accepted_length > 1.0):
        most = f"k is {run.k or least_k(run.accepted_length)} or more"
        most = f"of at most {run.k + 1}, k = {run.k}" if run.k and not run.k_inferred else most
        yield "mean accepted length", f"{run.accepted_length:.2f}", most
    if run.drafting_share is not None and run.drafting_share < NEARLY_ALL:
        drafts = [f"{run.drafting_share * run.steps:,.0f} of {run.steps:,}"] if run.steps else []
        drafts += [f"{run.per_draft:.1f} tokens each"] if run.drafting_share else []
        yield "steps with a draft", percent(run.drafting_share), ", ".join(drafts)
    if run.acceptance_rate is not None:
        yield "acceptance rate", f"{100.0 * run.acceptance_rate:.0f} %", _break_even(diagnosis.break_even)
    if run.tokens_per_s:
        plain = run.plain_tokens_per_s
        yield "tokens/s", f"{run.tokens_per_s:.4g}", f"without speculation {plain:.4g}" if plain else ""
    if any(run.by_position):
        shares = [f"{100.0 * share:.0f} %" for share in run.by_position[:SHOWN_POSITIONS]]
        yield "accepted by position", ", ".join(shares), ""
    if diagnosis.costs is not None:
        unit = "plain steps, " + ("measured" if diagnosis.measured else "estimated")
        yield "a draft token", f"{diagnosis.costs['draft']:.2f}", unit
        yield "verification", f"{diagnosis.costs['verify']:.2f}", unit
        yield "overhead per step", f"{diagnosis.costs['overhead']:.2f}", unit


def changes(diagnosis: Diagnosis) -> list[str]:
    """Return what to change, NOTHING for a run that is fast enough; empty without a diagnosis."""
    return [*diagnosis.recommendations] or ([] if diagnosis.step_cost is None else [NOTHING])


def _break_even(rate: float | None) -> str:
    if rate is None or rate < SMALLEST_RATE:
        return ""
    return f"break-even {100.0 * rate:.0f} %" if rate <= 1.0 else "break-even above 100 %"


def _titled(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title}:", *(f"{place}. {line}" for place, line in enumerate(lines, start=1))] if lines else []
