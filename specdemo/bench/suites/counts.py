"""Suites that count and time nothing: acceptance by position in the text, comparison of distributions."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from specdemo.bench.base import PRESET, Axis, Decoding, NewTokens, OfPreset, Once, Report, Stop
from specdemo.bench.result import TOKEN, Result
from specdemo.core.settings import Setting
from specdemo.presets.files import Preset

PACKAGE = Path(__file__).resolve().parents[2]  # its Python files are texts that no shipped model was trained on


class TextPosition(Decoding):
    """Counts accepted draft tokens at increasing positions in a text, up to the context limit, for every lane of a
    preset.

    All prompts end at the same places of Python files of specdemo and have more or less text before them, so that only
    the context differs. Nothing is timed.
    """

    name = "position"
    order = 4
    axis = Axis("position", "position in the text", "tokens before the draft", doubling=True)
    repeats: Once = 1
    new_tokens: NewTokens = 24
    preset: Annotated[str, PRESET] = "embedded-code"
    places: Annotated[int, Field(ge=2, le=200), Setting("Places in files.")] = 16

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.positions import positions

        return positions(self, self.preset, self.files(), self.places, report, cancelled)

    def files(self) -> list[Path]:
        """Return the Python files of the package, the largest first."""
        return sorted(PACKAGE.rglob("*.py"), key=lambda file: (-file.stat().st_size, file.name))


class Losslessness(OfPreset):
    """Tests whether the output of a preset's first lane has the same distribution as plain decoding."""

    name = "losslessness"
    order = 11
    axis = Axis(TOKEN, "token", "share of the continuations")
    preset: Annotated[str | Preset, PRESET] = "embedded-sampling"

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.losslessness import losslessness

        return losslessness(self, report, cancelled)
