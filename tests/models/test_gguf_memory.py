"""Memory of GGUF models."""

import pytest

from specdemo.models.gguf_memory import GGUFNeeds
from specdemo.models.sizes import Footprint

GB = 10**9
NEEDS = GGUFNeeds("big with small", Footprint(4 * GB, 100_000), [Footprint(GB // 2, 20_000)], 4000, 2)


def test_context_that_the_drafter_displaces():
    assert NEEDS.describe() == (
        "4.5 GB of weights and 0.9 GB of KV cache for 4,000 tokens; "
        "the drafter takes the memory of 5,800 tokens of context"
    )


def test_advice_is_a_context_if_the_weights_fit():
    NEEDS.check(6 * GB)
    with pytest.raises(ValueError, match="choose at most 2,066 tokens of prompt and output, or a smaller quantisation"):
        NEEDS.check(int(5.45 * GB))
    with pytest.raises(ValueError, match="needs 5.0 GB for weights and 1.0 GB .* free; choose a smaller quantisation"):
        NEEDS.check(3 * GB)
