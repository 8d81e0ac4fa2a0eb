"""Sampling temperature."""

from dataclasses import replace

from specdemo.bench.base import Axis, Laned, Report, Stop
from specdemo.bench.result import Result

TEMPERATURES = (0.0, 0.5, 0.75, 1.0, 1.5)


class Temperature(Laned):
    """Measures the first lane of a preset at increasing temperatures, with three ways to draft and verify.

    Sampled drafts are verified token by token and as a block; the third lane drafts the most likely tokens.
    """

    name = "temperature"
    order = 5
    title = "Temperature"
    question = (
        "What does sampling cost? Runs the preset's first lane at increasing temperatures, with sampled and greedy"
        " drafts."
    )
    axis = Axis("temperature", "temperature", "temperature of target and sampled drafts")

    def run(self, report: Report, cancelled: Stop) -> Result:
        import torch

        from specdemo.bench.measure import Place
        from specdemo.bench.sweeps import Likeliest, along_axis, first_lane, room, tokenizer
        from specdemo.core.block import Block
        from specdemo.core.sampling import Sampling
        from specdemo.models.text import encode

        target, lanes = first_lane(self, self.preset)
        (baseline, plain), (lane, drawn) = lanes.items()
        lanes = {
            baseline: plain,
            f"{lane}, drawn": drawn,
            f"{lane}, drawn, block": replace(drawn, accept=Block()),
            f"{lane}, likeliest": replace(drawn, drafter=Likeliest(drawn.drafter)),
        }
        texts = [encode(tokenizer(target), text, room(target, self)) for text in self.texts]
        prompts = [torch.tensor([ids], device=target.device) for ids in texts]
        places = [Place(t, prompts, Sampling(t)) for t in TEMPERATURES]
        return along_axis(self, target, lanes, places, report, cancelled)
