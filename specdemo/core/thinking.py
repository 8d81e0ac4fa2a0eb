"""Thinking modes of chat templates."""

from typing import Literal

Thinking = Literal["default", "on", "off"]
NAMES = ("enable_thinking", "thinking")  # of Qwen3, GLM, Gemma and others; of DeepSeek V3.1 and Granite


def template_arguments(mode: Thinking) -> dict[str, bool]:
    """Return the arguments of a chat template for a mode; none for the template's default."""
    return {} if mode == "default" else dict.fromkeys(NAMES, mode == "on")
