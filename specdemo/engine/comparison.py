"""Settings of a comparison and its lanes; every setting is declared here, once.

A field's type, bounds and default are pydantic's; a `Setting` in its annotation holds the texts for users. Presets,
share links, the options of `specdemo run`, the page's controls and the overrides of its API are derived from the
fields. Importing this needs no torch. Every rejection is a ValueError with one line.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from specdemo.core.dtypes import NAMES, dtype_name
from specdemo.core.options import TYPES, BaseOptions, Knob, changed_values, to_values
from specdemo.core.rules import DEFAULT_RULE, RULES, accept_rule, rules_help
from specdemo.core.safe_io import JsonObject
from specdemo.core.sampling_settings import Sampling
from specdemo.core.speedup import DEFAULT_LENGTH
from specdemo.core.suggest import DEVICES, program, short_repr, suggest
from specdemo.core.thinking import Thinking
from specdemo.methods import BASELINE, METHODS, MODEL_OPTIONS, check_model, parse_options
from specdemo.servers.address import address

if TYPE_CHECKING:
    RuleName = str
else:
    RuleName = Literal[tuple(RULES)]

if TYPE_CHECKING:  # these import torch
    from specdemo.core.accept import AcceptRule
    from specdemo.core.protocol import Budget

MAX_LANES = 3  # without the baseline
MAX_K = 16  # tokens
MAX_NEW_TOKENS = 1024
MAX_PROMPT_CHARACTERS = 100_000  # characters
MAX_REPEATS = 20
MAX_GRAMMAR = 20_000  # characters


@dataclass(frozen=True, slots=True)
class Setting:
    """Texts and presentation of a field.

    help: help of its option of `specdemo run`, which applies to every lane; "": no option. link: the field belongs to
    the comparison and not to the machine, so a share link carries it and the page has a control. label: of a control
    that the page draws by the field's type, with info, else help, below it; "": the page places it by hand. step: of a
    slider over the field's bounds; None: a number field. words: labels of the choices. brief: summary of a value for a
    folded panel; None: empty for the default, else label and value.
    """

    help: str = ""
    link: bool = True
    label: str = ""
    info: str = ""
    step: float | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    brief: Callable[[object], str] | None = None


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


def settings(of: type[Settings]) -> dict[str, Setting]:
    """Return the fields that have a `Setting`, in order."""
    return {name: s for name, f in of.model_fields.items() for s in f.metadata if isinstance(s, Setting)}


def linked(of: type[Settings]) -> list[str]:
    """Return the fields that a share link may carry."""
    return [name for name, setting in settings(of).items() if setting.link]


def brief(of: type[Settings], name: str, value: object) -> str:
    """Return a short summary of a field's value; may be empty."""
    setting, default = settings(of)[name], of.model_fields[name].default
    if setting.brief:
        return setting.brief(value)
    return "" if value == default else f"{setting.label.lower()} {value}"


@lru_cache
def _schema(of: type[Settings]) -> dict[str, JsonObject]:
    properties: dict[str, JsonObject] = of.model_json_schema()["properties"]
    # for an optional field, the first alternative is the type
    return {name: field | field.get("anyOf", [{}])[0] for name, field in properties.items()}


def type_of(of: type[Settings], name: str) -> type:
    """Return a field's plain type."""
    return TYPES[_schema(of)[name]["type"]]


def as_knob(of: type[Settings], name: str) -> Knob:
    """Describe a field as an option of a method. It has bounds if it has a step; an open bound is moved inward by one
    step."""
    field, setting = _schema(of)[name], settings(of)[name]
    step, low, high = setting.step, field.get("minimum"), field.get("maximum")
    if step is None:
        low = high = None
    elif low is None or high is None:
        low = field["exclusiveMinimum"] + step if low is None else low
        high = field["exclusiveMaximum"] - step if high is None else high
    choices = tuple(field.get("enum", ()))
    return Knob(name, type_of(of, name), field.get("default"), setting.help, low, high, step, choices)


