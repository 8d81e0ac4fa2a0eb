"""Cost of a target's forward pass by its width, and rounding differences between passes of different widths."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from operator import truediv
from statistics import median
from timeit import repeat

import torch
from torch import Tensor

from specdemo.core.protocol import Target
from specdemo.core.rounding import gap_change
from specdemo.core.suggest import counted
from specdemo.core.tree import chain_parents
from specdemo.costs.passes import ROUNDED, SAME_BITS, PassShape, pass_ratio
from specdemo.models.cpu_plan import CpuPlan, CpuSettings, cpu_plan, pass_shape
from specdemo.models.cpu_threads import step_threads, threads
from specdemo.models.devices import device_kind
from specdemo.models.machine import clock
from specdemo.models.packed import PADDED_ROWS, PADDING_LIMIT, Layout, float16_rows_agree
from specdemo.models.sources import LoadProgress, no_progress
from specdemo.models.target import HFTarget

VERIFY_TOKENS = 5
REPEATS = 6  # interleaved repeats of one measurement
ROUNDING_TOKENS = 48  # tokens over which rounding is measured
THREAD_SECONDS = 1.0
THREAD_CONTEXT = 16
EQUAL_TIMES = 1.1  # a further thread must gain more, because other programs disturb several threads
SAME_STARTS = (5, 122, 379)  # tokens before the passes that are compared
SAME_WIDTHS = (2, 5, 9, 17, 32)  # 17: on a Xeon of 2023, attention in float32 adds in another order from there on
CURVE_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12)
SLOW_WIDTHS = (1, 2, 3, 4, 5, 8)  # of a model whose passes take longer than SLOW_MS
SLOW_MS = 150.0
CURVE_SECONDS = 2.0
CHECKED = 4  # tokens of the sentence about their cost
COSTLY = 1.5  # cost of checking them, in passes, from which the sentence about a file compares types
COSTLY_IN_HALF = 1.2  # above it a model in half precision is compared with float32
BEST_TYPE = "Q4_K_M"
COMPARED = "type and processor decide, so compare files with `doctor FILE`"
READ_BYTES = 1 << 28  # more than most caches
PADDING_ROUNDS = 8

MIN_LAYERS = 2  # that are compared
Clock = Callable[[], float]  # seconds
Pass = tuple[Tensor, Tensor, list[int]]  # tokens [1, S], parents [1, S - 1], path from the root


def median_times(times: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Return the median of the repeats of every width."""
    return {width: median(repeats) for width, repeats in times.items()}


def pass_times(
    target: Target,
    widths: Sequence[int],
    repeats: int = 5,
    rows: int = 1,
    context: int = 32,
    now: Clock | None = None,
    limit_s: float = inf,
    report: LoadProgress = no_progress,
) -> dict[int, list[float]]:
    """Return slots -> milliseconds of every repeat of a pass over a chain of that many, after `context` tokens, for
    `rows` texts at once. Repeats of different widths are interleaved.

    now: the clock; None: that of lanes. limit_s: seconds after which no further repeat starts. report: called before
    every pass; may raise to stop.
    """
    now = now or clock(target.device, target.facts.wall_time)
    context = max(1, min(context, target.max_length - max(widths)))
    prompt = (torch.arange(1, context + 1, device=target.device) % target.vocab_size).repeat(rows, 1)
    times: dict[int, list[float]] = {width: [] for width in widths}
    with step_threads(target):
        target.start(prompt, reserve=max(widths))
        lengths = [context] * rows
        end = time.perf_counter() + limit_s
        for number in range(repeats + 1):
            if number > 1 and time.perf_counter() > end:
                break
            for place, (width, measured) in enumerate(times.items()):
                share = (number + place / len(times)) / (repeats + 1)
                report(share, f"measuring passes over {counted(width, 'token')}")
                seconds = _seconds(target, width, lengths, now)
                if number:  # the first round warms up
                    measured.append(1000.0 * seconds)
        target.release()
    return times


def measure_passes(target: Target, report: LoadProgress = no_progress) -> dict[int, float]:
    """Return `Target.pass_ms`, measured in about CURVE_SECONDS where it is empty. It stays empty for a model without a
    position after a text of one token."""
    if target.max_length < 2 or target.pass_ms:
        return target.pass_ms
    plain_ms = min(pass_times(target, (1,), 1)[1])
    widths: Sequence[int] = CURVE_WIDTHS if plain_ms < SLOW_MS else SLOW_WIDTHS
    times = pass_times(
        target, [n for n in widths if n < target.max_length], REPEATS, limit_s=CURVE_SECONDS, report=report
    )
    target.release_graphs()
    plain = median(times[1])
    # ratios within a round, because other programs slow down all passes of a round
    ratios = {n: median(map(truediv, repeats, times[1])) for n, repeats in times.items()}
    target.pass_ms.update({n: round(plain * ratio, 4) for n, ratio in ratios.items()})
    return target.pass_ms


