"""One kernel for every width, threads and layouts of models on a CPU."""

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specdemo.core.tree import chain_parents
from specdemo.models import cpu_plan as cpu_plan_module
from specdemo.models import cpu_threads, pass_cost
from specdemo.models.cpu_plan import CpuPlan, CpuSettings, cpu_plan, key_tails
from specdemo.models.cpu_threads import ThreadLimit, thread_counts, threads, usable_cores
from specdemo.models.fused import fuse_layers
from specdemo.models.packed import Layout, PackedLinear, float16_rows_agree, has_float16_products, packed_dtype
from specdemo.models.pass_cost import fastest_threads, plan_passes
from specdemo.models.target import HFTarget
from tests.models.tiny import force_layout

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")

PADDED = Layout("packed", rows=4)
EDGES = (1, 3, 60, 119, *range(123, 130), 200, 247, *range(251, 258), *range(374, 386), *range(506, 514), 600, 1019)
WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
SHAPES = {  # query heads, key heads, and size of a head
    "llama-1x64": (LlamaForCausalLM, LlamaConfig, 2, 2, 64, {}),
    "llama-3x64": (LlamaForCausalLM, LlamaConfig, 6, 2, 64, {}),
    "qwen3-8x128": (Qwen3ForCausalLM, Qwen3Config, 8, 1, 128, {}),
    "gemma3-4x256": (Gemma3ForCausalLM, Gemma3TextConfig, 4, 1, 256, WINDOWS),
}
SIZES = {"vocab_size": 97, "hidden_size": 192, "intermediate_size": 352, "num_hidden_layers": 2}
SIZES |= {"max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def model(name, dtype):
    kind, config, heads, kv_heads, size, more = SHAPES[name]
    torch.manual_seed(1)
    made = kind(config(**SIZES, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=size, **more))
    return made.to(dtype).eval().requires_grad_(False)


def has_bf16():
    return packed_dtype(torch.bfloat16) is not None


DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not has_bf16(), reason="no bfloat16"))]


def exact_target(monkeypatch, name, dtype, layout=PADDED):
    force_layout(monkeypatch, layout)
    monkeypatch.setattr(CpuPlan, "shapes", {})
    made = model(name, dtype)
    fuse_layers(made)
    target = HFTarget(made)
    assert plan_passes(target, CpuSettings(bit_exact="on"))[:1] in (
        (),
        *((n,) for n in plan_passes(target, CpuSettings(bit_exact="on"))),
    )
    assert target.facts.same_bits or may_differ(name, dtype)
    return target


def may_differ(name, dtype):
    """Return True where attention of this machine may add by the number of queries: MKL's products do in float32, with
    heads of more than 64 numbers, on processors with AMX."""
    return dtype == torch.float32 and SHAPES[name][4] > 64 and torch.cpu._is_amx_tile_supported()


def differing(target, lengths, widths=range(1, 18)):
    """Return the lengths after which a pass over several tokens gives other bits than passes over one."""
    tokens = torch.randint(1, 97, (1, max(lengths) + max(widths)), generator=torch.Generator().manual_seed(2))
    found = []
    for length in lengths:
        target.start(tokens[:, :length], reserve=max(widths) + 4)
        text, single = tokens[:, length : length + max(widths)], []
        for token in text.split(1, 1):
            single.append(target.forward(token, token[:, 1:]).logits)
            target.commit([[0]])
        expected = torch.cat(single, 1)
        for width in widths:
            target.crop([length])
            logits = target.forward(text[:, :width], chain_parents(1, width - 1, text.device)).logits
            if not torch.equal(logits, expected[:, :width]):
                found.append((length, width))
    target.release()
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_the_same_bits_at_every_width(monkeypatch, name, dtype):
    target = exact_target(monkeypatch, name, dtype)
    different = differing(target, (1, 127, 252, 255, 380, 511), (1, 2, 3, 4, 5, 9, 17, 32))
    assert target.facts.same_bits is (different == [])


@pytest.mark.skipif(not has_float16_products() or not float16_rows_agree(), reason="no such products here")
def test_passes_with_weights_in_float16_need_no_padding_for_the_same_bits(monkeypatch):
    target = exact_target(monkeypatch, "qwen3-8x128", torch.bfloat16, Layout("float16"))
    assert cpu_plan(target.model).shape.slots == 1
    assert target.facts.same_bits is (differing(target, (1, 127, 252, 255, 380, 511), (1, 2, 3, 4, 5, 9, 17, 32)) == [])


