"""A preset is one comparison: models, lanes, prompt, generation. A link is what differs from a preset, or a sweep.

Reading presets needs neither torch nor transformers. What a file says by itself (types, ranges, method names) is
checked when it is read; what only a method's own code knows (its options, whether it takes a model) is checked by
`with_changes`, `spec` and `from_query`. Every refusal is a ValueError of one line.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import parse_qsl, urlencode

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from specdemo.core.words import suggest
from specdemo.methods import METHODS, MODEL_OPTIONS, check_model, knobs, method, reader, validate_options
from specdemo.servers.address import address, check_listed

if TYPE_CHECKING:  # the engine brings torch and transformers along
    from specdemo.engine.spec import RunSpec

FOLDER = Path(__file__).parents[2] / "presets"
DEFAULT = "embedded-draft"
EMBEDDED = (
    "stories",
    "stories-draft-wide",
    "stories-draft-deep",
    "stories-medusa",
    "stories-mlp-speculator",
    "stories-eagle-1",
    "stories-eagle-3",
    "stories-mtp",
    "stories-dflash",
    "stories-bytes",
    "stories-bytes-heads",
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may ask for; `lanes` counts the baseline."""

    max_new_tokens: int = 1024
    k: int = 16
    lanes: int = 4
    prompt: int = 100_000  # characters
    link_prompt: int = 2000  # characters of a prompt that a link can carry
    link: int = 20_000  # characters of a whole query string
    sweep_repeats: int = 10
    temperature: float = 5.0
    top_k: int = 1000
    seed: int = 2**31 - 1


LIMITS = Limits()


def _printable(text: str, allowed: str = "\t\n\r") -> str:
    bad = next((c for c in text if (c < " " and c not in allowed) or "\x7f" <= c <= "\x9f"), None)
    if bad is not None:
        raise ValueError(f"must not hold the control character U+{ord(bad):04X}; remove it")
    return text


def _label(text: str) -> str:
    return _printable(text, allowed="")


def _some_words(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty; write at least one word")
    return text


def _known_method(name: str) -> str:
    if name not in METHODS:
        raise ValueError(f"unknown method {_shown(name)}; {suggest(name[:60], METHODS)}")
    return name


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return name


Server = Annotated[str, Field(max_length=300), AfterValidator(address)]
Name = Annotated[str, Field(max_length=80), AfterValidator(_label)]
Model = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_label)]
Prompt = Annotated[str, Field(max_length=LIMITS.prompt), AfterValidator(_printable), AfterValidator(_some_words)]
_strict = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class LaneConfig(BaseModel):
    """One speculative lane; `k` is the draft length. On a `server` the rest says what that server is meant to run."""

    model_config = _strict
    method: Annotated[str, AfterValidator(_known_method)]
    model: Model | None = None
    k: int = Field(4, ge=1, le=LIMITS.k)
    options: dict[str, int | float | bool | str] = {}
    acceptance: Literal["lossless", "typical"] = "lossless"
    name: Name = ""
    server: Server | None = None
    served_model: Model | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """Every model the lane names, those in its options too."""
        inside = [name.strip() for option in MODEL_OPTIONS for name in str(self.options.get(option, "")).split(",")]
        return tuple(name for name in (self.model, *inside) if name and name not in METHODS)

    def checked(self) -> "LaneConfig":
        """This lane as its method's own code accepts it; options that are at their default are left out."""
        cls = method(self.method)
        options = validate_options(self.method, self.options)
        cls.Options(**options)  # what holds between two options
        check_model(self.method, options, self.model)
        default = {k.name: k.default for k in knobs(self.method)}
        return self.model_copy(update={"options": {n: v for n, v in options.items() if v != default[n]}})


