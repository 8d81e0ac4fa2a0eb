"""Checks of a tokenizer.json before it is loaded.

Normalizers, padding and decoders can turn a short text into one that fills the memory, which ends the process. Such
files are rejected. The running time of their regular expressions cannot be checked.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from specdemo.core.json_limits import JsonLimits
from specdemo.core.safe_io import read_json

LIMITS = JsonLimits(64_000_000, 8_000_000, 1_000_000)  # twice the largest known: 262,000 entries, 514,000 merges
MAX_TEXT = 4096  # characters of a vocabulary entry, and of any other text in the file
MAX_STEPS = 32  # of a normalizer or pre-tokenizer
MAX_DECODERS = 8  # each could double a text
MAX_GROWTH = 1024  # characters that a normalizer makes from one, if its steps multiply
MAX_PADDING = 1 << 20
CHARACTER_MAP = "precompiled_charsmap"  # a long text in public files
NESTED = ("normalizers", "pretokenizers", "decoders")

Step = dict[str, Any]


def check_tokenizer(path: Path) -> None:
    """Raise ValueError, one line, for a tokenizer.json that is damaged, too large or could fill the memory."""
    content = read_json(path, LIMITS)
    try:
        problem = next(_problems(content), None)
    except (AttributeError, TypeError):
        problem = "is damaged"
    if problem:
        raise ValueError(f"its tokenizer {problem}; choose another model")


def _problems(content: Step) -> Iterator[str]:
    longest = max(map(len, _texts(content)), default=0)
    if longest > MAX_TEXT:
        yield f"has an entry of {longest:,} characters"
    for part in ("normalizer", "pre_tokenizer"):
        steps = list(_steps(content.get(part)))
        if len(steps) > MAX_STEPS or prod(map(_growth, steps)) > MAX_GROWTH:
            yield f"has an unsupported {part}, which could make a text much longer"
    padding = content.get("padding") or {}
    strategy = padding.get("strategy")
    fixed = strategy.get("Fixed", 0) if isinstance(strategy, dict) else 0
    if max(fixed, padding.get("pad_to_multiple_of") or 0) > MAX_PADDING:
        yield f"pads to more than {MAX_PADDING:,} tokens"
    decoders = list(_steps(content.get("decoder")))
    if len(decoders) > MAX_DECODERS or any("Regex" in s.get("pattern", {}) or _growth(s) > 1 for s in decoders):
        yield "has an unsupported decoder, whose output could grow without limit"


def _texts(content: Step) -> Iterator[str]:
    """Yield all texts except the merges, which consist of vocabulary entries."""
    model = dict(content.get("model") or {})
    model.pop("merges", None)
    vocab = model.pop("vocab", None) or ()
    yield from (entry[0] if isinstance(entry, list) else entry for entry in vocab)
    yield from _strings({**content, "model": model})


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key != CHARACTER_MAP:
                yield key
                yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _steps(component: Step | None) -> Iterator[Step]:
    """Yield the steps of a component, of which sequences may be nested."""
    if component:
        nested = [part for key in NESTED for part in component.get(key) or ()]
        if not nested:
            yield component
        for part in nested:
            yield from _steps(part)


def _growth(step: Step) -> float:
    """Return the largest number of characters that a step makes from one. A regular expression may match no text."""
    pattern, added = step.get("pattern") or {}, len(step.get("content") or "")
    if not added:
        return 1.0
    return 1.0 + added if "Regex" in pattern else max(1.0, added / max(1, len(pattern.get("String", ""))))
