"""Puts presets/ into the wheel, as specdemo/presets/files; all else is said in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["specdemo*"]), "specdemo.presets.files"],
    package_dir={"specdemo.presets.files": "presets"},
)
