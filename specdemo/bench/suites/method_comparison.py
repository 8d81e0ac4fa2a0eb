"""Methods on one target."""

from specdemo.bench.base import PresetId, Questioned, Report, Stop
from specdemo.bench.result import Result
from specdemo.presets.files import DEFAULT, preset


class Methods(Questioned):
    """Compares all embedded presets with one greedy lane on the same target and prompts."""

    name = "methods"
    order = 2
    title = "Methods"
    question = "Which method is fastest? Runs every embedded preset with one lane on the same target and prompts."
    preset: PresetId = DEFAULT

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.sweeps import as_shipped, shipped_lanes

        target = preset(self.preset).target
        return as_shipped(self, target, shipped_lanes(target), self.prompts_or_file, report, cancelled)
