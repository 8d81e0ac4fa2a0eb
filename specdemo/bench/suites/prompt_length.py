"""Prompt length."""

from dataclasses import replace

from specdemo.bench.base import Axis, Laned, Report, Stop
from specdemo.bench.result import Result
from specdemo.presets.limits import LIMITS

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TEXTS = 3  # prompts per length


class PromptLength(Laned):
    """Measures the first lane of a preset after prompts of increasing length, up to the context limit."""

    name = "prompt"
    order = 4
    title = "Prompt length"
    question = "What does a long prompt change? Runs the preset's first lane after prompts of increasing length."
    axis = Axis("prompt tokens", "prompt length", "tokens", doubling=True)
    companion = "position"

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.measure import Place, windows
        from specdemo.bench.sweeps import along_axis, first_lane, room, tokenizer
        from specdemo.models.text import encode

        target, lanes = first_lane(self, self.preset)
        text = encode(tokenizer(target), " ".join(self.texts), LIMITS.prompt)
        lengths = [n for n in LENGTHS if n <= room(target, self)]
        places = [Place(n, windows(text, n, TEXTS, target.device)) for n in lengths]
        found = along_axis(self, target, lanes, places, report, cancelled)
        remark = "The prompts are windows of the concatenated texts of the suite, repeated if necessary."
        return replace(found, remarks=[remark, *found.remarks])
