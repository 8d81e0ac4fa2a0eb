"""Where the page runs: at home, on a public machine, on GPUs that Hugging Face lends by the call (ZeroGPU).

SPECDEMO_PUBLIC=1, or SPACE_ID as every Space has it, makes the page public: listed models, short runs. SPACES_ZERO_GPU
is set where a GPU is lent: the function marked by `lent` runs in a forked process that has it, what it yields is
pickled, and models have to be in place in the first process before.
"""

import os
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from math import ceil
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from specdemo.core.bounds import FILE, PUBLIC_FILE, Bounds
from specdemo.presets.files import EMBEDDED, FOLDER, Preset, load_presets
from specdemo.presets.limits import LIMITS, PUBLIC, Limits

if TYPE_CHECKING:
    from specdemo.engine.comparison import Comparison

README = FOLDER.parent / "README.md"
NODES = 64  # of a draft tree, so that the trace of the longest run opens here again
START_S = 10  # until a lent GPU has the weights and every lane is warm
BACK_S = 2  # a run ends itself so long before the GPU is taken away
LEND_S = 120  # longer calls are refused
EMBEDDED_RATE, RATE = 60, 20  # tokens a second of one lane, at the least
SHARED = "remember"  # an option that shows one visitor what another wrote
HOME = "for more, duplicate this Space or run python app.py at home"

PRIVATE = f"{SHARED} is off on this public page: it drafts from what other visitors were answered; {HOME}"

Function = TypeVar("Function", bound=Callable[..., Any])


def public() -> bool:
    return os.environ.get("SPECDEMO_PUBLIC") == "1" or bool(os.environ.get("SPACE_ID"))


def zero_gpu() -> bool:
    """True where a GPU is lent by the call."""
    asked = os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")  # as `spaces` reads it
    return asked and find_spec("spaces") is not None


def turn_s() -> float:
    """Wall clock that one run, sweep or test may take; a public machine is shared."""
    return 120.0 if public() else 1800.0


def limits() -> Limits:
    return PUBLIC if public() else LIMITS


def bounds() -> Bounds:
    """Of a file that a visitor opens."""
    return PUBLIC_FILE if public() else FILE


def lent(duration: Callable[..., int]) -> Callable[[Function], Function]:
    """A decorator: the generator runs where a GPU is lent, for `duration(its arguments)` seconds; else as it is."""
    if not zero_gpu():
        return lambda function: function
    decorator: Callable[[Function], Function] = import_module("spaces").GPU(duration=duration)
    return decorator


def seconds(spec: "Comparison") -> int:
    """What a run may take at the most, loaded models given: the shorter the estimate, the sooner a GPU is lent."""
    rate = EMBEDDED_RATE if spec.target in EMBEDDED else RATE
    return min(LEND_S, START_S + ceil((len(spec.lanes) + 1) * spec.max_new_tokens / rate))


@lru_cache(maxsize=1)
def preloaded() -> tuple[str, ...]:
    """The models that the Space fetches when it is built: `preload_from_hub` in the README's front matter."""
    text = README.read_text(encoding="utf-8") if README.is_file() else ""
    if not text.startswith("---\n"):
        return ()
    front = yaml.safe_load(text.split("---\n")[1])
    return tuple(entry.split()[0] for entry in front.get("preload_from_hub", ()))


def at_hand() -> list[Preset]:
    """The presets whose models are all here."""
    return [p for p in load_presets().values() if {*p.models} <= {*EMBEDDED, *preloaded()}]


def admit(chosen: Preset) -> Preset:
    """The comparison again. Raises ValueError on a public page for one that is too large for it."""
    if not public():
        return chosen
    far = next((model for model in chosen.models if model not in (*EMBEDDED, *preloaded())), None)
    if far is not None:
        raise ValueError(f"{far} is not on this public page; {HOME}")
    if shares(chosen):
        raise ValueError(PRIVATE)
    asked = {
        "new tokens": (chosen.max_new_tokens, PUBLIC.max_new_tokens),
        "lanes": (len(chosen.lanes) + 1, PUBLIC.lanes),
        "characters of prompt": (len(chosen.prompt) + len(chosen.system), PUBLIC.prompt),
        "tokens of draft": (max(lane.k for lane in chosen.lanes), PUBLIC.k),
        "nodes of a draft tree": (max(int(lane.options.get("nodes", 0)) for lane in chosen.lanes), NODES),
    }
    for what, (wanted, most) in asked.items():
        if wanted > most:
            raise ValueError(f"this public page runs {most} {what} at most, not {wanted}; {HOME}")
    return chosen


def fit(chosen: Preset) -> Preset:
    """The comparison as this page offers it: on a public one cut to its limits."""
    if not public():
        return chosen
    lanes = [
        lane.model_copy(
            update={
                "k": min(lane.k, PUBLIC.k),
                "options": {name: value for name, value in lane.options.items() if name != SHARED},
            }
        )
        for lane in chosen.lanes[: PUBLIC.lanes - 1]
    ]
    return chosen.model_copy(
        update={"lanes": lanes, "max_new_tokens": min(chosen.max_new_tokens, PUBLIC.max_new_tokens)}
    )


def shares(chosen: Preset) -> bool:
    return any(lane.options.get(SHARED) for lane in chosen.lanes)