def checking_note(target: Target) -> str:
    """Return what checking CHECKED tokens costs with this model, in one sentence; empty before it is measured."""
    if not target.pass_ms:
        return ""
    cost = pass_ratio(target.pass_ms, CHECKED)
    note = f"checking {CHECKED} tokens costs {cost:.1f} passes in {target.facts.precision}"
    if costly_in_half(target):
        return f"{note}, so speculation gains less; compare with dtype float32"
    compares = target.model is None and cost >= COSTLY and target.facts.precision != BEST_TYPE
    return f"{note}; {COMPARED}" if compares else note


def costly_in_half(target: Target) -> bool:
    """Return True where checking tokens costs more than COSTLY_IN_HALF passes with a model in half precision on a
    CPU."""
    half = target.model is not None and target.threads > 0 and target.dtype != torch.float32
    return half and bool(target.pass_ms) and pass_ratio(target.pass_ms, CHECKED) > COSTLY_IN_HALF


@lru_cache
def read_gb_per_s(count: int) -> float:
    """Return the gigabytes per second that `count` CPU threads read from memory."""
    values = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    with threads(count):
        return READ_BYTES / min(repeat(values.sum, number=1, repeat=REPEATS)) / 1e9


def pass_facts(target: Target) -> dict[str, object]:
    """Return how the passes of a target run, for a trace: layout, exactness, `pass_ms`, and on a CPU the bandwidth of
    its memory and the share of it that a pass over one token uses."""
    passes = target.facts
    facts: dict[str, object] = {"layout": passes.layout} if passes.layout else {}
    facts["exactness"] = SAME_BITS if passes.same_bits else ROUNDED
    if target.pass_ms:
        facts["pass_ms"] = {str(width): ms for width, ms in target.pass_ms.items()}
    if target.pass_ms and target.threads and passes.pass_bytes >= READ_BYTES // 4:
        bandwidth = read_gb_per_s(target.threads)
        facts["bandwidth_gb_per_s"] = round(bandwidth, 2)
        facts["bandwidth_share"] = round(passes.pass_bytes / target.pass_ms[1] / 1e6 / bandwidth, 4)
    return facts


def fastest_threads(target: Target, counts: Sequence[int], seconds: float = THREAD_SECONDS) -> int:
    """Return the number of threads with which passes over one and over VERIFY_TOKENS tokens are fastest; of about equal
    ones the smallest, which other programs disturb least. Sets it.

    seconds: stop after this time, but measure each number once, and twice before the number changes.
    """
    times: dict[int, list[float]] = {count: [] for count in counts}
    before, rounds, end = target.threads, 0, time.perf_counter() + seconds

    def fastest() -> int:
        costs = {count: min(measured, default=0.0) for count, measured in times.items()}
        return next(count for count in counts if costs[count] <= EQUAL_TIMES * min(costs.values()))

    if len(counts) > 1 and target.max_length > VERIFY_TOKENS:
        context = min(THREAD_CONTEXT, target.max_length - VERIFY_TOKENS)
        prompt = torch.arange(1, context + 1, device=target.device)[None] % target.vocab_size
        target.start(prompt, reserve=VERIFY_TOKENS)
        while rounds < 1 or (rounds < 2 and fastest() != before) or (time.perf_counter() < end and rounds < REPEATS):
            rounds += 1
            for count, measured in times.items():
                target.threads = count
                with step_threads(target):
                    passes = [_seconds(target, width, [context], time.perf_counter) for width in (1, 1, VERIFY_TOKENS)]
                measured.append(sum(passes[1:]))  # the first one wakes the threads
        target.release()
    target.threads = fastest()
    return target.threads


def plan_passes(target: HFTarget, settings: CpuSettings) -> tuple[str, ...]:
    """Choose the shape of a model's passes, and on a CPU their threads. Return what a user should know, one sentence
    each."""
    plan, notes, on_cpu = cpu_plan(target.model), [], device_kind(target.device).host
    if on_cpu:
        fastest_threads(target, settings.counts)
    if settings.bit_exact == "on" or (on_cpu and settings.bit_exact == "auto"):
        plan.shape = one_kernel_shape(target, required=settings.bit_exact == "on")
        plan.same_bits = plan.shape != PassShape()
        plan.chains = plan.same_bits and settings.bit_exact == "on"
        if settings.bit_exact == "on" and not plan.same_bits:
            notes.append("bit_exact is on, but this model's passes of different widths still round differently here")
    return tuple(notes)


