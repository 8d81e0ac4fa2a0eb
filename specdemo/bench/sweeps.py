"""Measuring code of the suites: sweeps over draft length, methods, batch size, prompts, thinking and texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator

from specdemo.bench.base import Decoding, Laned, Questioned, Report, Stop
from specdemo.bench.measure import Compared, Place, Question, Show, Way, along, compare_lanes, read_questions, windows
from specdemo.bench.prompts import CODE, EDITS, PROMPTS
from specdemo.bench.report import sentence
from specdemo.bench.result import ALL, Result, Row
from specdemo.core.accept import Lossless
from specdemo.core.block import Block
from specdemo.core.protocol import GenerationConfig, Target
from specdemo.core.sampling import Sampling
from specdemo.core.thinking import Thinking
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.cost import WIDTHS, CostModel, fit_cost_model
from specdemo.engine.session import Session, environment
from specdemo.methods import BASELINE, build_drafter, load_drafter
from specdemo.methods.targets import load_target
from specdemo.methods.wrapper import Wrapper
from specdemo.models.pass_cost import median_times, pass_times
from specdemo.models.text import encode, has_thinking_modes
from specdemo.presets.files import load_presets, preset
from specdemo.presets.limits import LIMITS

BATCHES = (1, 2, 4, 8, 16, 32)
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TEMPERATURES = (0.0, 0.5, 0.75, 1.0, 1.5)
PROBES = 15  # repeats per width, to measure v
TEXTS = 3  # prompts per length
DRAFTS = {
    "wide draft": Lane(method="draft_model", model="stories-draft-wide"),
    "deep draft": Lane(method="draft_model", model="stories-draft-deep"),
}
LOOKUP = {"prompt lookup": Lane(method="ngram")}


def shipped_lanes(target: str = "stories") -> tuple[Lane, ...]:
    """Return the first lanes of the embedded presets with one greedy lane, named after their preset."""
    chosen = [p for p in load_presets().values() if p.embedded and p.target == target and p.temperature == 0.0]
    return tuple(p.lanes[0].validated().model_copy(update={"name": p.id}) for p in chosen if len(p.lanes) == 1)


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
    spec = _spec(suite, target, tuple(lane for _, lane in lanes))
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
    advice = (
        "off, because no k is predicted to be faster" if not best else f"k = {best} with {costs.speedup(best):.2f}x"
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
    spec = _spec(suite, target, lanes)
    where: list[dict[str, object]] = [{} for _ in range(len(lanes) + 1)]
    progress = Partial(suite, target, report, "lane")
    questions = _questions(texts)
    seen = compare_lanes(Session(), spec, questions, suite.repeats, progress, cancelled, progress.compared(where))
    rows = seen.rows(where)
    return Result(suite.name, len(seen.tallies), suite.config(target), seen.environment, rows, seen.remarks, "lane")


def over_texts(suite: Decoding, report: Report, cancelled: Stop) -> Result:
    """Measure the lanes that have a drafter in both families on each family's kinds of text."""
    stories = tuple(lane for lane in shipped_lanes() if _of_code(lane))
    rows: list[dict[str, object]] = []
    remarks: list[str] = []
    for turn, (target, kinds) in enumerate(KINDS.items()):
        lanes = stories if target == "stories" else tuple(filter(None, map(_of_code, stories)))
        questions = [Question(text, kind) for kind, texts in kinds.items() for text in texts]

        def report_progress(share: float, what: str, turn: int = turn, target: str = target) -> None:
            report((turn + share) / len(KINDS), f"{target}, {what}")

        seen = compare_lanes(
            Session(), _spec(suite, target, lanes), questions, suite.repeats, report_progress, cancelled
        )
        for row, at in zip(seen.rows([{} for _ in seen.names]), seen.places(), strict=True):
            kind = {"text": row.pop("category"), "lane": row.pop("lane")}
            if kind["text"] != ALL:
                rows.append({**kind, **row, **{f"kept at {i}": share for i, share in enumerate(at[:4], start=1)}})
        remarks += seen.remarks
    config = suite.config(", ".join(KINDS))
    return Result(suite.name, len(seen.tallies), config, seen.environment, rows, [_order(rows), *remarks], "text")


KINDS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "stories": {"stories": PROMPTS},
    "code": {"code": CODE, "edits": EDITS, "unknown": PROMPTS},
}
OF_CODE: Mapping[str | None, str | None] = {  # drafter of stories -> drafter of code
    None: None,
    "stories-draft-wide": "code-draft",
    "stories-eagle-1": "code-eagle-1",
}


EDITING = "embedded-code-edit"


def _of_code(lane: Lane) -> Lane | None:
    """Return the corresponding lane of the code target with its preset's draft length; None without a corresponding
    drafter.
    """
    if not {*lane.models, None} <= OF_CODE.keys():
        return None
    lengths = {own.method: own.k for own in preset(EDITING).lanes}
    return lane.model_copy(update={"model": OF_CODE[lane.model], "k": lengths.get(lane.method, lane.k)})


