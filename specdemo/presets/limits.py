"""Limits of a page. A private page allows everything a preset can express; a public page allows listed models and short
runs.

SPECDEMO_PUBLIC=1, or SPACE_ID as set on every Space, makes the page public.
"""

from dataclasses import dataclass
from functools import lru_cache

import yaml

from specdemo.core.deployment import public as public
from specdemo.costs.lengths import MAX_K
from specdemo.engine.comparison import MAX_LANES, MAX_NEW_TOKENS, MAX_PROMPT_CHARACTERS
from specdemo.presets.files import FOLDER, Preset, load_presets

SPACE = FOLDER.parent / "docs" / "space.yaml"
NODES = 64  # largest draft tree; a public page can open the trace of the longest run with it
SHARED = "remember"  # option with which drafts come from other visitors' text
HOME = "for more, duplicate this Space or run python -m specdemo ui on your machine"
PRIVATE = f"{SHARED} is off on this public page: it would draft from other visitors' answers; {HOME}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest allowed values; `lanes` includes the baseline, `prompt` counts characters."""

    max_new_tokens: int = MAX_NEW_TOKENS
    k: int = MAX_K
    lanes: int = MAX_LANES + 1
    prompt: int = MAX_PROMPT_CHARACTERS
    repeats: int = 10


LIMITS = Limits()
PUBLIC = Limits(max_new_tokens=256, k=10, lanes=3, prompt=4000, repeats=3)


def here() -> Limits:
    """Return the limits of this page."""
    return PUBLIC if public() else LIMITS


@lru_cache(maxsize=1)
def preloaded() -> tuple[str, ...]:
    """Return the models that the Space downloads when it is built: `preload_from_hub` in its settings."""
    settings = yaml.safe_load(SPACE.read_text(encoding="utf-8")) if SPACE.is_file() else {}
    return tuple(entry.split()[0] for entry in settings.get("preload_from_hub", ()))


def at_hand() -> list[Preset]:
    """Return the presets whose models are all on this machine."""
    return [p for p in load_presets().values() if all(model.embedded or model in preloaded() for model in p.models)]


def admit(comparison: Preset) -> Preset:
    """Return the comparison. Raises ValueError on a public page if it exceeds the limits."""
    if not public():
        return comparison
    far = next((model for model in comparison.models if not (model.embedded or model in preloaded())), None)
    if far is not None:
        raise ValueError(f"{far} is not available on this public page; {HOME}")
    if shares(comparison):
        raise ValueError(PRIVATE)
    values = {
        "new tokens": (comparison.max_new_tokens, PUBLIC.max_new_tokens),
        "lanes": (len(comparison.lanes) + 1, PUBLIC.lanes),
        "prompt characters": (len(comparison.prompt) + len(comparison.system), PUBLIC.prompt),
        "repeats": (comparison.repeats, PUBLIC.repeats),
        "draft tokens": (max(lane.k for lane in comparison.lanes), PUBLIC.k),
        "draft tree nodes": (max(lane.tree_nodes for lane in comparison.lanes), NODES),
    }
    for what, (value, most) in values.items():
        if value > most:
            raise ValueError(f"this public page allows {most} {what} at most, not {value}; {HOME}")
    return comparison


def fit(comparison: Preset) -> Preset:
    """Return the comparison, reduced to the limits on a public page."""
    if not public():
        return comparison
    lanes = []
    for lane in comparison.lanes[: PUBLIC.lanes - 1]:
        options = {name: value for name, value in lane.options.items() if name != SHARED}
        lanes.append(lane.model_copy(update={"k": min(lane.k, PUBLIC.k), "options": options}))
    tokens = min(comparison.max_new_tokens, PUBLIC.max_new_tokens)
    return comparison.model_copy(update={"lanes": lanes, "max_new_tokens": tokens})


def shares(comparison: Preset) -> bool:
    """Return whether a lane learns with a memory that all visitors share."""
    return any(lane.options.get(SHARED) for lane in comparison.lanes)
