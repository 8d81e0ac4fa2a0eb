"""Settings: one declaration each, from which commands, the page's controls, presets and share links are made.

A setting is a field of a pydantic model or a dataclass, or a parameter of a command. `setting` declares it, as its
default. Settings travel as values by name only in files, links, traces and JSON. Needs no torch.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from re import escape
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from specdemo.core.suggest import short_repr, suggest


@dataclass(frozen=True, slots=True)
class Setting:
    """Declaration of a setting, as `setting` makes it.

    help: of its option; "": none. link: it belongs to the comparison and not to the machine, so a share link carries it
    and the page has a control. label: of a control that the page draws by the type, with info, else help, below it; "":
    the page places it by hand. step: of a slider between the bounds; None: a number field. words: labels of the
    choices. brief: summary of a value for a folded panel; None: empty for the default, else label and value. metavar,
    flag: of its option; None: the type, and the name; an empty flag makes it a positional argument. command: further
    arguments of `typer.Option`.
    """

    help: str = ""
    link: bool = True
    label: str = ""
    info: str = ""
    step: float | None = None
    words: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    brief: Callable[[object], str] | None = None
    metavar: str | None = None
    flag: str | None = None
    command: Mapping[str, object] = dataclasses.field(default_factory=dict, hash=False)
    name: str = ""
    type: type = str
    default: Any = dataclasses.field(default=None, hash=False)
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def range(self) -> str:
        """Describe the allowed values in a few words."""
        if self.type is bool:
            return "true or false"
        if self.choices or self.type not in (int, float):
            return " | ".join(self.choices) or "text"
        if self.low is None or self.high is None:
            limits = {"at least": self.low, "at most": self.high}
            return " ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None) or "any number"
        return f"{self.low} to {self.high}"

    def complain(self, value: object) -> str:
        """Return the error message for a value that this option of a method rejects."""
        expected = self.range
        if self.choices:
            expected = f"one of {', '.join(self.choices)}"
        elif self.type in (int, float) and type(value) not in (int, float):
            expected = "a number"
        elif self.type is int and isinstance(value, float):
            expected = "a whole number"
        elif self.low is not None and self.high is not None:
            expected = f"between {self.low} and {self.high}"
        return f"option {self.name!r} must be {expected}, not {value!r:.60}"

    def facts(self) -> dict[str, object]:
        """Return the declaration of a method's option as JSON."""
        names = ("name", "default", "help", "low", "high", "step", "choices")
        return {name: getattr(self, name) for name in names} | {"type": self.type.__name__}

    def summary(self, value: object) -> str:
        """Return a short summary of a value; may be empty."""
        if self.brief:
            return self.brief(value)
        return "" if value == self.default else f"{self.label.lower()} {value}"


def setting(
    default: object,
    help: str = "",
    low: float | None = None,
    high: float | None = None,
    step: float | None = None,
    choices: tuple[str, ...] = (),
    above: float | None = None,
    below: float | None = None,
    **shown: Any,
) -> Any:
    """Declare a setting as the default of a field or of a command's parameter.

    default: `...` for a required one. help: one sentence. above, below: bounds that are no values themselves; a slider
    ends a step before them. choices: those of a `Literal` need not be given. shown: further fields of `Setting`.
    """
    lowest = low if above is None else above + (step or 0)
    highest = high if below is None else below - (step or 0)
    declared = Setting(help, step=step, default=default, low=lowest, high=highest, choices=choices, **shown)
    metadata: dict[str, Any] = {
        "json_schema_extra": {"setting": declared},
        "ge": low,
        "le": high,
        "gt": above,
        "lt": below,
    }
    if choices:
        metadata["pattern"] = f"^(?:{'|'.join(map(escape, choices))})$"
    if isinstance(default, int | float):
        metadata |= {"strict": True} | ({"allow_inf_nan": False} if isinstance(default, float) else {})
    return dataclasses.field(default=default, metadata=metadata)


def declared_by(default: Any) -> Setting:
    """Return the declaration of which `setting` made a default."""
    declared: Setting = default.metadata["json_schema_extra"]["setting"]
    return declared


