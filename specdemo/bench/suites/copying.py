"""Texts that repeat the prompt."""

from specdemo.bench.base import STORIES, Decoding, Report, Stop
from specdemo.bench.prompts import COPYING
from specdemo.bench.result import Result


class Copying(Decoding):
    """Compares the methods without weights on prompts whose answer repeats the prompt."""

    name = "copying"
    order = 9

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.sweeps import as_shipped, shipped_lanes

        lanes = tuple(lane for lane in shipped_lanes() if lane.model is None)
        return as_shipped(self, STORIES, lanes, COPYING, report, cancelled)
