"""Limits that keep the project small enough to read: the reading path of docs/architecture.md, the code, and the
documents.

A commit that needs more than a limit removes something, or changes the limit on purpose.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "specdemo"
PATH_FILES, PATH_LINES = 40, 6000
WORDS = {"README.md": 1500, "CONTRIBUTING.md": 1000, "docs/architecture.md": 1200, "docs/measurements.md": 7000}
VERSION_WORDS = 1500  # of the newest version in CHANGELOG.md
FOLDERS = {  # code lines. They only fall: the design allows 22,300 in all
    "": 599,
    "analysis": 2162,
    "bench": 3069,
    "core": 2268,
    "costs": 925,
    "engine": 1487,
    "kv": 829,
    "methods": 4904,
    "models": 5629,  # weights in float16
    "presets": 879,
    "servers": 1528,
    "training": 736,
    "ui": 2308,
}
TARGET_MEMBERS = 12  # methods and properties
FILES = 210  # the design allows 180
CLASSES = 392  # the design allows 330
LOCAL_IMPORTS = 86  # inside functions; the design allows 100
KV_CLASSES = 6  # store, view, mask, history, snapshot, graph: the classes of kv that the rest of the package imports
REGISTRIES = 4  # collections at the top of modules that fill up while the program runs; the design allows 4
COLLECTIONS = (
    "Counter OrderedDict WeakKeyDictionary WeakSet WeakValueDictionary defaultdict deque dict list set".split()
)
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def lines_of(node):
    return set(range(node.lineno, node.end_lineno + 1))


def code_lines(path):
    """Return the number of lines of a file without blank lines, comments, docstrings and imports."""
    text = path.read_text(encoding="utf-8")
    left_out = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= lines_of(node)
        elif isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            left_out |= lines_of(node.body[0])
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    return sum(bool(line) and not line.startswith("#") and number not in left_out for number, line in lines)


def reading_path():
    """Return the numbers and the files of the path in docs/architecture.md."""
    section = read("docs/architecture.md").partition("\n## Reading path\n")[2].partition("\n## ")[0]
    return re.findall(r"^(\d+)\. `([^`]+)`", section, re.MULTILINE)


def test_code_lines_are_those_that_do_something(tmp_path):
    file = tmp_path / "file.py"
    file.write_text('"""A module.\n\nMore."""\n\nimport os\nfrom a import (\n    b,\n)\n\n# y\nx = """\n\n1"""  # z\n')
    assert code_lines(file) == 2


def test_the_reading_path_is_short_and_exists():
    numbers, files = zip(*reading_path(), strict=True)
    assert [*map(int, numbers)] == [*range(1, len(files) + 1)] and len({*files}) == len(files) <= PATH_FILES
    assert sum(code_lines(ROOT / file) for file in files) <= PATH_LINES


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_does_not_grow(folder):
    files = (PACKAGE / folder).rglob("*.py") if folder else PACKAGE.glob("*.py")
    assert sum(map(code_lines, files)) <= FOLDERS[folder]


def test_every_folder_has_a_limit():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == FOLDERS.keys() - {""}


def test_a_target_has_few_members():
    tree = ast.parse(read("specdemo/core/protocol.py"))
    (target,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Target")
    assert len({node.name for node in target.body if isinstance(node, FUNCTIONS)}) <= TARGET_MEMBERS


DEVICE_QUESTION = re.compile(
    r"""\bdevice\.type\b|\.type [!=]= "(cpu|cuda|mps|xpu|meta)"|\bis_cuda\b|\b(cuda|mps|xpu)\.is_available\("""
)
KNOWS_DEVICES = {"models/devices.py", "core/host_copy.py"}  # the second is below the first: it copies to the host


def test_only_the_table_of_devices_asks_for_their_kind():
    """Other code asks a `DeviceKind` for what it needs to know."""
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    asking = {name for name, path in files.items() if DEVICE_QUESTION.search(path.read_text(encoding="utf-8"))}
    assert asking <= KNOWS_DEVICES


@cache
def modules():
    """Return every module of the package as a tree."""
    return [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]


def test_there_are_few_files():
    assert len(modules()) <= FILES


def test_there_are_few_classes():
    assert sum(isinstance(node, ast.ClassDef) for tree in modules() for node in ast.walk(tree)) <= CLASSES


def test_the_cache_shows_few_classes():
    """Aliases and functions do not count, nor do classes that only modules of kv use."""
    shown = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.parent.name != "kv" else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specdemo.kv"):
                shown |= {alias.name for alias in node.names}
    defined = [ast.parse(path.read_text(encoding="utf-8")) for path in (PACKAGE / "kv").glob("*.py")]
    classes = {node.name for tree in defined for node in tree.body if isinstance(node, ast.ClassDef)}
    assert len(shown & classes) <= KV_CLASSES, shown & classes


def test_few_functions_import():
    functions = (node for tree in modules() for node in ast.walk(tree) if isinstance(node, FUNCTIONS))
    assert sum(isinstance(x, ast.Import | ast.ImportFrom) for f in functions for x in ast.walk(f)) <= LOCAL_IMPORTS


def is_registry(node):
    """Return True for an assignment of an empty collection, which something fills later."""
    match getattr(node, "value", None):
        case ast.Dict(keys=[]) | ast.List(elts=[]):
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(value=ast.Name(id=name))):
            return name in COLLECTIONS
    return False


def test_few_modules_hold_state():
    assert sum(is_registry(node) for tree in modules() for node in tree.body) <= REGISTRIES


def test_files_that_the_architecture_names_exist():
    for name in re.findall(r"`([\w/]+\.(?:py|js|css))`", read("docs/architecture.md")):
        assert any((folder / name).is_file() for folder in (ROOT, ROOT / "specdemo")), name


@pytest.mark.parametrize("name", WORDS)
def test_a_document_is_short(name):
    assert len(read(name).split()) <= WORDS[name]


def test_the_newest_version_in_the_changelog_is_short():
    assert len(read("CHANGELOG.md").split("\n## ")[1].split()) <= VERSION_WORDS


def broken_links():
    """Yield the links between documents that lead to no file or no heading."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            file, _, heading = link.partition("#")
            aim = page.parent / file if file else page
            titles = re.findall(r"^#+ (.*)", aim.read_text(encoding="utf-8"), re.MULTILINE) if heading else []
            if not aim.exists() or (heading and heading not in map(anchor, titles)):
                yield f"{page.name}: {link}"


def anchor(title):
    """Return the name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_links_between_documents_lead_somewhere():
    assert [*broken_links()] == []
