"""Imports in one direction: a package imports only itself and the packages below it; `core` imports only torch and
pydantic. `costs` is next to it, because it is arithmetic on sizes, measured times and traces: models choose threads by
it and methods draft lengths, while what measures passes needs a target and is in `models`. The public API for scripts,
and the cost of importing it.
"""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import specdemo

ORDER = "core costs kv models training methods servers engine presets analysis bench ui".split()
PACKAGE = Path(__file__).parents[1] / "specdemo"


@cache
def imported(path):
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("package", ORDER)
def test_imports_run_one_way(package):
    allowed = {"__version__", *ORDER[: ORDER.index(package) + 1]}
    for path in (PACKAGE / package).rglob("*.py"):
        inside = {name.split(".")[1] for name in imported(path) if name.startswith("specdemo.")}
        assert inside <= allowed, f"{path.relative_to(PACKAGE)} imports {sorted(inside - allowed)}"


def test_no_files_import_each_other_in_a_circle():
    """Includes imports inside functions. TopologicalSorter raises CycleError with the names of the files."""
    files = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    graph = {}
    for name, path in files.items():
        modules = set(imported(path))  # modules, or names in modules
        graph[name] = (modules | {full.rpartition(".")[0] for full in modules}) & files.keys() - {name}
    assert len(list(TopologicalSorter(graph).static_order())) == len(files)


@pytest.mark.parametrize("package, others", [("core", {"torch", "pydantic"}), ("costs", {"pydantic"})])
def test_the_lowest_packages_need_few_others(package, others):
    outside = {name.split(".")[0] for path in (PACKAGE / package).rglob("*.py") for name in imported(path)}
    assert outside - sys.stdlib_module_names <= {"specdemo", *others}


def test_the_package_needs_nothing_of_the_checkout():
    """`benchmarks` and `recipes` are found by name at run time (presets/files.py)."""
    checkout_packages = {path.parent.name for path in PACKAGE.parent.glob("*/__init__.py")} | {"tests"}
    roots = {name.split(".")[0] for path in PACKAGE.rglob("*.py") for name in imported(path)}
    assert {"benchmarks", "recipes"} <= checkout_packages and roots & checkout_packages == {"specdemo"}


def test_only_the_public_interface_of_gradio_is_used():
    """Gradio documents the names of `gradio` and its components. An underscore marks what may change in any version."""
    for path in PACKAGE.rglob("*.py"):
        assert {name for name in imported(path) if name.startswith("gradio.")} <= {"gradio.components.Component"}, path
    for path in (PACKAGE / "ui").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                owner = ast.unparse(node.value)
                assert owner in ("self", "cls", "before"), f"{path.name}:{node.lineno}: {owner}.{node.attr}"


def test_every_package_has_its_place():
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} <= set(ORDER)


@pytest.mark.parametrize("package", ["core", "training", "methods", "engine"])
def test_engine_and_methods_use_interfaces(package):
    """Targets, training and decoding do not name `HFTarget`, and the loop does not name `Method`."""
    for path in (PACKAGE / package).rglob("*.py"):
        classes = {name.rpartition(".")[2] for name in imported(path)}
        assert "HFTarget" not in classes, f"{path.relative_to(PACKAGE)} depends on a concrete target"
        assert path.name != "loop.py" or "Method" not in classes


def test_all_is_what_the_package_exports():
    assert specdemo.__all__ == sorted(specdemo.__all__)
    names = "Budget GenerationConfig Sampling __version__ generate load_drafter load_target predict run"
    assert set(specdemo.__all__) == set(names.split())
    assert dir(specdemo) == specdemo.__all__
    assert all(getattr(specdemo, name) is not None for name in specdemo.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'laod_target'"):
        _ = specdemo.laod_target


def test_nothing_heavy_is_imported_early():
    code = "import specdemo.analysis.lanes; specdemo.predict('stories', model='stories-draft-wide', device='l4')"
    code += "; import sys; print({'torch', 'transformers', 'gradio', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_lookup_needs_neither_heads_nor_a_kv_store():
    code = "import specdemo.methods.ngram, sys; print({'specdemo.kv', 'specdemo.methods.heads'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_version_is_the_one_of_the_package():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == specdemo.__version__