def _printable(text: str, allowed: str = "\t\n\r") -> str:
    bad = next((c for c in text if (c < " " and c not in allowed) or "\x7f" <= c <= "\x9f"), None)
    if bad is not None:
        raise ValueError(f"must not contain the control character U+{ord(bad):04X}; remove it")
    return text


_label = partial(_printable, allowed="")


def _model(name: str) -> str:
    if name.startswith("-"):  # on the command line of a server it would be an option
        raise ValueError("must not begin with -; name a model or its folder")
    return _label(name)


def _non_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; write at least one word")
    return text


def validate_method_name(name: str) -> str:
    """Return the name of a method. Raises ValueError if it is unknown."""
    if name not in METHODS:
        raise ValueError(f"unknown method {short_repr(name)}; {suggest(name[:60], METHODS)}")
    return name


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", name):
        raise ValueError(f"must be {DEVICES}")
    return name


def _thinking(value: object) -> object:
    """Accept booleans, which YAML reads for `on` and `off`."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Server = Annotated[str, Field(max_length=300), AfterValidator(address)]
Name = Annotated[str, Field(max_length=80), AfterValidator(_label)]
Model = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_model)]
Text = Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS), AfterValidator(_printable)]
Messages = tuple[Mapping[str, str], ...]  # each with role and content


def _gguf(words: str, label: str) -> Setting:
    """Return the texts of a setting that applies to GGUF models only."""
    return Setting(f"GGUF models: {words}.", link=False, label=label, info=f"{words[0].upper()}{words[1:]}")


class Lane(Settings):
    """One speculative lane.

    On a `server` (servers/lane.py) the target's name is `served_model`, and method, model, k and options describe what
    the server is meant to run; they are not checked.
    """

    method: Annotated[
        str, AfterValidator(validate_method_name), Setting(f"Drafting method; `{program()} methods` lists them.")
    ]
    model: Annotated[Model | None, Setting("Draft model: embedded name, folder or hub id[@revision].")] = None
    k: Annotated[
        int,
        Setting(
            "Draft length; 0: the best one for the measured costs of this target's passes.",
            label="Draft length k",
            info="0: measured",
            step=1,
        ),
    ] = Field(0, ge=0, le=MAX_K)
    options: Annotated[dict[str, int | float | bool | str], Setting("Options of the method.")] = {}
    acceptance: Annotated[
        RuleName,
        Setting(
            f"Acceptance rule: {rules_help()}.",
            label="Acceptance",
            words={name: entry.label(name) for name, entry in RULES.items()},
        ),
    ] = DEFAULT_RULE
    acceptance_options: Annotated[dict[str, int | float | bool | str], Setting("Options of the acceptance rule.")] = {}
    name: Annotated[Name, Setting()] = ""
    server: Annotated[Server | None, Setting()] = None
    served_model: Model | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """Return all models that the lane names, including those in its options."""
        option_models = [
            name.strip() for option in MODEL_OPTIONS for name in str(self.options.get(option, "")).split(",")
        ]
        return tuple(name for name in (self.model, *option_models) if name and name not in METHODS)

    @property
    def budget(self) -> "Budget":
        """Return the budget: depth k, and as many nodes as the method's tree has with these options. A length that is
        not chosen yet counts as DEFAULT_LENGTH."""
        from specdemo.core.protocol import Budget

        k = self.k or (DEFAULT_LENGTH if self.method != BASELINE else 0)
        return Budget(k, max(k, getattr(self.parsed, "nodes", 0)))

    @cached_property
    def parsed(self) -> BaseOptions:
        """Return the `Options` of the method. Raises ValueError with one line if it rejects these or the model."""
        parsed = parse_options(self.method, self.options)
        check_model(self.method, to_values(parsed), self.model)
        if not RULES[self.acceptance].trees and getattr(parsed, "nodes", 0) > 0:
            raise ValueError(
                f"acceptance rule {self.acceptance!r} verifies chains only and this lane drafts a tree; set its option "
                "nodes to 0 or choose another method"
            )
        if self.k and getattr(parsed, "length", 0.0) > self.k + 1:
            raise ValueError(f"option 'length' is at most k + 1 = {self.k + 1}, not {parsed.length:g}; increase k")  # type: ignore[attr-defined]
        self.accept_rule()
        return parsed

    def accept_rule(self) -> "AcceptRule":
        """Return the acceptance rule with its options. Raises ValueError with one line if it rejects them."""
        return accept_rule(self.acceptance, self.acceptance_options)

    def validated(self) -> Self:
        """Return this lane as validated by its method and rule, without options that are at their default."""
        rule = self.accept_rule()
        of_rule = changed_values(rule) if isinstance(rule, BaseOptions) else {}
        lane = self.model_copy(update={"options": changed_values(self.parsed), "acceptance_options": of_rule})
        vars(lane)["parsed"] = self.parsed
        return lane


class Comparison(Settings):
    """Settings of one comparison. Lane 0, plain decoding, is always present and not listed; it runs on `server`, or
    locally if None."""

    id: Name  # of its preset, and of its trace
    target: Annotated[Model, Setting("Target model: embedded name, folder or hub id[@revision].")]
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        BeforeValidator(dtype_name),
        Setting(f"Data type: {NAMES}.", link=False),
    ] = "auto"
    device: Annotated[str, AfterValidator(_device), Setting(f"Device: {DEVICES}.", link=False)] = "auto"
    quantization: Annotated[
        Literal["4bit", "8bit"] | None, Setting("Quantization of the target: 4bit or 8bit.", link=False)
    ] = None
    gpu_layers: Annotated[int, _gguf("layers on the GPU; -1: all that fit", "GPU layers")] = Field(-1, ge=-1, le=1000)
    threads: Annotated[int, Setting("CPU threads; 0: the fastest number, measured.", label="Threads", link=False)] = (
        Field(0, ge=0, le=1024)
    )
    bit_exact: Annotated[
        Literal["auto", "on", "off"],
        Setting("One kernel for passes of every width on a CPU: auto (where it hardly costs), on or off.", link=False),
    ] = "auto"
    context: Annotated[int, _gguf("most tokens of a lane; 0: as the file states", "Context")] = Field(
        0, ge=0, le=1 << 20
    )
    cache_type: Annotated[
        Literal["auto", "f32", "f16", "q8_0"], _gguf("type of the KV cache: auto, f32, f16 or q8_0", "Cache type")
    ] = "auto"
    flash_attention: Annotated[
        bool, _gguf("flash attention; without it more texts differ at near-ties", "Flash attention")
    ] = True
    lanes: list[Lane] = Field(min_length=1, max_length=MAX_LANES)
    prompt: Annotated[Text, AfterValidator(_non_empty), Setting("Text to continue.")]
    chat: Annotated[bool | None, Setting("Send the prompt as a chat message, or as plain text to continue.")] = None
    system: Annotated[Text, Setting("System prompt of the chat.")] = ""
    thinking: Annotated[
        Thinking,
        BeforeValidator(_thinking),
        Setting(
            "Thinking of the chat template: default, on or off.",
            label="Thinking",
            info="of a chat; drafters may be trained in one mode",
            words={"default": "as the template", "on": "on", "off": "off"},
        ),
    ] = "default"
    grammar: Annotated[
        Text,
        Field(max_length=MAX_GRAMMAR),
        Setting(
            "JSON schema (begins with {) or regular expression that the output of every lane must match.",
            label="Grammar",
            info="JSON schema or regular expression for the output; empty: any text",
            brief=lambda grammar: "grammar" if grammar else "",
        ),
    ] = ""
    temperature: Annotated[
        float,
        Field(ge=0.0, le=5.0),
        AfterValidator(lambda t: Sampling(temperature=t).temperature),
        Setting(
            "Sampling temperature; 0: greedy.",
            label="Temperature",
            step=0.05,
            brief=lambda t: f"temperature {t}" if t else "greedy",
        ),
    ] = 0.0
    top_p: Annotated[float, Setting("Nucleus sampling; 1: off.", label="Top-p", step=0.01)] = Field(1.0, gt=0.0, le=1.0)
    top_k: Annotated[int, Setting("Sample from the k most likely tokens; 0: off.", label="Top-k", step=1)] = Field(
        0, ge=0, le=1000
    )
    min_p: Annotated[
        float, Setting("Smallest probability relative to the most likely token; 0: off.", label="Min-p", step=0.01)
    ] = Field(0.0, ge=0.0, lt=1.0)
    seed: Annotated[int, Setting("Random seed.", label="Seed", info="the same in every lane")] = Field(
        0, ge=0, le=2**31 - 1
    )
    max_new_tokens: Annotated[
        int,
        Setting(
            "Maximum number of new tokens.",
            label="Max new tokens",
            info="per lane",
            step=1,
            brief=lambda n: f"{n} token{'' if n == 1 else 's'}",
        ),
    ] = Field(128, ge=1, le=MAX_NEW_TOKENS)
    schedule: Annotated[
        Literal["race", "sequential"],
        Setting(
            "Order of the lanes: race (step by step in turn) or sequential.",
            label="Schedule",
            info="each lane is timed on its own compute time",
            words={"race": "interleaved", "sequential": "sequential"},
            brief=lambda schedule: "" if schedule == "race" else "sequential",
        ),
    ] = "race"
    repeats: Annotated[int, Setting("Number of runs to pool.", link=False)] = Field(1, ge=1, le=MAX_REPEATS)
    server: Annotated[Server | None, Setting(link=False)] = None
    served_model: Annotated[Model | None, Setting(link=False)] = None
    history: Messages = Field((), exclude=True)  # earlier messages of the chat, with the baseline's answers

    @cached_property
    def all_lanes(self) -> tuple[Lane, ...]:
        """Return all lanes with lane 0, whose k is 0."""
        plain = Lane(method=BASELINE, name="Baseline", server=self.server, served_model=self.served_model)
        return plain.model_copy(update={"k": 0}), *self.lanes

    @property
    def all_remote(self) -> bool:
        """Return True if all lanes run on servers, so that no local model is needed."""
        return all(lane.server for lane in self.all_lanes)

    @property
    def sampling(self) -> Sampling:
        """Return the sampling settings."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def validated(self) -> Self:
        """Return this comparison as validated by its methods. Raises ValueError with one line."""
        return self.model_copy(update={"lanes": [lane.validated() for lane in self.lanes]})


