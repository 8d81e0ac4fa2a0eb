"""Facts about a run of speculative decoding, in the form that a diagnosis reads. Needs no torch.

A reader of an engine's output fills in an `Observation` and leaves out what the output does not contain. `complete`
derives the values that follow from others.
"""

from dataclasses import dataclass, fields, replace
from math import ceil, isfinite
from typing import Any, Self

from specdemo.analysis.parts import MAX_DRAFTED, Contrast
from specdemo.core.estimate import Estimate
from specdemo.core.safe_io import JsonObject
from specdemo.costs.drafting import no_passes
from specdemo.methods.facts import PREDICTED, method_of
from specdemo.models.ref import ModelRef
from specdemo.presets.drafters import all_published
from specdemo.servers.counters import ServerStats

LARGEST = 1e9  # of any number; rates and tokens/s are far below
TOLERANCE = 0.02  # of a rate or length that an engine printed with two digits
VALUE_NAMES = {  # what a missing value is called
    "k": "draft length k",
    "accepted_length": "mean accepted length",
    "by_position": "acceptance by position",
    "speedup": "speed without speculation",
    "draft_cost": "drafting time",
    "verify_cost": "verification time",
    "batch_size": "batch size",
    "method": "drafting method",
    "target": "target model",
    "thinking": "thinking mode",
}
WITH_SPECULATION = "speed with speculation"
COMBINED = " and "  # between the methods of a run that drafts with several


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Facts about one run. None and empty values are unknown.

    engine: a name in `specdemo.servers.engines`. method: in words of the engine or of specdemo. k: draft length, or
    depth of the tree; k_inferred: k is the mean length of the drafts, some of which may be longer. accepted_length:
    mean accepted length, tokens output per target pass including the correction or bonus token. acceptance_rate:
    accepted / drafted tokens. by_position: share of the steps that accepted the draft tokens up to each position
    (unconditional). drafted_per_step: mean number of draft tokens over all steps; below k if drafts end early or some
    steps have none, above it for trees. drafting_share: share of the steps with a draft; None: unknown, all are taken
    to have one; 0: speculation is on and never drafted. threshold: confidence below which a draft ends. draft_cost:
    time to draft one token; verify_cost: time of the verification pass; overhead: rest of a step; all in units of a
    plain decoding step. draft_token_ms: time to draft one token.
    tokens_per_s and plain_tokens_per_s: with and without speculation, both over the same number of requests at a time.
    batch_size: mean number of requests per step. thinking: mode of the requests; trained_thinking: of the drafter's
    training answers. moe: the target is a mixture of experts. random_prompts: the prompts are random tokens.
    offloaded: weights or caches are read from main memory or disk, or requests are swapped out. draft_cache: type of
    the drafter's KV cache if it is quantised. verified_in_part: the engine verifies a confident part of each draft and
    counts the rest as not accepted. contrast: parts of the run in which far fewer tokens are accepted. notes: what the
    numbers leave out, in sentences.

    Raises ValueError, one line, for a number out of range.
    """

    engine: str = ""
    source: str = ""  # what was read
    method: str = ""
    target: str = ""
    drafter: str = ""
    k: int | None = None
    k_inferred: bool | None = None
    accepted_length: float | None = None
    acceptance_rate: float | None = None
    by_position: tuple[float, ...] = ()
    drafted_per_step: float | None = None
    drafting_share: float | None = None
    threshold: float | None = None
    steps: int | None = None
    draft_cost: float | None = None
    draft_token_ms: float | None = None
    verify_cost: float | None = None
    overhead: float | None = None
    plain_tokens_per_s: float | None = None
    tokens_per_s: float | None = None
    speedup: Estimate | None = None
    batch_size: float | None = None
    thinking: bool | None = None
    trained_thinking: bool | None = None
    moe: bool | None = None
    random_prompts: bool | None = None
    offloaded: bool | None = None
    draft_cache: str = ""
    verified_in_part: bool | None = None
    contrast: Contrast | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not (isfinite(value) and 0.0 <= value <= LARGEST):
                name = VALUE_NAMES.get(field.name, field.name.replace("_", " "))
                raise ValueError(f"{name} must be from 0 to {LARGEST:g}, not {value}")
        for name in ("tokens_per_s", "plain_tokens_per_s"):
            if getattr(self, name) == 0.0:
                raise ValueError(f"{name} must be more than 0")
        shares = (self.acceptance_rate, self.drafting_share, self.threshold)
        rates = [*self.by_position, *(share for share in shares if share is not None)]
        if not all(isfinite(rate) and 0.0 <= rate <= 1.0 + TOLERANCE for rate in rates):
            raise ValueError("acceptance rates must be from 0 to 1")
        if (self.k or 0) > MAX_DRAFTED or len(self.by_position) > MAX_DRAFTED:
            raise ValueError(f"k must be at most {MAX_DRAFTED}")

    @property
    def kind(self) -> str:
        """Return specdemo's name for the method; an unknown name as it is."""
        return method_of(self.method) or self.method

    @property
    def looks_up(self) -> bool:
        """Return whether the method drafts without a model, from earlier text."""
        return self.kind in PREDICTED and PREDICTED[self.kind].cost is no_passes

    @property
    def combined(self) -> bool:
        """Return whether several methods draft, each with a draft length of its own."""
        return COMBINED in self.method

    @property
    def stopped(self) -> bool:
        """Return whether a drafter with a model does not work in parts of the run. A lookup drafts by chance."""
        return self.contrast is not None and self.contrast.broken and not self.looks_up

    @property
    def per_draft(self) -> float:
        """Return the mean number of tokens of a draft, of a completed observation."""
        return (self.drafted_per_step or self.k or 1.0) / (self.drafting_share or 1.0)

    @property
    def draft_tokens(self) -> float | None:
        """Return the number of draft tokens of the run, None if it is unknown."""
        return self.steps * self.drafted_per_step if self.steps and self.drafted_per_step else None

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names of the values that are unknown and would make a diagnosis more certain."""
        words = VALUE_NAMES | ({"speedup": WITH_SPECULATION} if self.plain_tokens_per_s else {})
        return tuple(words[name] for name in VALUE_NAMES if getattr(self, name) in (None, "", ()))

    def changed(self, **values: object) -> Self:
        """Return the observation with other values; None and empty texts change nothing."""
        changes: dict[str, Any] = {name: value for name, value in values.items() if value not in (None, "")}
        return replace(self, **changes | ({"k_inferred": None} if "k" in changes else {}))

    def merged(self, plain: Self) -> Self:
        """Return the observation with the speed of a run without speculation on the same machine and load. Raises
        ValueError, one line, if that is unknown."""
        if plain.tokens_per_s is None and plain.plain_tokens_per_s is None:
            raise ValueError(f"the baseline ({plain.source}) contains no tokens/s; give the speed itself")
        return replace(self, plain_tokens_per_s=plain.tokens_per_s or plain.plain_tokens_per_s)


def values_of(stats: ServerStats) -> JsonObject:
    """Return the fields of an Observation that a server's statistics contain."""
    counters, steps, drafted = stats.counters, stats.counters.get("steps"), stats.counters.get("drafted")
    share = stats.drafting_steps / steps if stats.drafting_steps and steps else None
    values: JsonObject = {
        "accepted_length": counters.get("tokens_per_step"),
        # a rate without counts may include the bonus tokens
        "acceptance_rate": counters.get("acceptance_rate") if drafted else None,
        "by_position": tuple((rate or 0.0) * (share or 1.0) for rate in stats.accept_by_position),
        "drafted_per_step": drafted / steps if drafted and steps else None,
        "drafting_share": share,
        "steps": round(steps) if steps else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def complete(run: Observation) -> Observation:
    """Return the observation with the values that follow from others. Raises ValueError, one line, if they contradict
    each other."""
    k, share = run.k or len(run.by_position) or None, run.drafting_share or 1.0
    length, inferred = run.accepted_length, run.k_inferred
    if length is None and run.by_position:
        length = 1.0 + sum(run.by_position)
    drafted, rate = run.drafted_per_step, run.acceptance_rate
    if length is None and rate is not None and (drafted or k):
        length = 1.0 + rate * (drafted or share * (k or 0))
    if drafted is None:
        drafted = (length - 1.0) / rate if length is not None and rate else k and share * k
    if k is None and drafted and length is not None:
        inferred = True
        k = max(round(drafted / share), ceil((length - 1.0) / share - TOLERANCE), 1)
    if length is not None:
        _check_length(length, k)
        drafted = drafted and max(drafted, length - 1.0)
        rate = (length - 1.0) / drafted if rate is None and drafted else rate
    speedup = run.speedup
    if speedup is None and run.tokens_per_s and run.plain_tokens_per_s:
        speedup = Estimate(run.tokens_per_s / run.plain_tokens_per_s)
    return replace(
        run,
        k=k,
        k_inferred=inferred,
        accepted_length=length,
        acceptance_rate=rate,
        drafted_per_step=drafted,
        speedup=speedup,
        draft_cost=_draft_cost(run),
        trained_thinking=_training(run) if run.trained_thinking is None else run.trained_thinking,
    )


def _check_length(length: float, k: int | None) -> None:
    if length < 1.0 - TOLERANCE or (k and length > k + 1.0 + TOLERANCE):
        raise ValueError(
            f"a step with k = {k or '?'} draft tokens outputs 1 to k + 1 tokens, not {length:g}; the mean accepted "
            "length includes the correction or bonus token"
        )


def _draft_cost(run: Observation) -> float | None:
    """Return the time of a draft token in plain steps, which take 1 / (plain tokens/s) at batch size 1."""
    if run.draft_cost is not None or run.draft_token_ms is None or run.plain_tokens_per_s is None:
        return run.draft_cost
    return run.draft_token_ms * run.plain_tokens_per_s / 1000.0 if (run.batch_size or 1.0) < 2.0 else None


def _training(run: Observation) -> bool | None:
    """Return from the catalogue whether a drafter was trained on answers with thinking."""
    if not run.drafter:
        return None
    own = ModelRef(run.drafter).base_name
    modes = {entry.thinking for entry in all_published() if entry.drafter.base_name == own}
    return {("with",): True, ("without",): False}.get(tuple(filter(None, modes)))  # type: ignore[arg-type]