def _order(rows: list[Row]) -> str:
    """Explain in one sentence why one kind of text gains more than another."""
    kinds = dict.fromkeys(row["text"] for row in rows)
    best = [max((row for row in rows if row["text"] == kind), key=_times) for kind in kinds]
    best.sort(key=_times, reverse=True)
    words = "; ".join(
        f"{row['text']} {row['speed-up'].format()} with {row['tokens/pass']:.1f} tokens per pass ({row['lane']})"
        for row in best
    )
    return f"A pass costs the same for every text, so the gain depends on the acceptance rate: {words}."


def _times(row: Row) -> float:
    value: float = row["speed-up"].value
    return value


def over_batches(suite: Laned, report: Report, cancelled: Stop) -> Result:
    """Measure the first lane at batch sizes 1, 2, 4, ...; all texts have one length."""
    target, lanes = first_lane(suite, suite.preset)
    texts = [encode(tokenizer(target), text, room(target, suite)) for text in suite.texts]
    width = min(map(len, texts))
    places = []
    for size in BATCHES:
        taken = [texts[i % len(texts)][-width:] for i in range(size)]
        places.append(Place(size, [torch.tensor(taken, device=target.device)]))
    found = _along(suite, target, lanes, places, report, cancelled)
    return replace(found, remarks=[_gain(found.rows, "batch", "batch size"), *found.remarks])


def over_lengths(suite: Laned, report: Report, cancelled: Stop) -> Result:
    """Measure the first lane after prompts of 16, 32, 64, ... tokens."""
    target, lanes = first_lane(suite, suite.preset)
    text = encode(tokenizer(target), " ".join(suite.texts), LIMITS.prompt)
    lengths = [n for n in LENGTHS if n <= room(target, suite)]
    places = [Place(n, windows(text, n, TEXTS, target.device)) for n in lengths]
    found = _along(suite, target, lanes, places, report, cancelled)
    remark = "The prompts are windows of the concatenated texts of the suite, repeated if necessary."
    return replace(found, remarks=[remark, *found.remarks])


def over_temperatures(suite: Laned, report: Report, cancelled: Stop) -> Result:
    """Measure the first lane at increasing temperatures, with three ways to draft and verify.

    Sampled drafts are verified token by token and as a block; the third lane drafts the most likely tokens.
    """
    target, lanes = first_lane(suite, suite.preset)
    (baseline, plain), (lane, drawn) = lanes.items()
    lanes = {
        baseline: plain,
        f"{lane}, drawn": drawn,
        f"{lane}, drawn, block": replace(drawn, accept=Block()),
        f"{lane}, likeliest": replace(drawn, drafter=Likeliest(drawn.drafter)),
    }
    prompts = [
        torch.tensor([encode(tokenizer(target), t, room(target, suite))], device=target.device) for t in suite.texts
    ]
    places = [Place(t, prompts, Sampling(t)) for t in TEMPERATURES]
    return _along(suite, target, lanes, places, report, cancelled)


def over_thinking(suite: Laned, report: Report, cancelled: Stop) -> Result:
    """Measure the first lane on the suite's texts as chat messages, with thinking on and off."""
    target, lanes = first_lane(suite, suite.preset)
    modes: tuple[Thinking, ...] = ("on", "off")
    if not has_thinking_modes(tokenizer(target)):
        raise ValueError(f"{target.name} has no thinking mode; choose the preset of a model that can think")

    def prompt(text: str, mode: Thinking) -> torch.Tensor:
        message = {"role": "user", "content": text}
        ids = encode(tokenizer(target), [message], room(target, suite), mode)
        return torch.tensor([ids], device=target.device)

    places = [Place(mode, [prompt(text, mode) for text in suite.texts]) for mode in modes]
    return _along(suite, target, lanes, places, report, cancelled)


def _along(
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


def _spec(suite: Decoding, target: str, lanes: tuple[Lane, ...]) -> Comparison:
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


def _gain(rows: list[Row], axis: str, noun: str) -> str:
    drafting = [row for row in rows if row["lane"] != "Baseline"]
    lost = next((row for row in drafting if row["speed-up"].label == "slower"), None)
    if lost is not None:
        return f"The gain ends at {noun} {lost[axis]}: {lost['speed-up'].format()}."
    last = drafting[-1]
    words = "still gains" if last["speed-up"].label == "faster" else "is not clearly faster or slower"
    return f"Drafting {words} at {noun} {last[axis]}: {last['speed-up'].format()}."


def room(target: Target, suite: Decoding) -> int:
    """Return the longest possible prompt in tokens."""
    return target.max_length - suite.new_tokens


def tokenizer(target: Target) -> Any:
    """Return the target's tokenizer. Raises ValueError with one line if it has none."""
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer; put its tokenizer.json into the same folder")
    return target.tokenizer


def _questions(texts: Sequence[str] | Path) -> list[Question]:
    return read_questions(texts) if isinstance(texts, Path) else [Question(text) for text in texts]
