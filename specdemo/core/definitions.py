"""What every number means, once: the page, the docs and the API show this table. Needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Definition:
    """keys: of a summary or of a row of `comparison`. short: below its tile."""

    keys: tuple[str, ...]
    text: str
    short: str = ""


DEFINITIONS: dict[str, Definition] = {
    "tokens/s": Definition(
        ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"),
        "tokens after the first, divided by decode time: all steps but the prefill; of a lane on a server all tokens, "
        "divided by the time from the request to the last piece of text; with its 95 % interval",
    ),
    "speed-up": Definition(
        ("speedup", "speedup_low", "speedup_high"),
        "tokens/s of the lane divided by tokens/s of the baseline, where one of them ran on a server both from the "
        "request on; of several runs the tokens of all divided by the time of all, never a mean of ratios; with its "
        "95 % interval: what running the same again gives, not what another prompt gives. Faster or slower only where "
        "the interval leaves out 1",
        "tokens/s after the first token, divided by the baseline's",
    ),
    "clock": Definition(
        ("clock",),
        "of `environment`, what times are of: on a CPU the time that the lane's own thread ran, which no other program "
        "makes longer by taking the processor; on a GPU the time between CUDA events; on a server, and on a CPU with "
        "several threads, wall time",
    ),
    "waited": Definition(
        ("waited_share",),
        "the part of a lane's wall time in which its thread did not run, because other programs had the processor",
    ),
    "noisy": Definition(
        ("noisy", "reasons"),
        "a second run may say something else: a lane waited for the processor in 10 % of its time or more, plain steps "
        "differ by more than 50 % or drift by more than 15 %, a step is cheaper than the plain token it holds, a "
        "server's pieces came in bunches or its own times say otherwise, a GPU was slowed or its clock changed by more "
        "than 5 %, or half of the interval is wider than 10 %",
    ),
    "acceptance": Definition(
        ("acceptance_rate", "accepted", "drafted"),
        "drafted tokens that are in the text, divided by drafted tokens that were checked; drafts behind the end of "
        "the text count as checked, not as kept; of a tree all its nodes count, so it is low",
        "drafted tokens kept, of those checked",
    ),
    "tokens / target pass": Definition(
        ("tokens_per_step", "tokens", "steps"),
        "emitted tokens divided by target passes after the prefill, the target's own tokens included",
        "kept drafts and the target's own token",
    ),
    "kept at position n": Definition(
        ("accept_by_position", "accept_histogram"),
        "of the steps that drafted n tokens or more, the share that kept the n-th; the histogram: steps that kept n",
    ),
    "first (TTFT)": Definition(("ttft_ms",), "time to first token: the prefill step; of a server, to its first piece"),
    "gap (ITL)": Definition(
        ("itl_ms_p50", "itl_ms_p95"),
        "inter-token latency: the median (or 95th percentile) over tokens of their share of their step",
        "first token; median gap",
    ),
    "draft, target pass, other": Definition(
        ("ms_draft", "ms_verify", "ms_other"),
        "decode time by what it went into: drafting and what a drafter does with the outcome; the target's pass; "
        "accepting and the cache",
    ),
    "output": Definition(
        ("verdict", "identical", "first_divergence", "divergence_margin"),
        "*identical*: the same tokens as the baseline. *Rounding*: they part where the target's two best tokens are as "
        "good as equal in the arithmetic used. *Differs*: they part elsewhere, which is a fault. *Same distribution*: "
        "sampled, so that two right texts may differ. With a server *same text* or *text differs*: it names no tokens, "
        "and why it differs cannot be found out from here",
        "compared with the baseline, token for token",
    ),
    "peak memory": Definition(
        ("peak_memory_bytes",),
        "on a GPU the allocator's peak; on a CPU the weights and caches that the lane holds",
        "weights and caches",
    ),
}


def table() -> str:
    """The definitions as a table in Markdown."""
    rows = (f"| {name} | {definition.text} |" for name, definition in DEFINITIONS.items())
    return "\n".join(["| number | definition |", "|---|---|", *rows])


def by_key() -> dict[str, str]:
    """Key of a summary or of a row of `comparison` -> what it is."""
    return {key: definition.text for definition in DEFINITIONS.values() for key in definition.keys}
