"""Trees, ragged rows and windows with the GPU's attention kernels, on a GPU."""

import pytest
import torch

from specdemo.core.tree import chain_parents
from specdemo.models.cpu_plan import CpuPlan, CpuSettings
from specdemo.models.pass_cost import plan_passes
from specdemo.models.target import HFTarget
from tests.models.tiny import TREES, build, fresh, texts

pytestmark = pytest.mark.gpu
TREE = [0, 0, 1, 1, 2, 5, 0, 6]
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 2, 5, 6], [0, 7], [0, 2, 5, 6, 8]]


@pytest.fixture(params=TREES)
def name(request):
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_path_of_a_tree(name, dtype):
    reference = build(name)
    target = HFTarget(build(name).to("cuda", dtype))
    prompt, tokens = texts(1, 13), texts(1, len(TREE) + 1, seed=1)
    target.start(prompt.cuda())
    logits = target.forward(tokens.cuda(), torch.tensor([TREE]).cuda()).logits[0].float().cpu()
    for path in PATHS:
        slot_logits = fresh(reference, prompt[0].tolist() + tokens[0, path].tolist())
        tolerance = (5e-3 if dtype == torch.float32 else 0.3) * float(slot_logits.std())
        torch.testing.assert_close(logits[path[-1]], slot_logits, rtol=0, atol=tolerance)


def test_ragged_rows(name):
    reference, target = build(name), HFTarget(build(name).cuda())
    rows = texts(3, 13).tolist()
    target.start(torch.tensor(rows).cuda(), reserve=4)
    for step, lengths in enumerate([(0, 5, 8), (6, 0, 3), (4, 8, 0)]):
        tokens = texts(3, len(TREE) + 1, seed=step)
        target.forward(tokens.cuda(), torch.tensor([TREE] * 3).cuda())
        paths = [PATHS[k] for k in lengths]
        target.commit(paths)
        for row, row_tokens, path in zip(rows, tokens.tolist(), paths, strict=True):
            row += [row_tokens[slot] for slot in path]
    following = texts(3, 1, seed=9)
    logits = target.forward(following.cuda(), torch.empty(3, 0, dtype=torch.int64).cuda()).logits.cpu()
    for row_tokens, text, token in zip(logits, rows, following.tolist(), strict=True):
        torch.testing.assert_close(row_tokens[0], fresh(reference, text + token), rtol=1e-3, atol=5e-3)


def test_release_gives_the_memory_back():
    target = HFTarget(build("llama").cuda())
    for _ in range(2):  # the first pass allocates permanent library memory
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        target.start(texts(4, 13).cuda(), reserve=64)
        held = torch.cuda.memory_allocated()
        target.release()
        target.release_graphs()
    assert held > before
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_bit_exact_a_pass_of_every_width_is_one_of_sixteen_slots(monkeypatch, name, dtype):
    monkeypatch.setattr(CpuPlan, "shapes", {})
    made = build(name).to("cuda", dtype)
    before, target = HFTarget(made).capabilities.trees, HFTarget(made)
    assert plan_passes(target, CpuSettings()) == ()
    assert not target.facts.same_bits
    notes = plan_passes(target, CpuSettings(bit_exact="on"))
    target = HFTarget(made)
    assert before
    assert target.facts.same_bits is (notes == ())
    # an expert gets other rows at another width, whatever the padding
    if target.num_experts and not target.facts.same_bits:
        assert target.capabilities.trees
        return
    assert target.facts.same_bits
    assert not target.capabilities.trees  # they are cut to chains
    text = texts(1, 96).cuda()
    for start in (13, 60):  # before and across the end of the columns that one program reads
        target.start(text[:, :start], reserve=24)
        single = []
        for token in text[:, start : start + 16].split(1, 1):
            single.append(target.forward(token, token[:, 1:]).logits)
            target.commit([[0]])
        for width in (2, 3, 7, 16):
            target.crop([start])
            logits = target.forward(text[:, start : start + width], chain_parents(1, width - 1, text.device)).logits
            assert torch.equal(logits, torch.cat(single[:width], 1)), (start, width)
