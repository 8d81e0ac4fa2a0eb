"""Random models with the shapes of public models, and device measurements."""

import pytest
import torch

from specdemo.analysis.configs import shape
from specdemo.bench import device
from specdemo.bench.device import basics, passes, passes_of, step_times
from specdemo.bench.random_models import random_model
from specdemo.costs.profiles import profile
from specdemo.models.target import HFTarget

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny"])
def test_a_random_model_is_the_same_every_time_and_of_its_shape(name):
    one, other = (random_model(name, CPU, torch.float32) for _ in range(2))
    matrices = {n: p for n, p in one.named_parameters() if p.ndim > 1}
    assert sum(p.numel() for p in matrices.values()) == shape(name).parameters
    assert all(torch.equal(p, dict(other.named_parameters())[n]) for n, p in one.named_parameters())
    assert len({p.flatten()[0].item() for p in matrices.values()}) == len(matrices)
    ids = torch.arange(1, 30)[None]
    assert torch.isfinite(one(ids).logits).all()
    transformers_own = type(one)(one.config)  # with correct rotary angles
    transformers_own.load_state_dict(one.state_dict())
    torch.testing.assert_close(transformers_own.eval()(ids).logits, one(ids).logits)


@pytest.mark.filterwarnings("ignore")  # bitsandbytes warns on a CPU
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_take_what_they_are_counted_for(bits):
    target = HFTarget(random_model("llama-tiny", CPU, torch.bfloat16, bits))
    assert target.weight_bytes == pytest.approx(shape("llama-tiny", f"{bits}bit").weight_bytes(2), rel=0.1)
    assert torch.isfinite(target.start(torch.arange(1, 9)[None]).logits).all()


def test_an_unknown_shape_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'llama-8b'"):
        shape("lama-8b")


def test_passes_by_batch_and_width():
    target = HFTarget(random_model("llama-tiny", CPU, torch.float32))
    ms = passes(target, (3,), (1, 4))
    assert {batch: list(row) for batch, row in ms.items()} == {1: [1, 3], 4: [1, 3]}
    known = passes_of("llama-tiny", target, ms)
    assert known.v(4)[1] == 1.0 and set(known.ms[4]) == {1, 3}


def test_steps_accept_part_of_each_chain():
    """The rows of a batch reach different lengths, as in a real run."""
    targets = {name: HFTarget(random_model(name, CPU, torch.float32)) for name in ("llama-tiny", "qwen3-tiny")}
    found = {(step.model, step.method, step.k, step.batch): step for step in step_times(targets)}
    small = [("qwen3-tiny", "eagle", 5)]
    lanes = [("llama-tiny", "none", 0), *(("llama-tiny", "draft_model", k) for k in (2, 5)), *small]
    assert set(found) == {(*lane, batch) for lane in lanes for batch in (1, 8)}
    for (_, method, k, _), step in found.items():
        assert step.drafted == k and (0.0 < step.kept < k or not k)
        assert step.draft == ("qwen3-tiny" if method == "draft_model" else "")


def test_a_profile_reports_its_progress(monkeypatch):
    monkeypatch.setattr(device, "basics", lambda where, command: profile("laptop-cpu"))
    monkeypatch.setattr(device, "random_model", lambda name, where, dtype: random_model("llama-tiny", where, dtype))
    monkeypatch.setattr(device, "CPU_WIDTHS", (3,))
    monkeypatch.setattr(device, "CPU_BATCHES", (1, 2))
    monkeypatch.setattr(device, "STEP_TOKENS", 32)
    seen = []
    device.measure_profile("cpu", report=lambda share, what: seen.append((share, what)))
    shares = [share for share, _ in seen]
    assert shares[0] == 0.0 and shares == sorted(shares) and 0.8 < shares[-1] <= 1.0
    assert {"memory and matrix products", "passes, batch size 2", "steps of llama-100m, none"} <= {w for _, w in seen}


def test_the_basics_of_this_machine():
    profile = basics(CPU, "a test")
    assert profile.kind == "cpu" and profile.link_gb_per_s is None
    assert 0.1 < profile.bandwidth_gb_per_s.value < 10_000.0
    assert set(profile.compute_tflop_per_s) == {"float32", "bfloat16", "float16"}
    assert profile.launch_us.source == "measured by a test"
