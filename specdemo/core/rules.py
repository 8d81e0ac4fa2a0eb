"""Acceptance rules by name. They are imported on first use, so that the names are available without torch."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from specdemo.core.suggest import suggest

if TYPE_CHECKING:
    from specdemo.core.accept import AcceptRule


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """One rule: where its class is, and whether its output follows the target's distribution."""

    source: str  # module:class
    lossless: bool
    comment: str = ""  # added to its name in the help of --acceptance

    def label(self, name: str) -> str:
        """Return the name with its kind."""
        return f"{name} ({'lossless' if self.lossless else 'lossy'})"


DEFAULT_RULE = "lossless"
RULES = {
    DEFAULT_RULE: RuleEntry("specdemo.core.accept:Lossless", lossless=True),
    "block": RuleEntry("specdemo.core.block:Block", True, "also lossless, accepts more of a sampled chain"),
    "typical": RuleEntry("specdemo.core.typical:Typical", lossless=False, comment="lossy"),
}


def accept_rule(name: str) -> "AcceptRule":
    """Return the rule of that name with default options. Raises ValueError for an unknown name."""
    if name not in RULES:
        raise ValueError(f"unknown acceptance rule {name!r}; {suggest(name, RULES)}")
    module, _, attribute = RULES[name].source.partition(":")
    rule: AcceptRule = getattr(import_module(module), attribute)()
    return rule


def rules_help() -> str:
    """Return the names of all rules with their comments."""
    return "; ".join(f"{name} ({entry.comment})" if entry.comment else name for name, entry in RULES.items())
