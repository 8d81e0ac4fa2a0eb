import ast
import random
import re

import pytest

from recipes.code_edits import Edit, edit
from tests.recipes.test_code_corpus import FUNCTION


@pytest.mark.parametrize("seed", range(60))
def test_edit_states_its_instruction_and_parses(seed: int) -> None:
    edited = edit(FUNCTION, random.Random(seed))
    if edited is None:  # the text is too long for the drawn edit
        return
    before, order, after = re.fullmatch(r"(.*?)\n\n\n# (.*?)\n(.*)", edited, re.DOTALL).groups()  # type: ignore[union-attr]
    assert before == FUNCTION.strip() and after != before
    ast.parse(after)
    for old, new in re.findall(r"Rename (?!the)(\w+) to (\w+)\.", order):
        assert not re.search(rf"\b{old}\b(?!.*\")", after.replace("Read the first rows", "")) and new in after
    for new in re.findall(r"Rename the function to (\w+)\.", order):
        assert f"def {new}(" in after
    for returned in re.findall(r"Add types: .*? -> (.*?)\.", order):
        assert f") -> {returned}:" in after
    if "Remove the docstring" in order:
        assert '"""' not in after


def test_renaming_keeps_attributes_and_strings() -> None:
    made = Edit('def f(data):\n    self.data = data + "data"\n', random.Random(0))
    made.replace("data", "row")
    assert made.source == 'def f(row):\n    self.data = row + "data"\n'