class Preset(BaseModel):
    """One comparison. Lane 0, plain decoding, is always there and not listed; it runs on `server`, None: here."""

    model_config = _strict
    id: Name
    title: Name
    chip: Name = ""  # its title among the few that the page shows first; without one it stands in the list behind them
    description: str = ""
    target: Model
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, AfterValidator(_device)] = "auto"
    quantization: Literal["4bit", "8bit"] | None = None
    lanes: list[LaneConfig] = Field(min_length=1, max_length=LIMITS.lanes - 1)
    prompt: Prompt
    chat: bool | None = None  # the prompt is a message in the target's chat template; None: where it has one
    system: Annotated[str, Field(max_length=LIMITS.prompt), AfterValidator(_printable)] = ""
    max_new_tokens: int = Field(128, ge=1, le=LIMITS.max_new_tokens)
    temperature: float = Field(0.0, ge=0.0, le=LIMITS.temperature)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0, le=LIMITS.top_k)
    min_p: float = Field(0.0, ge=0.0, lt=1.0)
    seed: int = Field(0, ge=0, le=LIMITS.seed)
    schedule: Literal["race", "sequential"] = "race"
    server: Server | None = None
    served_model: Model | None = None
    # of presets whose models are downloaded
    group: Literal["16 GB", "24 GB", "80 GB"] | None = None  # a card that holds it
    memory_gb: float | None = Field(None, gt=0.0)  # weights and history, about
    gated: bool = False  # the hub asks for a login and an accepted licence
    licence: str = ""  # of the target, in a few words

    @property
    def models(self) -> tuple[str, ...]:
        """Every model it names, the target first."""
        return self.target, *(model for lane in self.lanes for model in lane.models)

    @property
    def embedded(self) -> bool:
        """True: it runs on the models that ship with the project; nothing is downloaded."""
        return all(model in EMBEDDED for model in self.models)

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(lane.method for lane in self.lanes))

    def with_changes(self, **changes: Any) -> "Preset":
        """The same comparison with other settings: any field of Preset, or of its lanes.

        `k` and `acceptance` go to every lane. `method` leaves one lane; `model` and `options` need that there is one.
        """
        for name in changes:
            if name not in _SETTINGS:
                raise ValueError(f"unknown setting {_shown(name)}; {suggest(name, _SETTINGS)}")
        of_lanes = {name: changes.pop(name) for name in _LANE_SETTINGS if name in changes}
        whole = _build(self.model_dump() | changes)
        changed = _build(whole.model_dump() | {"lanes": _change_lanes(whole.lanes, of_lanes, whole.target)})
        return changed.model_copy(update={"lanes": [lane.checked() for lane in changed.lanes]})

    def on_servers(self, servers: Sequence[str], served_model: str | None = None) -> "Preset":
        """The same comparison with a server a lane, in their order; of one more the first is the baseline's.

        Raises ValueError for more than that.
        """
        if len(servers) > len(self.lanes) + 1:
            raise ValueError(f"{len(servers)} servers for {len(self.lanes)} lanes and the baseline; name fewer")
        first = list(servers[: -len(self.lanes)])
        named = dict(zip(range(len(self.lanes)), servers[len(first) :], strict=False))
        lanes = [
            lane.model_dump() | ({"server": named[i], "served_model": served_model} if i in named else {})
            for i, lane in enumerate(self.lanes)
        ]
        baseline = {"server": first[0], "served_model": served_model} if first else {}
        return _build(self.model_dump() | {"lanes": lanes} | baseline)

    def spec(self) -> "RunSpec":
        """What the engine runs."""
        from specdemo.core.sampling import Sampling
        from specdemo.engine.spec import LaneSpec, RunSpec

        lanes = [lane.checked() for lane in self.lanes]
        return RunSpec(
            preset=self.id,
            target=self.target,
            prompt=self.prompt,
            chat=self.chat,
            system=self.system,
            lanes=tuple(
                LaneSpec(ln.method, ln.model, ln.k, ln.options, ln.acceptance, ln.name, ln.server, ln.served_model)
                for ln in lanes
            ),
            max_new_tokens=self.max_new_tokens,
            sampling=Sampling(self.temperature, self.top_k, self.top_p, self.min_p),
            seed=self.seed,
            schedule=self.schedule,
            dtype=self.dtype,
            device=self.device,
            quantization=self.quantization,
            server=self.server,
            served_model=self.served_model,
        )


