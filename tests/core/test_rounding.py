"""What counts as rounding: judged by the model's own, whatever its size."""

import pytest
import torch

from specdemo.core.rounding import difference, spacing

LOGITS = torch.tensor([[4.0, 1.0, 0.0], [0.0, 3.0, 2.5]])


def moved(by, position=1, token=2):
    logits = LOGITS.clone()
    logits[position, token] += by
    return logits


@pytest.mark.parametrize(
    ("by", "own", "is_rounding", "wrong"),
    [
        (0.3, 0.2, True, []),
        (0.3, 0.0, False, []),
        (0.7, 0.3, True, []),  # another token, 0.5 lower; the model's own passes explain it
        (0.7, 0.1, False, [1]),
        (5.0, 2.0, True, []),  # no limit of a machine: so much is rounding where the model itself rounds so much
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_a_difference_is_judged_by_the_models_own_rounding(scale, by, own, is_rounding, wrong):
    pair = scale * LOGITS, scale * moved(own)
    result = difference(scale * LOGITS, scale * moved(by), [pair], 1e-4, 4)
    assert result.is_rounding is is_rounding and result.wrong == wrong
    assert result.gap == pytest.approx(scale * by, rel=1e-3)


def test_the_spacing_of_the_numbers_is_the_least_limit():
    assert [spacing(d) for d in (torch.float32, torch.float16, torch.bfloat16)] == [1e-4, 2**-10, 2**-7]
    assert spacing(torch.float32, quantised=True) == 1 / 127
    result = difference(LOGITS, moved(0.7), [], 2**-3, 4)
    assert result.limit == 1.0 and result.is_rounding
    assert 0.0 < result.moved < 1.0


@pytest.mark.parametrize("mask", [-1e4, torch.finfo(torch.float32).min, float("-inf")])
def test_masked_tokens_do_not_raise_the_limit(mask):
    expected = torch.arange(20.0)[None]
    other = expected.flip(-1).masked_fill(expected < 9, mask)
    expected = expected.masked_fill(expected < 9, mask)
    result = difference(expected, other, [], 1e-4, 4)
    assert result.limit < 0.01 and result.wrong == [0] and not result.is_rounding
