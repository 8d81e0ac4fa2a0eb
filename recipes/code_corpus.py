"""Python corpus for the code models: collected, cleaned, split by project, and partly turned into edits (a function, an
instruction as a comment, and the edited function).

Sources are the standard library of the running Python and the wheels of `code_wheels.txt`, which pins their hashes.
Projects marked `held out` there are never trained on. Text that a small model cannot learn from is removed: tests,
vendored and generated files, all but the first line of docstrings, and near-duplicates.
"""

import ast
import email
import io
import random
import re
import subprocess
import sys
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from specdemo.core.atomic_io import write_text
from specdemo.training.collect import END

WHEELS = Path(__file__).with_name("code_wheels.txt")
VALIDATION_MARK = "# held out"
OUTSIDE = re.compile(
    r"(^|/)(tests?|testing|.*_tests?|test_.*|.*_test\.py|conftest\.py|_?vendor(ed)?|third_party|_?extern|locale|migrations|"
    r"pydoc_data|site-packages|idle_test|lib2to3|turtledemo)(/|$)"
)
MACHINE_MADE = re.compile(r"generated (by|from|file|using)|auto-?generated|do not edit", re.IGNORECASE)
PROJECT_CHARACTERS = 2_500_000  # limit per wheel, so that no project dominates
DOCUMENT_CHARACTERS = 2_000
VALID_CHARACTERS = 250_000
SHINGLE = 5  # lines per run
KINDS = ("str", "int", "bool", "float", "list[str]", "dict[str, str]", "Path", "bytes", "list[int]")
WORDS = (
    "value item result name path data text line key index count total size limit start end node entry row column field "
    "options config source target message buffer token record user request response handler state mode flag level"
).split()
LONGEST_EDIT = (250, 400, 700, 1200)  # characters of the function


def collect_code(folder: Path) -> Path:
    """Write `train.txt`, `valid.txt` and `ORIGIN-code.md` into `folder` unless they exist, and return the folder.

    Raises ValueError, one line, if a wheel cannot be fetched or its hash differs.
    """
    if (folder / "ORIGIN-code.md").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    pins = WHEELS.read_text(encoding="utf-8")
    valid_projects = {pin.partition("==")[0] for pin in pins.splitlines() if VALIDATION_MARK in pin}
    known: set[int] = set()
    train = list(fresh(standard_library(), known))
    valid: list[str] = []
    origins = [f"- the standard library of Python {sys.version.split()[0]}: PSF-2.0"]
    with TemporaryDirectory() as fetched:
        fetch_wheels(Path(fetched))
        wheels = sorted(Path(fetched).glob("*.whl"), key=lambda wheel: (project(wheel) in valid_projects, wheel.name))
        for wheel in wheels:
            of_wheel = list(fresh(wheel_sources(wheel), known, PROJECT_CHARACTERS))
            (valid if project(wheel) in valid_projects else train).extend(of_wheel)
            origins.append(origin(wheel) + (" (held out)" if project(wheel) in valid_projects else ""))
    random.Random("held out").shuffle(valid)
    write_text(folder / "train.txt", END.join(train))
    write_text(folder / "valid.txt", END.join(within(valid, VALID_CHARACTERS)))
    write_text(folder / "ORIGIN-code.md", "# Python source\n\n" + "\n".join(origins) + "\n")
    return folder


