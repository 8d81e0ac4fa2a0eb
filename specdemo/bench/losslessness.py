"""Test that the output of a preset's first lane has the same distribution as plain decoding.

Sampling: many independent continuations of one prompt from both, and a two-sample chi-square test of the tokens at each
position. Greedy: a comparison of the tokens, prompt by prompt.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from specdemo.bench.base import ROWS, OfPreset, Report, Stop, Tick
from specdemo.bench.measure import Decoder, run_complete, run_repeats
from specdemo.bench.prompts import PROMPTS
from specdemo.bench.result import DRAFTED, PLAIN, TOKEN, Result, Row
from specdemo.core.protocol import GenerationConfig, Target
from specdemo.core.rules import accept_rule
from specdemo.core.suggest import counted
from specdemo.engine.loop import generate
from specdemo.engine.session import Session, environment
from specdemo.methods import BASELINE, build_drafter, load_drafter, method
from specdemo.methods.pairs import load_target
from specdemo.models.text import encode, token_text, tokenizer_of
from specdemo.presets.files import Preset

PLACES = (2, 3, 4)  # positions of the compared tokens; the first token comes from the prefill, without speculation
TOP_TOKENS = 10  # most common tokens per position to show
MIN_COUNT = 10  # tokens that occur less often in both samples together are pooled
ALARM = 0.001  # significance level
GREEDY_TOKENS = 64
OTHERS = "(all others)"

Outcome = TypeVar("Outcome", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ChiSquare:
    statistic: float
    freedom: int
    p: float


def chi_square(a: Mapping[Outcome, int], b: Mapping[Outcome, int]) -> ChiSquare:
    """Test whether two samples of counts come from one distribution; p is the probability of a statistic this large if
    they do.

    Outcomes with fewer than MIN_COUNT counts in both samples together are pooled; with a single outcome there is no
    test.
    """
    pairs = [(a.get(outcome, 0), b.get(outcome, 0)) for outcome in {**a, **b}]
    frequent = [pair for pair in pairs if sum(pair) >= MIN_COUNT]
    rest = [sum(column) for column in zip((0, 0), *(pair for pair in pairs if sum(pair) < MIN_COUNT), strict=True)]
    if sum(rest) < MIN_COUNT and frequent:
        least = min(range(len(frequent)), key=lambda i: sum(frequent[i]))
        frequent[least] = (frequent[least][0] + rest[0], frequent[least][1] + rest[1])
    elif sum(rest):
        frequent.append((rest[0], rest[1]))
    sizes = sum(x for x, _ in frequent), sum(y for _, y in frequent)
    if len(frequent) < 2 or not all(sizes):
        return ChiSquare(0.0, 0, 1.0)
    scale = (sizes[1] / sizes[0]) ** 0.5
    statistic = sum((scale * x - y / scale) ** 2 / (x + y) for x, y in frequent)
    half = torch.tensor([(len(frequent) - 1) / 2, statistic / 2], dtype=torch.float64)
    return ChiSquare(statistic, len(frequent) - 1, float(torch.special.gammaincc(half[0], half[1])))


def continuations(
    target: Target, decoder: Decoder, prompt: Sequence[int], seed: int, tick: Callable[[], None]
) -> list[list[int]]:
    """Generate ROWS continuations of the prompt; `tick` is called before every step."""
    rows: list[list[int]] = [[] for _ in range(ROWS)]
    prompts = torch.tensor([prompt] * ROWS, device=target.device)
    config = replace(decoder.config, seed=seed)
    for event in generate(target, decoder.drafter, prompts, config, accept=decoder.accept):
        tick()
        for row, emitted in zip(rows, event.emitted, strict=True):
            row += emitted
    return rows


def losslessness(suite: OfPreset, report: Report, cancelled: Stop) -> Result:
    """Run the test for the preset's temperature. A repeat has ROWS continuations; greedy decoding has no repeats.

    Raises ValueError with one line.
    """
    comparison = suite.comparison
    drafting = comparison.lanes[0].method
    if not method(drafting).exact:
        raise ValueError(f"method {drafting!r} is not exact; choose a preset whose first lane has an exact method")
    if comparison.temperature == 0.0:
        return _same_tokens(suite, comparison, report, cancelled)
    return _same_distribution(suite, comparison, report, cancelled)


def _same_distribution(suite: OfPreset, comparison: Preset, report: Report, cancelled: Stop) -> Result:
    lane = comparison.lanes[0]
    target = load_target(comparison.target, suite.dtype, suite.device, comparison.quantization)
    tokens = PLACES[-1] + 1  # one more, so that a draft can reach the last position
    plain = GenerationConfig(tokens, comparison.sampling, stop_token_ids=())
    rule = lane.accept_rule()
    decoders = {
        PLAIN: Decoder(load_drafter(BASELINE, target), accept_rule("lossless"), plain),
        DRAFTED: Decoder(
            build_drafter(lane.method, target, lane.model, lane.parsed), rule, replace(plain, budget=lane.budget)
        ),
    }
    prompt = encode(tokenizer_of(target), comparison.prompt, target.max_length - tokens)

    every: list[list[list[list[int]]]] = []

    def once(repeat: int, tick: Tick) -> list[list[list[int]]]:
        """Return the continuations of every decoding setup. All seeds differ, because equal noise would correlate the
        samples.
        """
        samples = []
        for number, decoder in enumerate(decoders.values()):
            seed = comparison.seed + len(decoders) * repeat + number
            samples.append(continuations(target, decoder, prompt, seed, partial(tick, number / len(decoders))))
        every.append(samples)
        tick(1.0, lambda: conclude(every, []))
        return samples

    def conclude(done: Sequence[Sequence[Sequence[list[int]]]], remarks: list[str]) -> Result:
        """Return the result of the finished repeats. done[repeat][decoder]: continuations."""
        samples = [[row for samples in done for row in samples[number]] for number in range(len(decoders))]
        sampling = {name: getattr(comparison, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        config = {
            "target": comparison.target,
            "lane": lane.name or lane.method.replace("_", " "),
            "k": lane.budget.depth,
            "acceptance": lane.acceptance,
            **sampling,
            "draws": len(samples[0]),
            "prompt": comparison.prompt[:200],
        }
        rows, findings = _compared(tokenizer_of(target), samples, rule.exact)
        return Result("losslessness", len(done), config, environment(target), rows, [*findings, *remarks], TOKEN)

    return conclude(*run_repeats(suite.repeats, report, cancelled, once))


def _compared(
    tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sequence[list[int]]], exact: bool
) -> tuple[list[dict[str, object]], list[str]]:
    """Return the histograms of both samples at every position, then the verdict and the test of each position."""
    verdicts, rows = [], []
    for place in PLACES:
        counts = [Counter(row[place - 1] for row in sample) for sample in samples]
        verdicts.append(chi_square(counts[0], counts[1]))
        rows += _histogram(tokenizer, place, counts)
    tests = [
        f"Token {place}: chi-square {v.statistic:.1f} with {v.freedom} degrees of freedom, p = {_p(v.p)}."
        for place, v in zip(PLACES, verdicts, strict=True)
    ]
    return rows, [_verdict(verdicts, len(samples[0]), exact), *tests]


def _verdict(verdicts: Sequence[ChiSquare], draws: int, exact: bool) -> str:
    """Summarise all positions in one sentence; the significance level is divided among them."""
    least = min(verdict.p for verdict in verdicts)
    if least < ALARM / len(verdicts):
        fault = "as expected of a lossy rule" if not exact else "which is a bug in the method or the engine"
        rare = f"{1.0 / least:,.0f}" if least > 1e-9 else "more than a billion"
        return f"The distributions differ, {fault}: with equal distributions, such samples occur once in {rare} times."
    words = "No difference was found" if exact else "No difference was found yet, though the rule is lossy,"
    return f"{words} between {draws} continuations of each."


def _p(p: float) -> str:
    return f"{p:.3f}" if p >= ALARM else f"{p:.1e}"


def _histogram(tokenizer: PreTrainedTokenizerBase, place: int, counts: Sequence[Counter[int]]) -> list[Row]:
    """Return rows with the shares of the most common tokens of a position in both samples, then of all others
    together.
    """
    commonest = [token for token, _ in (counts[0] + counts[1]).most_common(TOP_TOKENS)]
    sizes = [count.total() for count in counts]
    rows = []
    for token in commonest:
        shares = [round(count[token] / size, 4) for count, size in zip(counts, sizes, strict=True)]
        rows.append({TOKEN: token_text(tokenizer, token), "place": place, PLAIN: shares[0], DRAFTED: shares[1]})
    left = [1.0 - sum(count[t] for t in commonest) / size for count, size in zip(counts, sizes, strict=True)]
    if max(left) > 0.0:
        rows.append({TOKEN: OTHERS, "place": place, PLAIN: round(left[0], 4), DRAFTED: round(left[1], 4)})
    return rows


def _same_tokens(suite: OfPreset, comparison: Preset, report: Report, cancelled: Stop) -> Result:
    """Compare plain and speculative decoding of every prompt, one after the other, token by token."""
    runner = Session()
    first = comparison.with_changes(lanes=[comparison.lanes[0].model_dump()], max_new_tokens=GREEDY_TOKENS)
    spec = first.changed(schedule="sequential", device=suite.device, dtype=suite.dtype)
    prompts = [comparison.prompt, *PROMPTS]

    def once(number: int, tick: Tick) -> dict[str, object]:
        trace = run_complete(runner, spec.model_copy(update={"prompt": prompts[number]}), cancelled)
        tick(0.0)  # do not count an interrupted run
        row = trace.comparison[0]
        same = row["first_divergence"]
        tokens = len(trace.lanes[0].token_ids)
        return {"prompt": prompts[number][:40], "tokens": tokens, "parts at": same, "output": row["verdict"]}

    rows, remarks = run_repeats(len(prompts), report, cancelled, once, "prompt")
    counts = Counter(str(row["output"]) for row in rows)
    summary = ", ".join(f"{count} {word}" for word, count in counts.items())
    config = {"target": comparison.target, "temperature": 0.0, "k": spec.lanes[0].budget.depth, "prompts": len(rows)}
    remark = f"Greedy, {counted(len(rows), 'prompt')}: {summary}."
    return Result("losslessness", len(rows), config, environment(runner.target()), rows, [remark, *remarks])
