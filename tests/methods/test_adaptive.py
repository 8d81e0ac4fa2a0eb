import random
from itertools import takewhile
from operator import eq

import pytest
import torch

from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.methods.adaptive import Goodput
from specdemo.methods.measurements import AcceptanceEstimator, LatencyTable, LookupAcceptance, StepOutcome
from specdemo.models.toy import ToyTarget

ROWS = torch.randint(3, 61, (3, 9), generator=torch.Generator().manual_seed(3))


class SimulatedCosts:
    """A simulation of a policy without model or clock. draft, slot: costs in plain steps. rates: acceptance by
    position.
    """

    def __init__(self, draft, slot, rates, seed=0):
        self.draft, self.slot, self.rates = draft, slot, rates
        self._dice = random.Random(seed)

    def step(self, k):
        accepted = next((i for i in range(k) if self._dice.random() >= self.rates[i]), k)
        noise = 1.0 + 0.1 * self._dice.random()
        return accepted, self.draft * k * noise, (1.0 + self.slot * k) * noise

    def speed(self, policy, steps, depth=8):
        """Return tokens per second, and how often each k was chosen."""
        tokens, seconds, chosen = 0, 0.0, [0] * (depth + 1)
        policy.start()
        for _ in range(steps):
            k = policy.choose(depth, depth) if isinstance(policy, Goodput) else policy
            accepted, drafting, verifying = self.step(k)
            if isinstance(policy, Goodput):
                policy.learn(StepOutcome(k, k + 1, [(k, accepted)], drafting, verifying))
            tokens, seconds, chosen[k] = tokens + accepted + 1, seconds + drafting + verifying, chosen[k] + 1
        return tokens / seconds, chosen


class Fixed(int):
    def start(self):
        pass


@pytest.mark.parametrize("alpha, draft, slot", [(0.8, 0.05, 0.02), (0.6, 0.1, 0.05), (0.5, 0.2, 0.1), (0.7, 0.0, 0.3)])
def test_goodput_is_close_to_the_best_fixed_depth(alpha, draft, slot):
    rates = [alpha] * 8
    fixed = [SimulatedCosts(draft, slot, rates, seed=1).speed(Fixed(k), 4000)[0] for k in range(9)]
    got, _ = SimulatedCosts(draft, slot, rates).speed(Goodput(), 4000)
    assert got > 0.97 * max(fixed)


@pytest.mark.parametrize("draft", [0.1, 0.3, 1.0, 3.0])
def test_goodput_never_loses_much_to_plain_decoding(draft):
    got, chosen = SimulatedCosts(draft, 0.2, [0.0] * 8).speed(Goodput(), 400)
    assert got > 0.97 / 1.05  # 1.05: the mean of the noise, also in plain decoding
    assert chosen[0] > 350


def test_goodput_recovers_when_the_draft_becomes_good():
    policy = Goodput()
    SimulatedCosts(0.1, 0.02, [0.0] * 8).speed(policy, 300)
    _, chosen = SimulatedCosts(0.1, 0.02, [0.9] * 8).speed(policy, 300)
    assert sum(chosen[4:]) > 150


def test_goodput_calibrates_and_persists_between_generations():
    policy = Goodput()
    SimulatedCosts(0.1, 0.02, [0.9] * 8).speed(policy, 60)
    alpha = policy.notes["alpha"]
    policy.start()
    assert policy.choose(8, 8) > 2
    assert policy.notes["alpha"] == pytest.approx(alpha, abs=0.05) and policy.notes["predicted"] > 1.5
    assert [Goodput().choose(depth, depth) for depth in (0, 8)] == [0, 0]
    cheap, dear = ({n: first + n * more for n in (1, 2, 4, 8)} for first, more in ((10.0, 0.1), (0.0, 10.0)))
    assert [Goodput(pass_ms).choose(7, 7) for pass_ms in (cheap, dear)] == [0, 0]
    assert [Goodput(pass_ms, LookupAcceptance()).choose(7, 7) for pass_ms in (cheap, dear)] == [7, 0]


