"""The table of devices, on simulated machines with other devices."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specdemo.engine import lanes
from specdemo.engine.clock import CpuStopwatch, stopwatch_for
from specdemo.engine.session import Session
from specdemo.kv.graphs import ENVIRONMENT_VARIABLE
from specdemo.models import devices, load, machine, memory
from specdemo.models.devices import (
    DEVICE_KINDS,
    DeviceKind,
    best_device,
    capture_for,
    device_kind,
    pick_device,
    pick_dtype,
)
from specdemo.models.fused import missing_kernels
from specdemo.models.machine import EnergyMeter, GpuClock
from specdemo.models.memory import Precision, check_memory, estimate_footprint, free_bytes, resolve_placement
from specdemo.presets import runnable
from specdemo.presets.files import preset


class Pretend(DeviceKind):
    """A device kind with `here` devices that records its calls."""

    here = 1

    def __init__(self, **row):
        super().__init__(**row)
        object.__setattr__(self, "calls", [])

    def count(self):
        return self.here

    def synchronize(self, device):
        self.calls.append("wait")

    def free(self, device):
        return 1000 + (device.index or 0) if device.type != "cpu" else 10**10

    def total(self, device):
        return 24_000_000_000

    def empty_cache(self):
        self.calls.append("empty")

    def prepare(self):
        self.calls.append("prepare")


@pytest.fixture
def pretend(monkeypatch):
    def make(name, here=1, **row):
        known = DEVICE_KINDS[name]
        row = {
            "title": known.title,
            "host": known.host,
            "timing": known.timing,
            "dtypes": known.dtypes,
            "quantised": known.quantised,
            "separate_memory": known.separate_memory,
        } | row
        made = Pretend(**row)
        monkeypatch.setattr(Pretend, "here", here)
        monkeypatch.setitem(DEVICE_KINDS, name, made)
        return made

    return make


@pytest.mark.parametrize("name", ["mps", "xpu", "cuda"])
def test_auto_is_the_best_there_is(name, pretend):
    pretend(name)
    where = pick_device("auto")
    assert where.type == name
    assert pick_dtype("auto", where) == torch.bfloat16
    assert resolve_placement()[0] == where
    assert runnable.this_machine.__wrapped__().gpu_gb == 24.0


def test_dedicated_gpu_precedes_one_that_shares_memory(pretend):
    assert best_device().type == "cpu"
    for name in ("mps", "xpu", "cuda"):
        pretend(name)
        assert best_device().type == name


@pytest.mark.parametrize("switch", ["0", "1"])
def test_graphs_are_for_gpus_and_can_be_switched_off(monkeypatch, switch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, switch)
    assert capture_for(torch.device("cpu")) is None
    assert (capture_for(torch.device("cuda")) is None) == (switch == "0")


@pytest.mark.parametrize("name", ["mps", "xpu"])
def test_a_lap_ends_when_the_device_is_done(name, pretend):
    device, row = torch.device(name), pretend(name)
    watch = stopwatch_for(device)
    assert isinstance(watch, CpuStopwatch)
    watch.start()
    watch.lap("draft")
    watch.lap("verify")
    assert list(watch.read()) == ["draft", "verify"]
    assert row.calls == ["wait"] * 3
    assert capture_for(device) is None


def test_free_memory(pretend):
    pretend("xpu", here=2)
    pretend("mps", here=2)
    assert free_bytes(torch.device("xpu")) == [1000, 1001]
    assert free_bytes(torch.device("xpu:1")) == [1001]
    assert free_bytes(torch.device("mps")) == [1000]
    precision = Precision(torch.bfloat16)
    assert check_memory("m", 1500, torch.device("xpu"), precision)  # over both devices
    with pytest.raises(ValueError, match="m needs about .* free on mps; choose quantization"):
        check_memory("m", 1500, torch.device("mps"), precision)  # it shares main memory


@pytest.mark.parametrize(
    ("device", "line"),
    [
        ("xpu", "this machine has no device 'xpu'; use device 'auto'"),
        ("mps", "this machine has no device 'mps'; use device 'auto'"),
        ("meta", "device 'meta' is not supported; use auto, cpu, mps, cuda, cuda:N, xpu or xpu:N"),
    ],
)
def test_missing_devices(device, line):
    with pytest.raises(ValueError) as refused:
        pick_device(device)
    assert str(refused.value) == line


def test_devices_without_4_bit_kernels_are_rejected(pretend):
    pretend("mps")
    with pytest.raises(ValueError, match="bitsandbytes has no kernels for mps; omit quantization '4bit'"):
        resolve_placement(device="mps", quantization="4bit")


@pytest.mark.parametrize("device", ["mps", "xpu", "xpu:1", "cuda:0"])
def test_comparison_may_name_a_device(device):
    assert preset("embedded-draft").with_changes(device=device).device == device


def test_cudnn_attention_is_off_on_nvidia():
    """cuDNN plans again for every text length."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    DEVICE_KINDS["cuda"].prepare()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_loading_prepares_the_device_and_frees_temporary_memory(pretend):
    row = pretend("cpu", dtypes=("float32",))
    load.load_target("stories")
    assert row.calls.count("empty") == 1 and row.calls[-1] == "prepare"


