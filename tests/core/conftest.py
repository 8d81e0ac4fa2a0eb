from math import sqrt

import pytest
import torch


def critical_value(freedom, z=3.72):
    """Return the chi-square value exceeded by chance once in 10,000 times (cube approximation of Wilson and
    Hilferty).
    """
    return freedom * (1 - 2 / (9 * freedom) + z * sqrt(2 / (9 * freedom))) ** 3


def fits(samples, probs):
    """Return whether samples [M] int64 can come from probs [K]. Cells with expected counts below 5 are pooled."""
    observed = torch.bincount(samples, minlength=len(probs)).double()
    expected = probs.double() / probs.double().sum() * len(samples)
    if observed[probs == 0].any():
        return False
    order = expected.argsort(descending=True)
    observed, expected = observed[order], expected[order]
    large = max(1, int((expected >= 5).sum()))
    observed = torch.cat([observed[:large], observed[large:].sum()[None]])
    expected = torch.cat([expected[:large], expected[large:].sum()[None]])
    cells = expected > 0
    statistic = ((observed[cells] - expected[cells]) ** 2 / expected[cells]).sum()
    return bool(statistic <= critical_value(max(1, int(cells.sum()) - 1)))


@pytest.fixture(scope="session", name="fits")
def fits_fixture():
    return fits
