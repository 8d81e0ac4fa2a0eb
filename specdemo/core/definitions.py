"""Definitions of all measured numbers; the page, the documentation and the API show this table. Needs no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of a definition's first number on the page. format: None if tiles.js has a function for this tile."""

    id: str
    title: str
    text: str  # below the number
    format: Literal["percent", "decimal", "count", "bytes", "milliseconds"] | None = None
    baseline: bool = False  # the baseline has a row too
    optional: bool = False  # hidden if no lane has the number
    more: bool = False  # in the fold below the others


@dataclass(frozen=True, slots=True)
class Definition:
    """Definition of one or more numbers. keys: in a summary or a row of `comparison`."""

    keys: tuple[str, ...]
    text: str
    tile: Tile | None = None


DEFINITIONS: dict[str, Definition] = {
    "tokens/s": Definition(
        ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"),
        "tokens after the first, divided by decode time (all steps but the prefill); for a lane on a server all "
        "tokens, divided by the time from the request to the last piece of text; with a 95 % interval",
    ),
    "speed-up": Definition(
        ("speedup", "speedup_low", "speedup_high"),
        "tokens/s of the lane divided by tokens/s of the baseline; if one of them ran on a server, both are timed from "
        "the request; over several runs all tokens divided by all time, never a mean of ratios; with a 95 % interval "
        "for a repeated run of the same prompt, not for other prompts. Faster or slower only if the interval excludes "
        "1",
        Tile("speedup", "Speed-up", "tokens/s after the first token, divided by the baseline's"),
    ),
    "clock": Definition(
        ("clock",),
        "the clock of all times, in `environment`: on a CPU the CPU time of the lane's thread, which other programs do "
        "not lengthen; on a GPU the time between CUDA events; on a server, and on a CPU with several threads, wall "
        "time. There, steps during which other programs took the cores for 5 % of the time or more are marked (on "
        "Linux), and count with the mean time of the lane's other steps",
    ),
    "waited": Definition(
        ("waited_share",),
        "the share of a lane's wall time in which its thread did not run because other programs used the CPU",
    ),
    "noisy": Definition(
        ("noisy", "reasons"),
        "a repeated run may differ: a lane waited for the CPU in 10 % of its time or more, other programs took the "
        "cores in half of its steps, plain steps vary by more "
        "than 50 % or drift by more than 15 %, a step is cheaper than one plain token, a server's pieces arrived in "
        "bunches or its own times differ, a GPU was throttled or its clock changed by more than 5 %, or half of the "
        "interval is wider than 10 %",
    ),
    "acceptance rate": Definition(
        ("acceptance_rate", "accepted", "drafted"),
        "accepted draft tokens divided by all verified ones. Draft tokens that were not reached, because an earlier "
        "one was rejected or the text ended, count as not accepted; in a tree all nodes count, so the rate is low",
        Tile("acceptance", "Acceptance rate", "accepted / all draft tokens, also those not reached", "percent"),
    ),
    "unverified": Definition(
        ("unverified",),
        "draft tokens that the target did not verify, because they were unlikely to be accepted (option `p_min`, "
        "DSpark on SGLang). They are not among the draft tokens of the other numbers. vLLM's "
        "`enable_adaptive_verification` does not report them: there they count as draft tokens that were not accepted",
        Tile("unverified", "Unverified", "draft tokens left out of the passes", "count", optional=True, more=True),
    ),
    "break-even": Definition(
        ("break_even",),
        "the acceptance rate below which this lane is slower than plain decoding on this machine: (time of a step in "
        "plain steps - 1) / draft tokens per step; above 1 it always is",
    ),
    "mean accepted length": Definition(
        ("tokens_per_step", "tokens", "steps"),
        "output tokens divided by target passes after the prefill, including correction and bonus tokens",
        Tile("per-pass", "Mean accepted length", "tokens per target pass: accepted plus one", "decimal", more=True),
    ),
    "acceptance rate at position n": Definition(
        ("accept_by_position", "accept_histogram"),
        "of the steps that drafted at least n tokens, the share that accepted the n-th; the histogram counts the steps "
        "that accepted n",
    ),
    "TTFT": Definition(
        ("ttft_ms",),
        "time to first token: the prefill; for a server, the time to its first piece",
        Tile("ttft", "TTFT", "to first token, ms", "milliseconds", baseline=True, more=True),
    ),
    "ITL": Definition(
        ("itl_ms_p50", "itl_ms_p95"),
        "inter-token latency: median (or 95th percentile) over all tokens, each with an equal share of its step's time",
        Tile("itl", "ITL", "between tokens, median, ms", "milliseconds", baseline=True, more=True),
    ),
    "draft, target pass, other": Definition(
        ("ms_draft", "ms_verify", "ms_other"),
        "parts of the decode time: drafting, with updates of the drafter; the target's forward pass; acceptance and "
        "cache updates",
    ),
    "output": Definition(
        ("verdict", "identical", "first_divergence", "divergence_margin", "bit_for_bit"),
        "*identical*: the same tokens as the baseline; *bit for bit*: the logits are the same bits too, in passes of "
        "every width (checked at load). *Rounding*: where the texts part, the logits of both tokens are "
        "as large as the best one, within the difference between passes over one and over k + 1 tokens. *Differs*: one "
        "is smaller, which is a bug. *Same distribution*: sampled, so two correct texts may differ. With a server "
        "*same text* or *text differs*: it sends no token ids, so the cause is unknown",
        Tile("output", "Output", "compared with the baseline, token by token"),
    ),
    "price of a lossy rule": Definition(
        ("tokens_changed", "log_likelihood", "baseline_log_likelihood"),
        "for a lossy lane: the accepted draft tokens that the lossless rule rejects (when sampling, with the same "
        "random numbers), and the mean natural logarithm of the target's probability of a token of its text, at "
        "temperature 1, next to the baseline's",
    ),
    "experts touched": Definition(
        ("experts_touched",),
        "of a mixture of experts: the different experts of a layer that the tokens of a target pass use, averaged over "
        "layers and passes. Plain decoding uses the few experts of one token; a verification reads those of all its "
        "tokens, so it costs more than a plain pass, and speculation gains less than on a dense model",
        Tile("experts", "Experts touched", "per layer and target pass", "decimal", baseline=True, optional=True),
    ),
    "peak memory": Definition(
        ("peak_memory_bytes",),
        "on a GPU the peak of the allocator; on a CPU the size of the lane's weights and caches",
        Tile("memory", "Peak memory", "weights and KV caches", "bytes", baseline=True, more=True),
    ),
}


def table() -> str:
    """Return the definitions as a Markdown table."""
    rows = (f"| {name} | {definition.text} |" for name, definition in DEFINITIONS.items())
    return "\n".join(["| number | definition |", "|---|---|", *rows])


def by_key() -> dict[str, str]:
    """Return the definition of every key of a summary or of a row of `comparison`."""
    return {key: definition.text for definition in DEFINITIONS.values() for key in definition.keys}
