"""Steps of an answer from a server, computed from the pieces that arrived and the draft counts of its engine.

A piece is what arrived at one time; a step is one pass of the target. The first token comes from the prefill.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from specdemo.core.trace import UNREPORTED, StepEvent
from specdemo.servers.counters import Drafts


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one step: their number, and the drafted and accepted tokens. drafted: None if unknown."""

    size: int
    drafted: int | None = 0
    accepted: int = 0


def spans_by_totals(totals: Sequence[tuple[int, int]]) -> list[Span] | None:
    """Return the steps from running totals. totals: drafted and accepted tokens up to each token of the text.

    Returns None for totals that no sequence of steps has.
    """
    if not totals or totals[0] != (0, 0):
        return None
    spans, at, before = [Span(1)], 1, totals[0]
    while at < len(totals):
        drafted, accepted = (new - old for new, old in zip(totals[at], before, strict=True))
        if not 0 <= accepted <= drafted:
            return None
        size = min(accepted + 1, len(totals) - at)
        if any(total != totals[at] for total in totals[at : at + size]):
            return None
        spans.append(Span(size, drafted, accepted))
        at, before = at + size, totals[at]
    return spans


def spans_by_drafts(pieces: Sequence[int], drafts: Drafts) -> list[Span] | None:
    """Return the steps from the drafts, in order. pieces: number of tokens of each piece.

    Steps without a draft are not among the drafts: they are found if every piece is a step. Pieces of several steps are
    accepted if each ends with a step. The last step may be cut off. Returns None if the drafts do not fit.
    """
    return _by_pieces(pieces, drafts) or _by_sum(pieces, drafts)


def _by_pieces(pieces: Sequence[int], drafts: Drafts) -> list[Span] | None:
    """Match pieces with drafts: a piece of several tokens had a draft, and one of a single token may have had one."""
    if not pieces or pieces[0] != 1:
        return None
    last = min(drafts[-1][1] + 1, pieces[-1]) if drafts else 1
    for final in dict.fromkeys(([drafts[-1][1] + 1] if drafts else []) + [last]):
        sizes = [accepted + 1 for _, accepted in drafts[:-1]] + ([final] if drafts else [])
        (singles, long), (undecided, steps) = _runs(pieces[1:]), _runs(sizes)
        if long == steps and all(few <= many for few, many in zip(undecided, singles, strict=True)):
            return [Span(1), *_matched(pieces[1:], singles, undecided, iter(drafts))]
    return None


def _runs(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the sizes above 1, and the number of ones before each and at the end."""
    singles, long = [0], []
    for size in sizes:
        if size == 1:
            singles[-1] += 1
        else:
            long.append(size)
            singles.append(0)
    return singles, long


def _matched(
    sizes: Sequence[int], singles: Sequence[int], drafts_in_run: Sequence[int], drafts: Iterator[tuple[int, int]]
) -> Iterator[Span]:
    """Yield the steps. In a run of single tokens it may be unknown which of them had a draft."""
    at = 0
    for many, few in zip(singles, drafts_in_run, strict=True):
        known = [next(drafts) for _ in range(few)]
        if few == many:
            yield from (Span(1, *draft) for draft in known)
        else:
            yield from [Span(1, None if few else 0)] * many
        at += many
        if at < len(sizes):
            yield Span(sizes[at], *next(drafts))
            at += 1


def _by_sum(pieces: Sequence[int], drafts: Drafts) -> list[Span] | None:
    """Lay the steps end to end; every piece has to end with one of them."""
    total = sum(pieces)
    sizes = [1, *(accepted + 1 for _, accepted in drafts)]
    ends = list(accumulate(sizes))
    if not drafts or not ends[-2] < total <= ends[-1]:
        return None
    ends[-1] = total
    if not set(accumulate(pieces)) <= set(ends):
        return None
    sizes[-1] = total - ends[-2]
    return [Span(1), *(Span(size, *draft) for size, draft in zip(sizes[1:], drafts, strict=True))]


def token_pieces(
    events: Sequence[StepEvent], texts: Sequence[str], decode: Callable[[list[int]], list[str]]
) -> tuple[list[str], list[bool]]:
    """Return the text of each token, and whether it is known.

    texts: of each event. decode: returns the text of the next token ids, one by one; it is right for an event if the
    texts add up.
    """
    pieces: list[str] = []
    known: list[bool] = []
    for event, text in zip(events, texts, strict=True):
        ids = event.emitted[0]
        parts = decode(ids) if min(ids) >= 0 else []
        right = len(ids) == 1 or (len(parts) == len(ids) and "".join(parts) == text)
        pieces += parts if right and len(ids) > 1 else [*[""] * (len(ids) - 1), text]
        known += [right] * len(ids)
    return pieces, known


def step_events(events: Sequence[StepEvent], spans: Sequence[Span], split: Sequence[bool]) -> list[StepEvent]:
    """Return one event per step in place of one per piece. A step takes the time until its last token arrived.

    split: for each token, whether its own text is known; a step with another token stays unknown, and so does one
    whose draft is unknown.
    """
    ids = [token for event in events for token in event.emitted[0]]
    clock = accumulate(sum(event.ms.values()) for event in events)
    arrivals = [ms for event, ms in zip(events, clock, strict=True) for _ in event.emitted[0]]
    steps, start, before = [], 0, 0.0
    for index, span in enumerate(spans):
        end = start + span.size
        ms = {"stream" if index else "prefill": round(arrivals[end - 1] - before, 4)}
        steps.append(_event(index, ids[start:end], span if all(split[start:end]) else Span(span.size, None), ms))
        start, before = end, arrivals[end - 1]
    return steps


def _event(index: int, emitted: list[int], span: Span, ms: dict[str, float]) -> StepEvent:
    if span.drafted is None:
        return StepEvent(index, [[]], [[]], [[]], [emitted], [[]], [[]], ms)
    known = [UNREPORTED if token < 0 else token for token in emitted[: span.accepted]]
    drafted = known + [UNREPORTED] * (span.drafted - len(known))
    path: list[int] = list(range(span.accepted + 1))
    unknown: list[list[float | None]] = [[None] * span.drafted]
    return StepEvent(index, [drafted], [list(range(span.drafted))], [path], [emitted], unknown, unknown, ms)