_MESSAGES = {
    "greater_than_equal": "must be {ge} or more, not {given}",
    "greater_than": "must be above {gt}, not {given}",
    "less_than_equal": "must be {le} or less, not {given}",
    "less_than": "must be below {lt}, not {given}",
    "literal_error": "must be {expected}, not {given}",
    "int_type": "must be a whole number, not {given}",
    "float_type": "must be a number, not {given}",
    "finite_number": "must be a finite number, not {given}",
    "string_type": "must be text, not {given}",
    "list_type": "must be a list, not {given}",
    "string_unicode": "must be valid text, not {given}",
    "string_too_long": "must have {max_length} characters at most",
    "string_too_short": "must not be empty",
    "too_long": f"must have 1 to {MAX_LANES} entries",
    "too_short": f"must have 1 to {MAX_LANES} entries",
    "missing": "is missing",
}


def _one_line(error: ErrorDetails, of: type[Settings]) -> str:
    """Format an error as `k must be 16 or less, not 9999`."""
    field_name = next((str(part) for part in reversed(error["loc"]) if isinstance(part, str)), "the preset")
    limits, value = error.get("ctx", {}), short_repr(error["input"])
    match error["type"]:
        case "extra_forbidden":
            settings_class = Lane if len(error["loc"]) > 1 else of
            return f"unknown setting {field_name!r}; {suggest(field_name, settings_class.model_fields)}"
        case "value_error":
            message = str(limits["error"])
            return f"the {field_name} {message}" if message.startswith(("must", "is ")) else message
        case error_type if error_type in _MESSAGES:
            return f"{field_name} {_MESSAGES[error_type].format(**limits, given=value)}"
    return f"{field_name}: {error['msg'].lower()}, not {value}"
