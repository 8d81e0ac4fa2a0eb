"""Report of a diagnosis for a terminal. Needs no torch."""

from collections.abc import Iterator

from specdemo.bench.report import visible
from specdemo.diagnosis.diagnose import SMALLEST_RATE, Diagnosis


def why_report(found: Diagnosis) -> str:
    """Return the verdict, the numbers, the causes in order, what to change, and what was missing."""
    nothing = [] if found.recommendations or found.step_cost is None else ["Nothing has to change."]
    parts = [[found.sentence], [*_numbers(found)], [*_causes(found)]]
    parts += [_titled("What to change", found.recommendations) or nothing, [*found.notes]]
    parts += [[f"Unknown, and would make this more certain: {', '.join(found.missing)}."] if found.missing else []]
    return visible("\n\n".join("\n".join(lines) for lines in parts if lines))


def _numbers(found: Diagnosis) -> Iterator[str]:
    one = found.observation
    if one.source:
        yield f"source                {one.source}"
    if one.accepted_length is not None and one.k:
        yield f"mean accepted length  {one.accepted_length:.2f} of at most {one.k + 1} (k = {one.k})"
    if one.acceptance_rate is not None:
        yield f"acceptance rate       {100.0 * one.acceptance_rate:.0f} %{_break_even(found.break_even)}"
    if any(one.by_position):
        yield f"by position           {', '.join(f'{100.0 * share:.0f} %' for share in one.by_position[:16])}"
    if found.costs is not None:
        how = "measured" if found.measured else "estimated"
        yield f"a draft token costs   {found.costs.draft:.2f} plain steps ({how})"
        yield f"verification costs    {found.costs.verify:.2f} plain steps ({how})"
        yield f"overhead per step     {found.costs.overhead:.2f} plain steps ({how})"


def _break_even(rate: float | None) -> str:
    if rate is None or rate < SMALLEST_RATE:
        return ""
    return f", break-even {100.0 * rate:.0f} %" if rate <= 1.0 else ", break-even above 100 %"


def _causes(found: Diagnosis) -> list[str]:
    title = "Causes, and the speed-up without each" if found.cause else "What limits the speed"
    lines = [f"{cause.title} ({cause.gain:.2f}x): {cause.evidence}" for cause in found.causes]
    return _titled(title, lines)


def _titled(title: str, lines: list[str] | tuple[str, ...]) -> list[str]:
    return [f"{title}:", *(f"{place}. {line}" for place, line in enumerate(lines, start=1))] if lines else []