class Sweep(BaseModel):
    """A benchmark suite on a preset's target. It names no model, so that any sweep is one for any visitor."""

    model_config = _strict
    sweep: Literal["k", "methods", "batch", "prompt", "depth-width"] = "k"
    preset: Annotated[str, AfterValidator(lambda id: preset(id).id)] = DEFAULT
    repeats: int = Field(3, ge=1, le=LIMITS.sweep_repeats)
    new_tokens: int = Field(96, ge=8, le=LIMITS.max_new_tokens)

    def with_changes(self, **changes: Any) -> "Sweep":
        """Raises ValueError with one line."""
        try:
            return Sweep.model_validate(self.model_dump() | changes)
        except ValidationError as error:
            raise ValueError(_one_line(error)) from None


_LANE_SETTINGS = ("method", "model", "k", "options", "acceptance")
_ABOUT = ("id", "title", "chip", "description", "group", "memory_gb", "gated", "licence")
_SETTINGS = (*(n for n in Preset.model_fields if n not in _ABOUT), *_LANE_SETTINGS)


def _change_lanes(lanes: list[LaneConfig], changes: dict[str, Any], target: str) -> list[dict[str, Any]]:
    """The lanes with one setting each replaced, not checked yet."""
    if "method" in changes:
        name = _known_method(str(changes["method"]))
        lanes = [next((lane for lane in lanes if lane.method == name), None) or _usual_lane(name, target, lanes[0].k)]
    alone = [name for name in ("model", "options") if name in changes]
    if alone and len(lanes) > 1:
        raise ValueError(f"{alone[0]} is for one lane and this preset has {len(lanes)}; name the method as well")
    return [lane.model_dump() | changes for lane in lanes]


def _usual_lane(name: str, target: str, k: int) -> LaneConfig:
    """A lane of that method, with the model and options that a preset gives it on this target, if one does."""
    shown = (lane for p in load_presets().values() if p.target == target for lane in p.lanes)
    return next(
        (lane.model_copy(update={"k": k}) for lane in shown if lane.method == name), LaneConfig(method=name, k=k)
    )


def _build(data: Any) -> Preset:
    try:
        return Preset.model_validate(data)
    except ValidationError as error:
        raise ValueError(_one_line(error)) from None


def _one_line(error: ValidationError) -> str:
    """The first complaint as `k must be 16 or less, not 9999`."""
    first = error.errors()[0]
    where = next((str(part) for part in reversed(first["loc"]) if isinstance(part, str)), "the preset")
    limits = first.get("ctx", {})
    words = {
        "greater_than_equal": "must be {ge} or more",
        "greater_than": "must be above {gt}",
        "less_than_equal": "must be {le} or less",
        "less_than": "must be below {lt}",
        "string_too_long": "must have {max_length} characters at most",
        "too_long": f"must have 1 to {LIMITS.lanes - 1} entries",
        "too_short": f"must have 1 to {LIMITS.lanes - 1} entries",
        "literal_error": "must be {expected}",
        "missing": "is missing",
        "int_type": "must be a whole number",
        "float_type": "must be a number",
        "finite_number": "must be a finite number",
        "string_type": "must be text",
        "list_type": "must be a list",
        "string_too_short": "must not be empty",
        "string_unicode": "must be valid text",
    }
    given = _shown(first["input"])
    match first["type"]:
        case "extra_forbidden":
            known = LaneConfig.model_fields if len(first["loc"]) > 1 else Preset.model_fields
            return f"unknown setting {where!r}; {suggest(where, known)}"
        case "value_error":
            message = str(limits["error"])
            return message if message.startswith("unknown") else f"the {where} {message}"
        case "missing" | "string_too_short" | "string_too_long" | "too_short" | "too_long" as kind:
            return f"{where} {words[kind].format(**limits)}"
        case kind if kind in words:
            return f"{where} {words[kind].format(**limits)}, not {given}"
    return f"{where}: {first['msg'].lower()}, not {given}"


