"""Loading of whole models where a head may be named instead: the error says which method reads it."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from specdemo.methods import head_of
from specdemo.models import load

P = ParamSpec("P")
T = TypeVar("T")


def naming_heads(of_whole: Callable[P, T]) -> Callable[P, T]:
    """A loader of whole models, given the name first, whose ValueError names the method of what is a head's folder."""

    @wraps(of_whole)
    def loaded(*given: P.args, **how: P.kwargs) -> T:
        try:
            return of_whole(*given, **how)
        except ValueError:
            name = next(iter((*given, *how.values())))
            head = head_of(name) if isinstance(name, str) else None
            if head is None:
                raise
            raise ValueError(f"{name} holds a head for method {head!r}; choose a whole model as the target") from None

    return loaded


load_target = naming_heads(load.load_target)
load_model = naming_heads(load.load_model)
outline = naming_heads(load.outline)
