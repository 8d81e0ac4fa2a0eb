"""Prompts of the suites: those of prompts.yaml for the embedded models, and those of a file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specdemo.core.safe_io import read_text
from specdemo.engine.comparison import MAX_PROMPT_CHARACTERS
from specdemo.presets.files import read_yaml

MOST = 10_000  # prompts of a file
FILE_BYTES = 16_000_000

_TEXTS: Any = read_yaml(Path(__file__).with_suffix(".yaml"))
PROMPTS, COPYING, CODE, EDITS = (tuple[str, ...](_TEXTS[kind]) for kind in ("stories", "copying", "code", "edits"))
OWN: Mapping[str, Mapping[str, Sequence[str]]] = {  # of models that were trained on one kind of text
    "stories": {"story": PROMPTS},
    "code": {"code": CODE, "code edit": EDITS},
}
# the lengths are coprime, so that each combination of words occurs once
NAMES = "Anna Ben Lily Max Mia Sam Tom".split()
ANIMALS = "bear bird cat cow dog duck fish fox frog horse mouse".split()
PLACES = "beach bridge farm forest garden hill house lake market park river school zoo".split()
THINGS = "ball bell boat book box cake coin drum flower hat key kite lamp map shell shoe stone".split()


def openings(count: int) -> list[str]:
    """Return openings of stories, up to 17,017 different ones."""
    return [
        f"{NAMES[n % len(NAMES)]} and a {ANIMALS[n % len(ANIMALS)]} went to the {PLACES[n % len(PLACES)]}. "
        f"They found a {THINGS[n % len(THINGS)]}, and"
        for n in range(count)
    ]


def read_questions(path: Path) -> dict[str, list[str]]:
    """Read prompts by category: from a `.jsonl` file the first turns of Spec-Bench's question_id, category, turns; else
    one per line, in the category that the file is named after. Raises ValueError with one line.
    """
    hint = "choose a question.jsonl, or a file with one prompt per line"
    lines = read_text(path, FILE_BYTES, hint).splitlines()
    of_bench = path.suffix == ".jsonl"
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ValueError(f"{path} contains no prompts; write one per line")
    if len(numbered) > MOST:
        raise ValueError(f"{path} contains {len(numbered)} prompts; the limit is {MOST}")
    questions: dict[str, list[str]] = {}
    for number, line in numbered:
        category, text = _question(path, number, line) if of_bench else (path.stem[:80], line)
        questions.setdefault(category, []).append(text)
    return questions


def _question(path: Path, number: int, line: str) -> tuple[str, str]:
    try:
        read = json.loads(line)
        text, category = read["turns"][0], read["category"]
        f"{text}{category}".encode()  # half of a surrogate pair is no text
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        text = category = None
    if not isinstance(text, str) or not isinstance(category, str) or not text.strip() or not category.strip():
        form = '{"question_id": 1, "category": "...", "turns": ["..."]}'
        raise ValueError(f"{path}, line {number}: not a question; it has the form {form}")
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise ValueError(
            f"{path}, line {number}: a question of {len(text):,} characters; the limit is {MAX_PROMPT_CHARACTERS:,}"
        )
    return category.strip()[:80], text
