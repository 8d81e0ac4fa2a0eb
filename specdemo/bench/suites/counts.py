"""Suite that counts and times nothing: comparison of distributions."""

from specdemo.bench.base import Axis, OfPreset, Report, Stop, preset_field
from specdemo.bench.result import TOKEN, Result
from specdemo.presets.files import Preset


class Losslessness(OfPreset):
    """Tests whether the output of a preset's first lane has the same distribution as plain decoding."""

    name = "losslessness"
    order = 11
    axis = Axis(TOKEN, "token", "share of the continuations")
    preset: str | Preset = preset_field("embedded-sampling")

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.losslessness import losslessness

        return losslessness(self, report, cancelled)
