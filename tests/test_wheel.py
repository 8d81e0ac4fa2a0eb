"""The installed wheel: all files that the package reads, and a command line and a page that work from any folder."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests import processes
from tests.overlays import others

ROOT = Path(__file__).parents[1]
WITH_PAGE = """
for name in [name for name in sys.modules if sys.modules[name] is None]:
    del sys.modules[name]
sys.modules |= before
from types import SimpleNamespace
from specdemo.costs.profiles import profiles
from specdemo.ui.page import build, preset
from specdemo.ui.race import Races

assert main(["presets", "--json"]) == 0
build()
visitor = SimpleNamespace(session_hash="a", query_params={})
assert '"recorded":true' in Races(preset("embedded-draft"), False).open_link(visitor, {})["view"]
assert main(["bench", "peers", "--pair", "8m"]) == 2
assert main(["train", "stories-target", "--corpus", "."]) == 2
assert "h100-sxm" in profiles()
"""


BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    elsewhere = folder / "elsewhere.cfg"  # the build leaves no files in the checkout
    lines = ["[build]", f"build_base = {folder / 'build'}", "[egg_info]", f"egg_base = {folder}"]
    lines += ["[bdist_wheel]", "compression = stored"]  # compressing the weights takes five seconds
    elsewhere.write_text("\n".join(lines), encoding="utf-8")
    environment = os.environ | {"DIST_EXTRA_CONFIG": str(elsewhere)}
    command = [sys.executable, "-c", BUILD, str(folder)]  # as pip does
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Install the wheel, and return the environment of processes that import it."""
    folder = tmp_path_factory.mktemp("installed")
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile", "--no-index"]
    command = [sys.executable, "-m", "pip", "install", *quiet, "--target", str(folder), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return os.environ | {"PYTHONPATH": str(folder)}


def files(folder):
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name for name in found if "__pycache__" not in name and not name.startswith(".")}


def test_the_wheel_holds_every_file_of_the_package_and_the_presets_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as opened:
        contents = {name for name in opened.namelist() if ".dist-info/" not in name}
    package = {f"specdemo/{name}" for name in files(ROOT / "specdemo")}
    assert contents == package | {f"specdemo/presets/installed/{name}" for name in files(ROOT / "presets")}
    assert {"specdemo/py.typed", "specdemo/ui/style.css", "specdemo/ui/lanes.js"} <= contents


WITHOUT_PAGE = """
import specdemo
from specdemo.__main__ import main

sizes = ["--repeats", "1", "--k", "2", "--preset", "embedded-ngram", "--new-tokens", "6", "--prompt", "Once upon"]
for command in (
    ["run", "embedded-draft", "--max-new-tokens", "4", "--out", "t.json"], ["replay", "t.json"], ["methods"],
    ["presets"], ["predict", "stories", "--trace", "t.json", "--device", "laptop-cpu"],
    ["doctor"], ["serve-command", "embedded-draft"], ["train", "--help"], ["bench", "--help"],
    ["bench", "k", *sizes, "--html", "k.html"],
):
    assert main(command) == 0, command
assert specdemo.run("embedded-ngram", max_new_tokens=2).lanes
assert main(["ui"]) == 2
assert main(["run", "embedded-draft", "--quantization", "4bit"]) == 2
"""


def test_an_installed_copy_works_in_an_empty_folder_and_without_the_page_only_the_page_is_missing(installed, tmp_path):
    absent = processes.block("gradio", "gradio_client", "pandas", "bitsandbytes")
    code = ("import sys", "before = dict(sys.modules)", absent, WITHOUT_PAGE, WITH_PAGE)
    done = processes.run("-c", "\n".join(code), cwd=tmp_path, env=installed)
    assert done.returncode == 0, done.stderr
    assert '"id": "qwen3-8b"' in done.stdout and "Draft 1.3M" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"t.json", "k.html"}
    for missing in (
        "stories-target",
        "Recipes of the embedded models",
        "or code for code-draft",
        "the recipes of code",
        "chromium",
        "app.py",
        "race-fairness",
        "busy-core",
    ):
        assert missing not in done.stdout
    *refused, suite, recipe = done.stderr.splitlines()
    assert refused == [
        'specdemo: this needs gradio; run: pip install "specdemo[page]"',
        "specdemo: quantization '4bit' needs bitsandbytes; run: pip install bitsandbytes accelerate",
    ]
    assert suite.startswith("specdemo: suite 'peers' measures specdemo itself and needs a checkout of specdemo")
    assert recipe.startswith("specdemo: unknown recipe 'stories-target': those of the embedded models need a checkout")


def test_the_metadata_describe_the_package(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(opened.read(name))
    description = metadata.get_payload()
    assert description.startswith("# specdemo\n") and metadata["Description-Content-Type"] == "text/markdown"
    assert not re.search(r"\]\((?!https://)", description)  # links and images that break outside the checkout
    assert set(metadata.get_all("Provides-Extra")) == {"page", "bitsandbytes", "gguf", "grammar"}
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    core = {
        requirement.name
        for requirement in required
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    assert {"torch", "transformers", "typer"} <= core and not {"gradio", "bitsandbytes"} & core


@pytest.mark.parametrize(
    ("current", "expected"), [("5.24.0", ["5.23.0", "5.24.10"]), ("5.24.10", ["5.23.0"]), ("5.23.0", ["5.24.10"])]
)
def test_other_allowed_releases_are_the_oldest_and_the_newest(current, expected):
    available = ["5.25.0", "5.24.10", "5.24.9", "5.24.0", "5.23.0", "5.22.2"]
    assert others(available, ["torch>=2", "transformers>=5.23,<5.25"], current) == expected


def test_no_untested_minor_version_is_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for group in project["optional-dependencies"].values() for line in group)]
    allowed = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        pin = Requirement(line)
        (clause,) = pin.specifier
        version = Version(clause.version)
        stable = pin.name in ("psutil", "PyYAML", "rich", "tqdm")  # we use little of them
        later = f"{version.major + 1}.0.0" if stable else f"{version.major}.{version.minor + 1}.0"
        assert not allowed[pin.name].contains(later), f"{pin.name} {later} was not tested"


def test_pins_satisfy_the_package_requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # the extra gguf is left out of requirements.txt, because its installation compiles llama.cpp for minutes
    groups = project["optional-dependencies"].items()
    extras = [line for name, lines in groups for line in lines if name != "gguf"]
    accepted = {requirement.name: requirement for requirement in map(Requirement, [*project["dependencies"], *extras])}
    pinned = [Requirement(line) for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()]
    assert {pin.name for pin in pinned} == set(accepted)
    for pin in pinned:
        (version,) = (clause.version for clause in pin.specifier)
        assert accepted[pin.name].specifier.contains(version), pin
        assert accepted[pin.name].marker == pin.marker