def speed_with_informative_confidence(requested, steps=3000):
    """Return tokens per second of a drafter that is at random sure or unsure of each token, with a matching acceptance
    rate.
    """
    dice, policy, tokens, seconds = random.Random(3), Goodput(), 0, 0.0
    policy.start()
    for _ in range(steps):
        k, sure = policy.choose(8, 8), [dice.choice((0.98, 0.2)) for _ in range(8)]
        if requested and k:
            k = next((n for n in range(1, k) if policy.should_stop([sure[n - 1]])), k)
        accepted = next((i for i in range(k) if dice.random() >= (0.95 if sure[i] > 0.5 else 0.3)), k)
        drafting, verifying = 0.1 * k, 1.0 + 0.1 * k
        policy.learn(StepOutcome(k, k + 1, [(k, accepted)], drafting, verifying))
        tokens, seconds = tokens + accepted + 1, seconds + drafting + verifying
    return tokens / seconds


def test_goodput_stops_a_draft_where_it_gets_unsure():
    assert speed_with_informative_confidence(True) > 1.05 * speed_with_informative_confidence(False)


def test_drafting_stops_when_confidence_is_low(tiny_llama):
    """The check runs after every token but the last, on the probability of the most probable token, also when
    sampling.
    """
    draft, requested = tiny_llama(16), []
    for sampling in (Sampling(), Sampling(1.0)):
        drafter = load_drafter("draft_model", ToyTarget(16), draft)
        drafter.start(2, sampling, torch.Generator().manual_seed(0))
        drafter.observe(Progress(ROWS[:2, :8] % 16, ROWS[:2, 1:] % 16, [8, 8]))
        requested.clear()
        got = drafter.propose(Budget(6, 6, lambda chances: requested.append(chances) or len(requested) == 3))
        assert got.nodes == 3 and len(requested) == 3
        likeliest = got.confidence if sampling.greedy else got.probs.amax(-1)
        torch.testing.assert_close(torch.tensor(requested).T, likeliest)
        assert drafter.propose(Budget(6, 6, lambda chances: False)).nodes == 6


def test_acceptance_is_counted_where_a_level_was_reached():
    acceptance = AcceptanceEstimator()
    for _ in range(200):
        acceptance.add(3, 1)  # accepted, rejected, not reached
    first, second, third = acceptance.rates(3)
    assert first == pytest.approx(1.0, abs=0.01)
    assert second < 0.12 and third == second
    assert AcceptanceEstimator().rates(2) == [0.7, 0.7]


def test_costs_are_medians_and_lines_between():
    costs = LatencyTable({0: 0.0})
    for seconds in (2.0, 90.0, 2.2):
        costs.add(2, seconds)
    assert costs.estimates([0, 1, 2, 4]) == pytest.approx([0.0, 1.1, 2.2, 4.4])
    costs.add(4, 1.0)
    assert costs.estimates([3, 9]) == pytest.approx([1.6, 1.0])
    assert LatencyTable({}).estimates([3]) == [0.0]


def test_costs_between_measurements_follow_the_curve():
    costs = LatencyTable({}, {1: 10.0, 4: 12.0, 5: 20.0, 8: 22.0})
    assert costs.estimates([1, 5]) == pytest.approx([0.010, 0.020])  # nothing is measured yet
    costs.add(1, 0.1)
    assert costs.estimates([4, 5, 8]) == pytest.approx([0.12, 0.2, 0.22])
    costs.add(8, 0.33)
    assert costs.estimates([1, 8]) == pytest.approx([0.1, 0.33])
    at_four, at_five = costs.estimates([4, 5])
    assert 0.12 < at_four < 0.16 and 0.2 < at_five < 0.3


class Watch:
    """A stopwatch on which drafting takes three times as long as verification."""

    wall_ms = waited_ms = None

    def start(self):
        self.ms = {}

    def lap(self, name):
        self.ms[name] = self.ms.get(name, 0.0) + {"draft": 3.0, "verify": 1.0}.get(name, 0.0)

    def read(self):
        return self.ms


