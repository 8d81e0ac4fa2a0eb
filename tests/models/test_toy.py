"""The toy target under the target's contract."""

import pytest
import torch

from specdemo.core.tree import ABSENT
from specdemo.models.toy import ToyTarget

TREE = [0, 0, 1, 2, 2]
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5]]


@pytest.fixture(params=[1, 2, 4])
def target(request):
    return ToyTarget(11, seed=3, order=request.param)


def test_every_path_of_a_tree(target):
    prompts = [[5, 6], [7, 8]]
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
    first = target.start(torch.tensor(prompts)).logits
    logits = target.forward(tokens, torch.tensor([TREE, TREE])).logits
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(first[row, 0].softmax(-1), target.next_probs(prompt))
        for slot, path in enumerate(PATHS):
            probs = logits[row, slot].softmax(-1)
            torch.testing.assert_close(probs, target.next_probs(prompt + tokens[row, path].tolist()))


def test_ragged_paths_crop_and_release(target):
    target.start(torch.tensor([[5, 6], [7, 8]]))
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, ABSENT, 3, ABSENT, ABSENT]])
    target.forward(tokens, torch.tensor([TREE, TREE]))
    target.commit([[0, 2, 5], []])
    assert target.length == [5, 2]
    target.crop([4, 2])
    logits = target.forward(torch.tensor([[9], [9]]), torch.empty(2, 0, dtype=torch.int64)).logits
    for row_logits, text in zip(logits, ([5, 6, 1, 3, 9], [7, 8, 9]), strict=True):
        torch.testing.assert_close(row_logits[0].softmax(-1), target.next_probs(text))
    target.release()
    with pytest.raises(ValueError, match="call start"):
        target.forward(tokens, torch.tensor([TREE, TREE]))


def test_taps(target):
    prompt = torch.tensor([[5, 6, 7]])
    forward = target.start(prompt, (0, 1, 3, -1))
    assert {tap: tuple(h.shape) for tap, h in forward.hidden.items()} == dict.fromkeys((0, 1, 3, -1), (1, 3, 8))
    torch.testing.assert_close(target.lm_head(forward.hidden[-1][:, -1:]), forward.logits)
    torch.testing.assert_close(forward.hidden[0], target.embed(prompt))
