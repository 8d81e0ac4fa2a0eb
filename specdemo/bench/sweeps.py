"""Measuring code that several suites share: lanes at every draft length, as shipped, or along an axis."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Generator

from specdemo.analysis.diagnose import SMALLEST_GAIN
from specdemo.bench.base import Decoding, LaneSuite, Report, Stop
from specdemo.bench.measure import AxisPoint, Decoder, LaneRuns, compare_lanes, measure_points
from specdemo.bench.report import sentence
from specdemo.bench.result import Result, Row
from specdemo.core.accept import Lossless
from specdemo.core.protocol import GenerationConfig, Target
from specdemo.core.sampling import Sampling
from specdemo.core.trace import BASELINE_LANE
from specdemo.costs.step import fit_cost_model
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.session import Session, environment
from specdemo.methods import BASELINE, build_drafter, load_drafter, method, model_method
from specdemo.methods.facts import PARALLEL
from specdemo.methods.pairs import load_target
from specdemo.methods.wrapper import Wrapper
from specdemo.models.pass_cost import median_times, pass_times
from specdemo.models.prefix_reuse import with_prefix_cache
from specdemo.presets.files import Preset, load_presets
from specdemo.presets.link import OWN

PROBES = 15  # repeats per width, to measure v
PROBE_WIDTHS = (1, 2, 3, 5, 9, 17)  # slots of passes that are timed apart from lanes


def shipped_lanes(target: str = "stories") -> tuple[Lane, ...]:
    """Return the first lanes of the embedded presets with one greedy lane, named after their preset."""
    presets = [
        p for p in load_presets().values() if p.embedded and p.target == target and not p.temperature and not p.grammar
    ]
    return tuple(p.lanes[0].model_copy(update={"name": p.id}) for p in presets if len(p.lanes) == 1)


def so_far(suite: Decoding, target: str, rows: list[Row], axis: str) -> Result:
    """Return the result of the rows that a running suite has measured."""
    return Result(suite.name, suite.repeats, suite.config(target), {}, rows, [], axis)


def every_k(suite: LaneSuite, ks: Sequence[int], base: Preset, report: Report, cancelled: Stop) -> Result:
    """Measure the first lane of a preset at every k, and predict them from its run at one, its own k if possible."""
    lane, ks = base.lanes[0], sorted({*ks} - {0})  # plain decoding is always measured
    name = lane.name or base.id
    lanes = tuple(lane.model_copy(update={"k": k, "name": f"{name}, k={k}"}) for k in ks)
    where = [{"lane": BASELINE_LANE, "k": 0}, *({"lane": name, "k": k} for k in ks)]
    own = 1 + (ks.index(lane.k) if lane.k in ks else len(ks) // 2)
    return measure_lanes(suite, base.target, lanes, where, "k" if len(ks) > 1 else "lane", report, cancelled, own)


def measure_lanes(
    suite: LaneSuite,
    target: str,
    lanes: tuple[Lane, ...],
    where: Sequence[Mapping[str, object]],
    axis: str,
    report: Report,
    cancelled: Stop,
    own: int = 0,
) -> Result:
    """Compare lanes with plain decoding on the suite's prompts. where: columns of each, those of plain decoding first.
    own: the lane of every k whose run predicts the others; 0: none."""
    runner, spec = Session(), comparison(suite, target, lanes)

    def result(comparisons: LaneRuns) -> Result:
        return so_far(suite, target, comparisons.rows(where), axis)

    comparisons = compare_lanes(runner, spec, suite.texts, suite.repeats, report, cancelled, result)
    rows = comparisons.rows(where)
    remarks = [*(_predict(runner.target(), comparisons, own, rows) if own else ()), *comparisons.remarks]
    rows = [{name: row.get(name) for name in COLUMNS if any(name in r for r in rows)} for row in rows]
    where_ran = comparisons.every[-1].environment
    return Result(suite.name, len(comparisons.traces), suite.config(target), where_ran, rows, remarks, axis)


COLUMNS = ("lane", "k", "tokens/s", "speed-up", "predicted", "accepted", "tokens/pass", "output")


def _predict(target: Target, comparisons: LaneRuns, own: int, rows: list[Row]) -> Iterator[str]:
    """Write predictions into the rows; yield how far they are off."""
    k, parallel = rows[own]["k"], comparisons.every[-1].lanes[own].method in PARALLEL
    costs = fit_cost_model(comparisons.events(0), comparisons.events(own), k, parallel)
    if costs is None:
        return
    costs = costs.with_probe(
        median_times(pass_times(target, sorted({*PROBE_WIDTHS, *(row["k"] + 1 for row in rows)}), PROBES))
    )
    off = {}
    for row in rows[1:] if costs.tree_nodes is None else [rows[own]]:
        row["predicted"] = round(costs.speedup(row["k"]), 4)
        off[row["k"]] = row["predicted"] / (row["speed-up"].value or 1.0) - 1.0
    worst, best = max(off, key=lambda k: abs(off[k])), costs.best_k(max(off))
    advice = f"k = {best} with {costs.speedup(best):.2f}x"
    if costs.speedup(best) < SMALLEST_GAIN:
        advice = "off, because no k is predicted to be clearly faster"
    yield (
        f"{rows[own]['lane']}: cost model calibrated at k = {k}; largest error {100.0 * abs(off[worst]):.1f} % "
        f"(k = {worst}); predicted best: {advice}."
    )


def along_axis(
    suite: LaneSuite,
    target: Target,
    lanes: Mapping[str, Decoder],
    points: Sequence[AxisPoint],
    report: Report,
    cancelled: Stop,
) -> Result:
    """Measure every lane at every point of the suite's axis."""
    assert suite.axis is not None
    axis, name = suite.axis.column, suite.comparison.target

    def result(rows: list[Row]) -> Result:
        return so_far(suite, name, rows, axis)

    rows, remarks, done = measure_points(target, lanes, points, axis, suite.repeats, report, cancelled, result)
    notes = [f"{sentence(note)}." for note in target.notes]
    return Result(suite.name, done, suite.config(name), environment(target), rows, [*remarks, *notes], axis)


