"""Which draft length pays under load, from results of `vllm bench serve` and GuideLLM. Needs no torch.

Results are compared at equal load by the mean time of a request per output token, which in a closed loop is the inverse
of throughput. The interval comes from the spread over the requests of a result (Student's t). Requests that ran at the
same time share disturbances, so it is rather too narrow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, hypot, sqrt
from pathlib import Path
from typing import Annotated

from pydantic import Field, PlainSerializer

from specdemo.analysis.observation import Observation
from specdemo.analysis.readers import read_json_output
from specdemo.analysis.readers.base import number, objects, text_of
from specdemo.analysis.readers.benchmarks import guidellm_benchmark, serving_result
from specdemo.bench.base import Axis, Report, Stop, Suite
from specdemo.bench.result import LATENCY, Result, Row
from specdemo.core.estimate import Estimate, t_quantile
from specdemo.core.settings import setting
from specdemo.core.trace import BASELINE_LANE
from specdemo.servers.counters import below

Files = Annotated[Sequence[Path], Field(min_length=1), PlainSerializer(lambda files: [file.name for file in files])]
COMPARED = f"Speed-up: {LATENCY} without speculation divided by that with it, at equal load."


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Result at one load. load: concurrent requests or requests per second, as in `unit`. per_token: ms.
    error: half of its 95 % interval, relative to it; None if the file has no spread."""

    load: float
    unit: str
    per_token: float
    error: float | None
    tokens_per_s: float
    run: Observation


class Load(Suite):
    """Names the draft length that pays at each load, from results of `vllm bench serve` or GuideLLM."""

    name = "load"
    order = 12
    axis = Axis("load", "load", "concurrent requests, or requests per second", doubling=True)
    repeats: Annotated[int, Field(ge=1, le=1)] = 1
    plain: Files = setting((), "Result without speculation; repeatable.", metavar="FILE")
    speculative: Files = setting(
        (), "Result with speculation, for example one per draft length; repeatable.", metavar="FILE"
    )

    def run(self, report: Report, cancelled: Stop) -> Result:
        if not self.plain or not self.speculative:
            raise ValueError("bench load compares results; give --plain FILE and --speculative FILE")
        plain = {(point.unit, point.load): point for file in self.plain for point in _plain_points(file)}
        drafting = [(file, point) for file in self.speculative for point in load_points(file)]
        rows = [_row(BASELINE_LANE, point, point) for point in plain.values()]
        rows += [_row(_lane(point, file), point, plain.get((point.unit, point.load))) for file, point in drafting]
        rows.sort(key=lambda row: (row["unit"], row["load"], row["k"] or 0))
        everything = [*plain.values(), *(point for _, point in drafting)]
        environment = {"device": ", ".join({point.run.target: 0 for point in everything}), "threads": None, "dtype": ""}
        remarks = [*_verdicts(rows), *_warnings(everything), COMPARED]
        return Result(self.name, 1, self.config(everything[0].run.target), environment, rows, remarks, self.axis.column)


def load_points(file: Path) -> list[LoadPoint]:
    """Return the loads of a file. Raises ValueError, one line with the file's name."""
    data = read_json_output(file)
    points = [*_serve_points(data)] or [*_guidellm_points(data)]
    if not points:
        raise ValueError(f"{file} is no result of `vllm bench serve --save-result` or GuideLLM with its load and times")
    return points


def _plain_points(file: Path) -> list[LoadPoint]:
    points = load_points(file)
    if any(point.run.accepted_length for point in points):
        raise ValueError(f"{file} was measured with speculation; give one without it as --plain")
    return points


def _serve_points(data: object) -> Iterator[LoadPoint]:
    observation = serving_result(data)
    if observation is None or not isinstance(data, dict):
        return
    rate, most = number(data.get("request_rate")), number(data.get("max_concurrency"))
    ttft, tpot = number(data.get("mean_ttft_ms")), number(data.get("mean_tpot_ms"))
    speed, requests = number(data.get("output_throughput")), number(data.get("request_throughput"))
    if not (speed and requests and tpot) or ttft is None or not (rate or most):
        return
    length = speed / requests
    spread = [number(data.get(f"std_{name}_ms")) for name in ("ttft", "tpot")]
    per_token = (ttft + tpot * (length - 1.0)) / length
    deviation = None if None in spread else (spread[0] or 0.0) / length + (spread[1] or 0.0)
    error = _error(deviation, per_token, number(data.get("completed")))
    load, unit = (rate, "requests/s") if rate else (most or 0.0, "concurrent")
    yield LoadPoint(load, unit, per_token, error, speed, observation)


