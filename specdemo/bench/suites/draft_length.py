"""Draft length k."""

from pathlib import Path
from typing import Annotated

from specdemo.bench.base import DRAFT_LENGTH, File, Ks, Option, PresetId, Questioned, Report, Stop
from specdemo.bench.result import ALL, Result
from specdemo.prediction.golden import write_golden
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
    golden: Annotated[
        File | None,
        Option("Write mean accepted lengths by k to this file, in the format of golden_al_distribution (YAML).", Path),
    ] = None

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.sweeps import every_k

        chosen = preset(self.preset).with_changes(temperature=0.0)
        lane = chosen.lanes[0]
        return every_k(self, self.ks, chosen.target, {lane.name or chosen.id: lane}, report, cancelled)

    def write(self, result: Result) -> None:
        """Write the golden file, if there is one."""
        if self.golden is None:
            return
        chosen, where = preset(self.preset), result.environment
        lane = chosen.lanes[0]
        rows = [row for row in result.rows if row["k"] and row.get("category", ALL) == ALL]
        facts = [
            f"Mean accepted length (tokens per target pass) by draft length k, measured by specdemo bench {self.name}.",
            f"target {chosen.target}, {lane.method} {lane.model or ''}, greedy, {self.new_tokens} output tokens per "
            f"prompt, {result.repeats} repeats",
            ", ".join(str(where[name]) for name in ("device", "dtype", "date") if where.get(name)),
        ]
        thinking = "on" if chosen.thinking == "on" else "off"
        write_golden(self.golden, chosen.target, thinking, {row["k"]: row["tokens/pass"] for row in rows}, facts)
