"""Failures of one lane in its drafter, target or rule: the lane reports the reason, the other lanes finish, the next
run works, and the memory is freed.
"""

import weakref
from dataclasses import replace
from itertools import combinations_with_replacement, count

import pytest
import torch

from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.sampling import Sampling
from specdemo.core.trace import from_json, to_json
from specdemo.core.tree import Draft
from specdemo.core.typical import Typical
from specdemo.engine import loop, verdict
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.loop import generate
from specdemo.engine.messages import LaneDone, Note, StepRow
from specdemo.engine.session import Session
from specdemo.methods.ngram import NGram
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from tests.models.tiny import build

SHAPES = "int64 ids and parents [1, N], with or without q [1, N, 2048]"
FAILURES = {
    KeyError("x"): "KeyError: 'x' (test_lanes.py:",
    AttributeError("no such thing\nand more lines"): "AttributeError: no such thing (test_lanes.py:",
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"): "CUDA out of memory. Tried to",
    StopIteration(3): "generator raised StopIteration",
    RuntimeError(): "RuntimeError (test_lanes.py:",
    ValueError("a half \ud83d of a character" + 9_000 * "!"): "a half ? of a character!!!",
}


def spec(*lanes, **changes):
    settings = {"target": "stories", "prompt": "Once upon a time, a dog saw a dog", "max_new_tokens": 10, **changes}
    lanes = [*lanes] or [Lane(method="ngram", k=2), Lane(method="suffix", k=2)]
    return Comparison(id="test", lanes=lanes[:1], **settings).model_copy(update={"lanes": lanes})


@pytest.fixture(scope="module")
def runner():
    return Session()


@pytest.fixture(scope="module")
def baseline_ids(runner):
    """Return the output that all lanes share."""
    return runner.run(spec()).lanes[0].token_ids


@pytest.fixture
def caches(monkeypatch):
    """Return a function that lists the KV caches of all lanes made since, None for each without keys and values."""
    seen = []
    make = HFTarget._new_history

    def made(self, rows, columns):
        history = make(self, rows, columns)
        seen.append(weakref.ref(history.store))
        return history

    monkeypatch.setattr(HFTarget, "_new_history", made)
    return lambda: [store if store is not None and store.bytes else None for store in (made() for made in seen)]


def break_method(monkeypatch, owner, name, error, when=lambda *args: True):
    """Make `name` raise an error where `when` returns True, and work as before otherwise."""
    real = getattr(owner, name, lambda *args: None)

    def fail(self, *args, **named):
        if when(self, *args):
            raise error
        return real(self, *args, **named)

    monkeypatch.setattr(owner, name, fail, raising=False)


def failed_alone(trace, baseline_ids, why):
    """Check that lane 1 alone failed, with this reason."""
    baseline, failed, other = trace.lanes
    assert [lane.finish for lane in trace.lanes] == ["length", "error", "length"]
    assert baseline.token_ids == other.token_ids == baseline_ids
    assert failed.token_ids == baseline_ids[: len(failed.token_ids)] and failed.summary["tokens"] < len(baseline_ids)
    assert failed.note.startswith(why) and "\n" not in failed.note and len(failed.note) < 600
    assert from_json(to_json(trace)) == trace
    return True


def caches_are_freed(runner, caches):
    return caches() and not any(cache is not None for cache in caches()) and not runner.lock.locked()


def next_run_works(runner, caches, baseline_ids):
    assert caches_are_freed(runner, caches)
    assert [lane.token_ids for lane in runner.run(spec()).lanes] == [baseline_ids] * 3
    return True


SIZES = [*combinations_with_replacement(range(1, 9), 2)]  # options of prompt lookup that tell lanes apart


def failing_lanes(count):
    return [Lane(method="ngram", k=2, options={"min_n": low, "max_n": high}) for low, high in SIZES[:count]]


def number_of(drafter):
    """Return the place of a drafter's lane among the failing ones."""
    return SIZES.index((drafter._sizes[0], drafter._sizes[-1]))


