"""Differences between greedy texts: rounding of near-ties, or bugs; what counts as rounding."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specdemo.core.protocol import TargetFacts
from specdemo.core.rounding import difference, spacing
from specdemo.core.sampling import PositionNoise, Sampling, draw_with_noise, to_probs
from specdemo.core.trace import LaneTrace, RunTrace, StepEvent
from specdemo.core.tree import is_chain
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.session import Session
from specdemo.engine.verdict import MAX_TOLERANCE, _margin, compare_outputs


class Rounding:
    """Target with the same logits at every position, plus an error of the second token in passes of `wide` tokens."""

    threads, model, facts = 0, None, TargetFacts("float32")

    device, wide = torch.device("cpu"), 5

    def __init__(self, logits, error=0.0, dtype=torch.float32):
        self.logits, self.error, self.dtype = torch.tensor(logits)[None, None], error, dtype

    def start(self, tokens, **_):
        return self.forward(tokens[:, :1])

    def forward(self, tokens, *_):
        logits = self.logits.repeat(1, tokens.shape[1], 1)
        logits[..., 1] += self.error * (tokens.shape[1] == self.wide)
        return SimpleNamespace(logits=logits)

    def commit(self, path): ...

    def release(self): ...


def judged(target, wrong, drafted=4, **how):
    """Return the row of a lane that outputs token `wrong` where the baseline outputs token 0."""
    draft = [0] * drafted
    verification = StepEvent(
        1, [draft], [[*range(drafted)]], [[0]], [[wrong]], [[1.0] * drafted], [[1.0] * drafted], {}
    )
    plain = LaneTrace("plain", "none", {}, True, [1, 2, 3], [0] * 30, finish="length")
    lane = replace(plain, token_ids=[*[0] * 9, wrong, *[0] * 20], events=[verification])
    trace = RunTrace("test", {}, {}, "race", [plain, lane])
    compare_outputs(trace, target, **how)
    return trace.comparison[0]


TIED = [32.25, 32.0, 32.0, 32.0, 1.0]


@pytest.mark.parametrize("token", [1, 2, 3])
def test_any_of_several_tokens_within_the_tolerance_is_rounding(token):
    row = judged(Rounding(TIED, dtype=torch.bfloat16), token)
    assert (row["verdict"], row["divergence_margin"]) == ("rounding", 0.25)


@pytest.mark.parametrize(
    ("error", "drafted", "gap", "verdict"),
    [
        (0.0, 4, 0.2, "differs"),  # float32 without a measured difference
        (0.2, 4, 0.2, "rounding"),
        (0.2, 8, 0.2, "differs"),  # the lane's passes have nine slots, and those agree with passes of one token
        (0.2, 4, 0.4, "differs"),
        (9.0, 4, 2.0, "differs"),  # passes that differ by more than MAX_TOLERANCE are wrong
    ],
)
def test_the_tolerance_is_the_difference_between_the_passes_of_the_two_lanes(error, drafted, gap, verdict):
    assert gap < MAX_TOLERANCE or verdict == "differs"
    row = judged(Rounding([5.0, 5.0 - gap, 5.0 - gap, 0.0], error), 2, drafted)
    assert (row["verdict"], row["divergence_margin"]) == (verdict, pytest.approx(gap, abs=1e-4))


def test_a_difference_where_chains_are_the_same_bits_is_a_bug():
    target = Rounding([5.0, 4.9, 4.9, 0.0], 0.2)
    assert judged(target, 2)["verdict"] == "rounding"
    target.facts = TargetFacts("float32", same_bits=True)  # no near-tie is looked for, though these passes round
    row = judged(target, 2)
    assert (row["verdict"], row["divergence_margin"]) == ("differs", pytest.approx(0.1, abs=1e-4))


def test_without_an_examination_no_text_is_read_again():
    row = judged(None, 2, explains=False)
    assert (row["verdict"], row["first_divergence"], row["identical"]) == ("unknown", 9, False)


class TreeRounding(Rounding):
    """Target whose second token has an error in passes over trees, as of kernels that read a cache in another order."""

    def forward(self, tokens, parents=None, *_):
        found = super().forward(tokens)
        if parents is not None and parents.shape[1] > 1 and not is_chain(parents):
            found.logits[..., 1] += self.error
        return found


def test_the_passes_of_the_lane_are_repeated_as_they_were():
    branches = StepEvent(1, [[9, 0, 8]], [[0, 0, 0]], [[0, 2]], [[0, 0]], [[1.0] * 3], [[1.0] * 3], {})
    first = StepEvent(0, [[]], [[]], [[0]], [[0]], [[]], [[]], {})
    plain = LaneTrace("plain", "none", {}, True, [1, 2, 3], [0] * 30, finish="length")
    for error, verdict in ((0.2, "rounding"), (0.0, "differs"), (9.0, "differs")):
        target = TreeRounding([5.0, 4.8, 4.8, 0.0] if error < 9 else [5.0, 3.0, 3.0, 0.0], error)
        lane = replace(plain, token_ids=[0, 0, 0, 2, *[0] * 26], events=[first, branches, branches])
        trace = RunTrace("test", {}, {}, "race", [plain, lane])
        compare_outputs(trace, target)
        assert trace.comparison[0]["verdict"] == verdict


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7), Sampling(1.2, top_k=5), Sampling(1.2, top_p=0.8), Sampling(1.0, min_p=0.2)]
)
def test_the_margin_of_a_sampled_token_is_the_change_that_makes_it_the_drawn_one(sampling):
    rng = torch.Generator().manual_seed(1)
    for position in range(6):
        noise = PositionNoise(3, 1, position, 12, torch.device("cpu")).ahead(1)[0, 0]
        logits = 3.0 * torch.rand(12, generator=rng)
        drawn = int(draw_with_noise(to_probs(logits, sampling), noise))
        scores = logits - sampling.temperature * noise.log()
        for token in range(12):
            margin = _margin(logits, [token], sampling, 3, position)
            assert (margin == 0.0) is (token == drawn)
            if sampling == Sampling(sampling.temperature):
                assert margin == pytest.approx(float(scores.max() - scores[token]), abs=1e-5)
            elif sampling.top_k and token != drawn:
                changed = logits.clone()
                changed[token] += margin + 1e-3
                changed[drawn] -= margin + 1e-3
                entered = int(logits.topk(6).indices[-1])  # replaces the drawn one if that falls below the limit
                assert int(draw_with_noise(to_probs(changed, sampling), noise)) in (token, entered)


def test_a_planted_wrong_token_of_sampled_text_is_a_bug():
    session = Session()
    settings = {
        "target": "stories",
        "dtype": "float32",
        "prompt": "A dog ran",
        "temperature": 0.8,
        "top_p": 0.95,
        "seed": 5,
        "max_new_tokens": 24,
    }
    spec = Comparison.build(
        {"id": "x", **settings, "lanes": [Lane(method="ngram", k=4), Lane(method="ngram", k=4, acceptance="lossless")]}
    )
    trace = session.run(spec)
    assert [row["verdict"] for row in trace.comparison] == ["identical", "same distribution"]
    baseline, lane = trace.lanes[:2]
    for index in (0, 7, 23):
        planted = [*lane.token_ids[:index], lane.token_ids[index] ^ 1, *lane.token_ids[index + 1 :]]
        wrong = replace(trace, lanes=[baseline, replace(lane, token_ids=planted)], comparison=[])
        compare_outputs(wrong, session.target())
        assert (wrong.comparison[0]["verdict"], wrong.comparison[0]["first_divergence"]) == ("differs", index)


def test_only_chains_on_a_target_with_the_same_bits_are_bit_for_bit(monkeypatch):
    session, lanes = Session(), [Lane(method="ngram", k=4), Lane(method="medusa", model="stories-medusa", k=3)]
    lanes[1] = lanes[1].model_copy(update={"options": {"nodes": 6}})
    spec = Comparison.build(
        {"id": "x", "target": "stories", "prompt": "A dog ran", "max_new_tokens": 24, "lanes": lanes}
    )
    trace, target = session.run(spec), session.target()
    for same_bits in (True, False):
        monkeypatch.setattr(type(target), "facts", TargetFacts("float32", same_bits=same_bits))
        compared = replace(trace, comparison=[])
        compare_outputs(compared, target)
        assert [row["verdict"] for row in compared.comparison] == ["identical"] * 2
        assert [row["bit_for_bit"] for row in compared.comparison] == [same_bits, False]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_planted_wrong_token_is_a_bug(dtype):
    session = Session()
    lanes = [Lane(method="ngram", k=4)]
    spec = Comparison.build(
        {"id": "x", "target": "stories", "prompt": "A dog ran", "dtype": dtype, "max_new_tokens": 30, "lanes": lanes}
    )
    trace, target = session.run(spec), session.target()
    baseline, lane = trace.lanes
    text = torch.tensor([baseline.prompt_ids + baseline.token_ids])
    for index in (1, 29):
        with torch.no_grad():
            logits = target.start(text[:, : len(baseline.prompt_ids) + index]).logits[0, -1].float()
        ranked = logits.sort(descending=True)
        for token in ranked.indices[ranked.values < ranked.values[0] - 1.0][[0, 100]].tolist():
            planted = [*baseline.token_ids[:index], token, *lane.token_ids[index + 1 :]]
            wrong = replace(trace, lanes=[baseline, replace(lane, token_ids=planted)], comparison=[])
            compare_outputs(wrong, target)
            assert (wrong.comparison[0]["verdict"], wrong.comparison[0]["first_divergence"]) == ("differs", index)
            assert wrong.comparison[0]["divergence_margin"] > 0.9


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
