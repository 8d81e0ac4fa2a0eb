"""Tokens per pass, from acceptance probabilities and by replaying a run."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdemo.core.trace import Remote, from_json
from specdemo.costs.acceptance import Acceptance, of_lane, of_passes, replayed
from specdemo.presets.files import FOLDER

guesses = st.lists(st.booleans(), min_size=1, max_size=60)


def decode(guessed, k):
    """Return the passes of a drafter whose guess at each position of a text is right or wrong, for any start of the
    draft.
    """
    passes, at = [], 0
    while at < len(guessed):
        drafted = min(k, len(guessed) - at - 1)
        accepted = next((i for i in range(drafted) if not guessed[at + i]), drafted)
        passes.append((accepted, drafted))
        at += accepted + 1
    return passes


@given(guesses, st.integers(1, 8), st.data())
def test_a_run_is_replayed_at_every_shorter_draft(guessed, recorded, data):
    k = data.draw(st.integers(1, recorded))
    truth = len(guessed) / len(decode(guessed, k))
    low, value, high = replayed(decode(guessed, recorded), k, 0.5)
    assert low <= value <= high
    assert low - 1e-9 <= truth <= high + 1e-9
    if not any(accepted == recorded for accepted, _ in decode(guessed, recorded)[:-1]):
        assert low == high == pytest.approx(truth)


@given(guesses, st.integers(1, 8))
def test_at_its_own_length_a_run_is_itself(guessed, k):
    low, value, high = replayed(decode(guessed, k), k, 0.3)
    assert low == value == high == pytest.approx(len(guessed) / len(decode(guessed, k)))


def test_simulated_shorter_draft_is_bounded():
    low, value, high = replayed([(4, 4), (0, 4)], 3, 0.5)  # guesses: yes yes yes yes unknown, no
    assert (low, high) == (2.0, 3.0) and value == pytest.approx(6 / 2.5)  # four tokens, then two in one pass or in two


chances = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8)


@given(chances, st.integers(0, 7), st.integers(1, 16))
def test_more_acceptance_never_means_fewer_tokens(rates, place, k):
    better = [*rates]
    better[place % len(rates)] = 1.0
    assert Acceptance(tuple(better)).expected(k) >= Acceptance(tuple(rates)).expected(k)
    assert 1.0 <= Acceptance(tuple(rates)).expected(k) <= k + 1.0


def test_last_acceptance_probability_continues():
    assert Acceptance((0.8, 0.5)).expected(4) == pytest.approx(1 + 0.8 + 0.4 + 0.2 + 0.1)


@pytest.mark.parametrize("rates", [(), (1.5,), (float("nan"),), (0.5,) * 65])
def test_invalid_probabilities(rates):
    with pytest.raises(ValueError, match="acceptance needs 1 to 64 numbers between 0 and 1"):
        Acceptance(rates)


def test_run_without_drafts_has_no_acceptance():
    with pytest.raises(ValueError, match="drafted nothing"):
        of_passes([(0, 0)])


def lane_of(preset, number=1):
    return from_json((FOLDER / "recorded" / f"{preset}.json").read_bytes()).lanes[number]


def test_a_recorded_lane_of_a_draft_model_is_replayed_exactly():
    lane = lane_of("embedded-draft")
    found = of_lane(lane)
    assert found.exact and found.longest == 4
    assert found.tokens(4).value == pytest.approx(lane.summary["tokens_per_step"], rel=0.02)
    values = [found.tokens(k).value for k in (1, 2, 3, 4)]
    assert values == sorted(values) and values[0] < 2.0


def test_heads_are_known_by_position_alone_and_trees_at_their_size():
    assert not of_lane(lane_of("embedded-eagle-3")).exact
    tree = of_lane(lane_of("embedded-medusa"))
    assert tree.nodes > len(tree.rates) and tree.longest is None
    assert len(tree.widths) == len(tree.rates) == 2 and tree.expected(1) < tree.expected(2)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 64))
def test_widest_row_sets_the_verification_width(rates, k, batch):
    acceptance = Acceptance(tuple(rates))
    assert acceptance.longest_of(k, 1) == pytest.approx(acceptance.expected(k))
    assert acceptance.longest_of(k, batch) <= acceptance.longest_of(k, batch + 1) + 1e-9 <= k + 1.0 + 1e-6
    assert 0.0 <= acceptance.p_all_accepted(k, batch) <= acceptance.p_all_accepted(k, batch + 1) + 1e-9 <= 1.0 + 1e-6


FULL = [(5, 5)] * 12 + [(0, 5), (1, 5), (2, 5), (3, 5)] * 5  # the last position was accepted 12 of 12 times


@pytest.mark.parametrize("exact", [True, False])
def test_acceptance_decays_and_the_interval_widens_after_the_recorded_k(exact):
    found = of_passes(FULL, exact)
    assert found.rates[-1] == 1.0 and found.longest == 5
    rates = [found.rate(position) for position in range(5, 17)]
    assert all(after < before for before, after in pairwise(rates))
    tokens = [found.tokens(k) for k in (5, 6, 16)]
    assert tokens[0].value < tokens[1].value < tokens[2].value < tokens[0].value + 11 * 12 / len(FULL)
    assert tokens[0].width < tokens[1].width < tokens[2].width
    for one, k in zip(tokens, (5, 6, 16), strict=True):
        assert one.low <= tokens[0].value <= one.value <= one.high <= k + 1


@given(guesses, st.integers(1, 5), st.data())
def test_interval_after_the_recorded_k_contains_the_real_run(guessed, recorded, data):
    k = data.draw(st.integers(recorded + 1, 16))
    passes = decode(guessed, recorded)
    if any(drafted == recorded for _, drafted in passes):
        found = of_passes(passes, exact=True).tokens(k)
        truth = len(guessed) / len(decode(guessed, k))
        assert found.low - 1e-9 <= truth <= found.high + 1e-9 and found.low <= found.value <= found.high


@given(st.lists(st.tuples(st.integers(0, 4), st.just(4)), min_size=1, max_size=40), st.integers(5, 16), st.booleans())
def test_a_longer_draft_never_emits_fewer_tokens(passes, k, exact):
    found = of_passes(passes, exact)
    assert found.tokens(k).value <= found.tokens(k + 1).value + 1e-9
    assert 1.0 <= found.tokens(k).low <= found.tokens(k).value <= found.tokens(k).high <= k + 1.0


def test_server_rates_alone_are_a_recording():
    lane = lane_of("embedded-draft")
    lane.remote = Remote("host:1", "m", "completions", accept_by_position=[0.9, 0.72, 0.72])
    lane.events = []
    found = of_lane(lane)
    assert found.longest == 3 and found.rates == pytest.approx((0.9, 0.8, 1.0))
    assert found.rate(4) < 0.9 and found.extrapolates(4) and not found.extrapolates(3)
    assert found.tokens(4).low == found.tokens(3).value < found.tokens(4).value < found.tokens(4).high


def test_given_rates_are_not_a_recording():
    given_rates = Acceptance((0.8, 0.5))
    assert given_rates.longest is None and not given_rates.extrapolates(9) and given_rates.rate(9) == 0.5
