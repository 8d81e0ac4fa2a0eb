"""Options that users set: frozen pydantic models whose fields come from `knob`.

Options travel as values by name only in files, links, traces and JSON. `parse` turns them into the object that the code
uses.
"""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from re import escape
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from specdemo.core.suggest import suggest

TYPES: Mapping[str, type] = {"integer": int, "number": float, "boolean": bool, "string": str, "object": dict}


class BaseOptions(BaseModel):
    """Base class of the options of methods. A frozen dataclass with fields from `knob` works as well."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def knob(
    default: object,
    help: str,
    low: float | None = None,
    high: float | None = None,
    step: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare an option. help: one sentence. step: of the slider on the page."""
    shown: dict[str, object] = {} if step is None else {"step": step}
    metadata = {"description": help, "strict": True, "json_schema_extra": shown, "ge": low, "le": high}
    if choices:
        shown["enum"] = list(choices)
        metadata["pattern"] = f"^(?:{'|'.join(map(escape, choices))})$"
    if isinstance(default, float):
        metadata["allow_inf_nan"] = False
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Knob:
    """Description of an option for the page, `--help` and error messages."""

    name: str
    type: type
    default: Any
    help: str
    low: float | None = None
    high: float | None = None
    step: float | None = None
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
        """Return the error message for a value that this option rejects."""
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


@lru_cache
def _adapter(of: type[BaseOptions]) -> TypeAdapter[BaseOptions]:
    return TypeAdapter(of)


@lru_cache
def describe(of: type[BaseOptions]) -> Mapping[str, Knob]:
    """Return the options that a class declares, by name."""
    properties = _adapter(of).json_schema().get("properties", {})
    return {name: _knob(name, schema) for name, schema in properties.items()}


def _knob(name: str, schema: Mapping[str, Any]) -> Knob:
    low, high, step = (schema.get(key) for key in ("minimum", "maximum", "step"))
    kind, choices = TYPES[schema["type"]], tuple(schema.get("enum", ()))
    return Knob(name, kind, schema["default"], schema["description"], low, high, step, choices)


def parse(of: type[BaseOptions], values: Mapping[str, object], owner: str) -> BaseOptions:
    """Return an instance of `of` with these values and defaults for the others.

    Numbers and booleans may be text, as in links and on the command line. owner: in error messages, e.g. "method 'x'".
    Raises ValueError, one line with the fix.
    """
    described = describe(of)
    for name in values:
        if name not in described:
            raise ValueError(f"unknown option {name!r:.60} of {owner}; {suggest(str(name)[:60], described)}")
    typed = {name: _from_text(described[name].type, value) for name, value in values.items()}
    try:
        return _adapter(of).validate_python(typed)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":  # from a validator of the class
            raise ValueError(str(first["ctx"]["error"])) from None
        name = str(first["loc"][0])
        raise ValueError(described[name].complain(typed[name])) from None


def _from_text(kind: type, value: object) -> object:
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
    described = describe(type(options))
    return {name: value for name, value in to_values(options).items() if value != described[name].default}
