"""Suites that compare lanes on the same prompts: draft lengths of one method, the shipped methods, and distributions,
which are counted and not timed."""

from specdemo.bench.base import Axis, Ks, LaneSuite, OfPreset, Report, Stop, preset_field
from specdemo.bench.result import TOKEN, Result
from specdemo.core.settings import setting
from specdemo.presets.files import Preset


class DraftLength(LaneSuite):
    """Measures the first lane of a preset at every draft length, and predicts all from one of them."""

    name = "k"
    order = 1
    title = "Draft length k"
    question = "How many tokens should a draft have? Runs the preset's first lane with short to long drafts."
    axis = Axis("k", "draft length", "k, draft tokens per step")
    ks: Ks = setting(range(1, 9), "Draft lengths, for example 4, 1-8 or 1,3,8.", metavar="K", flag="--k")

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.sweeps import every_k

        return every_k(self, self.ks, self.comparison.with_changes(temperature=0.0), report, cancelled)


class Methods(LaneSuite):
    """Compares all embedded presets with one greedy lane on the same target and prompts."""

    name = "methods"
    order = 2
    title = "Methods"
    question = "Which method is fastest? Runs every embedded preset with one lane on the same target and prompts."

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.sweeps import measure_lanes, shipped_lanes

        target = self.comparison.target
        if not (lanes := shipped_lanes(target)):
            raise ValueError(f"no embedded preset of one greedy lane runs on {target}; choose another preset")
        return measure_lanes(self, target, lanes, [{}] * (len(lanes) + 1), "lane", report, cancelled)


class Losslessness(OfPreset):
    """Tests whether the output of a preset's first lane has the same distribution as plain decoding."""

    name = "losslessness"
    order = 11
    axis = Axis(TOKEN, "token", "share of the continuations")
    preset: str | Preset = preset_field("embedded-sampling")

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.losslessness import losslessness

        return losslessness(self, report, cancelled)
