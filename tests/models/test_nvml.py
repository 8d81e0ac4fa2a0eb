"""GPU clocks, read from a stand-in for NVIDIA's library."""

from types import SimpleNamespace

import pytest
import torch

from specdemo.models import machine
from specdemo.models.machine import GpuClock


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