def _shown(value: Any) -> str:
    """The value, short enough for one line."""
    text = repr(value[:60]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 48 else text[:45] + "..."


def read_preset(path: Path) -> Preset:
    """Raises ValueError naming the file."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name} is not YAML: {str(error).partition(chr(10))[0]}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path.name} is not a preset: it must hold 'name: value' lines")
    try:
        return _build({"id": path.stem, **data})
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


@lru_cache(maxsize=1)
def load_presets() -> dict[str, Preset]:
    """Every preset by id: the default first, then the other embedded ones, then what is downloaded, by size of card."""
    presets = [read_preset(path) for path in FOLDER.glob("*.yaml")]
    if not presets:
        raise ValueError(f"no presets in {FOLDER}; run specdemo from its checkout, or install it with pip install -e .")
    presets.sort(key=lambda p: (p.id != DEFAULT, not p.embedded, p.group or "", p.id))
    return {preset.id: preset for preset in presets}


def preset(id: str) -> Preset:
    """The preset of that id, in which - and _ are alike. Raises ValueError with a suggestion."""
    if not isinstance(id, str):
        raise ValueError(f"a preset is named in text, not by {_shown(id)}")
    presets = load_presets()
    id = next((known for known in presets if known.replace("_", "-") == id.replace("_", "-")), id)
    if id not in presets:
        raise ValueError(f"unknown preset {_shown(id)}; {suggest(id, presets)}")
    return presets[id]


def allowed_models(presets: Mapping[str, Preset]) -> tuple[str, ...]:
    """What a visitor may name: the embedded models and those of the presets."""
    return tuple(dict.fromkeys([*EMBEDDED, *(model for p in presets.values() for model in p.models)]))


def known_drafters(target: str) -> list[tuple[str, str]]:
    """A method and the drafter it reads: all that ship, and those of the hub that a preset pairs with this target."""
    presets = [p for p in load_presets().values() if p.embedded or p.target == target]
    return [(reader(lane.method, lane.options), lane.model) for p in presets for lane in p.lanes if lane.model]


# Share links. dtype, device, quantization and what servers call their models stay out: they belong to the machine, not
# to the comparison. A lane's server counts only where the operator of the page that reads the link has listed it.

_LINK_FIELDS: dict[str, type] = {
    "target": str,
    "prompt": str,
    "chat": bool,
    "system": str,
    "max_new_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "schedule": str,
}
_LINK_LANE_FIELDS: dict[str, type] = {"model": str, "k": int, "acceptance": str, "name": str, "server": str}
_NOTES = 6
FOREIGN = "a link may only name models that are embedded or in a preset"


def to_query(preset: Preset, base: Preset) -> str:
    """What differs from `base`, as a query string: `preset=embedded-draft&k=7`.

    The second lane's settings end in 2, the third's in 3: `k2=5`; an option is `option.max_n=4`, `option2.max_n=4`.
    Raises ValueError when the prompt is too long for a link.
    """
    for text, usual in ((preset.prompt, base.prompt), (preset.system, base.system)):
        if text != usual and len(text) > LIMITS.link_prompt:
            raise ValueError(
                f"a link holds a prompt of {LIMITS.link_prompt} characters, this one has {len(text)}; "
                "shorten it or export the trace"
            )
    pairs = [("preset", base.id)]
    pairs += [(n, _text(getattr(preset, n))) for n in _LINK_FIELDS if getattr(preset, n) != getattr(base, n)]
    if len(preset.lanes) != len(base.lanes):
        pairs.append(("lanes", str(len(preset.lanes))))
    for index, lane in enumerate(preset.lanes):
        pairs += _lane_pairs(lane, _reference(base, index), _suffix(index))
    return urlencode(pairs)


def from_query(
    query: Mapping[str, Any] | str,
    presets: Mapping[str, Preset],
    allow_any_model: bool = False,
    start: Preset | None = None,
) -> tuple[Preset, list[str]]:
    """The comparison a link asks for, and a note for everything in it that was refused. Never raises.

    query: a query string, or a mapping (of several values under one key the first counts). Models must be embedded
    or named in a preset unless `allow_any_model`. start: what a link without a preset changes; None: the first one.
    """
    link = _Link(*_pairs(query), None if allow_any_model else allowed_models(presets))
    wanted = link.take("preset")
    chosen = start or next(iter(presets.values()))
    if wanted is not None and wanted in presets:
        chosen = presets[wanted]
    elif wanted is not None:
        link.refuse("preset", wanted, f"unknown preset; {suggest(wanted[:60], presets)}")
    base = chosen
    for name, kind in _LINK_FIELDS.items():
        chosen = link.change(chosen, name, kind)
    lanes = [link.lane(_reference(base, index), _suffix(index)) for index in range(link.lanes(len(base.lanes)))]
    if lanes != base.lanes:
        chosen = chosen.model_copy(update={"lanes": lanes})
    return chosen, link.all_notes()


def sweep_to_query(sweep: Sweep) -> str:
    """`sweep=k&preset=embedded-draft&repeats=3&new_tokens=96`"""
    return urlencode(sweep.model_dump())


def sweep_from_query(query: Mapping[str, Any] | str) -> tuple[Sweep, list[str]]:
    """The sweep a link asks for, and a note for everything in it that was refused. Never raises."""
    link = _Link(*_pairs(query), None)
    chosen = Sweep()
    for name, field in Sweep.model_fields.items():
        text = link.take(name)
        try:
            if text is not None:
                chosen = chosen.with_changes(**{name: link.value(name, text, int if field.annotation is int else str)})
        except ValueError as error:
            link.refuse(name, str(text), error)
    return chosen, link.all_notes()


def is_link(query: Mapping[str, Any]) -> bool:
    """Whether a page's address asks for anything but how Gradio shows it."""
    return not all(map(_of_gradio, query))


def is_sweep(query: Mapping[str, Any]) -> bool:
    """Whether a link is one to a sweep, not to a race."""
    return "sweep" in query


class _Link:
    """The values of one link, taken out one by one; what cannot be used leaves a note."""

    def __init__(self, values: dict[str, str], notes: list[str], models: tuple[str, ...] | None) -> None:
        self._values = values
        self._notes = notes
        self._models = models

    def take(self, key: str) -> str | None:
        return self._values.pop(key, None)

    def refuse(self, key: str, text: str, why: object) -> None:
        self._notes.append(f"ignored {key}={_shown(text)} from the link: {why}")

    def change(self, preset: Preset, key: str, kind: type) -> Preset:
        text = self.take(key)
        if text is None:
            return preset
        try:
            return _build(preset.model_dump() | {key: self.value(key, text, kind)})
        except ValueError as error:
            self.refuse(key, text, error)
            return preset

    def lanes(self, default: int) -> int:
        text = self.take("lanes")
        if text is None:
            return default
        if text in map(str, range(1, LIMITS.lanes)):
            return int(text)
        self.refuse("lanes", text, f"must be a number from 1 to {LIMITS.lanes - 1}")
        return default

    def lane(self, reference: LaneConfig, suffix: str) -> LaneConfig:
        given = {key: self.take(key + suffix) for key in ("method", *_LINK_LANE_FIELDS)}
        start = f"option{suffix}."
        options = {key: self._values.pop(key) for key in [k for k in self._values if k.startswith(start)]}
        lane = reference
        if given["method"] is not None and given["method"] != lane.method:
            lane = self._change_lane(lane, "method" + suffix, given["method"], {"model": None, "options": {}})
        for key, kind in _LINK_LANE_FIELDS.items():
            text = given[key]
            if text is not None:
                lane = self._change_lane(lane, key + suffix, text, kind=kind)
        for key, text in options.items():
            lane = self._change_option(lane, key, text)
        try:
            return lane if lane == reference else lane.checked()
        except ValueError as error:
            self.refuse("method" + suffix, lane.method, error)
            return reference

    def _change_lane(
        self, lane: LaneConfig, key: str, text: str, also: dict[str, Any] | None = None, kind: type = str
    ) -> LaneConfig:
        name = key.rstrip("23")
        try:
            value = self.value(name, text, kind)
            return LaneConfig.model_validate(lane.model_dump() | (also or {}) | {name: value})
        except ValidationError as error:
            self.refuse(key, text, _one_line(error))
        except ValueError as error:
            self.refuse(key, text, error)
        return lane

    def _change_option(self, lane: LaneConfig, key: str, text: str) -> LaneConfig:
        name = key.partition(".")[2]
        try:
            checked = validate_options(lane.method, {name: text})
        except ValueError as error:
            self.refuse(key, text, error)
            return lane
        changed = lane.model_copy(update={"options": {**lane.options, name: checked[name]}})
        if name in MODEL_OPTIONS and self._models is not None and not set(changed.models) <= set(self._models):
            self.refuse(key, text, FOREIGN)
            return lane
        return changed

    def value(self, name: str, text: str, kind: type) -> Any:
        if name in ("target", "model") and self._models is not None and text not in self._models:
            raise ValueError(FOREIGN)
        if name in ("prompt", "system") and len(text) > LIMITS.link_prompt:
            raise ValueError(f"a prompt in a link has {LIMITS.link_prompt} characters at most, not {len(text)}")
        if name == "server":
            return check_listed(text) if text else None
        if kind is str:
            return text
        if kind is bool:
            if text not in ("True", "False"):
                raise ValueError(f"{name} must be True or False")
            return text == "True"
        try:
            number = kind(text)
        except ValueError:
            raise ValueError(f"{name} must be a number") from None
        if kind is float and not math.isfinite(number):
            raise ValueError(f"{name} must be finite")
        return number

    def all_notes(self) -> list[str]:
        unknown = [key for key in self._values if not _of_gradio(key)]
        notes = [*self._notes, *(f"ignored unknown setting {_shown(key)} from the link" for key in unknown)]
        rest = len(notes) - _NOTES
        return notes if rest <= 0 else [*notes[:_NOTES], f"and {rest} more settings of the link were ignored"]


def _of_gradio(key: str) -> bool:
    """`?__theme=dark`, `?view=api`"""
    return key.startswith("__") or key == "view"


def _pairs(query: Mapping[str, Any] | str) -> tuple[dict[str, str], list[str]]:
    """The first value under every key, and notes on what else there was."""
    values: dict[str, str] = {}
    notes: list[str] = []
    if isinstance(query, str):
        if len(query) > LIMITS.link:
            return {}, [f"ignored the link: it has {len(query)} characters, {LIMITS.link} at most are read"]
        items: Iterable[tuple[Any, Any]] = parse_qsl(query.removeprefix("?"), keep_blank_values=True)
    else:
        multi_items = getattr(query, "multi_items", query.items)  # starlette's QueryParams keeps every value
        items = multi_items()
    for key, value in items:
        if not isinstance(key, str) or not isinstance(value, str):
            notes.append(f"ignored {_shown(key)} from the link: its value is no text")
        elif key in values:
            notes.append(f"ignored a second {_shown(key)} from the link")
        else:
            values[key] = value
    return values, notes


def _reference(base: Preset, index: int) -> LaneConfig:
    """What a lane of a link is described against: the same lane of the preset, or its last one."""
    return base.lanes[min(index, len(base.lanes) - 1)]


def _suffix(index: int) -> str:
    return "" if index == 0 else str(index + 1)


def _lane_pairs(lane: LaneConfig, reference: LaneConfig, suffix: str) -> list[tuple[str, str]]:
    pairs = []
    if lane.method != reference.method:
        pairs.append(("method" + suffix, lane.method))
        reference = reference.model_copy(update={"method": lane.method, "model": None, "options": {}})
    changed = [n for n in _LINK_LANE_FIELDS if getattr(lane, n) != getattr(reference, n)]
    pairs += [(n + suffix, _text(getattr(lane, n))) for n in changed]
    if lane.options != reference.options:
        default = {k.name: k.default for k in knobs(lane.method)}
        ours, theirs = default | lane.options, default | reference.options
        pairs += [(f"option{suffix}.{n}", _text(v)) for n, v in ours.items() if v != theirs[n]]
    return pairs


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else repr(value)
