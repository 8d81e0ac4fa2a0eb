"""Drafting methods by name. The interface is in methods/base.py. Methods are imported on first use, so listing their
names needs no torch.
"""

import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from specdemo.core.settings import BaseOptions as BaseOptions
from specdemo.core.settings import Setting, parse, settings, to_values
from specdemo.core.settings import setting as setting
from specdemo.core.signals import SIGNAL_EXIT_CODE
from specdemo.core.suggest import program, suggest
from specdemo.methods.facts import FACTS, MODELS
from specdemo.methods.facts import Facts as Facts
from specdemo.models.errors import checkpoint_errors, typed_line
from specdemo.models.ref import ModelRef
from specdemo.models.sources import cached_folder

if TYPE_CHECKING:
    from specdemo.core.protocol import Target
    from specdemo.methods.base import Method
    from specdemo.models.checkpoints import Checkpoint

Flags = list[str]  # of a serving engine
MethodOptions = Mapping[str, Any]  # all options of a method: name -> value
# the drafter (None: the target contains it), k, options -> flags
EngineArgs = Callable[[str | None, int, MethodOptions], Flags]

BASELINE = "none"  # lane 0 of every comparison
SYNTHETIC = "synthetic"  # wraps others and is not wrapped: its drafts are judged by a rule of its own

CAPABILITY_USES = {  # a capability that a method may require (core/protocol.py), in words
    "hidden_states": "reads the target's hidden states",
    "layers": "runs layers of the target by themselves",
    "shared_kv": "reads the target's KV cache",
    "trees": "drafts trees",
}

MODEL_OPTIONS = ("drafts", "inner_model")  # what these name are further models, with commas between

BUILT_IN = {name: f"{__name__}.{facts.cls}" for name, facts in FACTS.items()}
PLUG_INS = {entry.name: entry.value for entry in entry_points(group="specdemo.methods") if entry.name not in BUILT_IN}
METHODS = BUILT_IN | PLUG_INS  # name -> module:class


def wrappable(wrapper: str) -> tuple[str, ...]:
    """Return the methods that a wrapper supports: all but plain decoding, synthetic acceptance and itself."""
    return tuple(name for name in METHODS if name not in (BASELINE, SYNTHETIC, wrapper))


