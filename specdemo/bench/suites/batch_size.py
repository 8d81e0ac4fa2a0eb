"""Batch size."""

from dataclasses import replace

from specdemo.bench.base import Axis, Laned, Report, Stop
from specdemo.bench.result import Result, Row

BATCHES = (1, 2, 4, 8, 16, 32)


class Batch(Laned):
    """Measures the first lane of a preset at increasing batch sizes, against plain decoding of the same batch.

    All texts have one length.
    """

    name = "batch"
    order = 3
    title = "Batch size"
    question = "Where does the gain end? Runs the preset's first lane at increasing batch sizes."
    axis = Axis("batch", "batch size", "rows decoded together", doubling=True)

    def run(self, report: Report, cancelled: Stop) -> Result:
        import torch

        from specdemo.bench.measure import Place
        from specdemo.bench.sweeps import along_axis, first_lane, room, tokenizer
        from specdemo.models.text import encode

        target, lanes = first_lane(self, self.preset)
        texts = [encode(tokenizer(target), text, room(target, self)) for text in self.texts]
        width = min(map(len, texts))
        places = []
        for size in BATCHES:
            rows = [texts[i % len(texts)][-width:] for i in range(size)]
            places.append(Place(size, [torch.tensor(rows, device=target.device)]))
        found = along_axis(self, target, lanes, places, report, cancelled)
        return replace(found, remarks=[_gain(found.rows), *found.remarks])


def _gain(rows: list[Row]) -> str:
    """Return in words at which batch size the gain ends."""
    drafting = [row for row in rows if row["lane"] != "Baseline"]
    lost = next((row for row in drafting if row["speed-up"].label == "slower"), None)
    if lost is not None:
        return f"The gain ends at batch size {lost['batch']}: {lost['speed-up'].format()}."
    last = drafting[-1]
    words = "still gains" if last["speed-up"].label == "faster" else "is not clearly faster or slower"
    return f"Drafting {words} at batch size {last['batch']}: {last['speed-up'].format()}."
