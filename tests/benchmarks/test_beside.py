"""Rows of the comparison with vLLM."""

import pytest

from benchmarks.beside import SHORT, Round, _row


def test_speed_excludes_the_first_tokens():
    own, other = Round(2.5, 0.5, 5.0, [[1, 2], [3]]), Round(4.0, 1.5, 4.0, [[1, 2], [4]])
    drafting = Round(1.5, 0.5, 2.0, [[1, 2], [3]])
    done = [{"none, here": own, "none, vLLM": other, "draft_model, here": drafting, "draft_model, vLLM": other}] * 3
    plain, faster = (_row(f"{name}, here", done, 100 - SHORT) for name in ("none", "draft_model"))
    assert plain["tokens/s"].value == pytest.approx((100 - SHORT) * 2 / 2.0)
    assert plain["of vLLM's"].value == pytest.approx(1.25) and plain["speed-up"].value == 1.0
    assert plain["of vLLM's, whole requests"].value == pytest.approx(1.6)
    assert plain["by the wall"].value == pytest.approx(0.8)
    assert faster["speed-up"].value == pytest.approx(2.0) and faster["output"] == "1 identical"
