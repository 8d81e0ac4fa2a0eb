"""PARD: drafts compared with the authors' algorithm (AMD-AGI/PARD, pard/pard_infer.py), and the files it reads."""

import json
import shutil

import pytest
import torch

from specdemo.__main__ import main
from specdemo.analysis.predict import predict
from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling, to_probs
from specdemo.core.tree import ABSENT
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.loop import generate, warm_up
from specdemo.engine.session import Session, follow_up
from specdemo.methods import detect_head, load_drafter
from specdemo.methods.pairs import check_pair, outline
from specdemo.models.fused import fuse_layers
from specdemo.models.load import load_target
from specdemo.models.ref import ModelRef
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from tests.engine.test_chat_memory import TEMPLATE, with_template
from tests.engine.test_lossless import near_copy
from tests.generation import rows_of
from tests.models import tiny

MASK = 60
PROMPTS = tiny.texts(3, 9, seed=3)


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    """Return the folders of a target and of a PARD model, as the authors write them. param: of attention layers, or
    hybrid."""
    folder = tmp_path_factory.mktemp("pard")
    model = tiny.build(getattr(request, "param", "llama"))
    model.save_pretrained(folder / "target")
    draft = near_copy(model)
    draft.config.pard_token, draft.config.spd_type = MASK, "pard"
    draft.save_pretrained(folder / "draft")
    return str(folder / "target"), str(folder / "draft")