def test_products_whose_bits_depend_on_the_number_of_rows_are_noticed(monkeypatch):
    monkeypatch.setattr(pass_cost, "float16_rows_agree", lambda: False)
    force_layout(monkeypatch, Layout("float16"))
    made = model("llama-3x64", torch.float32)
    fuse_layers(made, PADDED)
    cpu_plan(made).layout = Layout("float16")
    plan_passes(HFTarget(made), CpuSettings())
    assert not cpu_plan(made).same_bits


@pytest.mark.release
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_the_same_bits_at_every_width_around_all_edges(monkeypatch, name, dtype, count):
    target = exact_target(monkeypatch, name, dtype)
    target.threads = count
    with threads(count):
        assert target.facts.same_bits is (differing(target, EDGES) == [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_that_depends_on_the_width_is_noticed(monkeypatch, dtype):
    target = exact_target(monkeypatch, "llama-3x64", dtype)
    forward = PackedLinear.forward

    def by_width(self, x):
        if x.shape[-2] < 9:
            return forward(self, x)
        half, weight = x.shape[-1] // 2, self._wide.to_dense(x.dtype)
        return x[..., :half] @ weight[:, :half].T + x[..., half:] @ weight[:, half:].T

    monkeypatch.setattr(PackedLinear, "forward", by_width)
    assert {width for _, width in differing(target, (60, 126))} >= {9, 17}
    assert not pass_cost.has_same_bits(target, 2)
    monkeypatch.setattr(CpuPlan, "shapes", {})
    assert plan_passes(target, CpuSettings(bit_exact="on"))[0].startswith("bit_exact is on, but")
    assert not target.facts.same_bits


def test_other_numbers_of_keys_would_add_in_another_order():
    assert 512 in key_tails(torch.float32, 64)
    assert all(tail % 128 == 0 for tail in key_tails(torch.float32, 64))


def test_bit_exact_off_leaves_passes_alone(monkeypatch):
    force_layout(monkeypatch, PADDED)
    made = model("llama-3x64", torch.float32)
    fuse_layers(made)
    target = HFTarget(made)
    plan_passes(target, CpuSettings(bit_exact="off"))
    assert not target.facts.same_bits
    assert cpu_plan(made) == CpuPlan(layout=PADDED, threads=target.threads)
    with pytest.raises(ValueError, match="unknown bit_exact 'yes'; choose one of auto, on, off"):
        CpuSettings(bit_exact="yes")


def test_products_that_cannot_be_packed_or_differ_are_left_out_with_a_note(monkeypatch):
    plain, forward = model("llama-3x64", torch.float32), PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: 1.1 * forward(self, x))
    note = fuse_layers(plain, PADDED)
    assert note.startswith("packed products move ") and note.endswith(" of a token, so they are not used")
    assert not any(isinstance(part, PackedLinear) for part in plain.modules()) and cpu_plan(plain).layout == Layout()
    monkeypatch.setattr(cpu_plan_module, "packed_dtype", lambda dtype: None)
    absent = "this processor has no packed products in {}, so its passes use plain ones{}"
    assert fuse_layers(plain, PADDED) == absent.format("float32", "")
    half = fuse_layers(model("llama-3x64", torch.bfloat16), PADDED)
    assert half == absent.format("bfloat16", "; choose dtype float32")
    target = HFTarget(plain)
    assert plan_passes(target, CpuSettings(bit_exact="on"))[0].startswith("bit_exact is on, but")


def test_bit_exact_costs_at_most_a_little_by_default(monkeypatch):
    force_layout(monkeypatch, PADDED)
    for cost, expected in ((1.04, True), (1.06, False)):
        monkeypatch.setattr(CpuPlan, "shapes", {})
        monkeypatch.setattr(pass_cost, "padding_cost", lambda target, shape, cost=cost: cost)
        made = model("llama-3x64", torch.float32)
        fuse_layers(made)
        plan_passes(HFTarget(made), CpuSettings())
        assert cpu_plan(made).same_bits == expected


@pytest.mark.parametrize(
    ("times", "best"), [({1: 4.0, 2: 2.5, 4: 2.4}, 2), ({1: 4.0, 2: 3.8, 4: 9.0}, 1), ({1: 4, 2: 3, 4: 1}, 4)]
)
def test_the_fewest_threads_that_are_about_as_fast(monkeypatch, times, best):
    made = HFTarget(model("llama-1x64", torch.float32))
    monkeypatch.setattr(pass_cost, "_seconds", lambda target, width, rows, now: times[target.threads])
    assert fastest_threads(made, tuple(times)) == best == made.threads
    assert HFTarget(made.model).threads == best


def test_threads_respect_the_affinity_and_the_quota(monkeypatch, tmp_path):
    files = {f"/sys/devices/system/cpu/cpu{n}/topology/core_cpus_list": f"{n % 8},{n % 8 + 8}" for n in range(16)}
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(cpu_threads, "_read", lambda path: files.get(path, ""))
    monkeypatch.setattr(cpu_threads.os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert usable_cores() == 7 and thread_counts() == (1, 2, 4, 7)  # 8 cores of two threads; one is left
    monkeypatch.setattr(cpu_threads.os, "sched_getaffinity", lambda pid: {0, 8, 3})
    assert thread_counts() == (1, 2)
    files["/sys/fs/cgroup/cpu.max"] = "150000 100000"
    assert thread_counts() == (1,)
    files["/sys/fs/cgroup/cpu.max"] = "max 100000"
    files["/sys/devices/cpu_core/cpus"] = "3-4"  # fast cores of a hybrid processor
    assert thread_counts() == (1,)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert thread_counts() == (3,)


def recorded(limit, ms, slots, curve, used=4):
    """Record passes and return the limit after each, which a pass follows."""
    seen = []
    for each in ms:
        limit.record(each, slots, min(used, limit.threads), curve)
        seen.append(min(used, limit.threads))
    return seen


def test_slow_passes_are_tried_with_fewer_threads(monkeypatch):
    monkeypatch.setattr(cpu_threads, "thread_counts", lambda: (1, 2, 4))
    limit, flat = ThreadLimit(), {1: 10.0, 5: 10.0}
    assert {*recorded(limit, [10.0 + 0.1 * n for n in range(20)], 1, flat)} == {4}
    assert {*recorded(limit, [90.0, 10.0, 10.0, 10.0, 10.0], 5, flat)} == {4}  # one slow pass is an accident
    assert recorded(limit, [20.0, 20.0, 20.0], 1, flat) == [4, 4, 2] and limit.on_trial
    assert recorded(limit, [40.0, 15.0, 15.0], 1, flat) == [2, 2, 2] and not limit.on_trial  # the first wakes threads
    assert {*recorded(limit, [15.0] * 9, 1, flat)} == {2}  # usual with fewer threads
    assert recorded(limit, [30.0] * 6, 1, flat) == [2, 2, 1, 1, 1, 2]  # fewer are no faster
    assert {*recorded(limit, [30.0] * 9, 1, flat)} == {2}
    limit.start_run()
    assert {*recorded(limit, [10.0 + 90.0 * (n > 5) for n in range(9)], 1, {})} == {4}  # another target, not measured
    assert recorded(limit, [130.0], 1, flat) == [2] and limit.on_trial  # every product waited for a taken core
    limit.start_run()
    assert recorded(limit, [130.0], 1, {1: 30.0}) == [4]


def test_passes_that_cost_what_was_measured_are_no_disturbance(monkeypatch):
    """With a GGUF file eight tokens cost 3.6 passes over one."""
    monkeypatch.setattr(cpu_threads, "thread_counts", lambda: (1, 2))
    limit, curve = ThreadLimit(), {1: 9.0, 4: 21.0, 8: 32.0}
    for slots in (1, 1, 1, 1, 8, 8, 8, 8, 1, 6, 6, 6):
        assert recorded(limit, [{1: 9.1, 6: 27.0, 8: 33.0}[slots]], slots, curve, used=2) == [2]
    assert recorded(limit, [60.0] * 3 + [50.0] * 3, 8, curve, used=2) == [2, 2, 1, 1, 1, 1]
    limit.start_run()
    assert recorded(limit, [26.0] * 20, 1, curve, used=2)[6:] == [2] * 14  # a long text on a slow host


def test_a_family_that_cannot_run_the_comparison_stays_as_it_is(monkeypatch):
    plain = model("llama-3x64", torch.float32)
    monkeypatch.setattr(plain, "get_input_embeddings", lambda: torch.nn.Identity())
    assert fuse_layers(plain, PADDED) == "" and cpu_plan(plain).layout == Layout()
    assert not any(isinstance(part, PackedLinear) for part in plain.modules())
