"""Suites of `bench` and of the page: every class derived from `Suite` in a file of this folder.

Reading the list needs no torch: `run` imports the measuring code.
"""

from functools import lru_cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated

from pydantic import AfterValidator

from specdemo.bench.base import Suite
from specdemo.core.settings import Settings, setting
from specdemo.core.suggest import suggest
from specdemo.presets.files import DEFAULT, of_checkout, preset
from specdemo.presets.limits import LIMITS

# in the folder `benchmarks` of a checkout
OF_THE_PROJECT = ("peers", "floor", "race-fairness", "busy-core", "gpu", "models", "page")


@lru_cache(maxsize=1)
def suites() -> dict[str, type[Suite]]:
    """Return all suites by name: those of the package and, in a checkout, those that benchmark the project itself."""
    benchmarks = of_checkout("benchmarks")
    return {suite.name: suite for suite in (*_in_folder(), *(benchmarks.SUITES if benchmarks else ()))}


def _in_folder() -> list[type[Suite]]:
    modules = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    members = {value for value in classes if issubclass(value, Suite) and value.__module__.startswith(f"{__name__}.")}
    return sorted(members, key=lambda suite: (suite.order, suite.name))


def known_suite(name: str) -> type[Suite]:
    """Return the suite of that name. Raise ValueError with a suggestion if there is none."""
    if name not in suites():
        if name in OF_THE_PROJECT:
            raise ValueError(f"suite {name!r} measures specdemo itself and needs a checkout of specdemo; run it there")
        raise ValueError(f"unknown suite {name!r}; {suggest(name, suites())}")
    return suites()[name]


def suite(name: str, **options: object) -> Suite:
    """Return the suite with these options, the others at their defaults. Raise ValueError with one line."""
    return known_suite(name).build(options)


def takes(name: str, option: str) -> bool:
    """Return whether a suite has that option."""
    return option in suites()[name].model_fields


def swept() -> dict[str, type[Suite]]:
    """Return the suites of the page's sweeps by name."""
    return {name: suite for name, suite in suites().items() if suite.question}


def _swept(name: str) -> str:
    if name not in swept():
        *others, last = map(repr, swept())
        raise ValueError(f"must be {', '.join(others)} or {last}, not {name[:60]!r}")
    return name


class Sweep(Settings):
    """Request of a sweep on the page: a suite on a preset's target. It names no model, so every visitor may run it."""

    sweep: Annotated[str, AfterValidator(_swept)] = setting("k")
    preset: Annotated[str, AfterValidator(lambda id: preset(id).id)] = setting(DEFAULT)
    repeats: int = setting(3, "", 1, LIMITS.repeats)
    new_tokens: int = setting(96, "", 8, LIMITS.max_new_tokens)

    def suite(self, **others: object) -> Suite:
        """Return the suite. others: more options of it, or another `preset`."""
        options = {"repeats": self.repeats, "new_tokens": self.new_tokens, "preset": self.preset}
        return suite(self.sweep, **options | others)
