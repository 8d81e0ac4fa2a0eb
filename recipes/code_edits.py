"""Edits for the code corpus: a function, an instruction as a comment, and the edited function."""

import ast
import io
import random
import re
import textwrap
import tokenize
from dataclasses import dataclass, field

KINDS = ("str", "int", "bool", "float", "list[str]", "dict[str, str]", "Path", "bytes", "list[int]")
WORDS = (
    "value item result name path data text line key index count total size limit start end node entry row column field "
    "options config source target message buffer token record user request response handler state mode flag level"
).split()
LONGEST_EDIT = (250, 400, 700, 1200)  # characters of the function


@dataclass(slots=True)
class Edit:
    """A function's source during editing; `orders` lists the instructions applied so far."""

    source: str
    rng: random.Random
    orders: list[str] = field(default_factory=list)

    def names(self) -> list[str]:
        """Return parameters and assigned names that are not also attributes, keywords or foreign names."""
        tree = ast.parse(self.source)
        names = [n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)]
        names += [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        taken = {n.arg for n in ast.walk(tree) if isinstance(n, ast.keyword)} | {"self", "cls", "_"}
        return sorted(set(names) - taken)

    def rename(self) -> None:
        """Rename a parameter or a variable."""
        names = self.names()
        if not names:
            return
        old = self.rng.choice(names)
        new = self.rng.choice([word for word in WORDS if not re.search(rf"\b{word}\b", self.source)] or [f"{old}_2"])
        self.replace(old, new)
        self.orders.append(f"Rename {old} to {new}.")

    def rename_function(self) -> None:
        """Replace one word of the function's name."""
        found = re.search(r"def (\w+)\(", self.source)
        if not found or found[1].startswith("__"):
            return
        words = [word for word in found[1].split("_") if word] or ["run"]
        words[self.rng.randrange(len(words))] = self.rng.choice(WORDS)
        new = "_".join(words)
        self.replace(found[1], new)
        self.orders.append(f"Rename the function to {new}.")

    def replace(self, old: str, new: str) -> None:
        """Replace a name, but not attributes or parts of strings."""
        columns = []
        before = ""
        for token in tokenize.generate_tokens(io.StringIO(self.source).readline):
            if token.type == tokenize.NAME and token.string == old and before != ".":
                columns.append(token.start)
            before = token.string
        lines = self.source.split("\n")
        for row, column in reversed(columns):
            line = lines[row - 1]
            lines[row - 1] = line[:column] + new + line[column + len(old) :]
        self.source = "\n".join(lines)

    def add_types(self) -> None:
        """Add types to the parameters and the return value of a signature that has none."""
        function = ast.parse(self.source).body[0]
        head = re.match(r"(?:async )?def \w+\(([\w ,]*)\):\n", self.source)
        if not head or not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        names = [a.arg for a in function.args.args if a.arg not in ("self", "cls")]
        if not names:
            return
        kinds = {name: self.rng.choice(KINDS) for name in names}
        returned = self.rng.choice([*KINDS, "None"])
        listed = ", ".join(f"{a.arg}: {kinds[a.arg]}" if a.arg in kinds else a.arg for a in function.args.args)
        self.source = f"{self.source[: head.start(1)]}{listed}) -> {returned}:\n{self.source[head.end() :]}"
        typed = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
        self.orders.append(f"Add types: {typed} -> {returned}.")

    def change_constant(self) -> None:
        """Replace a number or a string everywhere in the function."""
        found = re.findall(r"(?<![\w.\"'])\d+(?![\w.\"'])|\"[a-z]+\"|'[a-z]+'", self.source)
        if not found:
            return
        old = self.rng.choice(found)
        quote = old[0] if old[0] in "\"'" else ""
        new = f"{quote}{self.rng.choice(WORDS)}{quote}" if quote else str(self.rng.randrange(2, 100))
        self.source = self.source.replace(old, new) if quote else re.sub(rf"(?<![\w.]){old}(?![\w.])", new, self.source)
        self.orders.append(f"Use {new} instead of {old}.")

    def drop_docstring(self) -> None:
        """Remove the docstring."""
        shorter = re.sub(r"\n +\"\"\"[^\"\n]*\"\"\"(?=\n +\w)", "", self.source, count=1)
        if shorter != self.source:
            self.source = shorter
            self.orders.append("Remove the docstring.")


def edit(document: str, rng: random.Random) -> str | None:
    """Return a function of `document`, an instruction as a comment, and the edited function; None if there is no
    function.

    These documents add long copies to the corpus, so that lookup methods find matches.
    """
    longest = rng.choice(LONGEST_EDIT)
    functions = [f for f in functions_of(document) if 120 <= len(f) <= longest]
    if not functions:
        return None
    before = rng.choice(functions)
    after = Edit(before, rng)
    steps = [after.rename, after.rename_function, after.add_types, after.change_constant, after.drop_docstring]
    rng.shuffle(steps)
    edit_count = rng.choice((1, 1, 2, 3))
    try:
        for step in steps:
            if len(after.orders) < edit_count:
                step()
        ast.parse(after.source)
    except (SyntaxError, tokenize.TokenError, ValueError):
        return None
    if not after.orders or after.source == before:
        return None
    return f"{before}\n\n\n# {' '.join(after.orders)}\n{after.source}"


def functions_of(document: str) -> list[str]:
    """Return the functions and methods of a module, each dedented to the left margin."""
    try:
        tree = ast.parse(document)
    except SyntaxError:
        return []
    lines = document.splitlines()
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [textwrap.dedent("\n".join(lines[n.lineno - 1 : n.end_lineno])) for n in found]
