"""Loading of whole models where a head may be named instead: the error says which method reads it."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from specdemo.methods import detect_head
from specdemo.models import load

P = ParamSpec("P")
T = TypeVar("T")


def name_head_in_error(loader: Callable[P, T]) -> Callable[P, T]:
    """A loader of whole models, given the name first, whose ValueError names the method of what is a head's folder."""

    @wraps(loader)
    def load_or_explain(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return loader(*args, **kwargs)
        except ValueError:
            name = next(iter((*args, *kwargs.values())))
            head = detect_head(name) if isinstance(name, str) else None
            if head is None:
                raise
            raise ValueError(f"{name} holds a head for method {head!r}; choose a whole model as the target") from None

    return load_or_explain


load_target = name_head_in_error(load.load_target)
load_model = name_head_in_error(load.load_model)
outline = name_head_in_error(load.load_meta_target)
