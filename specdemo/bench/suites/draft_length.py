"""Draft length k."""

from specdemo.bench.base import DRAFT_LENGTH, Ks, PresetId, Questioned, Report, Stop
from specdemo.bench.result import Result
from specdemo.presets.files import DEFAULT, preset


class DraftLength(Questioned):
    """Measures the first lane of a preset at every draft length, and predicts all from one of them."""

    name = "k"
    order = 1
    title = "Draft length k"
    question = "How many tokens should a draft have? Runs the preset's first lane with short to long drafts."
    axis = DRAFT_LENGTH
    preset: PresetId = DEFAULT
    ks: Ks = range(1, 9)

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.sweeps import every_k

        chosen = preset(self.preset).with_changes(temperature=0.0)
        lane = chosen.lanes[0]
        return every_k(self, self.ks, chosen.target, {lane.name or chosen.id: lane}, report, cancelled)
