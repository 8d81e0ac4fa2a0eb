"""The card of a target: facts that a run and the names of the drafters on this machine tell about it."""

from specdemo.bench.tune import last_found
from specdemo.core.trace import RunTrace, whole_requests
from specdemo.costs.passes import curve_of, pass_ratio
from specdemo.models.ref import ModelRef
from specdemo.presets.drafters import RULES, UNKNOWN, drafts_for
from specdemo.ui.model_menus import pairs

PASS_TOKENS = 5  # width of the pass whose cost the card names
SHOWN = 3  # models that it lists


def model_card(trace: RunTrace) -> dict[str, object]:
    """Return facts about the target of a run on this machine, `card`, and the query of a link to what the last `tune`
    found for it, `found`; empty for the shipped models."""
    target, speed = ModelRef(trace.config.get("target")), trace.lanes[0].summary.get("tokens_per_s")
    if target.embedded or whole_requests(trace.lanes[0]) or not speed:
        return {}
    rows = [("This model", target.short_name), ("Plain decoding", f"{speed:.0f} tokens/s")]
    if curve := curve_of(trace.environment):
        cost = pass_ratio(curve, PASS_TOKENS)
        rows.append((f"A pass over {PASS_TOKENS} tokens", f"costs as much as {cost:.1f} plain tokens"))
    known = [fit for fit in pairs(target) if fit.fits is not False][:SHOWN]
    drafters = [f"{fit.drafter.short_name} ({fit.reason})".removesuffix(f" ({UNKNOWN})") for fit in known]
    rows.append(("Drafters for it", ", ".join(drafters) or f"none is known; it would be {RULES[0]}"))
    rows += [("It can draft for", ", ".join(larger[:SHOWN])) for larger in drafts_for(target).values()][:1]
    found, query = last_found(target, trace.environment.get("device")) or ("", "")
    return {"card": [*rows, ("Found here", found)] if found else rows, "found": query}
