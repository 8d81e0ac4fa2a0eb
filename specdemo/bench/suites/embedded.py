"""Embedded models."""

from specdemo.bench.base import DRAFT_LENGTH, STORIES, Ks, Questioned, Report, Stop
from specdemo.bench.result import Result


class Embedded(Questioned):
    """Compares plain decoding with two draft models and prompt lookup, greedy, on the embedded models."""

    name = "embedded"
    order = 8
    axis = DRAFT_LENGTH
    ks: Ks = (4,)

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.sweeps import DRAFTS, LOOKUP, every_k

        return every_k(self, self.ks, STORIES, DRAFTS | LOOKUP, report, cancelled)
