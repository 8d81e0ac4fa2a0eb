"""Docstrings of public functions: their own, those of the overridden method, or those of the protocol."""

import importlib
import inspect
import pkgutil
from importlib.util import find_spec

import recipes
import specdemo
from specdemo.core import protocol

NEEDS = {"specdemo.models.triton_kernels": "triton"}  # modules that import a package which only GPUs use


def modules():
    for package in (specdemo, recipes):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__") and find_spec(NEEDS.get(module.name, "torch")):
                yield importlib.import_module(module.name)


def public(namespace):
    return ((name, value) for name, value in vars(namespace).items() if not name.startswith("_"))


def functions(module):
    """Yield public functions and methods of public classes as (name, function, class)."""
    for name, value in public(module):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value):
            yield name, value, None
        elif inspect.isclass(value):
            for method, kind in public(value):
                if inspect.isfunction(kind) or isinstance(kind, property | classmethod | staticmethod):
                    yield method, inspect.getattr_static(value, method), value


def promised(module, method):
    """Return whether a protocol of the module, or of core.protocol, documents the method."""
    protocols = (c for place in (module, protocol) for _, c in public(place) if getattr(c, "_is_protocol", False))
    return any(inspect.getdoc(getattr(c, method, None)) for c in protocols if hasattr(c, method))


def inherited(method, owner):
    return any(method in vars(base) for base in owner.__mro__[1:])


def test_every_public_function_has_a_docstring():
    silent = [
        f"{module.__name__}: {owner.__name__ + '.' if owner else ''}{name}"
        for module in modules()
        for name, function, owner in functions(module)
        if not inspect.getdoc(function) and not (owner and (inherited(name, owner) or promised(module, name)))
    ]
    assert not silent
