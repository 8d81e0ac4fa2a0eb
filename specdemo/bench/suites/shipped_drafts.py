"""Draft models of the shipped target."""

from specdemo.bench.base import DRAFT_LENGTH, STORIES, Ks, Questioned, Report, Stop
from specdemo.bench.result import Result


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


class Embedded(Questioned):
    """Compares plain decoding with two draft models and prompt lookup, greedy, on the embedded models."""

    name = "embedded"
    order = 8
    axis = DRAFT_LENGTH
    ks: Ks = (4,)

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.sweeps import DRAFTS, LOOKUP, every_k

        return every_k(self, self.ks, STORIES, DRAFTS | LOOKUP, report, cancelled)