class MemoryCounter(DeviceKind):
    """A CPU with the counters of a GPU's allocator: 700 MB belong to other programs, and every step uses 5 MB
    temporarily.
    """

    def allocated(self, device):
        return 700_000_000 + self.in_use()

    def peak(self, device):
        return 705_000_000 + self.in_use()

    def in_use(self):
        return max((lane._model_bytes for lane in MemoryCounter.lanes), default=0)


def test_a_lanes_memory_is_its_own(monkeypatch):
    """The process's peak would include other lanes and models."""
    MemoryCounter.lanes = []
    prepare = lanes.LocalLane.prepare
    monkeypatch.setattr(
        lanes.LocalLane, "prepare", lambda lane, c: (MemoryCounter.lanes.append(lane), prepare(lane, c))[1]
    )
    monkeypatch.setitem(DEVICE_KINDS, "cpu", MemoryCounter(tested=True))
    spec = preset("embedded-draft").with_changes(max_new_tokens=12)
    trace = Session().run(spec)
    peaks = [lane.summary["peak_memory_bytes"] for lane in trace.lanes]
    plain = Session()
    plain.load(spec)
    weights = [plain.target().weight_bytes] * 2
    assert all(weight + 5_000_000 < peak < weight + 50_000_000 for weight, peak in zip(weights, peaks, strict=True))


def test_unquantizable_4_bit_weights_are_rejected(tmp_path, monkeypatch):
    """transformers only logs a warning and dequantizes, while the memory check counts 4 bits."""
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(memory, "find_spec", lambda package: None if package == "kernels" else package)
    with pytest.raises(ValueError, match="is stored in MXFP4, which needs other packages; run: pip install kernels$"):
        estimate_footprint(tmp_path, Precision(torch.bfloat16))
    monkeypatch.setattr(memory, "find_spec", lambda package: package)
    assert estimate_footprint(tmp_path, Precision(torch.bfloat16)).weights == 0


def test_missing_linear_attention_kernels_are_reported(monkeypatch):
    from transformers import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(num_hidden_layers=4)
    assert "linear_attention" in config.layer_types
    note = "linear attention runs without specialised kernels; for more speed run: pip install flash-linear-attention"
    assert missing_kernels(config, torch.device("cuda")) == note
    assert missing_kernels(config, torch.device("cpu")) == ""
    monkeypatch.setattr("specdemo.models.fused.find_spec", lambda package: package)
    assert missing_kernels(config, torch.device("cuda")) == ""


def test_every_device_row_is_reported():
    for row in DEVICE_KINDS.values():
        assert ("untested on hardware" in row.describe()) == (not row.tested)
    assert device_kind(torch.device("meta")) is DEVICE_KINDS["cpu"]
    assert (
        "no CUDA graphs" in replace(DEVICE_KINDS["mps"]).describe()
        and "; CUDA graphs" in DEVICE_KINDS["cuda"].describe()
    )
    assert devices.now(torch.device("cpu")) > 0.0


BUILD = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.fixture
def gpus(monkeypatch):
    """Simulate NVIDIA GPUs by compute capability, with the PyTorch build BUILD."""

    def make(*capabilities):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: BUILD)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index or 0])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index or 0}")

    return make