@pytest.mark.parametrize("call", ["start", "propose", "observe"])
def test_a_drafter_that_raises(runner, baseline_ids, caches, monkeypatch, call):
    """Every lane fails with another error."""
    errors = list(FAILURES)
    with monkeypatch.context() as broken:
        for n, error in enumerate(errors):
            break_method(broken, NGram, call, error, lambda self, *args, n=n: number_of(self) == n)
        *messages, finished = runner.stream(spec(*failing_lanes(len(errors)), Lane(method="suffix", k=2)))
    first, *failed, last = finished.trace.lanes
    for error, lane in zip(errors, failed, strict=True):
        assert failed_alone(
            replace(finished.trace, lanes=[first, lane, last], comparison=[]), baseline_ids, FAILURES[error]
        )
    assert [row["verdict"] for row in finished.trace.comparison] == [*["unknown"] * len(errors), "identical"]
    assert sorted(m.text for m in messages if isinstance(m, Note)) == sorted(lane.note for lane in failed)
    assert sorted(m.lane for m in messages if isinstance(m, LaneDone)) == [*range(len(errors) + 2)]
    del messages
    assert next_run_works(runner, caches, baseline_ids)


def test_a_drafter_that_raises_late_keeps_what_it_wrote(runner, baseline_ids, caches, monkeypatch):
    calls = count()
    with monkeypatch.context() as broken:
        break_method(broken, NGram, "observe", KeyError("late"), lambda *args: next(calls) > loop.WARM_UP_TOKENS + 3)
        trace = runner.run(spec())
    assert failed_alone(trace, baseline_ids, "KeyError: 'late'") and len(trace.lanes[1].token_ids) > 1
    assert next_run_works(runner, caches, baseline_ids)


def test_a_lane_that_fails_off_the_clock_alone_does_not_fail(runner, baseline_ids, monkeypatch):
    calls = count()
    break_method(monkeypatch, NGram, "start", KeyError("cold"), lambda *args: not next(calls))
    assert [lane.token_ids for lane in runner.run(spec()).lanes] == [baseline_ids] * 3


def test_a_drafter_that_cannot_be_built(runner, baseline_ids, caches, monkeypatch):
    with monkeypatch.context() as broken:
        break_method(broken, NGram, "__init__", KeyError("weights"))
        assert failed_alone(runner.run(spec()), baseline_ids, "KeyError: 'weights' (test_lanes.py:")
    assert next_run_works(runner, caches, baseline_ids)
    break_method(monkeypatch, NGram, "__init__", ValueError("it does not fit; choose another"))
    with pytest.raises(ValueError, match="^it does not fit; choose another$"):
        runner.run(spec())


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("no kernel")])
def test_a_target_that_raises(runner, baseline_ids, caches, monkeypatch, error):
    with monkeypatch.context() as broken:
        break_method(broken, HFTarget, "forward", error, lambda self, tokens, *more: tokens.shape[1] == 3)
        trace = runner.run(spec(Lane(method="ngram", k=2), Lane(method="suffix", k=1)))
    assert failed_alone(trace, baseline_ids, str(error) if isinstance(error, RuntimeError) else type(error).__name__)
    assert next_run_works(runner, caches, baseline_ids)


def test_a_rule_that_raises(runner, baseline_ids, caches, monkeypatch):
    with monkeypatch.context() as broken:
        break_method(broken, Typical, "__call__", IndexError("slot 9"))
        trace = runner.run(spec(Lane(method="ngram", k=2, acceptance="typical"), Lane(method="suffix", k=2)))
    assert failed_alone(trace, baseline_ids, "IndexError: slot 9")
    assert next_run_works(runner, caches, baseline_ids)


def chain(*ids, **changes):
    return replace(Draft.chain(torch.tensor([ids])), **changes)


INVALID_DRAFTS = {
    "minus two": (chain(-2), "the draft has token -2; the vocabulary has 0 to 2047"),
    "one too far": (chain(5, 2048), "the draft has token 2048; the vocabulary has 0 to 2047"),
    "its own parent": (chain(5, 6, parents=torch.tensor([[0, 2]])), "node 1 of the draft has parent slot 2"),
    "no parent": (chain(5, parents=torch.tensor([[-1]])), "node 0 of the draft has parent slot -1"),
    "reals": (chain(5.0, 6.0), f"a draft must have {SHAPES}, not [1, 2] torch.float32, [1, 2] torch.int64"),
    "too few parents": (chain(5, 6, parents=torch.tensor([[0]])), f"a draft must have {SHAPES}, not [1, 2]"),
    "narrow q": (chain(5, probs=torch.ones(1, 1, 9)), f"a draft must have {SHAPES}, not [1, 1] torch.int64, "),
    "nothing": (None, "AttributeError: 'NoneType' object has no attribute 'tokens'"),
}


