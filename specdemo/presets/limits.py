"""What one run, sweep or page may ask for."""

from dataclasses import dataclass

from specdemo.engine.comparison import LANES, PROMPT, Comparison, Lane, bounds


@dataclass(frozen=True, slots=True)
class Limits:
    """The greatest values; `lanes` counts the baseline, `prompt` characters."""

    max_new_tokens: int = bounds(Comparison, "max_new_tokens")[1]
    k: int = bounds(Lane, "k")[1]
    lanes: int = LANES + 1
    prompt: int = PROMPT
    sweep_repeats: int = 10


LIMITS = Limits()
PUBLIC = Limits(max_new_tokens=256, k=10, lanes=3, prompt=4000, sweep_repeats=3)
