"""Values of settings of generation: sampling, number formats, thinking modes. Importing this needs no torch."""

from dataclasses import dataclass
from typing import Literal, TypeVar

SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPES = f"auto, {', '.join(f'{name} ({short})' for short, name in SHORT.items())}"
Thinking = Literal["default", "on", "off"]  # mode of a chat template
THINKING = ("enable_thinking", "thinking")  # of Qwen3, GLM, Gemma and others; of DeepSeek V3.1 and Granite

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings. Temperature 0 is greedy: a one-hot on the argmax, and the other settings have no effect.

    They apply in the order of transformers: temperature, top-k, top-p, min-p.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off

    def __post_init__(self) -> None:
        if self.temperature != 0.0 and not 0.001 <= self.temperature <= 100.0:  # below, logits overflow float32
            raise ValueError(f"temperature must be 0 (greedy) or between 0.001 and 100, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1 (off), not {self.top_p}")
        if not 0.0 <= self.min_p < 1.0:
            raise ValueError(f"min_p must be at least 0 (off) and below 1, not {self.min_p}")

    @property
    def greedy(self) -> bool:
        """Return True for temperature 0."""
        return self.temperature == 0.0


def dtype_name(name: Value) -> Value | str:
    """Return torch's name of a dtype for its short name (`bf16` -> `bfloat16`), and any other value unchanged."""
    return SHORT.get(name, name) if isinstance(name, str) else name


def template_arguments(mode: Thinking) -> dict[str, bool]:
    """Return the arguments of a chat template for a mode; none for the template's default."""
    return {} if mode == "default" else dict.fromkeys(THINKING, mode == "on")