@pytest.mark.parametrize("hot", [0.0, 1.0])
def test_invalid_drafts_fail_only_their_lanes(runner, caches, monkeypatch, hot):
    drafts = list(INVALID_DRAFTS.values())
    with monkeypatch.context() as broken:
        broken.setattr(NGram, "propose", lambda self, budget: drafts[number_of(self)][0])
        trace = runner.run(spec(*failing_lanes(len(drafts)), Lane(method="suffix", k=2), temperature=hot))
    first, *failed, last = trace.lanes
    assert (first.finish, last.finish) == ("length", "length") and from_json(to_json(trace)) == trace
    for (_, why), lane in zip(drafts, failed, strict=True):
        assert lane.finish == "error" and len(lane.events) == 1 and not lane.events[0].drafted[0]
        assert lane.note.startswith(why) and "\n" not in lane.note
    assert caches_are_freed(runner, caches)


@pytest.mark.parametrize("hot", [0.0, 1.0])
@pytest.mark.parametrize("model", ["toy", "llama", "qwen3_next"])
@pytest.mark.parametrize("case", ["minus two", "one too far"])
def test_the_library_itself_raises_on_every_kind_of_target(model, case, hot):
    target = ToyTarget(2048) if model == "toy" else HFTarget(build(model))
    draft, _ = INVALID_DRAFTS[case]
    drafter = NGram(target)
    drafter.propose = lambda budget: draft
    config = GenerationConfig(8, Sampling(hot), Budget(2, 2))
    with pytest.raises(ValueError, match="^the draft has token"):
        list(generate(target, drafter, torch.tensor([[3, 4, 5]]), config))


def test_release_error_is_reported_by_its_lane_only(runner, baseline_ids, caches, monkeypatch):
    with monkeypatch.context() as broken:
        break_method(broken, NGram, "release", KeyError("handle"))
        trace = runner.run(spec())
        stream = runner.stream(spec())
        while not isinstance(next(stream), StepRow):
            pass
        stream.close()
    assert [lane.token_ids for lane in trace.lanes] == [baseline_ids] * 3
    assert [lane.finish for lane in trace.lanes] == ["length"] * 3  # its text was complete
    assert trace.lanes[1].note.startswith("KeyError: 'handle'")
    del stream
    assert next_run_works(runner, caches, baseline_ids)


def test_both_are_released_even_if_the_first_fails(monkeypatch):
    target = ToyTarget(16)
    drafter = NGram(target)
    drafter.release = lambda: released.append(True)
    released = []
    break_method(monkeypatch, ToyTarget, "release", OSError("stuck"))
    with pytest.raises(OSError, match="stuck"):
        list(generate(target, drafter, torch.tensor([[3, 4, 5]]), GenerationConfig(4)))
    assert released


def test_process_exit_ends_the_run(runner, baseline_ids, caches, monkeypatch):
    with monkeypatch.context() as broken:
        break_method(broken, NGram, "propose", KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.run(spec())
    assert next_run_works(runner, caches, baseline_ids)


def test_a_lane_keeps_one_learner_and_none_that_failed(monkeypatch):
    session = Session()
    for every in (3, 2):
        lane = Lane(method="online", model="stories-draft-deep", k=2, options={"every": every})
        session.run(spec(lane))
        assert len(session._learners) == 1
    assert session.run(spec(lane)).lanes[1].finish == "length" and session._learners
    break_method(monkeypatch, type(next(iter(session._learners.values())).drafter), "_update", KeyError("loss"))
    assert session.run(spec(lane)).lanes[1].finish == "error" and not session._learners


def test_a_text_that_cannot_be_read_again_leaves_the_verdict_open(runner, monkeypatch):
    lanes = runner.run(spec()).lanes
    other = replace(lanes[1], token_ids=[*lanes[1].token_ids[:-1], 7])
    trace = replace(runner.run(spec()), lanes=[lanes[0], other], comparison=[])

    def no_memory(*_):
        raise MemoryError

    monkeypatch.setattr(verdict, "_divergence", no_memory)
    verdict.compare_outputs(trace, runner.target())
    assert trace.comparison[0]["verdict"] == "unknown" and trace.comparison[0]["identical"] is False
