"""The losslessness test: its statistic against scipy, its verdicts on a toy target and on the shipped models."""

from collections import Counter

import pytest
import torch
from scipy import stats

from specdemo.bench import losslessness as module
from specdemo.bench.losslessness import chi_square, continuations
from specdemo.bench.measure import Decoder
from specdemo.bench.plot import chart
from specdemo.bench.result import Result
from specdemo.bench.suites.lanes import Losslessness
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.rules import accept_rule
from specdemo.core.sampling import Sampling
from specdemo.engine.loop import never_cancelled
from specdemo.methods import load_drafter
from specdemo.models.toy import ToyTarget
from specdemo.presets.files import preset


def ignore(*_):
    pass


@pytest.mark.parametrize(("a", "b"), [([40, 30, 30], [35, 45, 20]), ([400, 30, 70], [210, 12, 28])])
def test_the_statistic_is_scipys(a, b):
    found = chi_square(dict(enumerate(a)), dict(enumerate(b)))
    expected = stats.chi2_contingency([a, b], correction=False)
    assert (found.freedom, found.statistic, found.p) == pytest.approx(
        (expected.dof, expected.statistic, expected.pvalue)
    )


def test_rare_outcomes_are_one():
    rare = {f"rare {i}": 3 for i in range(10)}
    assert chi_square({"a": 50, **rare}, {"a": 50}).freedom == 1
    assert chi_square({"a": 50, "b": 20, "rare": 2}, {"a": 50, "b": 20}).freedom == 1  # "rare" is pooled


@pytest.mark.parametrize("same", [{}, {"a": 1}, {"a": 500}])
def test_one_outcome_compares_nothing(same):
    assert chi_square(same, same).p == 1.0


@pytest.mark.parametrize(
    ("rule", "lossless"), [("lossless", True), ("typical", False), ("fly", False), ("speculative_cascade", False)]
)
def test_the_lossy_rule_is_found_out_and_the_lossless_one_is_not(rule, lossless, tiny_llama):
    target = ToyTarget(8, seed=4)
    plain = GenerationConfig(4, Sampling(1.0), stop_token_ids=())
    drafting = GenerationConfig(4, Sampling(1.0), Budget(3, 3), stop_token_ids=())
    ways = (
        Decoder(load_drafter("none", target), accept_rule("lossless"), plain),
        Decoder(load_drafter("draft_model", target, tiny_llama(8)), accept_rule(rule), drafting),
    )
    rows = [
        [row for i in range(6) for row in continuations(target, way, [1, 2], 2 * i + n, ignore)]
        for n, way in enumerate(ways)
    ]
    assert all(len(row) == 4 for sample in rows for row in sample)
    counts = [Counter(row[1] for row in sample) for sample in rows]
    assert (chi_square(*counts).p > 0.001) is lossless


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(module, "ROWS", 24)
    monkeypatch.setattr(module, "PROMPTS", module.PROMPTS[:1])
    monkeypatch.setattr(module, "GREEDY_TOKENS", 8)


def test_a_sampled_result_has_both_histograms(few):
    progress, parts = [], []

    def report(share, what, so_far=None):
        progress.append(share)
        parts.extend([so_far()] if so_far else [])

    result = Losslessness(preset=preset("embedded-sampling"), repeats=2).run(report, never_cancelled)
    assert progress == sorted(progress) and 0.5 in progress
    assert [part.config["draws"] for part in parts] == [24, 48] and parts[-1] == result
    assert (result.repeats, result.config["draws"]) == (2, 48)
    for place in (2, 3, 4):
        rows = [row for row in result.rows if row["place"] == place]
        for sample in ("plain", "speculative"):
            assert sum(row[sample] for row in rows) == pytest.approx(1.0, abs=0.002)
    assert result.remarks[0] == "No difference was found between 48 continuations of each."
    assert [remark.split(":")[0] for remark in result.remarks[1:4]] == ["Token 2", "Token 3", "Token 4"]
    for group in chart(result)["groups"]:
        assert [bar["name"] for bar in group["bars"]] == ["plain", "speculative"]


def test_stop_keeps_the_finished_batches(few):
    progress = []
    result = Losslessness(preset=preset("embedded-sampling"), repeats=5).run(
        lambda share, *_: progress.append(share), lambda: bool(progress) and progress[-1] >= 0.4
    )
    assert result.repeats == 2 and result.remarks[-1] == "stopped after 2 of 5 repeats"


def test_greedy_compares_tokens(few):
    result = Losslessness(preset=preset("embedded-draft"), repeats=3).run(ignore, never_cancelled)
    assert [row["output"] for row in result.rows] == ["identical", "identical"]
    assert [row["tokens"] for row in result.rows] == [8, 8] and result.remarks == ["Greedy, 2 prompts: 2 identical."]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"place": 2, "plain": 7.0, "speculative": 0.1},
        {"place": 2, "plain": 0.2, "speculative": 0.1, "token": None},
    ],
)
def test_invalid_histogram_of_a_foreign_result_is_rejected(row):
    with pytest.raises(ValueError, match="nothing to draw"):
        chart(Result("losslessness", 1, {"draws": 10}, {}, [{"token": "a", **row}], [], "token"))


def test_synthetic_lanes_are_not_tested():
    chosen = preset("embedded-sampling").with_changes(method="synthetic", model="stories-draft-wide")
    with pytest.raises(ValueError, match="'synthetic' is not exact; choose a preset"):
        Losslessness(preset=chosen, repeats=1).run(ignore, never_cancelled)


def test_equal_seeds_are_not_used_twice(few, monkeypatch):
    seeds = []
    monkeypatch.setattr(
        module,
        "continuations",
        lambda target, way, prompt, seed, tick: seeds.append(seed) or torch.ones(4, 5).int().tolist(),
    )
    Losslessness(preset=preset("embedded-sampling"), repeats=3).run(ignore, never_cancelled)
    assert len(set(seeds)) == len(seeds) == 6
