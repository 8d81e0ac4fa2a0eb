"""The GPU tests on the simulated device, which shows without a GPU that the tests work.

Tests that need allocated memory or a device capability are left out; the simulated device has neither.
"""

import pytest

from tests.gpu.device import pretended
from tests.gpu.test_graphs import (  # noqa: F401
    test_a_recorded_draft_is_the_draft,
    test_a_replay_does_not_wait_for_the_device,
    test_replay_equals_eager_pass,
    test_texts_are_the_same,
    without_graphs,
)
from tests.gpu.test_target import (  # noqa: F401
    test_a_chain_is_verified_without_waiting_for_the_device,
    test_every_path_of_a_tree,
    test_ragged_rows,
    test_with_bit_exact_a_pass_of_every_width_is_one_of_sixteen_slots,
)
from tests.models.tiny import TREES


@pytest.fixture(params=[name for name in TREES if name != "gpt_oss"])  # its experts are captured in bfloat16 only
def name(request):
    return request.param


@pytest.fixture(autouse=True)
def world():
    with pretended() as made:
        yield made
        assert made.sync_mode == "default"
