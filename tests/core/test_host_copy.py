"""Copies between host and device."""

import torch

from specdemo.core.host_copy import split_columns, to_lists


def test_concatenated_matrices_are_split():
    first, second = torch.arange(6).view(2, 3), torch.arange(4).view(2, 2)
    expected = to_lists(first, second)
    assert expected == [first.tolist(), second.tolist()]
    assert split_columns(torch.cat([first, second], 1).tolist(), [3, 2]) == expected
