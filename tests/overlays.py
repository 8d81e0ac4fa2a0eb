"""Other releases of transformers that the package allows, to run tests on: the oldest and the newest.

`python -m tests.overlays FOLDER` installs each into a folder of its own in FOLDER, without its requirements, and prints
these folders. A process runs on a release with its folder in PYTHONPATH.
"""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
NAME = "transformers"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def others(available: list[str], requirements: list[str], current: str) -> list[str]:
    """Return the oldest and the newest available version that the requirements allow, unless it is the current one."""
    (allowed,) = (r.specifier for r in map(Requirement, requirements) if r.name == NAME)
    versions = list(allowed.filter(available))
    ordered = sorted(versions, key=lambda text: [int(part) for part in text.split(".")])
    return [text for text in dict.fromkeys((ordered[0], ordered[-1])) if text != current]


def main(folder: Path) -> None:
    """Install the releases and print their folders."""
    listed = subprocess.run([*PIP, "index", "versions", NAME], capture_output=True, text=True)
    if listed.returncode:  # no network
        print(*(place.resolve() for place in folder.glob(f"{NAME}-*")), sep="\n")
        return
    (line,) = re.findall(r"Available versions: (.*)", listed.stdout)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for release in others(line.split(", "), project["dependencies"], version(NAME)):
        place = folder / f"{NAME}-{release}"
        if not (place / NAME).is_dir():
            command = [*PIP, "install", "--quiet", "--no-deps", "--target", str(place), f"{NAME}=={release}"]
            subprocess.run(command, check=True)
        print(place.resolve())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
