"""The measured cost of verification, on a fake clock: more measurements near the limit, and no rejection."""

from itertools import cycle

import pytest

from specdemo.models.pass_cost import (
    REPEATS,
    ROUNDS,
    VERIFY_LIMIT,
    VERIFY_TOKENS,
    checking_note,
    measure_passes,
    pass_facts,
    verify_cost,
)
from specdemo.models.toy import ToyTarget


class Timed(ToyTarget):
    """A target with scripted pass times: one second for one token, the next of `ratios` for several."""

    def __init__(self, *ratios):
        super().__init__()
        self.seconds, self.ratios, self.verified = 0.0, cycle(ratios), 0

    def forward(self, tokens, parents, taps=()):
        several = tokens.shape[1] > 1
        self.verified += several
        self.seconds += next(self.ratios) if several else 1.0
        return super().forward(tokens, parents, taps)

    def now(self):
        return self.seconds


def measured(*ratios):
    target = Timed(*ratios)
    cost = verify_cost(target, target.now)
    return cost, target.verified // (REPEATS + 1)  # one pass of each round is a warm-up


def test_a_clear_cost_is_measured_once():
    cost, rounds = measured(1.5, 1.51)
    assert rounds == 1 and not cost.unclear
    assert cost.one_ms == pytest.approx(1000.0) and 1500.0 <= cost.verify_ms <= 1510.0
    assert 1.49 < cost.ratio.low < cost.ratio.value < cost.ratio.high < 1.52


@pytest.mark.parametrize("ratios", [(1.19, 1.22), (1.0, 1.5)])
def test_a_cost_near_the_limit_is_measured_more_often(ratios):
    cost, rounds = measured(*ratios)
    assert rounds == ROUNDS
    assert cost.ratio.low < VERIFY_LIMIT < cost.ratio.high


def test_more_repeats_settle_what_one_outlier_left_open():
    noisy = [1.1] * (REPEATS - 1) + [2.0] + [1.1] * 60
    cost, rounds = measured(*noisy)
    assert 1 < rounds <= ROUNDS
    assert cost.ratio.value < VERIFY_LIMIT and cost.note("bfloat16") == ""


class Quantised(ToyTarget):
    """A target with a scripted curve of pass costs."""

    precision, pass_ms = "Q4_1", {}

    def __init__(self, precision, *ms):
        super().__init__()
        self.precision, self.pass_ms = precision, dict(enumerate(ms, start=1))


@pytest.mark.parametrize(
    "precision, ms, words",
    [
        ("Q4_1", (10.0, 13.0, 16.0, 19.0), ("costs 1.9 passes in Q4_1;", "1.2 instead of 1.9 passes on a Xeon")),
        ("Q4_K_M", (10.0, 13.0, 16.0, 19.0), ("costs 1.9 passes in Q4_K_M",)),
        ("Q8_0", (10.0, 10.5, 11.0, 12.0), ("costs 1.2 passes in Q8_0",)),
        ("Q4_1", (), ()),
    ],
)
def test_note_about_the_cost_of_four_tokens(precision, ms, words):
    note = checking_note(Quantised(precision, *ms))
    assert all(word in note for word in words) and bool(note) is bool(words)
    assert ("SmolLM2 135M" in note) is (len(words) > 1)  # measured elsewhere, so its source is named


def test_passes_are_measured_once_and_recorded():
    target = Quantised("float32")
    curve = measure_passes(target)
    assert (
        min(curve) == 1
        and {4, 8} <= set(curve)
        and target.pass_ms == curve
        and measure_passes(target) is target.pass_ms
    )
    assert pass_facts(target)["pass_ms"] == {str(slots): ms for slots, ms in curve.items()}
    assert pass_facts(target)["exactness"] == "passes of different widths round differently"


def test_the_note_has_the_ratio_and_its_interval():
    cost, _ = measured(1.5, 1.6)
    note = cost.note("bfloat16")
    assert note.startswith(f"verifying {VERIFY_TOKENS} tokens in bfloat16 takes 1.55 times as long as one token")
    assert f"(95 % interval {cost.ratio.interval()})" in note and note.endswith("compare with dtype float32")


def test_a_clock_that_stands_still_yields_a_cost_without_an_interval():
    cost = verify_cost(ToyTarget(), lambda: 0.0)
    assert cost.ratio.interval() == "" and cost.note("bfloat16") == ""