def _guidellm_points(data: object) -> Iterator[LoadPoint]:
    for benchmark in objects(below(data, "benchmarks")):
        observation = guidellm_benchmark(data, benchmark)
        strategy = below(benchmark, "config", "strategy")
        rate = number(below(strategy, "rate"))
        most = number(below(strategy, "max_concurrency")) or number(below(strategy, "streams"))
        most = 1.0 if text_of(below(strategy, "type_")) == "synchronous" else most
        metrics = {
            name: below(benchmark, "metrics", name, "successful") for name in ("request_latency", "output_token_count")
        }
        seconds, length = (number(below(metric, "mean")) for metric in metrics.values())
        if not seconds or not length or not (rate or most):
            continue
        per_token = 1000.0 * seconds / length
        deviation = number(below(metrics["request_latency"], "std_dev"))
        count = number(below(benchmark, "metrics", "request_totals", "successful"))
        concurrency = number(below(benchmark, "metrics", "request_concurrency", "successful", "mean")) or most or 1.0
        error = _error(deviation, seconds, count)
        load, unit = (rate, "requests/s") if rate else (most or 0.0, "concurrent")
        yield LoadPoint(load, unit, per_token, error, 1000.0 * concurrency / per_token, observation)


def _error(deviation: float | None, mean: float, count: float | None) -> float | None:
    """Return half of the 95 % interval of a mean, relative to it; None if the spread is unknown."""
    if deviation is None or not count or count < 2.0:
        return None
    return t_quantile(int(count) - 1) * deviation / mean / sqrt(count)


def _lane(point: LoadPoint, file: Path) -> str:
    return f"k = {point.run.k}" if point.run.k else file.name


def _row(lane: str, point: LoadPoint, plain: LoadPoint | None) -> Row:
    return {
        "lane": lane,
        "k": 0 if point is plain else point.run.k,
        "load": point.load,
        "unit": point.unit,
        "tokens/s": Estimate(point.tokens_per_s),
        LATENCY: _with_error(point.per_token, point.error),
        "speed-up": None if plain is None else _speedup(point, plain),
        "tokens/pass": point.run.accepted_length,
    }


def _speedup(point: LoadPoint, plain: LoadPoint) -> Estimate:
    if point is plain:
        return Estimate(1.0)
    error = None if point.error is None or plain.error is None else hypot(point.error, plain.error)
    return _with_error(plain.per_token / point.per_token, error)


def _with_error(value: float, error: float | None) -> Estimate:
    return Estimate(value) if error is None else Estimate(value, value * exp(-error), value * exp(error))


def _verdicts(rows: Sequence[Row]) -> Iterator[str]:
    """Yield one line per load: the lane that pays, none, or unknown with the reason."""
    for unit, load in dict.fromkeys((row["unit"], row["load"]) for row in rows):
        lanes = [row for row in rows if (row["unit"], row["load"]) == (unit, load) and row["lane"] != BASELINE_LANE]
        yield f"{load:g} {unit}: {_verdict(lanes)}."


def _verdict(lanes: Sequence[Row]) -> str:
    if not lanes:
        return "unknown, no result with speculation"
    comparisons = [row for row in lanes if row["speed-up"] is not None]
    if not comparisons:
        return "unknown, no result without speculation at this load"
    best = max(comparisons, key=lambda row: (row["speed-up"].label == "faster", row["speed-up"].value))
    speed, most = best["speed-up"], f"{best['lane']} is {best['speed-up'].format()}"
    if speed.label == "faster":
        return f"{best['lane']} pays, {speed.format()}"
    if all(row["speed-up"].label == "slower" for row in comparisons):
        return f"none pays, turn speculation off; {most}"
    if speed.low is None:
        return f"unknown, the results have no spread over requests; {most}"
    return f"no clear gain, serve without speculation or measure more requests; {most}"


def _warnings(points: Sequence[LoadPoint]) -> Iterator[str]:
    targets = [*dict.fromkeys(point.run.target for point in points if point.run.target)]
    if len(targets) > 1:
        yield f"The results are of different models: {', '.join(targets)}."
    if any(point.run.random_prompts for point in points):
        yield "Random prompts: their acceptance says nothing about real ones."
