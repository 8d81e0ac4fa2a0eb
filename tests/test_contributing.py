"""The diffs in CONTRIBUTING.md, which must apply to the current code."""

import re
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL)
BEFORE = {
    diff: [line[1:].strip() for line in diff.splitlines() if line[:1] in " -" and line[1:].strip()] for diff in DIFFS
}


@pytest.fixture(scope="module")
def sources():
    files = chain.from_iterable((ROOT / "specdemo").rglob(f"*.{kind}") for kind in ("py", "js", "html"))
    return ["\n".join(line.strip() for line in file.read_text(encoding="utf-8").splitlines()) for file in files]


@pytest.mark.parametrize("diff", [diff for diff, lines in BEFORE.items() if lines])
def test_lines_that_a_diff_keeps_or_removes_exist(diff, sources):
    assert any("\n".join(BEFORE[diff]) in source for source in sources)
