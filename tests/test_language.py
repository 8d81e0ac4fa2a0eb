"""Names and docstrings in plain English and the terms of docs/glossary.md."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ["specdemo", "benchmarks", "recipes", "examples", "tests"]
PRIVATE = set(
    "said told tell tells says say spoken hasten untake behind beside foretold foreseen beforehand alike unlike heard "
    "surety stray anew lent kept let judge judged asked ask theirs ours whole whose begun began scene dies held enough "
    "untold odd wanted apart beyond".split()
)
FRAGMENT = re.compile(r"(Of|As|What|Whether|Why|How|Who|Those|That|Its|Their|Where|Which|Behind|Beside|So)\b")
ODD = re.compile(
    r"\b(said|told|tells|foretold|behind|beside|anew|alike|whoever|whatever|nobody|so many|so much|stranger|lent|"
    r"quicken|hasten|cure)\b",
    re.IGNORECASE,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def nodes(folder: str) -> Iterator[ast.AST]:
    for file in (ROOT / folder).rglob("*.py"):
        if "embedded" not in file.parts:
            yield from ast.walk(ast.parse(file.read_text(encoding="utf-8")))


def names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node defines, class names as words with underscores."""
    if isinstance(node, FUNCTIONS):
        yield node.name
        yield from (a.arg for a in node.args.args + node.args.kwonlyargs)
    elif isinstance(node, ast.ClassDef):
        yield re.sub(r"(?<!^)(?=[A-Z])", "_", node.name)
    elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
        yield node.id if isinstance(node, ast.Name) else node.attr


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_and_docstrings_are_plain_english(folder):
    found = list(nodes(folder))
    defined = [name for node in found for name in names(node)]
    private = [name for name in defined if PRIVATE & set(name.strip("_").lower().split("_"))]
    assert len(private) <= 0.006 * len(defined), sorted(set(private))
    documented = (ast.Module, ast.ClassDef, *FUNCTIONS)
    texts = [text for node in found if isinstance(node, documented) and (text := ast.get_docstring(node))]
    fragments, odd = filter(FRAGMENT.match, texts), filter(ODD.search, texts)
    for wrong, limit in ((list(fragments), 0.02), (list(odd), 0.01)):
        assert len(wrong) <= limit * len(texts), [text.splitlines()[0] for text in wrong]
    classes = Counter(node.name for node in found if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1] == []