@torch.no_grad()
def one_kernel_shape(target: HFTarget, required: bool) -> PassShape:
    """Return the shape of passes that makes the logits of every width the same bits, the ordinary shape if there is
    none, or unless required, if its padding makes a one-token pass slower than PADDING_LIMIT allows."""
    plan, config = cpu_plan(target.model), target.layer_config
    on_cpu = device_kind(target.device).host
    unpadded = plan.layout == Layout("float16") and float16_rows_agree()
    if not target.capabilities.trees or (on_cpu and plan.layout.rows < PADDED_ROWS and not unpadded):
        return PassShape()
    kind = type(target.model), str(sorted(config.items(), key=str)), target.dtype, target.device
    key = kind, plan.layout, plan.threads, required
    if key not in CpuPlan.shapes:
        sizes = tuple({size for _, size in target.kv_shapes.values()})
        shape = pass_shape(target.dtype, sizes) if on_cpu else PassShape(device_kind(target.device).exact_slots)
        if unpadded:
            shape = replace(shape, slots=1)
        kinds = list(config.get("layer_types") or ["all"])
        some = max(MIN_LAYERS, *(1 + kinds.index(kind) for kind in kinds)) if on_cpu else target.num_layers
        layers = min(target.num_layers, some)
        plan.shape = shape
        with step_threads(target):
            same = has_same_bits(target, layers)
        suitable = same and (required or unpadded or padding_cost(target, shape) <= PADDING_LIMIT)
        CpuPlan.shapes[key] = shape if suitable else PassShape()
    return CpuPlan.shapes[key]


def padding_cost(model: HFTarget, shape: PassShape) -> float:
    """Return the time of a one-token pass of this shape, in that of an ordinary one."""
    plan = cpu_plan(model.model)
    times: dict[PassShape, list[float]] = {shape: [], PassShape(): []}
    used, plan.threads = plan.threads, 1  # its CPU time does not include other programs
    for _ in range(PADDING_ROUNDS):
        for each, measured in times.items():
            plan.shape = each
            measured.extend(pass_times(model, (1,), repeats=2)[1])
        ratio = min(times[shape]) / min(times[PassShape()])
        if ratio <= 1.0:
            break
    plan.shape, plan.threads = PassShape(), used
    return ratio


@torch.no_grad()
def has_same_bits(target: HFTarget, layers: int) -> bool:
    """Return whether the first `layers` layers and the head give a slot of a chain the same bits in passes of the
    `SAME_WIDTHS`, after texts that end before and after a block of keys."""
    widths = [width for width in SAME_WIDTHS if width <= device_kind(target.device).exact_slots]
    starts = [start for start in SAME_STARTS if start + max(widths) <= target.max_length]
    count = max(starts, default=0) + max(widths)
    tokens = 7 * torch.arange(1, count + 1, device=target.device)[None] % target.vocab_size
    for start in starts:
        history = target.first_layers(layers)
        history.extend(tokens[:, :start], (), reserve=max(widths))
        text = tokens[:, start : start + max(widths)]
        single = []
        for token in text.split(1, 1):
            single.append(history.forward(token, token[:, 1:], ()).logits)
            history.commit([[0]])
        expected = torch.cat(single, 1)
        for width in widths:
            history.crop([start])
            output = history.forward(text[:, :width], chain_parents(1, width - 1, text.device), ()).logits
            if not torch.equal(output, expected[:, :width]):
                return False
    return bool(starts)


def _seconds(target: Target, width: int, lengths: list[int], now: Clock) -> float:
    """Return the time of a pass after texts of these lengths, without that of undoing the last one."""
    rows = len(lengths)
    target.crop(lengths)
    tokens = (torch.arange(width, device=target.device) % target.vocab_size).repeat(rows, 1)
    begin = now()
    target.forward(tokens, chain_parents(rows, width - 1, target.device))
    return now() - begin


def chain_rounding(target: Target, tokens: Tensor, slots: int = VERIFY_TOKENS) -> float:
    """Return the `pass_rounding` of passes over chains of `slots` tokens, about the last ROUNDING_TOKENS of tokens
    [1, T]. 0.0 for a text of one token."""
    slots = min(slots, tokens.shape[1] - 1)
    if slots < 2:
        return 0.0
    count = slots * min(max(ROUNDING_TOKENS // slots, 1), (tokens.shape[1] - 1) // slots)
    parents = chain_parents(1, slots - 1, tokens.device)
    chains = [(chain, parents, [*range(slots)]) for chain in tokens[:, -count:].split(slots, 1)]
    return pass_rounding(target, tokens[:, :-count], chains)


def pass_rounding(target: Target, tokens: Tensor, passes: Sequence[Pass]) -> float:
    """Return the largest change of the gap between two likely tokens from one-token passes to `passes` over the same
    text, after tokens [1, T]. Kernels for other widths, and caches in another order, add in another order."""
    text = torch.cat([slots[:, path] for slots, _, path in passes], 1)
    # one-token passes first, because the CUDA graph of a wide pass would serve single tokens too
    single = _logits(target, tokens, [(token, token[:, 1:], [0]) for token in text.split(1, 1)])
    return gap_change(single[0], _logits(target, tokens, passes)[0])


def _logits(target: Target, tokens: Tensor, passes: Sequence[Pass]) -> Tensor:
    """Return the logits [1, N, vocabulary] of the N slots on the paths of passes after tokens [1, T]."""
    target.start(tokens, reserve=sum(slots.shape[1] for slots, _, _ in passes))
    found = []
    for slots, parents, path in passes:
        found.append(target.forward(slots, parents).logits[:, path].float())
        target.commit([path])
    target.release()
    return torch.cat(found, 1)
