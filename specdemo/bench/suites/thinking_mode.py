"""Thinking of a chat model."""

from specdemo.bench.base import Axis, Laned, Report, Stop
from specdemo.bench.result import Result
from specdemo.core.generation import Thinking


class ThinkingMode(Laned):
    """Measures the first lane of a preset on the texts as chat messages, with the target's thinking on and off."""

    name = "thinking"
    order = 6
    title = "Thinking"
    question = "Does the drafter follow the target's thoughts? Runs the preset's first lane with thinking on and off."
    axis = Axis("thinking", "thinking", "thinking of the target")

    def run(self, report: Report, cancelled: Stop) -> Result:
        import torch

        from specdemo.bench.measure import Place
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

        places = [Place(mode, [prompt(text, mode) for text in self.texts]) for mode in modes]
        return along_axis(self, target, lanes, places, report, cancelled)