class BaseOptions(BaseModel):
    """Base class of the options of methods. A frozen dataclass with fields from `setting` works as well."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Settings(BaseModel):
    """Validated external data. Every rejection is one line."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def build(cls, data: Mapping[str, object]) -> Self:
        """Validate data. Raises ValueError with one line."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ValueError(_one_line(error.errors()[0], cls)) from None

    def changed(self, **changes: object) -> Self:
        """Return a validated copy with other values. Raises ValueError with one line."""
        return self.build(self.model_dump() | changes)

    def with_valid(self, changes: Mapping[str, object]) -> tuple[Self, dict[str, str]]:
        """Return a copy with the valid changes, and one line for each other field."""
        try:
            return self.model_validate({**self.model_dump(), **changes}), {}
        except ValidationError as error:
            wrong = {str(e["loc"][0]): _one_line(e, type(self)) for e in reversed(error.errors())}
            return self.changed(**{name: value for name, value in changes.items() if name not in wrong}), wrong

    def __copy__(self) -> Self:
        """Return a copy without cached properties: `model_copy` may change what they depend on."""
        copied = super().__copy__()
        for name in vars(copied).keys() - type(self).model_fields.keys():
            del vars(copied)[name]
        return copied


@lru_cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


@lru_cache
def settings(cls: type[Any]) -> Mapping[str, Setting]:
    """Return the settings that a class declares by name, with the types and choices of its fields."""
    if issubclass(cls, BaseModel):
        fields = cls.model_fields
    else:
        hints = get_type_hints(cls, include_extras=True)
        fields = {f.name: FieldInfo.from_annotated_attribute(hints[f.name], f) for f in dataclasses.fields(cls)}
    declarations = {}
    for name, field in fields.items():
        if isinstance(field.json_schema_extra, dict):
            declared: Setting = field.json_schema_extra["setting"]  # type: ignore[assignment]
            kind, choices = _type(field.annotation)
            declarations[name] = replace(declared, name=name, type=kind, choices=declared.choices or choices)
    return declarations


def _type(annotation: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the type of a field, and its choices. Lists of numbers are written as text: 1-8 or 0,1,3."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return str, arguments
    if origin in (Annotated, Union, UnionType):  # for an optional field, the first alternative is the type
        return _type(arguments[0])
    if isinstance(origin, type) and issubclass(origin, Sequence):
        kind, _ = _type(arguments[0])
        return list[kind] if kind in (str, Path) else str, ()  # type: ignore[valid-type]
    return origin or annotation, ()


def linked(cls: type[Settings]) -> list[str]:
    """Return the settings that a share link may carry."""
    return [name for name, declared in settings(cls).items() if declared.link]


def parse(cls: type[BaseOptions], values: Mapping[str, object], owner: str) -> BaseOptions:
    """Return an instance of `cls` with these values and defaults for the others.

    Numbers and booleans may be text, as in links and on the command line. owner: in error messages, e.g. "method 'x'".
    Raises ValueError, one line with the fix.
    """
    declarations = settings(cls)
    for name in values:
        if name not in declarations:
            raise ValueError(f"unknown option {name!r:.60} of {owner}; {suggest(str(name)[:60], declarations)}")
    typed = {name: from_text(declarations[name].type, value) for name, value in values.items()}
    try:
        options: BaseOptions = _adapter(cls).validate_python(typed)
        return options
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # from a validator of the class
            raise ValueError(str(first["ctx"]["error"])) from None
        name = str(first["loc"][0])
        raise ValueError(declarations[name].complain(typed[name])) from None


def from_text(kind: type, value: object) -> object:
    """Return a number or a boolean for its text, and any other value unchanged."""
    if isinstance(value, str) and kind is bool:
        return {"true": True, "false": False}.get(value.lower(), value)
    if isinstance(value, str) and kind in (int, float):
        with suppress(ValueError):
            return kind(value)
    return value


def to_values(options: BaseOptions) -> dict[str, object]:
    """Return all values by name, for JSON."""
    values: dict[str, object] = _adapter(type(options)).dump_python(options)
    return values


def changed_values(options: BaseOptions) -> dict[str, object]:
    """Return the values that are not at their default."""
    declarations = settings(type(options))
    return {name: value for name, value in to_values(options).items() if value != declarations[name].default}


_MESSAGES = {
    "greater_than_equal": "must be {ge} or more, not {given}",
    "greater_than": "must be above {gt}, not {given}",
    "less_than_equal": "must be {le} or less, not {given}",
    "less_than": "must be below {lt}, not {given}",
    "literal_error": "must be {expected}, not {given}",
    "bool_type": "must be true or false, not {given}",
    "int_type": "must be a whole number, not {given}",
    "float_type": "must be a number, not {given}",
    "finite_number": "must be a finite number, not {given}",
    "string_type": "must be text, not {given}",
    "list_type": "must be a list, not {given}",
    "string_unicode": "must be valid text, not {given}",
    "string_too_long": "must have {max_length} characters at most",
    "string_too_short": "must not be empty",
    "too_long": "must have {min_length} to {max_length} entries",
    "too_short": "must have {min_length} to {max_length} entries",
    "missing": "is missing",
}


def _one_line(error: Mapping[str, Any], cls: type[BaseModel]) -> str:
    """Format an error as `k must be 16 or less, not 9999`."""
    name = next((str(part) for part in reversed(error["loc"]) if isinstance(part, str)), "the preset")
    limits, value = error.get("ctx", {}), short_repr(error["input"])
    match error["type"]:
        case "extra_forbidden":
            inner = cls.model_fields.get(str(error["loc"][0]))
            owner = get_args(inner.annotation)[0] if inner else cls
            return f"unknown setting {name!r}; {suggest(name, owner.model_fields)}"
        case "value_error":
            message = str(limits["error"])
            return f"the {name} {message}" if message.startswith(("must", "is ")) else message
        case error_type if error_type in _MESSAGES:
            if error_type.startswith("too_"):  # the error names one end only
                ends, bounds = ("min_length", "max_length"), cls.model_fields[name].metadata
                limits |= {end: getattr(one, end) for one in bounds for end in ends if hasattr(one, end)}
            return f"{name} {_MESSAGES[error_type].format(**limits, given=value)}"
    return f"{name}: {error['msg'].lower()}, not {value}"
