"""Suites of one lane along an axis: batch size, prompt length, temperature, thinking of a chat model."""

import argparse
from dataclasses import replace
from inspect import getsource
from math import log
from operator import itemgetter

from specdemo.analysis.diagnose import SMALLEST_GAIN
from specdemo.bench.base import Axis, LaneSuite, Report, Stop, new_tokens_field
from specdemo.bench.prompts import openings
from specdemo.bench.result import Result, Row
from specdemo.core.generation import Thinking
from specdemo.core.settings import setting
from specdemo.core.trace import BASELINE_LANE
from specdemo.models.ref import ModelRef
from specdemo.presets.limits import LIMITS
from specdemo.presets.pair import add_pair

BATCHES = (1, 2, 4, 8, 16, 32)
PROMPT_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
CONTEXTS = tuple(2**n for n in range(6, 21))  # tokens
PLACES = (1.0, 0.9, 0.8)  # of each context, where an answer begins: the next tokens differ in how well they are guessed
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
        from specdemo.bench.sweeps import along_axis, first_lane, room
        from specdemo.models.text import encode, tokenizer_of

        target, lanes = first_lane(self)
        texts = [encode(tokenizer_of(target), text, room(target, self)) for text in self.texts]
        width = min(map(len, texts))
        points = []
        for size in BATCHES:
            rows = [texts[i % len(texts)][-width:] for i in range(size)]
            points.append(AxisPoint(size, [torch.tensor(rows, device=target.device)]))
        result = along_axis(self, target, lanes, points, report, cancelled)
        return replace(result, remarks=[_gain(result.rows, "batch", "batch size"), *result.remarks])


def _gain(rows: list[Row], axis: str, title: str) -> str:
    """Return in words where on the axis the gain ends."""
    drafting = [row for row in rows if row["lane"] != BASELINE_LANE]
    lost = next((row for row in drafting if row["speed-up"].label == "slower"), None)
    if lost is not None:
        return f"The gain ends at {title} {lost[axis]}: {lost['speed-up'].format()}."
    last = drafting[-1]
    words = "still gains" if last["speed-up"].label == "faster" else "is not clearly faster or slower"
    return f"Drafting {words} at {title} {last[axis]}: {last['speed-up'].format()}."


class PromptLength(LaneSuite):
    """Measures the first lane of a preset after prompts of increasing length, up to the context limit."""

    name = "prompt"
    order = 4
    title = "Prompt length"
    question = "What does a long prompt change? Runs the preset's first lane after prompts of increasing length."
    axis = Axis("prompt tokens", "prompt length", "tokens", doubling=True)

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.measure import AxisPoint, windows
        from specdemo.bench.sweeps import along_axis, first_lane, room
        from specdemo.models.text import encode, tokenizer_of

        target, lanes = first_lane(self)
        text = encode(tokenizer_of(target), " ".join(self.texts), LIMITS.prompt)
        lengths = [n for n in PROMPT_LENGTHS if n <= room(target, self)]
        points = [AxisPoint(n, windows(text, n, TEXTS_PER_LENGTH, target.device)) for n in lengths]
        result = along_axis(self, target, lanes, points, report, cancelled)
        remark = "The prompts are windows of the concatenated texts of the suite, repeated if necessary."
        return replace(result, remarks=[remark, *result.remarks])


class Context(LaneSuite):
    """Measures the first lane of a preset along one long text, which is read once: at the longest context first."""

    name = "context"
    order = 5
    title = "Context"
    question = "Do long texts still gain? Runs the preset's first lane at growing lengths of one long text."
    axis = Axis("context", "length of the context", "tokens", doubling=True)
    target: str | None = setting(None)
    model: str | None = setting(None, "Drafter of that target; default: n-gram lookup.")
    new_tokens: int = new_tokens_field(32)
    longest: int = setting(8192, "Longest context in tokens.", 16, 1 << 20)

    def run(self, report: Report, cancelled: Stop) -> Result:
        import torch

        from specdemo.bench.measure import AxisPoint
        from specdemo.bench.sweeps import along_axis, first_lane, room
        from specdemo.models.text import encode, tokenizer_of

        if self.model and not self.target:
            raise ValueError("the drafter of a preset is part of it; name its target too (--target)")
        own = add_pair(ModelRef(self.target), ModelRef(self.model) if self.model else None) if self.target else None
        suite = self.changed(preset=own.id) if own else self
        target, lanes = first_lane(suite, cached=True)
        text = " ".join(self.prompts or [_long_text(target.name)])
        ids = encode(tokenizer_of(target), text, LIMITS.prompt)
        most = min(self.longest, room(target, self), len(ids))
        lengths = [n for n in CONTEXTS if n < most] + [most]
        places = {n: [int(share * n) for share in PLACES] for n in reversed(lengths)}  # where the cache is only cut
        cut = {n: [torch.tensor([ids[:end]], device=target.device) for end in ends] for n, ends in places.items()}
        points = [AxisPoint(n, texts) for n, texts in cut.items()]
        result = along_axis(suite, target, lanes, points, report, cancelled)
        rows = [{name: row[name] for name in row if name != "TTFT ms"} for row in result.rows]
        rows.sort(key=itemgetter("context"))
        return replace(result, rows=rows, remarks=[_crossing(rows), *result.remarks])


