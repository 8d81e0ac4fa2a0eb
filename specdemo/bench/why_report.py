"""Report of a diagnosis for a terminal, and the parts of it that the page shows too. Needs no torch."""

from collections.abc import Iterator, Sequence

from specdemo.analysis.diagnose import SMALLEST_RATE, Diagnosis, least_k, percent
from specdemo.bench.report import visible

POSITIONS = 16  # positions of which the acceptance is shown
ALL = 0.98  # share of steps with a draft; the last step of a request often has none
NOTHING = "Nothing has to change."


def why_report(found: Diagnosis) -> str:
    """Return the verdict, the numbers, the causes in order, what to change, and what was missing."""
    rows = [f"{name:<22}{value:<6}{remark}".rstrip() for name, value, remark in numbers(found)]
    changed = changes(found)
    parts = [[found.sentence], rows, found.limits()]
    parts += [changed if changed == [NOTHING] else _titled("What to change", changed), [*found.notes]]
    parts += [[f"Unknown, and would make this more certain: {', '.join(found.missing)}."] if found.missing else []]
    return visible("\n\n".join("\n".join(lines) for lines in parts if lines))


def numbers(found: Diagnosis) -> Iterator[tuple[str, str, str]]:
    """Yield the numbers of a diagnosis: name, value, and a remark that may be empty."""
    one = found.observation
    if one.source:
        yield "source", one.source, ""
    if one.method:
        yield "method", one.method, ""
    if one.accepted_length is not None and (one.k or one.accepted_length > 1.0):
        most = f"of at most {one.k + 1}, k = {one.k}" if one.k else f"k is {least_k(one.accepted_length)} or more"
        yield "mean accepted length", f"{one.accepted_length:.2f}", most
    if one.drafting_share is not None and one.drafting_share < ALL:
        drafts = f"{one.drafting_share * one.steps:,.0f} of {one.steps:,}, " if one.steps else ""
        yield "steps with a draft", percent(one.drafting_share), f"{drafts}{one.per_draft:.1f} tokens each"
    if one.acceptance_rate is not None:
        yield "acceptance rate", f"{100.0 * one.acceptance_rate:.0f} %", _break_even(found.break_even)
    if one.tokens_per_s:
        plain = one.plain_tokens_per_s
        yield "tokens/s", f"{one.tokens_per_s:.4g}", f"without speculation {plain:.4g}" if plain else ""
    if any(one.by_position):
        yield "accepted by position", ", ".join(f"{100.0 * share:.0f} %" for share in one.by_position[:POSITIONS]), ""
    if found.costs is not None:
        unit = "plain steps, " + ("measured" if found.measured else "estimated")
        yield "a draft token", f"{found.costs.draft:.2f}", unit
        yield "verification", f"{found.costs.verify:.2f}", unit
        yield "overhead per step", f"{found.costs.overhead:.2f}", unit


def changes(found: Diagnosis) -> list[str]:
    """Return what to change, NOTHING for a run that is fast enough; empty without a diagnosis."""
    return [*found.recommendations] or ([] if found.step_cost is None else [NOTHING])


def _break_even(rate: float | None) -> str:
    if rate is None or rate < SMALLEST_RATE:
        return ""
    return f"break-even {100.0 * rate:.0f} %" if rate <= 1.0 else "break-even above 100 %"


def _titled(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title}:", *(f"{place}. {line}" for place, line in enumerate(lines, start=1))] if lines else []
