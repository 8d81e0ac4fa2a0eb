"""Prefix reuse in a chat: the next turn starts from the KV cache of the last one, with the same output and fewer tokens
read.
"""

import gc
import shutil
import weakref

import pytest
from transformers import PreTrainedTokenizerFast

from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.lanes import WARM_UP_PROMPT
from specdemo.engine.messages import Started, StepRow
from specdemo.engine.session import Session, follow_up
from specdemo.models.prefix_reuse import PrefixCachedTarget
from specdemo.models.ref import ModelRef
from specdemo.models.target import HFTarget

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
LANES = (
    Lane(method="draft_model", model="stories-draft-wide", k=3),
    Lane(method="eagle", model="stories-eagle-3", k=4),
    Lane(method="medusa", model="stories-medusa", k=3),
    Lane(method="adaptive", model="stories-draft-wide", k=4, options={"drafter": "cascade"}),
    Lane(method="layer_skip", k=2),
)
NGRAM = (Lane(method="ngram"),)


def with_template(folder, template):
    shutil.copytree(ModelRef("stories").path, folder, dirs_exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(ModelRef("stories").path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    return with_template(tmp_path_factory.mktemp("chatty"), TEMPLATE)


@pytest.fixture(scope="module")
def runner():
    return Session()


@pytest.fixture
def session(runner):
    """Yield a session that may have loaded models but remembers no chat."""
    runner._forget_chat()
    return runner


@pytest.fixture
def without(runner):
    """Return a function that runs a comparison without the previous turn."""

    def run(comparison):
        runner._forget_chat()
        return runner.run(comparison)

    return run


def spec(target, lanes=NGRAM, **changes):
    settings = {"max_new_tokens": 12, "prompt": "Once upon a time, a dog", **changes}
    one = Comparison(id="test", target=target, lanes=[*lanes[:1]], **settings)
    return one.model_copy(update={"lanes": [*lanes]})


def tokens_read(monkeypatch):
    """Record the number of tokens read in the prefill of every target and draft model."""
    seen = []
    start = PrefixCachedTarget.start

    def counted(self, tokens, *more, **named):
        forward = start(self, tokens, *more, **named)
        seen.append(tokens.shape[1] - self.cached_tokens)
        return forward

    monkeypatch.setattr(PrefixCachedTarget, "start", counted)
    return seen


def prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def session_state(trace):
    return [lane.events[0].notes.get("kept", 0) for lane in trace.lanes]


def outputs(trace):
    return [(lane.prompt_ids, lane.token_ids, lane.text) for lane in trace.lanes]


def test_next_turns_equal_runs_without_prefix_cache(session, without, chatty):
    comparison = spec(chatty, LANES)
    trace = session.run(comparison)
    assert session_state(trace) == [0] * 6  # the warm-up is not counted
    for message in ("The dog saw a ball", "Then the ball"):
        comparison, before = follow_up(comparison, trace, message), trace
        trace = session.run(comparison)
        assert [row["verdict"] for row in trace.comparison] == ["identical"] * 5
        for number, old, lane in zip(session_state(trace), before.lanes, trace.lanes, strict=True):
            shared = prefix([*old.prompt_ids, *old.token_ids], lane.prompt_ids)
            # The last output token has not been read yet unless it was drafted.
            assert len(old.prompt_ids) < shared - 1 <= number <= shared < len(lane.prompt_ids)
    fresh = without(comparison)
    assert outputs(trace) == outputs(fresh) and session_state(fresh) == [0] * 6


def test_target_and_draft_model_read_only_new_tokens(session, chatty, monkeypatch):
    comparison = spec(chatty, LANES[:1], prompt="Once upon a time, a dog ran. " * 20)
    read = tokens_read(monkeypatch)
    before = session.run(comparison)
    prompt_length = len(before.lanes[0].prompt_ids)
    assert len(read) == 6 and max(read[:3]) <= WARM_UP_PROMPT < prompt_length - 1 <= min(read[3:])
    read.clear()
    session.run(follow_up(comparison, before, "The dog saw a ball"))
    assert len(read) == 6 and max(read) < 12  # three models, each in the warm-up and in the race
    assert sorted(read[:3]) == sorted(read[3:])


def test_cached_prefix_counts_as_memory_and_is_freed(session, chatty):
    comparison = spec(chatty, LANES[:2])
    trace = session.run(comparison)
    *models, (name, size) = session.loaded()
    assert name == "the chat so far" and size > 0 and chatty in dict(models)
    slabs = [weakref.ref(target._history.store.slabs[0].keys) for target, _ in session._chat.values()]
    again = follow_up(comparison, trace, "The dog saw a ball")
    session.unload()
    gc.collect()
    assert session.loaded() == [] and [slab() for slab in slabs] == [None] * 3
    assert session_state(session.run(again)) == [0] * 3


@pytest.mark.parametrize("other", ["text", "chat", "load", "place_models"])
def test_another_comparison_ends_the_chat(session, chatty, other):
    comparison = spec(chatty)
    again = follow_up(comparison, session.run(comparison), "The dog saw a ball")
    if other == "text":
        session.run(spec(chatty, chat=False, max_new_tokens=2))
        assert "the chat so far" not in dict(session.loaded())
    elif other == "chat":
        session.run(spec(chatty, max_new_tokens=2))
    else:
        getattr(session, other)(spec("stories"))
        assert not session._chat
    assert session_state(session.run(again)) == [0, 0]


def test_a_run_that_was_stopped_leaves_nothing(session, chatty):
    comparison = spec(chatty)
    again = follow_up(comparison, session.run(comparison), "The dog saw a ball")
    for message in (run := session.stream(again)):
        assert session._chat
        if isinstance(message, StepRow):
            run.close()
    assert not session._chat and "the chat so far" not in dict(session.loaded())
    stop = [False, False, False, False, True]
    for _ in session.stream(comparison, cancelled=lambda: stop.pop(0) if len(stop) > 1 else True):
        pass
    assert not session._chat


def test_a_comparison_that_cannot_be_loaded_leaves_the_chat_as_it_was(session, chatty):
    comparison = spec(chatty)
    again = follow_up(comparison, session.run(comparison), "The dog saw a ball")
    with pytest.raises(ValueError, match="stopped while"):
        list(session.stream(again, cancelled=lambda: True))
    assert min(session_state(session.run(again))) > 0


def test_learning_drafter_continues_too(session, chatty):
    comparison = spec(chatty, (Lane(method="online", model="stories-draft-deep", k=2, options={"every": 2}),))
    again = follow_up(comparison, session.run(comparison), "The dog saw a ball")
    assert min(session_state(session.run(again))) > 0
    session.run(spec(chatty, comparison.lanes, chat=False))
    (pair,) = session._learners.values()
    assert isinstance(pair.target, PrefixCachedTarget) and pair.target.history_bytes == 0
    assert not session._chat


def test_plain_text_prompts_are_not_cached(session, chatty):
    for message in session.stream(spec(chatty, chat=False, max_new_tokens=4)):
        if isinstance(message, Started):
            assert not session._chat
    assert [type(session.target())] == [HFTarget] and not session._chat
