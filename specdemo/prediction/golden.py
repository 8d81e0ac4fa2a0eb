"""Mean accepted lengths measured elsewhere: `golden_al_distribution` files of InferenceX (YAML), and results of
`vllm bench serve` (JSON). Needs no torch.

A golden file maps a model and a thinking mode to the mean accepted length per draft length k (tokens per target pass,
including the correction or bonus token). vLLM replays such a length as `synthetic_acceptance_length`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import yaml

from specdemo.core.atomic_io import write_text
from specdemo.core.json_limits import FILE_LIMITS, JsonLimits
from specdemo.core.safe_io import JsonObject, read_json
from specdemo.prediction.acceptance import LONGEST, Acceptance, of_lengths
from specdemo.presets.reading import read_yaml

MODES = {"thinking_on": "on", "thinking_off": "off"}
SERVE = "spec_decode_acceptance_length"  # key of a result of `vllm bench serve` with speculation
CURVES = 32  # largest number in a file


@dataclass(frozen=True, slots=True)
class Curve:
    """Mean accepted lengths of one model in one thinking mode, by draft length k.

    thinking: on, off, or empty if the file has no modes. rates: conditional acceptance rates by position, if known.
    """

    model: str
    thinking: str
    lengths: Mapping[int, float]
    rates: tuple[float, ...] = ()

    @property
    def title(self) -> str:
        """Return the model and the thinking mode."""
        return f"{self.model}, thinking {self.thinking}" if self.thinking else self.model

    def length(self, k: int) -> float:
        """Return the mean accepted length at k. Raises ValueError if it was not measured."""
        if k not in self.lengths:
            raise ValueError(
                f"{self.title} has no length for k = {k}; choose one of {', '.join(map(str, self.lengths))}"
            )
        return self.lengths[k]

    def acceptance(self) -> Acceptance:
        """Return the acceptance rates for predictions."""
        return of_lengths(self.lengths, self.rates)


def read_curves(path: Path, limits: JsonLimits = FILE_LIMITS) -> list[Curve]:
    """Return the curves of a file. Raises ValueError, one line with the file's name."""
    try:
        with path.open("rb") as file:
            is_json = file.read(64).lstrip()[:1] == b"{"
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}; choose another file") from None
    data = None if is_json else read_yaml(path)
    result = read_json(path, limits) if is_json else {}
    try:
        return [_served(result)] if is_json else golden_curves(data)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def read_curve(text: str) -> Curve:
    """Return the curve of `FILE`, `FILE:on` or `FILE:off`. Raises ValueError with one line if it is not unique."""
    name, _, mode = text.rpartition(":")
    if not name or mode not in ("on", "off"):
        name, mode = text, ""
    curves = read_curves(Path(name))
    found = [curve for curve in curves if not mode or curve.thinking == mode]
    if len(found) == 1:
        return found[0]
    titles = "; ".join(curve.title for curve in curves)
    if not found:
        raise ValueError(f"{name} has no curve with thinking {mode}, only {titles}")
    raise ValueError(f"{name} has several curves ({titles}); add :on or :off to the file, or keep one model in it")


def write_golden(path: Path, model: str, thinking: str, lengths: Mapping[int, float], facts: Sequence[str]) -> None:
    """Write a golden file with one curve. facts: lines of comment with the conditions of the measurement."""
    comment = "".join(f"# {' '.join(fact.split())}\n" for fact in facts)
    mode = next(name for name, value in MODES.items() if value == thinking)
    curve = {model: {mode: {k: round(length, 2) for k, length in sorted(lengths.items())}}}
    write_text(path, comment + yaml.safe_dump(curve, sort_keys=False, allow_unicode=True))


def golden_curves(data: object) -> list[Curve]:
    """Return the curves of a golden file's data. Raises ValueError, one line, for anything else."""
    if not isinstance(data, dict):
        raise ValueError("expected a model with thinking_on or thinking_off and a length per k")
    curves = []
    for model, modes in data.items():
        if str(model).startswith("_"):  # metadata
            continue
        for mode, lengths in modes.items() if isinstance(modes, dict) else ():
            if mode not in MODES:
                raise ValueError(f"unknown mode {str(mode)[:40]!r}; expected thinking_on or thinking_off")
            curves.append(Curve(str(model)[:200], MODES[mode], _lengths(lengths)))
    if not 0 < len(curves) <= CURVES:
        raise ValueError(f"expected 1 to {CURVES} curves: a model with thinking_on or thinking_off and a length per k")
    return curves


def _lengths(lengths: object) -> dict[int, float]:
    if not isinstance(lengths, dict) or not lengths:
        raise ValueError("expected a mean accepted length per draft length k")
    for k, length in lengths.items():
        if type(k) is not int or not 1 <= k <= LONGEST:
            raise ValueError(f"draft lengths must be whole numbers from 1 to {LONGEST}, not {str(k)[:40]!r}")
        if not _is_number(length) or not 1.0 <= length <= k + 1.0:
            raise ValueError(f"the length at k = {k} must be from 1 to {k + 1}, not {str(length)[:40]!r}")
    return {k: float(lengths[k]) for k in sorted(lengths)}


def _served(data: JsonObject) -> Curve:
    """Return the curve of one result of `vllm bench serve`: a single k."""
    length, shares = data.get(SERVE), data.get("spec_decode_per_position_acceptance_rates")
    if not _is_number(length):
        raise ValueError(f"no {SERVE}: run `vllm bench serve --save-result` against a server with speculation")
    drafts, drafted = data.get("spec_decode_num_drafts"), data.get("spec_decode_draft_tokens")
    known = isinstance(shares, list) and all(_is_number(share) and 0.0 <= share <= 1.0 for share in shares)
    reached = [float(share) for share in shares] if known and shares else []
    k = len(reached)
    if not k and _is_number(drafts) and _is_number(drafted) and drafts:
        k = round(drafted / drafts)
    rates = [min(b / a, 1.0) if a else 0.0 for a, b in zip([1.0, *reached], reached, strict=False)]
    return Curve(str(data.get("model_id", "model"))[:200], "", _lengths({k: length}), tuple(rates))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
