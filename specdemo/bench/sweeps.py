"""Measuring code that several suites share: lanes at every draft length, as shipped, or along an axis."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Generator
from transformers import PreTrainedTokenizerBase

from specdemo.analysis.diagnose import SMALLEST_GAIN
from specdemo.bench.base import Decoding, Laned, Questioned, Report, Stop
from specdemo.bench.measure import Compared, Place, Question, Show, Way, along, compare_lanes, read_questions
from specdemo.bench.report import sentence
from specdemo.bench.result import Result, Row
from specdemo.core.accept import Lossless
from specdemo.core.protocol import GenerationConfig, Target
from specdemo.core.sampling import Sampling
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.cost import WIDTHS, CostModel, fit_cost_model
from specdemo.engine.session import Session, environment
from specdemo.methods import BASELINE, build_drafter, load_drafter
from specdemo.methods.pairs import load_target
from specdemo.methods.wrapper import Wrapper
from specdemo.models.pass_cost import median_times, pass_times
from specdemo.presets.files import load_presets, preset

PROBES = 15  # repeats per width, to measure v
DRAFTS = {
    "wide draft": Lane(method="draft_model", model="stories-draft-wide"),
    "deep draft": Lane(method="draft_model", model="stories-draft-deep"),
}


def shipped_lanes(target: str = "stories") -> tuple[Lane, ...]:
    """Return the first lanes of the embedded presets with one greedy lane, named after their preset."""
    chosen = [
        p for p in load_presets().values() if p.embedded and p.target == target and not p.temperature and not p.grammar
    ]
    return tuple(p.lanes[0].model_copy(update={"name": p.id}) for p in chosen if len(p.lanes) == 1)


@dataclass(slots=True)
class Partial:
    """Progress of a suite that also shows the rows measured so far."""

    suite: Decoding
    target: str
    report: Report
    axis: str
    share: float = 0.0
    what: str = ""

    def __call__(self, share: float, what: str) -> None:
        self.share, self.what = share, what
        self.report(share, what)

    def show(self, rows: Callable[[], list[dict[str, object]]]) -> None:
        """Report a function that returns the result so far."""
        self.report(self.share, self.what, lambda: self._result(rows()))

    def compared(self, where: Sequence[Mapping[str, object]]) -> Show[Compared]:
        """Return the callback for `compare_lanes`. where: columns of the lanes."""
        return lambda so_far: self.show(lambda: so_far().rows(where))

    def _result(self, rows: list[dict[str, object]]) -> Result:
        return Result(self.suite.name, self.suite.repeats, self.suite.config(self.target), {}, rows, [], self.axis)


def every_k(
    suite: Questioned, ks: Sequence[int], target: str, families: Mapping[str, Lane], report: Report, cancelled: Stop
) -> Result:
    """Measure every family at every k. The predictions of a family come from its run at one k, its own if measured."""
    ks = sorted({*ks} - {0})  # plain decoding is always measured
    lanes = [
        (name, lane.model_copy(update={"k": k, "name": f"{name}, k={k}"}))
        for name, lane in families.items()
        for k in ks
    ]
    runner = Session()
    spec = comparison(suite, target, tuple(lane for _, lane in lanes))
    where = [{"lane": "Baseline", "k": 0}, *({"lane": name, "k": lane.k} for name, lane in lanes)]
    axis = "k" if len(ks) > 1 else "lane"
    progress = Partial(suite, target, report, axis)
    questions = _questions(suite.prompts_or_file)
    seen = compare_lanes(runner, spec, questions, suite.repeats, progress, cancelled, progress.compared(where))
    rows = seen.rows(where)
    probe = median_times(pass_times(runner.target(), sorted({*WIDTHS, *(k + 1 for k in ks)}), PROBES))
    remarks = []
    for family, lane in families.items():
        own = lane.k if lane.k in ks else ks[len(ks) // 2]
        index = 1 + next(i for i, (name, at) in enumerate(lanes) if (name, at.k) == (family, own))
        costs = fit_cost_model(seen.runs[0], seen.runs[index], own)
        if costs is not None:
            remarks.append(_predict(family, own, costs.with_probe(probe), rows))
    rows = [{name: row.get(name) for name in COLUMNS if any(name in r for r in rows)} for row in rows]
    config = suite.config(target)
    return Result(suite.name, len(seen.tallies), config, seen.environment, rows, [*remarks, *seen.remarks], axis)


COLUMNS = ("lane", "k", "category", "tokens/s", "speed-up", "predicted", "accepted", "tokens/pass", "output")


def _predict(family: str, own: int, costs: CostModel, rows: list[Row]) -> str:
    """Write the predictions into the family's rows; how far they are off."""
    off = {}
    for row in rows:
        if row["lane"] != family or row.get("category", "all") != "all":
            continue
        if costs.tree_nodes is None or row["k"] == own:
            row["predicted"] = round(costs.speedup(row["k"]), 4)
            off[row["k"]] = row["predicted"] / (row["speed-up"].value or 1.0) - 1.0
    worst = max(off, key=lambda k: abs(off[k]))
    best = costs.best_k(max(off))
    best = best if costs.speedup(best) >= SMALLEST_GAIN else 0
    advice = (
        "off, because no k is predicted to be clearly faster"
        if not best
        else f"k = {best} with {costs.speedup(best):.2f}x"
    )
    return (
        f"{family}: cost model calibrated at k = {own}; largest error {100.0 * abs(off[worst]):.1f} % "
        f"(k = {worst}); predicted best: {advice}."
    )


