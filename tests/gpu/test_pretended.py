"""The GPU tests on the simulated device, which shows without a GPU that the code and the tests work."""

from unittest.mock import patch

import pytest
import torch

from tests.gpu.device import pretended
from tests.gpu.test_graphs import (  # noqa: F401
    test_a_recorded_draft_is_the_draft,
    test_a_replay_does_not_wait_for_the_device,
    test_memory_does_not_grow_with_the_runs,
    test_replay_equals_eager_pass,
    test_texts_are_the_same,
    without_graphs,
)
from tests.gpu.test_target import (  # noqa: F401
    test_every_path_of_a_tree,
    test_ragged_rows,
    test_release_gives_the_memory_back,
    test_with_bit_exact_a_pass_of_every_width_is_one_of_sixteen_slots,
)
from tests.models.tiny import TREES

pytestmark = pytest.mark.release


@pytest.fixture(params=[name for name in TREES if name != "gpt_oss"])  # its experts are captured in bfloat16 only
def name(request):
    return request.param


@pytest.fixture(autouse=True)
def world():
    with pretended() as made, patch.object(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, create=True):
        yield made
        assert not made.no_waits
