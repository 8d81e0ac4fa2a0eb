"""Packages that add a method: the one of docs/add-a-method.md, built from the code on that page, and any folder."""

import os
import re
import shutil
import tomllib
from contextlib import contextmanager

import pytest

from specdemo.methods import METHODS, PLUG_INS, _plug_in
from tests import processes
from tests.processes import ROOT

HYDRA = ROOT / "examples" / "hydra"
PAGE = ROOT / "docs" / "add-a-method.md"


@contextmanager
def registered_hydra():
    """Register the entry point of examples/hydra, as if the package were installed."""
    project = tomllib.loads((HYDRA / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with pytest.MonkeyPatch.context() as patch:
        for methods in (PLUG_INS, METHODS):
            patch.setitem(methods, "hydra", project["entry-points"]["specdemo.methods"]["hydra"])
        _plug_in.cache_clear()
        yield
    _plug_in.cache_clear()


def install_bigram(folder):
    """Install the page's package with pip into a folder inside `folder`, and return that folder."""
    return install(write_bigram(folder / "page"), folder)


def write_bigram(source):
    """Write the page's package into a new folder, as importable as if it were installed, and return the folder."""
    source.mkdir()
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"`(\w+\.(?:py|toml))`[^\n]*:\n\n```\w+\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in blocks] == ["bigram.py", "pyproject.toml"]
    for name, text in blocks:
        (source / name).write_text(text, encoding="utf-8")
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = source / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8")
    ((name, place),) = project["entry-points"]["specdemo.methods"].items()
    (info / "entry_points.txt").write_text(f"[specdemo.methods]\n{name} = {place}\n", encoding="utf-8")
    return source


def install(package, folder):
    """Install a copy of a package with pip into a folder inside `folder`, and return that folder."""
    source, site = shutil.copytree(package, folder / "source"), folder / "site"
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    run("-m", "pip", "install", *offline, "--target", str(site), str(source))
    return site


def run(*command, **environment):
    """Run `python COMMAND...`, which must succeed, and return its output."""
    done = processes.run(*command, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
