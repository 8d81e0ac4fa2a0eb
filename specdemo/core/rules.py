"""Acceptance rules by name. They are imported on first use, so that the names are available without torch.

A rule with options is a `BaseOptions` whose fields come from `setting`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from specdemo.core.settings import BaseOptions, Setting, parse, settings
from specdemo.core.suggest import suggest

if TYPE_CHECKING:
    from specdemo.core.accept import AcceptRule


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """One rule: where its class is, and whether its output follows the target's distribution."""

    source: str  # module:class
    lossless: bool
    comment: str = ""  # added to its name in the help of --acceptance
    trees: bool = True  # False: verifies chains only
    coupled: bool = False  # draws by position: lanes of one seed write one text

    def label(self, name: str) -> str:
        """Return the name with its kind."""
        kind = "lossless" if self.lossless else "lossy"
        return name if name == kind else f"{name} ({kind})"


DEFAULT_RULE = "coupled"
RULES = {
    DEFAULT_RULE: RuleEntry(
        "specdemo.core.coupled:Coupled", True, "lossless; every lane writes the text of plain decoding", coupled=True
    ),
    "lossless": RuleEntry(
        "specdemo.core.accept:Lossless",
        True,
        "rejection sampling, accepts more of a sampled chain; each lane has its text",
    ),
    "block": RuleEntry("specdemo.core.block:Block", True, "also lossless, accepts more of a sampled chain"),
    "typical": RuleEntry("specdemo.core.typical:Typical", lossless=False, comment="lossy"),
    "fly": RuleEntry("specdemo.core.fly:Fly", lossless=False, comment="lossy, chains only", trees=False),
    "speculative_cascade": RuleEntry(
        "specdemo.core.speculative_cascade:SpeculativeCascade", False, "lossy, chains only", trees=False
    ),
}


def accept_rule(name: str, options: Mapping[str, object] | None = None) -> "AcceptRule":
    """Return the rule of that name. Raises ValueError for an unknown name or option."""
    cls = _rule_class(name)
    if issubclass(cls, BaseOptions):
        rule: AcceptRule = parse(cls, options or {}, f"acceptance rule {name!r}")  # type: ignore[assignment]
        return rule
    for option in options or {}:
        raise ValueError(f"acceptance rule {name!r} has no options; leave out {option!r:.60}")
    plain: AcceptRule = cls()
    return plain


def draws_by_position(options: Mapping[str, object]) -> bool:
    """Return True if a sampling lane with these options draws its tokens with random numbers of their position."""
    rule = RULES.get(str(options.get("acceptance")))
    return rule is not None and rule.coupled


def rule_options(name: str) -> list[Setting]:
    """Return the options of a rule; none for an unknown one."""
    cls = _rule_class(name) if name in RULES else None
    return [*settings(cls).values()] if cls and issubclass(cls, BaseOptions) else []


def _rule_class(name: str) -> Any:
    if name not in RULES:
        raise ValueError(f"unknown acceptance rule {name!r}; {suggest(name, RULES)}")
    return resolve_name(RULES[name].source)


def rules_help() -> str:
    """Return the names of all rules with their comments."""
    return "; ".join(f"{name} ({entry.comment})" if entry.comment else name for name, entry in RULES.items())