class Likeliest(Wrapper):
    """Drafts as if the target were greedy."""

    title = "Most likely tokens"
    summary = "Drafts the most likely tokens at every temperature."

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, Sampling(), rng)


def comparison(suite: Decoding, target: str, lanes: tuple[Lane, ...]) -> Comparison:
    """Return the comparison of a suite's lanes, one after the other."""
    settings = {"id": f"bench-{suite.name}", "target": target, "prompt": "-", "max_new_tokens": suite.new_tokens}
    how = {"schedule": "sequential", "dtype": suite.dtype, "device": suite.device}
    spec = Comparison.build({**settings, **how, "lanes": [*lanes[:1]]})
    return spec.model_copy(update={"lanes": [*lanes]})  # the page's limit of lanes does not apply


def first_lane(suite: LaneSuite, cached: bool = False) -> tuple[Target, dict[str, Decoder]]:
    """Return the preset's target, and its first lane after plain decoding. No lane stops early. cached: a text is not
    read again where it begins as the last one."""
    base = suite.comparison.with_changes(temperature=0.0)
    lane = base.lanes[0]
    target = load_target(base.target, suite.dtype, suite.device, base.quantization)
    model: object = lane.model
    if cached:
        target = with_prefix_cache(target)
        reader = method(model_method(lane.method, lane.options))
        model = with_prefix_cache(reader.load(str(model), target)) if model else None
    drafter = build_drafter(lane.method, target, model, lane.parsed)
    plain = GenerationConfig(suite.new_tokens, stop_token_ids=())
    lanes = {
        BASELINE_LANE: Decoder(load_drafter(BASELINE, target), Lossless(), plain),
        lane.name or (lane.title if base.id == OWN else base.id): Decoder(
            drafter, Lossless(), replace(plain, budget=lane.budget)
        ),
    }
    return target, lanes


def room(target: Target, suite: Decoding) -> int:
    """Return the longest possible prompt in tokens."""
    return target.max_length - suite.new_tokens
