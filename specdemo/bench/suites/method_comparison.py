"""Methods on one target."""

from specdemo.bench.base import STORIES, Decoding, PresetId, Questioned, Report, Stop
from specdemo.bench.prompts import COPYING
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


class Copying(Decoding):
    """Compares the methods without weights on prompts whose answer repeats the prompt."""

    name = "copying"
    order = 9

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.sweeps import as_shipped, shipped_lanes

        lanes = tuple(lane for lane in shipped_lanes() if lane.model is None)
        return as_shipped(self, STORIES, lanes, COPYING, report, cancelled)