def method(name: str) -> "type[Method]":
    """Return the class of a method. Raise ValueError for an unknown name and for a plug-in that cannot be used."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; {suggest(name, METHODS)}")
    cls: type[Method] | str = resolve_name(BUILT_IN[name]) if name in BUILT_IN else _plug_in(name)
    if isinstance(cls, str):
        raise ValueError(cls)
    return cls


@cache  # a module that fails is imported once: it may be slow, and it may change something each time
def _plug_in(name: str) -> "type[Method] | str":
    """Return the class of a plug-in or, if it cannot be used, one line that says why."""
    from specdemo.methods.base import Method

    try:
        cls = resolve_name(METHODS[name])
        if not (isinstance(cls, type) and issubclass(cls, Method)):
            raise TypeError(f"{METHODS[name]} is not a subclass of specdemo.methods.base.Method")
        _ = cls.title, cls.summary, settings(cls.Options)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may raise anything, SystemExit included
        if isinstance(error, SystemExit) and error.code == SIGNAL_EXIT_CODE + signal.SIGTERM:
            raise  # this process was terminated (core/signals.py), not the module
        why = f"cannot be imported ({typed_line(error)}); fix or uninstall it"
        return f"method {name!r} of another package {why}"
    return cls


def unusable() -> dict[str, str]:
    """Return why a plug-in cannot be used, by its name. Import every plug-in."""
    return {name: reason for name in PLUG_INS if isinstance(reason := _plug_in(name), str)}


def facts_of(name: str) -> Facts:
    """Return the facts of a method: a row of the table, or attributes of its class. Raises ValueError as `method`."""
    if name in FACTS and FACTS[name].title:
        return FACTS[name]
    cls = method(name)
    return Facts(METHODS[name], cls.title, cls.drafting_cost, cls.config_marks)


def usable() -> list[str]:
    """Return the name of every method except the plug-ins that cannot be used."""
    without = unusable()
    return [name for name in METHODS if name not in without]


def method_options(name: str) -> list[Setting]:
    """Return the options of a method, read from its `Options` class."""
    return [*settings(method(name).Options).values()]


def parse_options(name: str, values: Mapping[str, object]) -> BaseOptions:
    """Return the `Options` of a method with these values. Raises ValueError with one line that names the fix."""
    return parse(method(name).Options, values, f"method {name!r}")


def model_method(name: str, options: Mapping[str, object] | None = None) -> str:
    """Return the method that reads the lane's model: a wrapper (with an option `drafter`) passes it to the wrapped
    method.
    """
    inner = {k.name: k.default for k in method_options(name)} | dict(options or {})
    return model_method(inner["drafter"]) if "drafter" in inner else name


def check_model(name: str, options: Mapping[str, object] | None, model: object) -> None:
    """Raise ValueError when a model is missing, or given to a method that takes none."""
    needs_model = method(model_method(name, options)).needs_model
    if needs_model and model is None:
        raise ValueError(f"method {name!r} needs a model; `{program()} drafters TARGET` lists those of your target")
    if not needs_model and model is not None:
        raise ValueError(f"method {name!r} takes no model; leave it out")


def load_drafter(name: str, target: "Target", model: object = None, **options: object) -> "Method":
    """Build the drafter `name` for `target`.

    model: path, id or loaded module for methods that need one; None for "mtp" on a GGUF target: the layer in its file.
    Raises ValueError when the name or an option is unknown, when a model is missing, or when the drafter does not fit
    the target.
    """
    parsed = parse_options(name, options)
    if model is None and model_method(name, options) == "mtp" and ModelRef(target.name).gguf:
        model = target.name  # whose file may have a prediction layer
    check_model(name, to_values(parsed), model)
    return build_drafter(name, target, model, parsed)


def build_drafter(name: str, target: "Target", model: object, options: BaseOptions) -> "Method":
    """Build a drafter as `load_drafter` does, with options of `parse_options` and a model of `check_model`."""
    cls = method(name)
    check_capabilities(cls, target)

    with checkpoint_errors(model) if isinstance(model, str) else nullcontext():
        drafter = cls(target, model, options)
    _check_taps(drafter, target)
    if p_min := getattr(options, "p_min", 0.0):
        from specdemo.methods.wrapper import Confident

        return Confident(drafter, p_min)
    return drafter


def check_capabilities(cls: "type[Method]", target: "Target") -> None:
    """Raise ValueError for a target without a capability that the method requires, before weights are loaded."""
    for capability in sorted(cls.requires):
        if not getattr(target.capabilities, capability):
            raise ValueError(
                f"{cls.title} {CAPABILITY_USES[capability]}, which {target.name or 'the target'} does not support; "
                "choose 'ngram' or 'draft_model'"
            )


def _check_taps(drafter: "Method", target: "Target") -> None:
    """Raise ValueError if the drafter reads hidden states that the target does not return."""
    available = target.capabilities.hidden_states
    missing = [] if available == "all" else sorted(set(drafter.taps) - available)
    if missing:
        raise ValueError(
            f"{drafter.title} reads the hidden states of layers {', '.join(map(str, missing))}, which "
            f"{target.name or 'the target'} does not return; choose another head"
        )


def detect_method(checkpoint: "Checkpoint") -> str:
    """Return the method that reads a checkpoint. The last of METHODS is asked first: plug-ins before the built-in
    methods, heads before `draft_model`, which any complete model is for.

    Raise ValueError if no method recognises it.
    """
    failed = ""
    for name in reversed(usable()):
        try:
            if method(name).recognises(checkpoint):
                return name
        except Exception as error:
            if name in BUILT_IN:
                raise
            failed += f"; method {name!r} of another package failed on it ({typed_line(error)})"
    sample = ", ".join(list(checkpoint.tensors)[:3]) or "nowhere"
    raise ValueError(f"{checkpoint.name} is no speculator known here; its tensors begin {sample}{failed}")


def require_method(checkpoint: "Checkpoint", name: str) -> None:
    """Raise ValueError if the checkpoint is for another method than `name`, and name that method; also for weights and
    values of the config that no method supports."""
    if not reads(name, checkpoint):
        detected = detect_method(checkpoint)
        if detected in MODELS:
            raise ValueError(
                f"{checkpoint.name} is a whole model, not a head for method {name!r}; choose a head for it"
            )
        other = "a draft model" if name == "draft_model" else f"for method {name!r}"
        raise ValueError(
            f"{checkpoint.name} is a head for method {detected!r}, not {other}; choose method {detected!r}"
        )
    if name != "draft_model":
        from specdemo.methods.heads.formats import check_values
        from specdemo.models.checkpoints import check_weights

        check_weights(checkpoint)
        if vars(method(name)).get("config_keys"):  # a subclass reads files of its own
            check_values(checkpoint)


def reads(name: str, checkpoint: "Checkpoint") -> bool:
    """Return whether method `name`, when it is chosen, reads the checkpoint.

    It does if `kind_of` finds it. If `kind_of` finds a plug-in or a variant of it (one class derives from the other),
    it is enough that the chosen method recognises the checkpoint. Between unrelated built-in methods the order of
    METHODS decides, because some recognise more files than they read. Raise ValueError if no method recognises it.
    """
    kind = detect_method(checkpoint)
    if kind == name:
        return True
    cls, other = method(name), method(kind)
    related = issubclass(cls, other) or issubclass(other, cls)
    return (related or kind in PLUG_INS) and cls.recognises(checkpoint)


def detect_head(source: ModelRef) -> str | None:
    """Return the method of the head in a folder; None for complete models, names that are not on this machine, and
    anything else.
    """
    from specdemo.models.checkpoints import open_meta_checkpoint

    path = source.path
    try:
        folder = path if path and path.is_dir() else cached_folder(source)
        with checkpoint_errors(source):
            detected = detect_method(open_meta_checkpoint(str(folder)))
    except ValueError:
        return None
    return None if detected in MODELS else detected


def check_no_head(name: ModelRef) -> None:
    """Raise ValueError, one line, for a head where a complete model is needed."""
    if (head := detect_head(name)) is not None:
        raise ValueError(f"{name} is a head for method {head!r}; choose a complete model as the target") from None
