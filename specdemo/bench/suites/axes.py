"""Suites of one lane along an axis: batch size, prompt length, temperature, thinking of a chat model."""

from dataclasses import replace

from specdemo.bench.base import Axis, LaneSuite, Report, Stop
from specdemo.bench.result import Result, Row
from specdemo.core.generation import Thinking
from specdemo.core.trace import BASELINE_LANE
from specdemo.presets.limits import LIMITS

BATCHES = (1, 2, 4, 8, 16, 32)
PROMPT_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TEXTS_PER_LENGTH = 3  # prompts per length
TEMPERATURES = (0.0, 0.5, 0.75, 1.0, 1.5)


class Batch(LaneSuite):
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

        from specdemo.bench.measure import AxisPoint
        from specdemo.bench.sweeps import along_axis, first_lane, room, tokenizer
        from specdemo.models.text import encode

        target, lanes = first_lane(self, self.preset)
        texts = [encode(tokenizer(target), text, room(target, self)) for text in self.texts]
        width = min(map(len, texts))
        points = []
        for size in BATCHES:
            rows = [texts[i % len(texts)][-width:] for i in range(size)]
            points.append(AxisPoint(size, [torch.tensor(rows, device=target.device)]))
        result = along_axis(self, target, lanes, points, report, cancelled)
        return replace(result, remarks=[_gain(result.rows), *result.remarks])


def _gain(rows: list[Row]) -> str:
    """Return in words at which batch size the gain ends."""
    drafting = [row for row in rows if row["lane"] != BASELINE_LANE]
    lost = next((row for row in drafting if row["speed-up"].label == "slower"), None)
    if lost is not None:
        return f"The gain ends at batch size {lost['batch']}: {lost['speed-up'].format()}."
    last = drafting[-1]
    words = "still gains" if last["speed-up"].label == "faster" else "is not clearly faster or slower"
    return f"Drafting {words} at batch size {last['batch']}: {last['speed-up'].format()}."


class PromptLength(LaneSuite):
    """Measures the first lane of a preset after prompts of increasing length, up to the context limit."""

    name = "prompt"
    order = 4
    title = "Prompt length"
    question = "What does a long prompt change? Runs the preset's first lane after prompts of increasing length."
    axis = Axis("prompt tokens", "prompt length", "tokens", doubling=True)

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.measure import AxisPoint, windows
        from specdemo.bench.sweeps import along_axis, first_lane, room, tokenizer
        from specdemo.models.text import encode

        target, lanes = first_lane(self, self.preset)
        text = encode(tokenizer(target), " ".join(self.texts), LIMITS.prompt)
        lengths = [n for n in PROMPT_LENGTHS if n <= room(target, self)]
        points = [AxisPoint(n, windows(text, n, TEXTS_PER_LENGTH, target.device)) for n in lengths]
        result = along_axis(self, target, lanes, points, report, cancelled)
        remark = "The prompts are windows of the concatenated texts of the suite, repeated if necessary."
        return replace(result, remarks=[remark, *result.remarks])


class Temperature(LaneSuite):
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

        from specdemo.bench.measure import AxisPoint
        from specdemo.bench.sweeps import Likeliest, along_axis, first_lane, room, tokenizer
        from specdemo.core.block import Block
        from specdemo.core.sampling import Sampling
        from specdemo.models.text import encode

        target, lanes = first_lane(self, self.preset)
        (baseline, plain), (lane, sampled) = lanes.items()
        lanes = {
            baseline: plain,
            f"{lane}, drawn": sampled,
            f"{lane}, drawn, block": replace(sampled, accept=Block()),
            f"{lane}, likeliest": replace(sampled, drafter=Likeliest(sampled.drafter)),
        }
        texts = [encode(tokenizer(target), text, room(target, self)) for text in self.texts]
        prompts = [torch.tensor([ids], device=target.device) for ids in texts]
        points = [AxisPoint(t, prompts, Sampling(t)) for t in TEMPERATURES]
        return along_axis(self, target, lanes, points, report, cancelled)


class ThinkingMode(LaneSuite):
    """Measures the first lane of a preset on the texts as chat messages, with the target's thinking on and off."""

    name = "thinking"
    order = 6
    title = "Thinking"
    question = "Does the drafter follow the target's thoughts? Runs the preset's first lane with thinking on and off."
    axis = Axis("thinking", "thinking", "thinking of the target")

    def run(self, report: Report, cancelled: Stop) -> Result:
        import torch

        from specdemo.bench.measure import AxisPoint
        from specdemo.bench.sweeps import along_axis, first_lane, room, tokenizer
        from specdemo.models.text import encode, has_thinking_modes

        target, lanes = first_lane(self, self.preset)
        modes: tuple[Thinking, ...] = ("on", "off")
        if not has_thinking_modes(tokenizer(target)):
            raise ValueError(f"{target.name} has no thinking mode; choose the preset of a model that can think")

        def prompt(text: str, mode: Thinking) -> torch.Tensor:
            message = {"role": "user", "content": text}
            ids = encode(tokenizer(target), [message], room(target, self), mode)
            return torch.tensor([ids], device=target.device)

        points = [AxisPoint(mode, [prompt(text, mode) for text in self.texts]) for mode in modes]
        return along_axis(self, target, lanes, points, report, cancelled)
