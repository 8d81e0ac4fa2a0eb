import pytest

from specdemo.engine.cost import best_k, explain, predicted_speedup, tokens_per_step


def test_published_best_k():
    """Leviathan et al. / OSD's cost model at alpha 0.6 and a free verification."""
    assert [best_k(0.6, c) for c in (0.01, 0.02, 0.05, 0.1)] == [7, 6, 4, 3]


def test_limits_of_the_formula():
    assert tokens_per_step(1.0, 4) == 5.0
    assert tokens_per_step(0.0, 4) == 1.0
    assert predicted_speedup(0.8, 0, 0.1) == 1.0
    assert best_k(0.1, 0.5) == 0


def test_a_dear_verification_shortens_the_draft():
    assert best_k(0.8, 0.05, lambda n: 1.0 + 0.2 * (n - 1)) < best_k(0.8, 0.05)


@pytest.mark.parametrize("speed, word", [(150.0, "Faster"), (80.0, "Slower")])
def test_explanation_says_which_way_and_why(speed, word):
    lane = {"tokens_per_s": speed, "steps": 10, "tokens_per_step": 2.0, "ms_draft": 60.0, "drafted": 40}
    sentence = explain({"tokens_per_s": 100.0}, lane | {"acceptance_rate": 0.25})
    assert sentence.startswith(word)
    assert "25% of the drafted tokens were kept" in sentence
