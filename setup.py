"""Puts presets/ into the wheel, as specdemo/presets/installed; all else is said in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["specdemo*"]), "specdemo.presets.installed"],
    package_dir={"specdemo.presets.installed": "presets"},
)