@pytest.mark.parametrize(
    ("capabilities", "device", "dtype"),
    [
        ([(7, 5)], "cuda", torch.float16),  # T4: bf16 is emulated
        ([(8, 9)], "cuda", torch.bfloat16),  # runs the code for 8.6
        ([(12, 1)], "cuda", torch.bfloat16),
        ([(13, 0)], "cuda", torch.bfloat16),  # compiles the PTX
        ([(6, 1)], "cpu", torch.float32),  # no kernels
        ([(6, 1), (7, 5)], "cuda:1", torch.float16),
    ],
)
def test_auto_uses_gpus_with_kernels_and_their_native_dtype(capabilities, device, dtype, gpus):
    gpus(*capabilities)
    chosen = pick_device("auto")
    assert (str(chosen), pick_dtype("auto", chosen)) == (device, dtype)


def test_gpu_without_kernels_is_rejected_with_its_name(gpus):
    gpus((6, 1))
    with pytest.raises(ValueError, match=r"has no kernels for GPU 0 \(sm_61\); use device 'auto', or install"):
        pick_device("cuda")


class Library:
    """A stand-in for NVML that returns scripted clocks and limits in turn."""

    def __init__(self, mhz, limits, fails=()):
        self.mhz, self.limits, self.fails = iter(mhz), limits, fails

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        assert name == b"GPU-abc"
        return 0

    def __getitem__(self, function):
        def call(handle, *arguments):
            clock = function == "nvmlDeviceGetClockInfo"
            arguments[-1]._obj.value = next(self.mhz) if clock else self.limits
            return int(function in self.fails)

        return call


@pytest.mark.parametrize(
    ("library", "reasons"),
    [
        (Library([1980, 1980], 0), []),
        (Library([1980, 1410], 0), ["the GPU's clock went from 1980 to 1410 MHz"]),
        (Library([1980, 1950], 0x04 | 0x20), ["the GPU is throttled by heat and its power limit"]),
        (Library([1980, 1410], 0x04, ["nvmlDeviceGetClockInfo", "nvmlDeviceGetCurrentClocksThrottleReasons"]), []),
        (None, []),
    ],
)
def test_gpu_clock_readings(monkeypatch, library, reasons):
    monkeypatch.setattr(machine, "_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    assert GpuClock(torch.device("cuda")).reasons() == reasons


def test_cpu_has_no_gpu_clock():
    assert GpuClock(torch.device("cpu")).reasons() == []


def zone(folder, name, energy, most):
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in {"name": name, "energy_uj": energy, "max_energy_range_uj": most}.items():
        (folder / file).write_text(f"{text}\n")


def test_energy_of_a_cpu_is_that_of_its_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "RAPL", tmp_path)
    cpu = torch.device("cpu")
    assert EnergyMeter(cpu).joules() is None  # as on most virtual machines
    for number, energy in enumerate((5_000_000, 999_000_000)):
        zone(tmp_path / f"intel-rapl:{number}", f"package-{number}", energy, 1_000_000_000)
    zone(tmp_path / "intel-rapl:0:0", "core", 1, 1_000_000_000)  # parts of a package
    zone(tmp_path / "intel-rapl:2", "psys", 1, 1_000_000_000)  # contains the packages
    meter = EnergyMeter(cpu)
    for name, energy in {"0": 7_500_000, "1": 1_000_000, "0:0": 9_000_000, "2": 9_000_000}.items():
        (tmp_path / f"intel-rapl:{name}" / "energy_uj").write_text(str(energy))
    assert meter.joules() == 2.5 + 2.0  # the counter of the second package began anew
    assert meter.joules() == 0.0
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert meter.joules() is None and meter.joules() is None
    zone(tmp_path / "intel-rapl:1", "package-1", 500, 0)
    meter = EnergyMeter(cpu)
    zone(tmp_path / "intel-rapl:1", "package-1", 9, 0)
    assert meter.joules() is None  # it was reset
    (tmp_path / "intel-rapl:1" / "energy_uj").write_bytes(b"\xff")
    assert meter.joules() is None
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("unknown")
    assert meter.joules() is None


@pytest.mark.parametrize(("fails", "joules"), [((), 1.5), (("nvmlDeviceGetTotalEnergyConsumption",), None)])
def test_energy_of_a_gpu_is_that_of_nvml(monkeypatch, fails, joules):
    library = Library([], 10_000, fails)
    monkeypatch.setattr(machine, "_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    meter = EnergyMeter(torch.device("cuda"))
    library.limits += 1_500  # millijoules
    assert meter.joules() == joules
