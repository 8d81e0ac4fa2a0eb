"""The comparison of two models that the user names."""

import pytest

import specdemo
from specdemo.__main__ import main
from specdemo.models.ref import ModelRef
from specdemo.presets.files import load_presets
from specdemo.presets.link import OWN
from specdemo.presets.pair import QUESTION, TASKS, add_pair, comparison, kind_of_work, task, work_prompts


@pytest.fixture(autouse=True)
def without_pair(monkeypatch):
    monkeypatch.setitem(load_presets(), OWN, None)
    load_presets().pop(OWN)


@pytest.fixture
def served(monkeypatch):
    """Return the arguments of the pages that were started."""
    starts = []
    monkeypatch.setattr("specdemo.ui.page.serve", lambda *given, **more: starts.append(given))
    return starts


@pytest.mark.parametrize(
    ("draft", "method"),
    [("stories-draft-wide", "draft_model"), ("stories-eagle-1", "eagle"), (None, "suffix")],
)
def test_page_starts_with_the_named_models(served, draft, method):
    assert main(["ui", "--target", "stories", *(["--draft", draft] if draft else []), "--threads", "2"]) == 0
    ((start, *_),) = served
    chosen = load_presets()[start]
    assert (chosen.target, chosen.lanes[0].method, chosen.lanes[0].model) == ("stories", method, draft)
    assert (chosen.chat, chosen.chip, chosen.threads) == (False, "Your models", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "/absent/model.gguf"], "the file /absent/model.gguf does not exist"),
        (["--target", "stories", "--draft", "code-eagle-1"], "code-eagle-1 does not fit stories: "),
        (["--draft", "stories-draft-wide"], "--draft needs a target; add --target MODEL"),
        (["--threads", "2"], "--threads needs a target; add --target MODEL"),
        (["--target", "stories", "--preset", "embedded-ngram"], "--preset and --target exclude each other"),
        (["--target", "stories", "--cache-type", "q4"], "cache_type must be 'auto', 'f32', 'f16' or 'q8_0'"),
    ],
)
def test_bad_names_are_one_line_before_the_server_starts(served, capsys, options, message):
    assert main(["ui", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"specdemo: {message}") and not served


def test_too_little_memory_is_one_line_before_the_server_starts(served, capsys, monkeypatch):
    monkeypatch.setattr("specdemo.models.memory.free_bytes", lambda device: [1_000_000])
    monkeypatch.setattr("specdemo.engine.session.free_bytes", lambda device: [1_000_000])
    assert main(["ui", "--target", "stories", "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "stories needs about" in line and "free on cpu; choose" in line and not served


def test_public_page_names_no_models(served, capsys, monkeypatch):
    monkeypatch.setenv("SPECDEMO_PUBLIC", "1")
    assert main(["ui", "--target", "stories"]) == 2
    assert "a public page offers only the models of its presets; remove --target" in capsys.readouterr().err


def test_chat_template_of_a_model_decides_the_prompt(monkeypatch):
    assert add_pair(ModelRef("stories")).prompt.startswith("Once upon a time")
    monkeypatch.setattr("specdemo.presets.pair.has_chat_template", lambda target: True)
    assert add_pair(ModelRef("stories")).prompt.startswith("Explain")


def test_a_prompt_to_continue_is_not_sent_as_a_message(monkeypatch):
    monkeypatch.setattr("specdemo.presets.pair.has_chat_template", lambda target: target == "code")
    written = load_presets()["embedded-draft"].prompt
    assert comparison("embedded-draft", {"target": "code"}).prompt == QUESTION
    kept = (
        {"target": "stories"},
        {"target": "code", "chat": False},
        {"target": "code", "prompt": written},
        {"seed": 2},
    )
    assert [comparison("embedded-draft", changes).prompt for changes in kept] == [written] * 4


def test_a_target_needs_no_preset(capsys):
    assert main(["run", "--target", "stories", "--max-new-tokens", "4"]) == 0
    assert {"Prompt lookup", "Suffix decoding"} <= {line[:15].strip() for line in capsys.readouterr().out.splitlines()}
    trace = specdemo.run(target="stories", model="stories-draft-wide", k=2, max_new_tokens=4)
    assert [lane.method for lane in trace.lanes] == ["none", "draft_model"] and trace.lanes[1].options["k"] == 2
    assert [lane.k for lane in add_pair(ModelRef("stories")).lanes] == [0, 0]  # chosen from the measured passes
    for changes, k in (({"target": "code"}, 0), ({"target": "code", "k": 6}, 6), ({"target": "stories"}, 4)):
        assert load_presets()["embedded-draft"].with_changes(**changes).lanes[0].k == k
    assert main(["run"]) == 2
    assert "or name a model: --target MODEL" in capsys.readouterr().err


def test_tasks_end_with_a_cue_where_there_is_no_chat_template():
    for name, (kind, end) in TASKS.items():
        words = work_prompts()[kind][0]
        assert task(name, chat=True) == words and task(name, chat=False) == f"{words}\n\n{end}\n"


def test_the_kind_of_work_is_that_of_a_task_or_of_the_presets_own_prompt():
    add_pair(ModelRef("code"))
    tasks = {task(name, chat): kind for name, (kind, _) in TASKS.items() for chat in (True, False)}
    assert {prompt: kind_of_work(OWN, prompt) for prompt in tasks} == tasks
    assert kind_of_work("embedded-code", load_presets()["embedded-code"].prompt) == "code"
    assert kind_of_work("embedded-code", "def mine():") == kind_of_work("unknown", "def mine():") == ""