def _long_text(target: str) -> str:
    """Return a long text of the kind that a target continues: stories, or source code of Python."""
    return " ".join(openings(2000)) if target.startswith("stories") else getsource(argparse)


def _crossing(rows: list[Row]) -> str:
    """Return from which length on plain decoding is faster, between the last length that gains and the next one."""
    gains = [(row["context"], row["speed-up"]) for row in rows if row["lane"] != BASELINE_LANE]
    lost = next((place for place in range(len(gains)) if all(gain.value < 1.0 for _, gain in gains[place:])), None)
    if lost is None or gains[-1][1].value * SMALLEST_GAIN > 1.0:
        return _gain(rows, "context", "a context of")
    if not lost:
        return "Plain decoding is faster at every length."
    (before, gain), (after, loss) = gains[lost - 1 : lost + 1]
    length = before * (after / before) ** (log(gain.value) / log(gain.value / loss.value))
    speeds = f"{gain.format()} at {before:,}, {loss.format()} at {after:,}"
    return f"From about {float(f'{length:.2g}'):,.0f} tokens on, plain decoding is faster: {speeds}."


class Temperature(LaneSuite):
    """Measures the first lane of a preset at increasing temperatures, with three ways to draft and verify.

    Sampled drafts are verified token by token and as a block; the third lane drafts the most likely tokens.
    """

    name = "temperature"
    order = 6
    title = "Temperature"
    question = (
        "What does sampling cost? Runs the preset's first lane at increasing temperatures, with sampled and greedy"
        " drafts."
    )
    axis = Axis("temperature", "temperature", "temperature of target and sampled drafts")

    def run(self, report: Report, cancelled: Stop) -> Result:
        import torch

        from specdemo.bench.measure import AxisPoint
        from specdemo.bench.sweeps import Likeliest, along_axis, first_lane, room
        from specdemo.core.block import Block
        from specdemo.core.sampling import Sampling
        from specdemo.models.text import encode, tokenizer_of

        target, lanes = first_lane(self)
        (baseline, plain), (lane, sampled) = lanes.items()
        lanes = {
            baseline: plain,
            f"{lane}, drawn": sampled,
            f"{lane}, drawn, block": replace(sampled, accept=Block()),
            f"{lane}, likeliest": replace(sampled, drafter=Likeliest(sampled.drafter)),
        }
        texts = [encode(tokenizer_of(target), text, room(target, self)) for text in self.texts]
        prompts = [torch.tensor([ids], device=target.device) for ids in texts]
        points = [AxisPoint(t, prompts, Sampling(t)) for t in TEMPERATURES]
        return along_axis(self, target, lanes, points, report, cancelled)


class ThinkingMode(LaneSuite):
    """Measures the first lane of a preset on the texts as chat messages, with the target's thinking on and off."""

    name = "thinking"
    order = 7
    title = "Thinking"
    question = "Does the drafter follow the target's thoughts? Runs the preset's first lane with thinking on and off."
    axis = Axis("thinking", "thinking", "thinking of the target")

    def run(self, report: Report, cancelled: Stop) -> Result:
        import torch

        from specdemo.bench.measure import AxisPoint
        from specdemo.bench.sweeps import along_axis, first_lane, room
        from specdemo.models.text import encode, has_thinking_modes, tokenizer_of

        target, lanes = first_lane(self)
        modes: tuple[Thinking, ...] = ("on", "off")
        if not has_thinking_modes(tokenizer_of(target)):
            raise ValueError(f"{target.name} has no thinking mode; choose the preset of a model that can think")

        def prompt(text: str, mode: Thinking) -> torch.Tensor:
            message = {"role": "user", "content": text}
            ids = encode(tokenizer_of(target), [message], room(target, self), mode)
            return torch.tensor([ids], device=target.device)

        points = [AxisPoint(mode, [prompt(text, mode) for text in self.texts]) for mode in modes]
        return along_axis(self, target, lanes, points, report, cancelled)