def as_shipped(
    suite: Decoding, target: str, lanes: tuple[Lane, ...], texts: Sequence[str] | Path, report: Report, cancelled: Stop
) -> Result:
    """Compare the lanes, each with its own draft length."""
    if not lanes:
        raise ValueError(f"no embedded preset of one greedy lane runs on {target}; choose another preset")
    spec = comparison(suite, target, lanes)
    where: list[dict[str, object]] = [{} for _ in range(len(lanes) + 1)]
    progress = Partial(suite, target, report, "lane")
    questions = _questions(texts)
    seen = compare_lanes(Session(), spec, questions, suite.repeats, progress, cancelled, progress.compared(where))
    rows = seen.rows(where)
    return Result(suite.name, len(seen.tallies), suite.config(target), seen.environment, rows, seen.remarks, "lane")


def along_axis(
    suite: Laned, target: Target, lanes: Mapping[str, Way], places: Sequence[Place], report: Report, cancelled: Stop
) -> Result:
    """Measure every lane at every point of the suite's axis."""
    assert suite.axis is not None
    axis = suite.axis.column
    progress = Partial(suite, preset(suite.preset).target, report, axis)
    rows, remarks, done = along(target, lanes, places, axis, suite.repeats, progress, cancelled, progress.show)
    config = suite.config(preset(suite.preset).target)
    notes = [f"{sentence(note)}." for note in target.notes]
    return Result(suite.name, done, config, environment(target), rows, [*remarks, *notes], axis)


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


def first_lane(suite: Decoding, preset_id: str) -> tuple[Target, dict[str, Way]]:
    """Return the preset's target, and its first lane after plain decoding. No lane stops early."""
    base = preset(preset_id).with_changes(temperature=0.0)
    lane = base.lanes[0]
    target = load_target(base.target, suite.dtype, suite.device, base.quantization)
    drafter = build_drafter(lane.method, target, lane.model, lane.parsed)
    plain = GenerationConfig(suite.new_tokens, stop_token_ids=())
    lanes = {
        "Baseline": Way(load_drafter(BASELINE, target), Lossless(), plain),
        lane.name or base.id: Way(drafter, Lossless(), replace(plain, budget=lane.budget)),
    }
    return target, lanes


def room(target: Target, suite: Decoding) -> int:
    """Return the longest possible prompt in tokens."""
    return target.max_length - suite.new_tokens


def tokenizer(target: Target) -> PreTrainedTokenizerBase:
    """Return the target's tokenizer. Raises ValueError with one line if it has none."""
    found: PreTrainedTokenizerBase | None = target.tokenizer
    if found is None:
        raise ValueError(f"{target.name} has no tokenizer; put its tokenizer.json into the same folder")
    return found


def _questions(texts: Sequence[str] | Path) -> list[Question]:
    return read_questions(texts) if isinstance(texts, Path) else [Question(text) for text in texts]
