"""The suites by name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from specdemo.bench.fairness import race_fairness
from specdemo.bench.floor import floor
from specdemo.bench.losslessness import losslessness
from specdemo.bench.measure import (
    Ask,
    Place,
    Question,
    Report,
    along,
    compare_lanes,
    read_questions,
    windows,
)
from specdemo.bench.peers import peers
from specdemo.bench.prompts import COPYING, PROMPTS
from specdemo.bench.result import Result, Spread, read_result
from specdemo.core.protocol import Budget, Drafter, GenerationConfig
from specdemo.core.words import suggest
from specdemo.engine.cost import WIDTHS, Costs, observed
from specdemo.engine.loop import never
from specdemo.engine.session import Session, environment
from specdemo.engine.spec import LaneSpec, RunSpec
from specdemo.methods import BASELINE, load_drafter
from specdemo.models.load import load_target, verify_costs
from specdemo.models.target import HFTarget
from specdemo.models.text import encode
from specdemo.presets.schema import DEFAULT, LIMITS, Preset, load_presets, preset

__all__ = ["SUITES", "Ask", "Result", "Spread", "losslessness", "read_result", "run_suite", "shipped_lanes"]

NEW_TOKENS = 96
BATCHES = (1, 2, 4, 8, 16, 32)
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PROBES = 15  # of each width, for v
TEXTS = 3  # prompts of each length
STORIES = "stories"
SAMPLING = "embedded-sampling"

Suite = Callable[[Ask, Report, Callable[[], bool]], Result]


def run_suite(name: str, ask: Ask, report: Report, cancelled: Callable[[], bool] = never) -> Result:
    """Run a suite. When `cancelled()` turns true the result covers the finished repeats. Raises ValueError with one
    line that names the cure."""
    if name not in SUITES:
        raise ValueError(f"unknown suite {name!r}; {suggest(name, SUITES)}")
    _check(name, ask)
    return SUITES[name].run(ask, report, cancelled)


def _check(name: str, ask: Ask) -> None:
    if ask.repeats < 1:
        raise ValueError(f"repeats must be 1 or more, not {ask.repeats}")
    usual = Ask()
    for field in fields(Ask):
        if field.name in NOUNS and getattr(ask, field.name) != getattr(usual, field.name):
            noun, option = NOUNS[field.name]
            if field.name not in SUITES[name].takes:
                raise ValueError(f"suite {name!r} has no {noun} to choose; leave {option} out")
    if ask.ks is not None and not (ask.ks and all(1 <= k <= LIMITS.k for k in ask.ks)):
        raise ValueError(f"draft lengths go from 1 to {LIMITS.k}, not {list(ask.ks)[:20]}")
    if ask.new_tokens is not None and not 2 <= ask.new_tokens <= LIMITS.max_new_tokens:
        raise ValueError(f"new tokens must be 2 to {LIMITS.max_new_tokens}, not {ask.new_tokens}")
    if ask.prompts is not None and not (ask.prompts and all(text.strip() for text in ask.prompts)):
        raise ValueError("a prompt is empty; write at least one word")
    if ask.prompts is not None and ask.questions is not None:
        raise ValueError("prompts and a question file exclude each other; give one of them")


def embedded(ask: Ask, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Plain decoding against the wide draft, the deep draft and prompt lookup, greedy, on the shipped models."""
    return _sweep("embedded", ask, STORIES, {**DRAFTS, "prompt lookup": LaneSpec("ngram")}, (4,), report, cancelled)


