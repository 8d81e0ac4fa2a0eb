"""Suites that compare lanes on the same prompts: draft lengths, methods, shapes of shipped draft models."""

from specdemo.bench.base import DRAFT_LENGTH, STORIES, Ks, PresetId, Questioned, Report, Stop
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


class DepthWidth(Questioned):
    """Compares draft models with one and with four layers and the same number of parameters (Yan et al. 2402.01528)."""

    name = "depth-width"
    order = 7
    title = "Depth or width"
    question = (
        "Which shape should a draft model have? One layer against four, with the same number of parameters, at every"
        " draft length."
    )
    axis = DRAFT_LENGTH
    ks: Ks = range(1, 9)

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.sweeps import DRAFTS, every_k

        return every_k(self, self.ks, STORIES, DRAFTS, report, cancelled)