def as_pard(name, folder, **config):
    """Copy a model with a tokenizer into a folder, as a PARD model; return the folder."""
    shutil.copytree(ModelRef(name).path, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pard_token": 3, "spd_type": "pard"} | config))
    return str(folder)


def authors_logits(model, text, k):
    """Return the logits [k, V] of a draft after a text: those at its last token and at k - 1 masks."""
    with torch.no_grad():
        return model(torch.tensor([text + [MASK] * (k - 1)]), use_cache=False).logits[0, -k:]


@pytest.mark.parametrize(
    ("pair", "k"), [("llama", 1), ("llama", 2), ("llama", 6), ("qwen3_5", 6)], indirect=["pair"], scope="module"
)
def test_drafts_are_those_of_the_authors_algorithm_and_the_text_is_the_targets(pair, k):
    """Rows accept different numbers of tokens, and the budget of the last steps is shorter than k."""
    target = load_target(pair[0], dtype="float32")
    drafter = load_drafter("pard", target, pair[1])
    events = list(generate(target, drafter, PROMPTS, GenerationConfig(24, budget=Budget(k, k), stop_token_ids=())))
    texts, accepted = PROMPTS.tolist(), set()
    for event in events:
        for row, text in enumerate(texts):
            if drafted := [token for token in event.drafted[row] if token != ABSENT]:
                assert drafted == authors_logits(drafter.model.model, text, len(drafted)).argmax(-1).tolist()
                accepted.add(len(event.emitted[row]))
            text += event.emitted[row]
    assert len(accepted) > 1 and {len(event.drafted[0]) for event in events} >= {min(k, 1), k}
    expected = target.model.generate(PROMPTS, max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert texts == expected.tolist()


def test_sampled_drafts_have_the_distribution_of_their_position(pair):
    target, sampling = load_target(pair[0], dtype="float32"), Sampling(0.8, top_k=12)
    drafter = load_drafter("pard", target, pair[1])
    drafter.start(3, sampling, torch.Generator().manual_seed(1))
    drafter.observe(Progress(PROMPTS[:, :-1], PROMPTS[:, 1:], [8] * 3))
    draft = drafter.propose(Budget(4, 4))
    for row, text in enumerate(PROMPTS.tolist()):
        q = to_probs(authors_logits(drafter.model.model, text, 4)[None], sampling)[0]
        torch.testing.assert_close(draft.probs[row], q, atol=1e-4, rtol=1e-4)
        assert bool((q.gather(-1, draft.tokens[row][:, None]) > 0.0).all())


def test_a_draft_costs_one_pass(pair, monkeypatch):
    target = load_target(pair[0], dtype="float32")
    drafter = load_drafter("pard", target, pair[1])
    passes, forward = [], type(drafter.model).forward
    monkeypatch.setattr(
        type(drafter.model), "forward", lambda self, *given: passes.append(self) or forward(self, *given)
    )
    events = list(generate(target, drafter, PROMPTS, GenerationConfig(24, budget=Budget(4, 4), stop_token_ids=())))
    assert passes.count(drafter.model) == sum(bool(event.drafted[0]) for event in events) > 5
    assert drafter.read_bytes(4) == drafter.read_bytes(1) == drafter.weight_bytes


def test_a_draft_that_is_recorded_as_a_graph_is_the_draft():
    """All widths are recorded before the first text: no step records another one."""
    model = tiny.build("llama")
    fuse_layers(model)
    model.config.pard_token = MASK
    target, config = HFTarget(model), GenerationConfig(24, budget=Budget(4, 4), stop_token_ids=())
    drafted = []
    for recorder in (None, tiny.Replayed()):
        drafter = load_drafter("pard", target, HFTarget(model, capture=recorder))
        warm_up(target, drafter, PROMPTS, config)
        recorded = recorder and recorder.recorded
        drafted.append([event.drafted for event in generate(target, drafter, PROMPTS, config)])
        assert drafter.graph_note == ""
    assert drafted[0] == drafted[1] and recorder.recorded == recorded > 1 and recorder.replayed > 10


@pytest.mark.parametrize(
    ("name", "options"),
    [("pard", {"p_min": 0.2}), ("draft_model", {}), ("cascade", {})],
)
def test_other_uses_of_a_pard_model_are_lossless(name, options, pair):
    target = load_target(pair[0], dtype="float32")
    config = GenerationConfig(24, budget=Budget(5, 5), stop_token_ids=())
    drafter = load_drafter(name, target, pair[1], **options)
    plain = rows_of(list(generate(target, load_drafter("none", target), PROMPTS, config)))
    assert rows_of(list(generate(target, drafter, PROMPTS, config))) == plain
    assert ("method 'pard' drafts all its tokens in one pass" in drafter.note) == (name in ("draft_model", "cascade"))


def test_the_next_turn_of_a_chat_and_another_vocabulary(tmp_path):
    """The next turn continues from the KV cache of the draft model, where no mask may be left."""
    target = with_template(tmp_path / "chatty", TEMPLATE)
    drafts = [as_pard(name, tmp_path / name) for name in ("stories-draft-wide", "stories-draft-other")]
    lanes = [Lane(method="pard", model=draft, k=4) for draft in drafts]
    spec = Comparison(id="test", target=target, lanes=lanes, prompt="Once upon a time, a dog", max_new_tokens=16)
    session = Session()
    spec = follow_up(spec, session.run(spec), "The dog saw a ball")
    trace, fresh = session.run(spec), Session().run(spec)
    assert [row["verdict"] for row in trace.comparison] == ["identical"] * 2
    assert trace.lanes[1].events[0].notes["kept"] > 16 and not fresh.lanes[1].events[0].notes.get("kept")
    for lane, other in zip(trace.lanes[1:], fresh.lanes[1:], strict=True):
        assert [event.drafted for event in lane.events] == [event.drafted for event in other.events]
    assert "another tokenizer" in trace.lanes[2].note


def test_files_of_pard_are_recognised(pair, tmp_path, capsys):
    target, draft = map(ModelRef, pair)
    fit = check_pair(outline(target), draft)
    assert (fit.method, fit.fits) == ("pard", True) and detect_head(draft) is None
    assert check_pair(outline(draft), target).method == "draft_model"
    wide = as_pard("stories-draft-wide", tmp_path / "wide")
    assert main(["doctor", "stories", wide]) == 0 and "pard" in capsys.readouterr().out
    kinds = ("pard", "draft_model")
    one, six = (predict("stories", method=kind, model=wide, acceptance=[0.7], ks=(6,)).rows[0] for kind in kinds)
    assert one.draft_ms < six.draft_ms / 2
    with pytest.raises(ValueError, match="^this method needs a draft model; name one with --model$"):
        predict("stories", method="pard", acceptance=[0.7])


@pytest.mark.parametrize("mask", [-1, 61, "60", 1.5])
def test_a_mask_token_outside_the_vocabulary_is_one_line(mask, tiny_llama):
    draft = tiny_llama(61)
    draft.config.pard_token = mask
    with pytest.raises(ValueError, match=r"^pard_token .* of .* is not in its vocabulary of 61; fetch its config.json"):
        load_drafter("pard", ToyTarget(61), draft)
    load_drafter("draft_model", ToyTarget(61), draft)


def test_a_pard_2_model_drafts_without_the_targets_states(pair, tmp_path):
    """Its projection of these states is in a file of its own."""
    folder = tmp_path / "pard2"
    shutil.copytree(pair[1], folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"spd_type": "pard2", "pard2_target_layers": [-1, -2]}))
    torch.save({"target_proj.weight": torch.zeros(32, 64)}, folder / "warp_model.bin")
    target, drafted = load_target(pair[0], dtype="float32"), []
    for draft in (pair[1], str(folder)):
        drafter = load_drafter("pard", target, draft)
        events = list(generate(target, drafter, PROMPTS, GenerationConfig(24, budget=Budget(4, 4))))
        drafted.append([event.drafted for event in events])
    assert drafted[0] == drafted[1]
    assert drafter.note == "This PARD-2 model drafts without the target's hidden states here, one of its two modes."


def test_what_is_no_pard_model_is_one_line(capsys):
    plain = tiny.build("llama")
    with pytest.raises(ValueError, match=r"has no pard_token in a config.json; choose method 'draft_model' for it$"):
        load_drafter("pard", ToyTarget(tiny.VOCABULARY), plain)
    with pytest.raises(ValueError, match="stories-eagle-3 is a head for method 'eagle', not a draft model"):
        load_drafter("pard", load_target("stories"), "stories-eagle-3")
    assert main(["run", "embedded-draft", "--method", "pard", "--model", "stories-draft-wide"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_it_cannot_learn(pair):
    target = load_target(pair[0], dtype="float32")
    drafter = load_drafter("online", target, pair[1], drafter="pard", every=1)
    with pytest.raises(ValueError, match="would forget its mask tokens while it learns; choose another draft model"):
        list(generate(target, drafter, PROMPTS, GenerationConfig(24)))
