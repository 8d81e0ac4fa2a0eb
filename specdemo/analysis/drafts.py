"""Drafting cost of a method by its name. The built-in methods need no torch; others are imported."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from specdemo.core.shapes import UNREADABLE, Config, Shape
from specdemo.core.suggest import suggest
from specdemo.methods import METHODS, method, usable
from specdemo.methods.drafting_cost import ADAPTIVE, Drafting, DraftingCost

MOST_TRIED = 64  # longest draft length to try if the drafter's config contains one


def drafting(name: str, target: Shape, config: Config | None, options: Mapping[str, int]) -> Drafting:
    """Return the passes of a method. config: the drafter's; None: typical sizes for the target. Raises ValueError with
    one line.
    """
    hint = suggest(name[:60], DraftingCost.declared)
    if name not in METHODS:
        raise ValueError(f"unknown method {name[:60]!r}; {hint}")
    if name in ADAPTIVE:
        raise ValueError(f"method {name!r} drafts adaptively and cannot be predicted; {hint}")
    cost = DraftingCost.declared.get(name) or method(name)
    try:
        passes = cost.drafting_cost(target, config or {}, options)
    except UNREADABLE as error:
        if type(error) is ValueError:
            raise
        raise ValueError(
            f"this config.json lacks the sizes of a drafter for method {name!r}; choose another --model"
        ) from None
    if passes is None:
        raise ValueError(f"method {name!r} declares no drafting cost and cannot be predicted; {hint}")
    return replace(passes, method=name, longest=min(max(passes.longest, 1), MOST_TRIED))


def method_in(config: Config, plug_ins: bool = True) -> str:
    """Return the method of the drafter that a config describes. EAGLE-1 looks like a complete model, so its method must
    be given. plug_ins: whether to import and try the methods that need torch to declare their cost.
    """
    text = " ".join(map(str, (config.get("architectures"), config.get("model_type"), *config))).lower()
    costs = _costs(plug_ins)
    return next((name for name, cost in costs if any(mark in text for mark in cost.config_marks)), "draft_model")


def _costs(plug_ins: bool) -> Iterator[tuple[str, type[DraftingCost]]]:
    yield from DraftingCost.declared.items()
    if plug_ins:
        yield from ((name, method(name)) for name in usable() if name not in (*DraftingCost.declared, *ADAPTIVE))