def test_a_slow_draft_is_given_up(tiny_llama):
    """The policy must use the lane's stopwatch, since only that one includes the device's time."""
    target = ToyTarget(16, seed=1)
    drafter = load_drafter("adaptive", target, tiny_llama(16))
    config = GenerationConfig(60, stop_token_ids=())
    events = list(generate(target, drafter, ROWS[:1] % 16, config, stopwatch=Watch()))
    depths = [int(e.notes["k"]) for e in events[1:]]
    assert depths[:4] == [0, 0, 1, 1]
    assert depths[-20:].count(0) >= 19
    assert events[-1].notes["predicted"] == 1.0


def test_short_rows_count_their_drafts_only(monkeypatch):
    drafter = load_drafter("adaptive", ToyTarget(64), drafter="ngram")
    outcomes = []
    monkeypatch.setattr(drafter.policy, "choose", lambda depth, nodes: depth)
    monkeypatch.setattr(drafter.policy, "learn", outcomes.append)
    drafter.start(3, Sampling(), torch.Generator())
    ids = torch.tensor([[1, 2, 1, 2], [1, 2, 3, 4], [5, 5, 5, 5]])
    drafter.observe(Progress(ids[:, :-1], ids[:, 1:], [3, 3, 3]))
    draft = drafter.propose(Budget(2, 2))
    assert draft.tokens.tolist() == [[1, 2], [ABSENT, ABSENT], [5, 5]]
    drafter.observe(Progress(torch.zeros(3, 3).long(), torch.zeros(3, 3).long(), [3, 1, 0]))
    drafter.on_step_timed({"draft": 1.0, "verify": 2.0})
    assert (outcomes[0].rows, outcomes[0].slots) == ([(2, 2), (0, 0)], 3)


@pytest.mark.parametrize("lookup", ["ngram", "suffix"])
def test_a_lookup_drafts_again_as_soon_as_the_text_is_copied(monkeypatch, lookup):
    """A pass over k + 1 tokens costs 1 + k / 2, and most matches of random text are wrong."""
    curve = {n: 0.5 + 0.5 * n for n in range(1, 17)}
    monkeypatch.setattr(ToyTarget, "pass_ms", curve)
    drafter, dice = load_drafter("adaptive", ToyTarget(16), drafter=lookup), random.Random(5)
    prompt = [dice.randrange(16) for _ in range(200)]
    fresh = [dice.randrange(16) for _ in range(100)]
    verified = {}
    for name, text in (("fresh", fresh), ("copied", prompt[20:120])):
        drafter.start(1, Sampling(), torch.Generator())
        drafter.observe(Progress(torch.tensor([prompt[:-1]]), torch.tensor([prompt[1:]]), [len(prompt) - 1]))
        done, verified[name] = 1, [0, 0]
        while done < len(text):
            draft = drafter.propose(Budget(7, 7)).tokens[0].tolist()
            same = sum(takewhile(bool, map(eq, draft, text[done:])))
            step = text[done - 1 : done + same + 1]
            drafter.observe(Progress(torch.tensor([step[:-1]]), torch.tensor([step[1:]]), [len(step) - 1]))
            drafter.on_step_timed({"draft": 0.001, "verify": curve[len(draft) + 1]})
            done += len(step) - 1
            verified[name] = [verified[name][0] + len(draft), verified[name][1] + same]
    assert verified["fresh"][0] < 15
    drafted, accepted = verified["copied"]
    assert drafted < accepted + 5 and accepted > 35  # 17 and 19 if it only learns from drafts that are verified


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adaptive", {"drafter": "ngram"}, "'adaptive' takes no model"),
        ("adaptive", {"drafter": "adaptive"}, "must be one of"),
        ("cascade", {"inner": "draft_model"}, "'draft_model' needs a model"),
        ("cascade", {"inner_model": "stories"}, "'ngram' takes no model"),
        ("router", {"drafts": "draft_model"}, "'draft_model' needs a model"),
    ],
)
def test_wrapped_drafters_without_their_models_are_refused(name, options, message, tiny_llama):
    with pytest.raises(ValueError, match=message):
        load_drafter(name, ToyTarget(16), tiny_llama(16), **options)


def test_the_model_goes_to_the_wrapped_drafter(tiny_llama):
    drafter = load_drafter("adaptive", ToyTarget(16), tiny_llama(16))
    assert drafter.weight_bytes == drafter.drafters[0].weight_bytes > 0
    assert drafter.history_bytes == 0
