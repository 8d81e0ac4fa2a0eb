"""The methods: one file each, one line here. A method is a class with

title, summary   words for people
needs_model      whether it takes a second model or head
Options          a frozen dataclass whose fields are made by `knob`. By convention `nodes` is the size of its draft tree
                 (0: a chain of k), a method that wraps another names it in `drafter` and hands the model on,
                 and whatever is in MODEL_OPTIONS names further models, with commas between
load(source, target)                 only if needs_model: a name, folder or hub id -> what __init__ takes as `model`, so
                 that whoever races it again need not read it again. Raises ValueError with the cure
read(checkpoint, target)             of heads: what `load` makes of an open checkpoint; it looks at names and shapes
                 alone, so that pairs.py can ask it without weights. Raises ValueError with the cure
__init__(target, model, options)     `model`: what `load` gives, or a source; raises ValueError when it does not fit
taps, start, propose, observe        core.protocol.Drafter
learns           optional: True for a drafter that gets better with use, so that a session keeps it from run to run
max_length       optional: the tokens it can read; it drafts nothing behind a longer text
note             optional: one sentence on what it decided for itself, such as a convention it had to probe for

A method whose head can be trained here has three more:

head             the nn.Module in use
loss(batch)      core.protocol.Trainable
fresh(target, **sizes)               class method: an untrained head for `target`, as `load` would give it
save(folder, target_name)            writes the head in its family's public format
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, Any

from specdemo.core.words import suggest

if TYPE_CHECKING:  # the names of the methods can be had without torch
    from specdemo.core.protocol import Drafter, Target
    from specdemo.models.checkpoints import Checkpoint

BASELINE = "none"  # lane 0 of every comparison

MODEL_OPTIONS = ("drafts", "inner_model")

METHODS = {
    "none": "specdemo.methods.none:NoDraft",
    "draft_model": "specdemo.methods.draft_model:DraftModel",
    "ngram": "specdemo.methods.ngram:NGram",
    "suffix": "specdemo.methods.suffix:Suffix",
    "medusa": "specdemo.methods.heads.medusa:Medusa",
    "hydra": "specdemo.methods.heads.hydra:Hydra",
    "mlp_speculator": "specdemo.methods.heads.mlp_speculator:MLPSpeculator",
    "mtp": "specdemo.methods.heads.mtp:MTP",
    "eagle": "specdemo.methods.heads.eagle:Eagle",
    "dflash": "specdemo.methods.heads.dflash:DFlash",
    "lookahead": "specdemo.methods.lookahead:Lookahead",
    "layer_skip": "specdemo.methods.layer_skip:LayerSkip",
    "adaptive": "specdemo.methods.adaptive:Adaptive",
    "online": "specdemo.methods.online:Online",
    "cascade": "specdemo.methods.cascade:Cascade",
    "router": "specdemo.methods.router:Router",
}


@dataclass(frozen=True, slots=True)
class Knob:
    """One option of a method, as the page, the presets and `--help` show it."""

    name: str
    type: type
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    step: float | None = None
    choices: tuple[str, ...] = ()

    def check(self, value: Any) -> Any:
        """The value in this knob's type. Raises ValueError with the range."""
        if isinstance(value, str) and self.type in (int, float):
            value = _number(self.name, value, self.type)
        if self.type is float and type(value) is int:
            value = float(value)
        if type(value) is not self.type:
            raise ValueError(f"option {self.name!r} must be of type {self.type.__name__}, not {value!r}")
        if self.choices and value not in self.choices:
            raise ValueError(f"option {self.name!r} must be one of {', '.join(self.choices)}, not {value!r}")
        low = -inf if self.low is None else self.low
        high = inf if self.high is None else self.high
        if isinstance(value, int | float) and not low <= value <= high:
            raise ValueError(f"option {self.name!r} must be between {self.low} and {self.high}, not {value}")
        return value


def _number(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"option {name!r} must be a number, not {text!r}") from None


def knob(default: Any, help: str, **limits: Any) -> Any:
    """A dataclass field of an `Options` class: its default, one sentence, and low, high, step or choices."""
    return field(default=default, metadata={"help": help, **limits})


def method(name: str) -> Any:
    """The class of a method. Raises ValueError for an unknown name."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; {suggest(name, METHODS)}")
    module, _, attribute = METHODS[name].partition(":")
    return getattr(import_module(module), attribute)


def knobs(name: str) -> list[Knob]:
    """The options of a method, read from its `Options` dataclass."""
    return [
        Knob(name=f.name, type=type(f.default), default=f.default, **f.metadata)
        for f in dataclasses.fields(method(name).Options)
    ]


def validate_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The given options, checked, with defaults filled in. Raises ValueError with one line that names the cure."""
    known = {k.name: k for k in knobs(name)}
    for option in options:
        if option not in known:
            raise ValueError(f"unknown option {option!r} of method {name!r}; {suggest(option, known)}")
    return {k.name: k.check(options[k.name]) if k.name in options else k.default for k in known.values()}


def reader(name: str, options: Mapping[str, Any] | None = None) -> str:
    """The method that reads the lane's model: a wrapper (one with an option `drafter`) hands it to what it wraps."""
    inner = {k.name: k.default for k in knobs(name)} | dict(options or {})
    return reader(inner["drafter"]) if "drafter" in inner else name


def check_model(name: str, options: Mapping[str, Any] | None, model: Any) -> None:
    """Raise ValueError when a model is missing, or given to a method that takes none."""
    wanted = method(reader(name, options)).needs_model
    if wanted and model is None:
        raise ValueError(f"method {name!r} needs a model; name a draft model, e.g. 'stories-draft-wide'")
    if not wanted and model is not None:
        raise ValueError(f"method {name!r} takes no model; leave it out")


def load_drafter(name: str, target: "Target", model: Any = None, **options: Any) -> "Drafter":
    """Build the drafter `name` for `target`.

    model: path, id or loaded module for methods that need one. Raises ValueError when the name or an option is
    unknown, when a model is missing, or when the drafter does not fit the target.
    """
    cls = method(name)
    checked = validate_options(name, options)
    check_model(name, checked, model)
    drafter: Drafter = cls(target, model, cls.Options(**checked))
    return drafter


def expect(checkpoint: "Checkpoint", name: str) -> None:
    from specdemo.models import checkpoints

    checkpoints.expect(checkpoint, name)
