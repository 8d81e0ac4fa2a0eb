"""Prompts of the suites: built-in ones for the embedded models, and those of a file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from specdemo.core.safe_io import read_text

MOST = 10_000  # prompts of a file
FILE_BYTES = 16_000_000
LONGEST = 100_000  # characters of a prompt

PROMPTS = (
    "Once upon a time, there was a girl named Sue. She had a big kite. One windy day,",
    "Tom and his dog went to the beach. They found a shiny shell in the sand. Tom said,",
    "There was a little bear who could not sleep. He asked his mom,",
    "One day, Anna saw a frog sitting on a rock by the pond. The frog was sad because",
    "Max liked to build tall towers with his blocks. His sister wanted to play too, but",
    "In a small house near the woods lived an old man and his cat. Every morning they",
    "Lily baked cookies with her grandma. They smelled so good that",
    "The red truck was stuck in the mud. All the animals came to help.",
)
COPYING = (
    "Tom had a red ball. He played with it in the park. A big dog took the ball and ran away. Tom was sad. Then the dog"
    " came back and gave him the ball.\n\nTell it again with Ben, not Tom.\n\n",
    "Mia saw a small bird in the garden. The bird could not fly. Mia took it home and gave it some bread. Soon the bird"
    " was well again.\n\nTell it again with Anna, not Mia.\n\n",
    "Sam and his mom went to the shop. They wanted to buy a cake. The cake was big and sweet. Sam was very happy.\n\n"
    "Tell it again with Max, not Sam.\n\n",
    "One day, Lily found a key in the sand. She looked for a door. The door was in an old tree. Inside she saw a tiny"
    " house.\n\nTell it again with Sue, not Lily.\n\n",
)
CODE = (
    'def read_config(path):\n    """Read the configuration file."""',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
    'def test_name(name):\n    """Return True if the name is valid."""\n    if not isinstance(name, str):',
    "import os\nimport sys\n\n\ndef find_files(directory, pattern):",
    "class Response(Message):\n    def __init__(self, status, headers=None, body=None):",
    'def get_version(package):\n    """Return the installed version of a package."""\n    try:',
)
EDITS = (
    "def find_users(name, limit):\n    found = []\n    for user in load_users():\n        if user.name == name:\n"
    "            found.append(user)\n        if len(found) >= limit:\n            break\n    return found\n\n\n"
    "# Rename name to text. Add types: text: str, limit: int -> list[str].\n",
    'def parse_line(line, separator):\n    """Split a line into key and value."""\n    if separator not in line:\n'
    '        raise ValueError("missing separator")\n    key, value = line.split(separator, 1)\n'
    "    return key.strip(), value.strip()\n\n\n# Rename line to row.\n",
    "def write_lines(path, lines):\n    with open(path, 'w') as stream:\n        for line in lines:\n"
    "            stream.write(line + '\\n')\n    return len(lines)\n\n\n# Rename the function to save_lines.\n",
    "def count_words(text, limit):\n    counts = {}\n    for word in text.split():\n        if len(word) > 10:\n"
    "            continue\n        counts[word] = counts.get(word, 0) + 1\n    return counts\n\n\n"
    "# Use 20 instead of 10.\n",
)
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
    found: dict[str, list[str]] = {}
    for number, line in numbered:
        category, text = _question(path, number, line) if of_bench else (path.stem[:80], line)
        found.setdefault(category, []).append(text)
    return found


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
    if len(text) > LONGEST:
        raise ValueError(f"{path}, line {number}: a question of {len(text):,} characters; the limit is {LONGEST:,}")
    return category.strip()[:80], text
