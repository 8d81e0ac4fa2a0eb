"""Names of the number formats of weights and KV cache."""

from typing import TypeVar

SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
NAMES = f"auto, {', '.join(f'{name} ({short})' for short, name in SHORT.items())}"

Value = TypeVar("Value")


def dtype_name(name: Value) -> Value | str:
    """Return torch's name of a dtype for its short name (`bf16` -> `bfloat16`), and any other value unchanged."""
    return SHORT.get(name, name) if isinstance(name, str) else name
