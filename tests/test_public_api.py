"""The public API for scripts, and the cost of importing it."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import specdemo


def test_all_is_what_the_package_exports():
    assert specdemo.__all__ == sorted(specdemo.__all__)
    assert set(specdemo.__all__) == {
        "Budget",
        "GenerationConfig",
        "Sampling",
        "__version__",
        "generate",
        "load_drafter",
        "load_target",
        "predict",
        "run",
    }
    assert dir(specdemo) == specdemo.__all__
    assert all(getattr(specdemo, name) is not None for name in specdemo.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'laod_target'"):
        _ = specdemo.laod_target


@pytest.mark.parametrize(
    "first", ["import specdemo", "from specdemo.presets.files import load_presets; load_presets()"]
)
def test_nothing_heavy_is_imported_early(first):
    code = f"{first}; import sys; print({{'torch', 'transformers', 'gradio'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_version_is_the_one_of_the_package():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == specdemo.__version__