def fetch_wheels(folder: Path) -> None:
    """Fetch the pinned wheels. Wheels without compiled parts are the same for every machine."""
    how = ["--no-deps", "--only-binary=:all:", "--platform=any", "--require-hashes", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *how, "-r", str(WHEELS), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
        raise ValueError(f"cannot fetch the training sources: {reason[-1]}; name a folder of text files with --corpus")


def project(wheel: Path) -> str:
    """Return the name of a wheel's project in `code_wheels.txt`."""
    return wheel.name.partition("-")[0].lower()


def origin(wheel: Path) -> str:
    """Return one line with name, version and licence from the wheel's metadata."""
    with ZipFile(wheel) as files:
        name = next(n for n in files.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(files.read(name))
    classifiers = [str(c).split(" :: ")[-1] for c in metadata.get_all("Classifier", []) if str(c).startswith("License")]
    licence = metadata["License-Expression"] or ", ".join(classifiers) or metadata["License"]
    return f"- {metadata['Name']} {metadata['Version']}: {licence}"


def standard_library() -> Iterator[str]:
    """Yield the source of each module of the standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not OUTSIDE.search(path.relative_to(root).as_posix()):
            yield path.read_text(encoding="utf-8", errors="replace")


def wheel_sources(wheel: Path) -> Iterator[str]:
    """Yield the source of each module of a wheel."""
    with ZipFile(wheel) as files:
        for name in sorted(files.namelist()):
            if name.endswith(".py") and not OUTSIDE.search(name):
                yield files.read(name).decode("utf-8", errors="replace")


def within(documents: Iterable[str], characters: int) -> Iterator[str]:
    """Return the leading documents whose total length is at most `characters`."""
    for document in documents:
        characters -= len(document)
        if characters < 0:
            return
        yield document


def fresh(sources: Iterable[str], known: set[int], characters: int = sys.maxsize) -> Iterator[str]:
    """Yield the documents of modules, except those with more than half of their line runs in `known`; extend
    `known`.
    """

    def novel() -> Iterator[str]:
        for source in sources:
            for document in documents(source):
                runs = shingles(document)
                if 2 * len(runs & known) <= len(runs):
                    known.update(runs)
                    yield document

    return within(novel(), characters)


def shingles(document: str) -> set[int]:
    """Return the hashes of all runs of `SHINGLE` lines, ignoring blank lines and indentation."""
    lines = [line.strip() for line in document.splitlines() if line.strip()]
    return {hash(tuple(lines[i : i + SHINGLE])) for i in range(max(1, len(lines) - SHINGLE + 1))}


def documents(source: str) -> list[str]:
    """Split a module into groups of whole top-level statements of about `DOCUMENT_CHARACTERS`; [] if it cannot be
    parsed.
    """
    source = source.replace("\r\n", "\n").replace("\t", "    ")
    if MACHINE_MADE.search(source[:2000]):
        return []
    try:
        source = shorten_docstrings(source)
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = source.splitlines()
    pieces: list[str] = []
    start = body[0].lineno - 1 - decorators(body[0]) if body else 0  # skip the licence comment above
    for i, node in enumerate(body):
        end = (body[i + 1].lineno - 1 - decorators(body[i + 1])) if i + 1 < len(body) else len(lines)
        while end > (node.end_lineno or 0) and lines[end - 1].startswith("#"):  # comments belong to the next statement
            end -= 1
        if sum(map(len, lines[start:end])) > DOCUMENT_CHARACTERS or i + 1 == len(body):
            pieces.append("\n".join(lines[start:end]).strip())
            start = end
    return [piece for piece in pieces if readable(piece)]


def decorators(node: ast.stmt) -> int:
    """Return the number of decorator lines above a definition."""
    listed = node.decorator_list if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
    return node.lineno - min([node.lineno, *(d.lineno for d in listed)])


def readable(document: str) -> bool:
    """Return whether a document looks hand-written: a definition, short lines, plain letters, few digits."""
    if len(document) < 200 or not document.isascii() or END in document:
        return False
    few_digits = sum(map(str.isdigit, document)) < 0.08 * len(document)
    defines = re.search(r"^ *(async )?def |^class ", document, re.MULTILINE) is not None
    return few_digits and defines and max(map(len, document.splitlines())) <= 120


def shorten_docstrings(source: str) -> str:
    """Cut every docstring to its first line, since a model of this size cannot learn prose. Raises SyntaxError."""
    lines: list[str | None] = list(source.splitlines())
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
            continue
        match node.body[0]:
            case ast.Expr(value=ast.Constant(value=str(doc)) as text) if text.end_lineno != text.lineno:
                first = doc.strip().partition("\n")[0].strip().replace("\\", "/").replace('"', "'")
                lines[text.lineno - 1] = " " * text.col_offset + f'"""{first or "..."}"""'
                lines[text.lineno : text.end_lineno] = [None] * ((text.end_lineno or 0) - text.lineno)
    return "\n".join(line.rstrip() for line in lines if line is not None)


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