def depth_width(ask: Ask, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Two drafts of as many parameters, one layer against four, over the draft length (Yan et al. 2402.01528)."""
    return _sweep("depth-width", ask, STORIES, DRAFTS, range(1, 9), report, cancelled)


def sweep_k(ask: Ask, report: Report, cancelled: Callable[[], bool]) -> Result:
    """The first lane of a preset at every draft length, and what its run at one of them predicts for the others."""
    chosen = _greedy(ask)
    lane = chosen.spec().lanes[0]
    name = lane.name or chosen.id
    return _sweep("k", ask, chosen.target, {name: lane}, range(1, 9), report, cancelled)


def methods(ask: Ask, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Every embedded preset of one greedy lane on one target, each as it ships, all on the same prompts."""
    target = STORIES if ask.preset is None else preset(ask.preset).target
    return _as_shipped("methods", ask, target, shipped_lanes(target), PROMPTS, report, cancelled)


def copying(ask: Ask, report: Report, cancelled: Callable[[], bool]) -> Result:
    """The methods without weights on prompts whose answer repeats the prompt."""
    lanes = tuple(lane for lane in shipped_lanes() if lane.model is None)
    return _as_shipped("copying", ask, STORIES, lanes, COPYING, report, cancelled)


def batch(ask: Ask, report: Report, cancelled: Callable[[], bool]) -> Result:
    """The first lane of a preset at growing batch sizes, against plain decoding of the same batch."""
    chosen = _greedy(ask)
    target, lanes = _lanes(chosen, ask)
    texts = [encode(_tokenizer(target), text, _room(target, ask)) for text in _texts(ask, PROMPTS)]
    width = min(map(len, texts))
    places = []
    for size in BATCHES:
        taken = [texts[i % len(texts)][-width:] for i in range(size)]
        places.append(Place(size, [torch.tensor(taken, device=target.device)]))
    rows, remarks, done = along(target, lanes, places, "batch", ask.repeats, report, cancelled)
    remark = _gain(rows, "batch", "batch size")
    return Result("batch", done, _config(ask, chosen.target), environment(target), rows, [remark, *remarks], "batch")


def prompt(ask: Ask, report: Report, cancelled: Callable[[], bool]) -> Result:
    """The first lane of a preset behind prompts of growing length, as far as the context reaches."""
    chosen = _greedy(ask)
    target, lanes = _lanes(chosen, ask)
    text = encode(_tokenizer(target), " ".join(_texts(ask, PROMPTS)), LIMITS.prompt)
    lengths = [n for n in LENGTHS if n <= _room(target, ask)]
    places = [Place(n, windows(text, n, TEXTS, target.device)) for n in lengths]
    axis = "prompt tokens"
    rows, remarks, done = along(target, lanes, places, axis, ask.repeats, report, cancelled)
    remarks = ["The prompts are windows on the suite's texts, one behind the other and over again.", *remarks]
    return Result("prompt", done, _config(ask, chosen.target), environment(target), rows, remarks, axis)


def lossless(ask: Ask, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Is the first lane of a preset distributed as plain decoding? With the preset's own sampling and acceptance."""
    chosen = preset(ask.preset or SAMPLING)
    return losslessness(chosen, ask.repeats, report, cancelled, ask.device, ask.dtype)


def shipped_lanes(target: str = STORIES) -> tuple[LaneSpec, ...]:
    """The lanes of those presets, named by their preset."""
    chosen = [p for p in load_presets().values() if p.embedded and p.target == target and p.temperature == 0.0]
    return tuple(replace(p.spec().lanes[0], name=p.id) for p in chosen if len(p.lanes) == 1)


DRAFTS = {
    "wide draft": LaneSpec("draft_model", "stories-draft-wide"),
    "deep draft": LaneSpec("draft_model", "stories-draft-deep"),
}


def _sweep(
    suite: str,
    ask: Ask,
    target: str,
    families: dict[str, LaneSpec],
    usual_ks: Sequence[int],
    report: Report,
    cancelled: Callable[[], bool],
) -> Result:
    """Every family at every k; what is predicted for a family comes from its run at one k, its own if it is there."""
    ks = sorted(set(ask.ks or usual_ks))
    lanes = [(name, replace(lane, k=k, name=f"{name}, k={k}")) for name, lane in families.items() for k in ks]
    runner = Session()
    spec = _spec(suite, ask, target, tuple(lane for _, lane in lanes))
    seen = compare_lanes(runner, spec, _questions(ask, PROMPTS), ask.repeats, report, cancelled)
    rows = seen.rows([{"lane": "Baseline", "k": 0}, *({"lane": name, "k": lane.k} for name, lane in lanes)])
    probe = verify_costs(runner.target(), sorted({*WIDTHS, *(k + 1 for k in ks)}), PROBES)
    remarks = []
    for family, lane in families.items():
        own = lane.k if lane.k in ks else ks[len(ks) // 2]
        index = 1 + next(i for i, (name, at) in enumerate(lanes) if (name, at.k) == (family, own))
        costs = observed(seen.runs[0], seen.runs[index], own)
        if costs is not None:
            remarks.append(_predict(family, own, costs.probed(probe), rows))
    rows = [{name: row.get(name) for name in COLUMNS if any(name in r for r in rows)} for row in rows]
    axis = "k" if len(ks) > 1 else "lane"
    config = _config(ask, target)
    return Result(suite, len(seen.tallies), config, seen.environment, rows, [*remarks, *seen.remarks], axis)


COLUMNS = ("lane", "k", "category", "tokens/s", "speed-up", "predicted", "accepted", "tokens/pass", "output")


def _predict(family: str, own: int, costs: Costs, rows: list[dict[str, Any]]) -> str:
    """Write the predictions into the family's rows; how far they are off."""
    off = {}
    for row in rows:
        if row["lane"] != family or row.get("category", "all") != "all":
            continue
        if costs.tree_nodes is None or row["k"] == own:
            row["predicted"] = round(costs.speedup(row["k"]), 4)
            off[row["k"]] = row["predicted"] / (row["speed-up"].median or 1.0) - 1.0
    worst = max(off, key=lambda k: abs(off[k]))
    best = costs.best_k(max(off))
    advice = "off, nothing is predicted to pay" if not best else f"k = {best} with {costs.speedup(best):.2f}x"
    return (
        f"{family}: predicted from its run at k = {own}, at most {abs(off[worst]):.1%} off the measurement "
        f"(k = {worst}); predicted best: {advice}."
    )


def _as_shipped(
    suite: str,
    ask: Ask,
    target: str,
    lanes: tuple[LaneSpec, ...],
    texts: Sequence[str],
    report: Report,
    cancelled: Callable[[], bool],
) -> Result:
    if not lanes:
        raise ValueError(f"no embedded preset of one greedy lane runs on {target}; choose another preset")
    spec = _spec(suite, ask, target, lanes)
    seen = compare_lanes(Session(), spec, _questions(ask, texts), ask.repeats, report, cancelled)
    rows = seen.rows([{} for _ in seen.names])
    remarks = seen.remarks
    return Result(suite, len(seen.tallies), _config(ask, target), seen.environment, rows, remarks, "lane")


def _spec(suite: str, ask: Ask, target: str, lanes: tuple[LaneSpec, ...]) -> RunSpec:
    tokens = ask.new_tokens or NEW_TOKENS
    return RunSpec(
        f"bench-{suite}", target, "-", lanes, tokens, schedule="sequential", dtype=ask.dtype, device=ask.device
    )


def _greedy(ask: Ask) -> Preset:
    return preset(ask.preset or DEFAULT).with_changes(temperature=0.0)


def _lanes(chosen: Preset, ask: Ask) -> tuple[HFTarget, dict[str, tuple[Drafter, GenerationConfig]]]:
    """The preset's target, and its first lane beside plain decoding on it. No lane stops early."""
    lane = chosen.spec().lanes[0]
    target = load_target(chosen.target, ask.dtype, ask.device, chosen.quantization)
    drafter = load_drafter(lane.method, target, lane.model, **lane.options)
    plain = GenerationConfig(ask.new_tokens or NEW_TOKENS, stop_token_ids=())
    budget = Budget(lane.k, max(lane.k, int(lane.options.get("nodes", 0))))
    name = lane.name or chosen.id
    return target, {
        "Baseline": (load_drafter(BASELINE, target), plain),
        name: (drafter, replace(plain, budget=budget)),
    }


def _gain(rows: list[dict[str, Any]], axis: str, noun: str) -> str:
    drafting = [row for row in rows if row["lane"] != "Baseline"]
    lost = next((row for row in drafting if row["speed-up"].median < 1.0), None)
    if lost is None:
        last = drafting[-1]
        return f"Drafting still pays at {noun} {last[axis]}: {last['speed-up'].median:.2f}x."
    return f"The gain is gone at {noun} {lost[axis]}: {lost['speed-up'].median:.2f}x."


def _room(target: HFTarget, ask: Ask) -> int:
    return target.max_length - (ask.new_tokens or NEW_TOKENS)


def _tokenizer(target: HFTarget) -> Any:
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer; put its tokenizer.json into the same folder")
    return target.tokenizer


def _texts(ask: Ask, usual: Sequence[str]) -> Sequence[str]:
    return ask.prompts if ask.prompts is not None else usual


def _questions(ask: Ask, usual: Sequence[str]) -> list[Question]:
    if ask.questions is not None:
        return read_questions(ask.questions)
    return [Question(text) for text in _texts(ask, usual)]


def _config(ask: Ask, target: str) -> dict[str, Any]:
    """What was asked for and the target it was asked of."""
    asked = {field.name: getattr(ask, field.name) for field in fields(Ask) if field.name != "repeats"}
    kept = {name: value for name, value in asked.items() if value is not None}
    if ask.questions is not None:
        kept["questions"] = ask.questions.name
    if ask.ks is not None:
        kept["ks"] = list(ask.ks)
    if ask.prompts is not None:
        kept["prompts"] = len(ask.prompts)
    return {"target": target, "temperature": 0.0, **kept, "new_tokens": ask.new_tokens or NEW_TOKENS}


@dataclass(frozen=True, slots=True)
class Entry:
    run: Suite
    takes: frozenset[str]  # the fields of Ask that mean something to it


NOUNS = {
    "preset": ("preset", "--preset"),
    "ks": ("draft length", "--k"),
    "prompts": ("prompt", "--prompt"),
    "new_tokens": ("number of new tokens", "--new-tokens"),
    "device": ("device", "--device"),
    "dtype": ("dtype", "--dtype"),
    "pair": ("model pair", "--pair"),
    "questions": ("question file", "--questions"),
}
_PLACE = frozenset({"device", "dtype", "new_tokens"})
_ASKED = _PLACE | {"prompts", "questions"}
SUITES = {
    "embedded": Entry(embedded, _ASKED | {"ks"}),
    "methods": Entry(methods, _ASKED | {"preset"}),
    "k": Entry(sweep_k, _ASKED | {"preset", "ks"}),
    "batch": Entry(batch, _PLACE | {"preset", "prompts"}),
    "prompt": Entry(prompt, _PLACE | {"preset", "prompts"}),
    "depth-width": Entry(depth_width, _ASKED | {"ks"}),
    "copying": Entry(copying, _PLACE),
    "losslessness": Entry(lossless, frozenset({"preset", "device", "dtype"})),
    "peers": Entry(peers, _PLACE | {"pair"}),
    "floor": Entry(floor, _PLACE | {"pair"}),
    "race-fairness": Entry(race_fairness, frozenset()),
}
