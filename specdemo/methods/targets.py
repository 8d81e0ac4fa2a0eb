"""Model loaders whose error names the method when the source is a head instead of a complete model."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from specdemo.methods import detect_head
from specdemo.models import load

P = ParamSpec("P")
T = TypeVar("T")


def name_head_in_error(loader: Callable[P, T]) -> Callable[P, T]:
    """Wrap a model loader: if the source is the folder of a head, its ValueError names the method."""

    @wraps(loader)
    def load_or_explain(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return loader(*args, **kwargs)
        except ValueError:
            name = next(iter((*args, *kwargs.values())))
            head = detect_head(name) if isinstance(name, str) else None
            if head is None:
                raise
            raise ValueError(f"{name} is a head for method {head!r}; choose a complete model as the target") from None

    return load_or_explain


load_target = name_head_in_error(load.load_target)
load_model = name_head_in_error(load.load_model)
outline = name_head_in_error(load.load_meta_target)
