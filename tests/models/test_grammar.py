"""Grammars of JSON schemas and regular expressions on the embedded models: exactness, forced tokens, bad input."""

import json
import re

import pytest
import torch
from transformers import AutoTokenizer

from specdemo.__main__ import main
from specdemo.core.trace import from_json, output_outcomes, to_json
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.messages import StepRow, replay
from specdemo.engine.session import Session
from specdemo.models import grammar
from specdemo.models.grammar import compile_grammar
from specdemo.models.ref import ModelRef
from specdemo.presets.files import load_presets, preset
from specdemo.presets.link import from_query, to_query
from specdemo.ui.views import view

SCHEMA = json.dumps({
    "type": "object", "required": ["name", "animal"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "maxLength": 8}, "animal": {"enum": ["dog", "cat"]}},
})  # fmt: skip
WIDE = Lane(method="draft_model", model="stories-draft-wide", k=4)
LANES = [
    WIDE,
    Lane(method="ngram", k=3),
    Lane(method="eagle", model="stories-eagle-3", k=4, options={"nodes": 12}),
    Lane(method="medusa", model="stories-medusa", k=4, options={"nodes": 10}),
    Lane(method="mtp", model="stories-mtp", k=3),
    Lane(method="dflash", model="stories-dflash", k=4),
    Lane(method="lookahead", k=3),
    Lane(method="adaptive", model="stories-draft-wide", k=4, options={"drafter": "draft_model"}),
    Lane(method="layer_skip", k=3),
]


def spec(*lanes, **changes):
    settings = {
        "id": "test",
        "target": "stories",
        "prompt": "Once upon a time",
        "max_new_tokens": 60,
        "grammar": SCHEMA,
    }
    return Comparison.build({**settings, **changes, "lanes": [*lanes]})


@pytest.fixture(scope="module")
def runner():
    return Session()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ModelRef("stories").path)


@pytest.mark.parametrize(
    "lanes", [LANES[:3], LANES[3:6], LANES[6:]], ids=lambda lanes: "-".join(x.method for x in lanes)
)
def test_every_method_writes_the_greedy_text_of_the_mask(runner, lanes):
    trace = runner.run(spec(*lanes))
    assert [row["verdict"] for row in trace.comparison] == ["identical"] * 3, [lane.note for lane in trace.lanes]
    value = json.loads(trace.lanes[0].text)
    assert set(value) == {"name", "animal"} and value["animal"] in ("dog", "cat") and len(value["name"]) <= 8
    assert all(lane.finish == "stop" for lane in trace.lanes) and trace.config["grammar"] == SCHEMA
    for lane in trace.lanes[1:]:
        assert any("forced" in output_outcomes(event) for event in lane.events)
        assert len(lane.events) < len(trace.lanes[0].events)


def test_forced_tokens_are_in_the_trace_and_the_page(runner):
    trace = runner.run(spec(WIDE))
    stored = from_json(to_json(trace))
    assert stored == trace
    steps = [view(message) for message in replay(stored) if isinstance(message, StepRow) and message.lane == 1]
    outcomes = [outcome for step in steps for outcome in step["output_outcomes"]]
    assert outcomes.count("forced") > 8
    drafts = [pair for step in steps for pair in zip(step["drafted"], step["draft_outcomes"], strict=True)]
    marked = [text for text, outcome in drafts if outcome == "forced"]
    assert "animal" in "".join(marked)
    stored.lanes[1].events[1].forced[0].append(99)
    with pytest.raises(ValueError, match="step 1 is inconsistent"):
        from_json(to_json(stored))


def test_sampled_text_matches_a_regular_expression(runner):
    pattern = r"(cat|dog)s?, [0-9]{2}\."
    for seed in range(2):
        trace = runner.run(spec(WIDE, grammar=pattern, temperature=1.0, seed=seed, max_new_tokens=30, dtype="float32"))
        assert all(re.fullmatch(pattern, lane.text.removesuffix("<|endoftext|>")) for lane in trace.lanes)
        assert trace.comparison[0]["verdict"] == "identical"


def test_masks_contain_only_tokens_that_match(tokenizer):
    state = compile_grammar("(cat|dog)s?", tokenizer, len(tokenizer), (0,))()
    texts = [tokenizer.decode([token]) for token in torch.nonzero(state.allowed())[:, 0].tolist()]
    assert texts and all(any(word.startswith(text) for word in ("cats", "dogs")) for text in texts)
    for token in tokenizer("cat", add_special_tokens=False)["input_ids"]:
        state = state.after(token)
    assert state.allowed()[0] and state.after(0) is None and state.forced() == []


@pytest.mark.parametrize(("text", "line"), [
    ("(a", "the grammar is not a valid regular expression: unclosed group"),
    ('{"type": "objct"}', "the grammar is not a valid JSON schema: "),
    ('{"type": ', "the grammar begins with { but is not JSON: "),
])  # fmt: skip
def test_a_bad_grammar_is_one_line(capsys, text, line):
    assert main(["run", "embedded-draft", "--grammar", text]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"specdemo: {line}") and error.count("\n") == 1


def test_a_grammar_needs_the_package_and_local_exact_lanes(monkeypatch, tokenizer, runner):
    with pytest.raises(ValueError, match="'synthetic' outputs tokens that a grammar forbids; choose another method"):
        runner.run(spec(Lane(method="synthetic")))
    monkeypatch.setenv("SPECDEMO_SERVERS", "http://127.0.0.1:1")
    with pytest.raises(ValueError, match="a grammar needs local lanes, and one runs on a server"):
        runner.run(spec(Lane(method="ngram", server="http://127.0.0.1:1")))
    monkeypatch.setattr(grammar, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="a grammar needs llguidance; run: pip install llguidance"):
        compile_grammar("absent", tokenizer, len(tokenizer), (0,))


def test_a_grammar_travels_in_presets_and_links():
    base = preset("embedded-grammar")
    assert base.grammar.startswith("{") and json.loads(base.grammar)["type"] == "object"
    changed = base.with_changes(grammar="[a-z]+")
    assert from_query(to_query(changed, base), load_presets()) == (changed, [])
