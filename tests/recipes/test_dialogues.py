import random
from types import SimpleNamespace

import pytest
import torch

from recipes import dialogues
from recipes.dialogues import DialogueLoss, Template, untrained_head, varied, write_dialogues
from specdemo.methods.heads.eagle import Eagle
from specdemo.methods.heads.mlp_speculator import MLPSpeculator
from specdemo.models.target import HFTarget
from specdemo.training import collect

TEMPLATE = Template({"assistant": [1, 2], "user": [3, 4]}, 5)
TAPS = (0, 1, 1)


@pytest.fixture
def model(tiny_llama):
    return tiny_llama(24)


def written(model, rows=8, length=40, taps=TAPS[:2]):
    columns = write_dialogues(model, [[7, 8, 9]] * rows, TEMPLATE, length, (*taps, -1), 3)
    model.set_attn_implementation("eager")
    return columns


def test_the_model_writes_questions_and_answers_in_turn(model):
    columns = written(model, 32)
    turns = 0
    for row, roles in zip(columns["tokens"].tolist(), columns["roles"].tolist(), strict=True):
        assert row[:3] == [7, 8, 9] and roles[:3] == [0, 0, 2]
        speaker = "user"
        for place in [i for i in range(3, 37) if row[i] == 5 and roles[i - 1]]:
            speaker = "assistant" if speaker == "user" else "user"
            assert row[place + 1 : place + 3] == TEMPLATE.turns[speaker] and roles[place : place + 2] == [0, 0]
            assert roles[place + 2] == dialogues.ROLES.index(speaker)
            turns += 1
    assert turns > 4


def test_the_states_are_those_of_the_finished_rows(model):
    columns = written(model, 2)
    read = model(columns["tokens"].long(), output_hidden_states=True).hidden_states
    expected = torch.cat([read[tap] for tap in (0, 1, -1)], -1)
    torch.testing.assert_close(columns["states"].float(), expected, atol=0.02, rtol=0.02)


def job(start=None, **shape):
    return SimpleNamespace(start=start, recipe=SimpleNamespace(plan=SimpleNamespace(taps=TAPS), shape=shape, name="x"))


@pytest.fixture(params=[torch.float32, torch.bfloat16])  # of matrix products, by the instructions of the CPU
def learned(request, model, monkeypatch):
    """Return a function that trains a head on dialogues, and returns its drafter and its draft vocabulary."""
    for module in (dialogues, collect):
        monkeypatch.setattr(module, "matmul_dtype", lambda device: request.param)
    monkeypatch.setattr(dialogues, "DROPOUT", 0.0)
    torch.manual_seed(0)
    ids = torch.tensor([*range(0, 24, 2), 5]).sort().values
    monkeypatch.setattr(dialogues, "frequent_tokens", lambda rows, vocab_size: ids)
    columns = written(model, taps=TAPS)
    batch = columns["tokens"].long(), columns["roles"], columns["states"]

    def learn(student, target):
        first, ids, drafted, drafter = student
        head = first.float().requires_grad_(True)
        lessons = DialogueLoss(drafted, target, ids)
        optimizer = torch.optim.Adam(head.parameters(), 0.02)
        losses = []
        for _ in range(60):
            loss = lessons.loss(*batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.9 * losses[0]
        with torch.no_grad():
            assert 0.0 <= lessons.measure(*batch)["agree_1"] <= 1.0
        return drafter(), ids

    return learn


def test_a_head_learns_from_dialogues_and_loads_without_output_rows(model, tmp_path, learned):
    target = HFTarget(model)
    drafter, ids = learned(dialogues.eagle(job(), target, []), target)
    drafter.save(tmp_path, "tiny")
    loaded = Eagle.load_trainable(str(tmp_path), target)
    torch.testing.assert_close(loaded.lm_head.weight, target.lm_head.weight[ids])
    state = torch.randn(1, target.hidden_size)
    torch.testing.assert_close(loaded.logits(state), target.lm_head(loaded.norm(state))[:, ids])


def test_a_speculator_learns_from_dialogues_and_drafts_only_from_its_vocabulary(model, tmp_path, learned):
    target = HFTarget(model)
    drafter, ids = learned(dialogues.speculator(job(inner_dim=16), target, []), target)
    drafter.save(tmp_path, "tiny")
    loaded = MLPSpeculator.load_trainable(str(tmp_path), target)
    assert loaded.head[0].weight.shape == (24, 16)
    state = loaded.initial_state(torch.randn(50, target.hidden_size))
    for step, token in enumerate(torch.randint(24, (3, 50))):
        state, logits = loaded(state, token, step)
        assert set(logits.argmax(-1).tolist()) <= {*ids.tolist()}
    with pytest.raises(ValueError, match="starts from scratch; omit --start"):
        dialogues.speculator(job(str(tmp_path)), target, [])


def test_a_run_goes_on_with_the_weights_and_the_draft_vocabulary_of_a_trained_head(model, tmp_path):
    target = HFTarget(model)
    trained = untrained_head(target, torch.arange(1, 24, 2), TAPS)
    torch.nn.init.normal_(trained.fc.weight)
    Eagle(target, trained).save(tmp_path, "tiny")
    head, ids, *_ = dialogues.eagle(job(str(tmp_path)), target, [])  # no row decides the vocabulary
    assert ids.tolist() == [*range(1, 24, 2)] and head.lm_head is None
    for name, weight in trained.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], weight)


def test_rows_that_repeat_themselves_are_left_out():
    rng = random.Random(0)
    assert varied(torch.tensor([rng.randrange(99) for _ in range(80)]))
    assert not varied(torch.tensor([1, 2, 3, 4, 5] * 16))
