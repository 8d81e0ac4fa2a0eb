"""Steps of an answer from a server, computed from its pieces and the draft counts of its engine."""

import random

import pytest

from specdemo.core.trace import UNREPORTED, StepEvent, output_outcomes
from specdemo.servers.stream import Span, spans_by_drafts, spans_by_totals, step_events, token_pieces

UNKNOWN = Span(1, None)


def pieces(*sizes, ms=10.0):
    """Return one event per piece, with the ids 0, 1, 2, ..."""
    ids = iter(range(10_000))
    return [
        StepEvent(i, [[]], [[]], [[]], [[next(ids) for _ in range(size)]], [[]], [[]], {"stream": ms})
        for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("sizes", "drafts", "spans"),
    [
        ([1, 3, 1, 5], [(4, 2), (4, 0), (4, 4)], [Span(1), Span(3, 4, 2), Span(1, 4, 0), Span(5, 4, 4)]),
        ([1, 3, 2], [(4, 2), (4, 4)], [Span(1), Span(3, 4, 2), Span(2, 4, 4)]),  # the length limit cuts the last step
        ([1, 3, 1], [(4, 2), (4, 4)], [Span(1), Span(3, 4, 2), Span(1, 4, 4)]),
        ([1, 1, 1], [], [Span(1), Span(1), Span(1)]),  # nothing was drafted
        ([1, 1, 3, 1], [(4, 2)], [Span(1), Span(1), Span(3, 4, 2), Span(1)]),  # steps without a draft
        ([1, 1, 1, 3], [(4, 0), (4, 2)], [Span(1), UNKNOWN, UNKNOWN, Span(3, 4, 2)]),  # one of two had a draft
        ([1, 4, 5], [(4, 2), (4, 0), (4, 4)], [Span(1), Span(3, 4, 2), Span(1, 4, 0), Span(5, 4, 4)]),  # merged
        ([4, 5], [(4, 2), (4, 4)], [Span(1), Span(3, 4, 2), Span(5, 4, 4)]),  # merged with the prefill
        ([1, 2, 4], [(4, 2), (4, 2)], None),  # a piece ends within a step
        ([1, 3, 9], [(4, 2), (4, 4)], None),  # more tokens than the steps have
        ([1, 3], [(4, 2), (4, 4)], None),  # a step without a token
        ([], [], None),
    ],
)
def test_drafts_are_matched_with_pieces(sizes, drafts, spans):
    assert spans_by_drafts(sizes, drafts) == spans


@pytest.mark.parametrize("seed", range(20))
def test_random_answers_are_read_back(seed):
    rng = random.Random(seed)
    drafts = [(4, rng.randint(0, 4)) for _ in range(rng.randint(1, 40))]
    sizes = [1, *(accepted + 1 for _, accepted in drafts)]
    sizes[-1] -= rng.randrange(sizes[-1])
    spans = [Span(1), *(Span(size, *draft) for size, draft in zip(sizes[1:], drafts, strict=True))]
    assert spans_by_drafts(sizes, drafts) == spans
    totals, drafted, accepted = [(0, 0)], 0, 0
    for span in spans[1:]:
        drafted, accepted = drafted + span.drafted, accepted + span.accepted
        totals += [(drafted, accepted)] * span.size
    assert spans_by_totals(totals) == spans


@pytest.mark.parametrize(
    "totals",
    [
        [],
        [(4, 2)],  # a draft before the first token
        [(0, 0), (4, 2), (8, 2)],  # a draft in the middle of a step
        [(0, 0), (4, 5)],
        [(0, 0), (4, 2), (4, 2), (4, 2), (2, 1)],
    ],
)
def test_impossible_totals_give_no_steps(totals):
    assert spans_by_totals(totals) is None


def test_a_step_takes_the_time_until_its_last_token():
    spans = [Span(1), Span(3, 4, 2), Span(1, 4, 0), Span(2, 4, 4)]
    merged = step_events(pieces(1, 4, 2), spans, [True] * 7)
    assert [event.ms for event in merged] == [{"prefill": 10.0}, {"stream": 10.0}, {"stream": 0.0}, {"stream": 10.0}]
    single = step_events(pieces(*[1] * 7), spans, [True] * 7)
    assert [sum(event.ms.values()) for event in single] == [10.0, 30.0, 10.0, 20.0]
    assert [output_outcomes(event) for event in single] == [
        ["target"],
        ["accepted", "accepted", "corrected"],
        ["corrected"],
        ["accepted", "accepted"],
    ]
    assert single[1].drafted == [[1, 2, UNREPORTED, UNREPORTED]]
    assert single[3].drafted == [[5, 6, UNREPORTED, UNREPORTED]]


def test_tokens_without_a_text_of_their_own_are_grey():
    events = pieces(1, 3, 2)
    names = {0: "a", 1: " b", 2: " c", 3: " d", 4: " e", 5: " f"}
    decode = lambda ids: [names[token] for token in ids]  # noqa: E731
    texts, known = token_pieces(events, ["a", " b c d", " other"], decode)
    assert texts == ["a", " b", " c", " d", "", " other"] and known == [True] * 4 + [False] * 2
    steps = step_events(events, [Span(1), Span(3, 4, 2), Span(2, 4, 1)], known)
    assert [output_outcomes(event)[-1] for event in steps] == ["target", "corrected", "unknown"]
    assert token_pieces(events, ["a", "b", "c"], lambda ids: [])[1] == [True] + [False] * 5
