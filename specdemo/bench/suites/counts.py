"""Suite that counts and times nothing: comparison of distributions."""

from typing import Annotated

from specdemo.bench.base import PRESET, Axis, Device, Dtype, Report, Stop, Suite
from specdemo.bench.result import TOKEN, Result
from specdemo.presets.files import Preset


class Losslessness(Suite):
    """Tests whether the output of a preset's first lane has the same distribution as plain decoding."""

    name = "losslessness"
    order = 11
    axis = Axis(TOKEN, "token", "share of the continuations")
    preset: Annotated[str | Preset, PRESET] = "embedded-sampling"
    device: Device = "auto"
    dtype: Dtype = "auto"

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.losslessness import losslessness

        return losslessness(self, report, cancelled)
