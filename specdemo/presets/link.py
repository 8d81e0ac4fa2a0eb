"""Share links: differences from a preset, or a sweep. Links come from strangers, so unusable parts are skipped and
listed.

A field of a comparison or a lane is part of links if its declaration says so (engine/comparison.py). Machine settings
are not. A lane's server counts only if the operator of the page that opens the link has listed it.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import TypeVar
from urllib.parse import parse_qsl, urlencode

from specdemo.core.atomic_io import json_text
from specdemo.core.rules import accept_rule, rule_options
from specdemo.core.settings import Settings, from_text, linked, settings
from specdemo.core.suggest import short_repr
from specdemo.engine.comparison import Comparison, Lane, validate_method_name
from specdemo.methods import method_options, parse_options
from specdemo.models.ref import ModelRef
from specdemo.presets.files import Preset, allowed_models
from specdemo.presets.limits import LIMITS
from specdemo.servers.address import check_listed

MAX_QUERY = 20_000  # characters of a query string
LONGEST_TEXT = 2000  # characters
_OF_LANE = [name for name in linked(Lane) if name not in ("method", "options", "acceptance_options")]  # own syntax
_NOTES = 6
_OPTIONS = 32  # most options per lane that are read; no method has as many
FOREIGN = "a link may name only embedded models and models of presets"
OWN = "your-models"  # the preset of the models that the page was started with
ELSEWHERE = "this page has {}; to race the model of the link, start the page with --target and that model"
ANOTHER = (
    "this page has another file of that name ({}); to race the model of the link, start the page with --target and it"
)
HASHED = re.compile(r"(.+)@([0-9a-f]{12})")  # name of a model in files, and its hash


Linkable = TypeVar("Linkable", bound=Settings)


def changed_by_query(base: Linkable, query: Mapping[str, object] | str) -> tuple[Linkable, list[str]]:
    """Return settings with the values of a link that names them as they are, `sweep=k&preset=embedded-draft&repeats=3`,
    and a note for every part that was ignored. Never raises."""
    link = _Link(*_pairs(query), {})
    return link.change(base, settings(type(base))), link.all_notes()


def to_query(preset: Preset, base: Preset) -> str:
    """Return the differences from `base` as a query string: `preset=embedded-draft&k=7`.

    The second lane's settings end in 2, the third's in 3: `k2=5`; an option is `option.max_n=4`, `option2.max_n=4`,
    one of the acceptance rule `rule.window=4`, `rule2.window=4`. A link to the page's own models always names them,
    because the preset has others elsewhere: by hub id, or by file name and hash. Raises ValueError if the prompt is too
    long.
    """
    own = base.id == OWN
    changed = _difference(*(item.model_dump(include={*linked(Comparison)}) for item in (preset, base)))
    if own or "target" in changed:
        changed["target"] = preset.target.link_name
    if len(preset.lanes) != len(base.lanes):
        changed["lanes"] = len(preset.lanes)
    for index, lane in enumerate(preset.lanes):
        of_lane = _lane_difference(lane, _reference(base, index))
        if lane.model and (own or "model" in of_lane):
            of_lane["model"] = lane.model.link_name
        changed |= {_in_lane(name, _suffix(index)): value for name, value in of_lane.items()}
    texts = {name: _text(value) for name, value in changed.items()}
    for name, text in texts.items():
        if len(text) > LONGEST_TEXT:
            raise ValueError(
                f"the {name} of a link can have {LONGEST_TEXT} characters, this one has {len(text)}; "
                "shorten it or export the trace"
            )
    return urlencode({"preset": base.id} | texts)


def to_command(preset: Preset, base: Preset) -> str:
    """Return the command that races a comparison: `python -m specdemo run embedded-draft --k 7`.

    Where lanes differ from those of `base` in what options of the command cannot say, it opens the page with `base`.
    """
    if base.id == OWN:
        drafter = preset.lanes[0].model
        words = ["app.py", "--target", preset.target, *(["--draft", drafter] if drafter else [])]
        return f"python {shlex.join(words)}"
    lanes = [_lane_difference(*pair) for pair in zip(preset.lanes, base.lanes, strict=False)]
    changed = _difference(*(item.model_dump(include={*linked(Comparison)}) for item in (preset, base)))
    same = len(preset.lanes) == len(base.lanes) and all(lane == lanes[0] for lane in lanes)
    if not same or any("." in name or (name != "k" and len(lanes) > 1) for name in lanes[0]):
        return f"python {shlex.join(['app.py', '--preset', base.id])}"
    words = ["run", base.id]
    for name, value in (changed | lanes[0]).items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, _text(value)]
    return f"python -m specdemo {shlex.join(words)}"


def from_query(
    query: Mapping[str, object] | str,
    presets: Mapping[str, Preset],
    allow_any_model: bool = False,
    start: Preset | None = None,
) -> tuple[Preset, list[str]]:
    """Return the comparison of a link, and a note for every part that was ignored. Never raises.

    query: a query string, or a mapping (the first of several values of a key counts). Models must be embedded or in a
    preset unless `allow_any_model`. start: what a link without a preset changes; None: the first preset.
    """
    models = allowed_models(presets)
    known = {model.label: model for model in models} | {model.link_name: model for model in models}
    link = _Link(*_pairs(query), known, allow_any_model)
    preset_id = link.take("preset")
    comparison = start or next(iter(presets.values()))
    if preset_id is not None and preset_id in presets:
        comparison = presets[preset_id]
    elif preset_id is not None and not (preset_id == OWN and "target" in link.values):
        near = get_close_matches(preset_id[:60], presets, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one in the menu"
        link.refuse("preset", preset_id, f"unknown preset; {hint}")
    base = comparison
    link.foreign = ELSEWHERE.format(base.target.link_name) if preset_id == OWN else FOREIGN
    comparison = link.change(comparison, linked(Comparison))
    if "target" in link.refused:
        # models draft for the refused target; one note is enough
        link.values = {key: text for key, text in link.values.items() if key.rstrip("0123456789") != "model"}
    lanes = [link.lane(_reference(base, index), _suffix(index)) for index in range(link.lanes(len(base.lanes)))]
    if lanes != base.lanes:
        comparison = comparison.model_copy(update={"lanes": lanes})
    return comparison, link.all_notes()


def without_folders(text: str, models: Iterable[ModelRef]) -> str:
    """Return JSON in which models in files have no folders, which may contain the name of a user."""
    for model in sorted(models, key=len, reverse=True):
        name, label = str(model), model.label
        for _ in range(2):  # as JSON, and as JSON in JSON, such as a flag of vLLM
            name, label = json_text(name)[1:-1], json_text(label)[1:-1]
            text = text.replace(name, label)
    return text


def is_link(query: Mapping[str, object]) -> bool:
    """Return whether a page's address contains more than Gradio's display parameters."""
    return not all(map(_of_gradio, query))


def is_sweep(query: Mapping[str, object]) -> bool:
    """Return whether a link opens a sweep instead of a race."""
    return "sweep" in query


class _Link:
    """The values of a link, taken one by one. Every unusable value adds a note."""

    def __init__(
        self, values: dict[str, str], notes: list[str], models: Mapping[str, ModelRef], any_model: bool = False
    ) -> None:
        """models: those that the page has, by the name that links have for them."""
        self.values = values
        self._notes = notes
        self._models = models
        self._any = any_model
        self.refused: set[str] = set()
        self.foreign = FOREIGN  # reason to refuse a model

    def take(self, key: str) -> str | None:
        return self.values.pop(key, None)

    def refuse(self, key: str, text: str, why: object) -> None:
        self.refused.add(key)
        self._notes.append(f"ignored {key}={short_repr(text)} from the link: {why}")

    def change(self, base: Linkable, names: Iterable[str], suffix: str = "") -> Linkable:
        """Return a comparison or lane with the valid values of these fields. A new method starts without model and
        options.
        """
        texts = {name: text for name in names if (text := self.take(name + suffix)) is not None}
        values: dict[str, object] = {}
        wrong: dict[str, str] = {}
        for name, text in texts.items():
            try:
                values[name] = self.value(name, text, settings(type(base))[name].type)
            except ValueError as error:
                wrong[name] = str(error)
        if "method" in values:
            values = {"model": None, "options": {}} | values
        if "acceptance" in values:
            values = {"acceptance_options": {}} | values
        changed, invalid = base.with_valid(values) if values else (base, {})
        for name, text in texts.items():
            if why := wrong.get(name) or invalid.get(name):
                self.refuse(name + suffix, text, why)
        return changed

    def lanes(self, default: int) -> int:
        text = self.take("lanes")
        if text is None:
            return default
        if text in map(str, range(1, LIMITS.lanes)):
            return int(text)
        self.refuse("lanes", text, f"must be a number from 1 to {LIMITS.lanes - 1}")
        return default

    def lane(self, reference: Lane, suffix: str) -> Lane:
        texts = self._prefixed(f"option{suffix}.")
        of_rule = self._prefixed(f"rule{suffix}.")
        if self.values.get("method" + suffix) == reference.method:
            self.take("method" + suffix)
        lane = self.change(reference, ("method", *_OF_LANE), suffix)
        options = self._valid_options(f"option{suffix}.", texts, lambda texts: self._check_options(lane, texts))
        rule = self._valid_options(
            f"rule{suffix}.", of_rule, lambda texts: accept_rule(lane.acceptance, {**lane.acceptance_options, **texts})
        )
        lane = lane.model_copy(
            update={"options": {**lane.options, **options}, "acceptance_options": {**lane.acceptance_options, **rule}}
        )
        try:
            return lane if lane == reference else lane.validated()
        except ValueError as error:
            self.refuse("method" + suffix, lane.method, error)
            return reference

    def _prefixed(self, start: str) -> dict[str, str]:
        """Take the values whose key begins with `start`, by the rest of their key."""
        keys = [key for key in self.values if key.startswith(start)][:_OPTIONS]
        return {key.removeprefix(start): self.values.pop(key) for key in keys}

    def _valid_options(
        self, start: str, texts: Mapping[str, str], check: Callable[[Mapping[str, str]], object]
    ) -> Mapping[str, str]:
        """Return the options that pass `check`, as text. One by one only if they cannot all be set."""
        with suppress(ValueError):
            check(texts)
            return texts
        valid: dict[str, str] = {}
        for name, text in texts.items():
            try:
                check(valid | {name: text})
                valid[name] = text
            except ValueError as error:
                self.refuse(start + name, text, error)
        return valid

    def _check_options(self, lane: Lane, texts: Mapping[str, str]) -> None:
        parse_options(lane.method, {**lane.options, **texts})
        changed = lane.model_copy(update={"options": texts})
        if not self._any and not set(changed.models) <= {lane.model, *self._models.values()}:
            raise ValueError(self.foreign)

    def value(self, name: str, text: str, kind: type) -> object:
        if name == "method":
            return validate_method_name(text)
        if name in ("target", "model"):
            if text in self._models:
                return self._models[text]
            hashed = HASHED.fullmatch(text)
            if hashed and hashed[1] in self._models:
                raise ValueError(ANOTHER.format(self._models[hashed[1]].link_name))
            if hashed or not self._any:
                raise ValueError(self.foreign)
        if kind is str and len(text) > LONGEST_TEXT:
            raise ValueError(f"the {name} of a link can have {LONGEST_TEXT} characters, not {len(text)}")
        if name == "server":
            return check_listed(text) if text else None
        return from_text(kind, text) if text or kind is str else None  # as `_text` writes None

    def all_notes(self) -> list[str]:
        unknown = [key for key in self.values if not _of_gradio(key)]
        notes = [*self._notes, *(f"ignored unknown setting {short_repr(key)} from the link" for key in unknown)]
        rest = len(notes) - _NOTES
        return notes if rest <= 0 else [*notes[:_NOTES], f"and {rest} more settings of the link were ignored"]


def _of_gradio(key: str) -> bool:
    """Return True for keys that Gradio uses: `?__theme=dark`, `?view=api`."""
    return key.startswith("__") or key == "view"


def _pairs(query: Mapping[str, object] | str) -> tuple[dict[str, str], list[str]]:
    """Return the first value of every key, and notes about the other values."""
    values: dict[str, str] = {}
    notes: list[str] = []
    if isinstance(query, str):
        if len(query) > MAX_QUERY:
            return {}, [f"ignored the link: it has {len(query)} characters; the limit is {MAX_QUERY}"]
        items: Iterable[tuple[object, object]] = parse_qsl(query.removeprefix("?"), keep_blank_values=True)
    else:
        multi_items = getattr(query, "multi_items", query.items)  # starlette's QueryParams keeps every value
        items = multi_items()
    for key, value in items:
        if not isinstance(key, str) or not isinstance(value, str):
            notes.append(f"ignored {short_repr(key)} from the link: its value is not text")
        elif key in values:
            notes.append(f"ignored a second {short_repr(key)} from the link")
        else:
            values[key] = value
    return values, notes


def _reference(base: Preset, index: int) -> Lane:
    """Return the lane that a link's lane is compared with: the same lane of the preset, or its last one."""
    return base.lanes[min(index, len(base.lanes) - 1)]


def _suffix(index: int) -> str:
    return "" if index == 0 else str(index + 1)


def _in_lane(name: str, suffix: str) -> str:
    """Return a lane's setting with the number of the lane: option.max_n -> option2.max_n."""
    head, dot, rest = name.partition(".")
    return f"{head}{suffix}{dot}{rest}"


def _flat(lane: Lane) -> dict[str, object]:
    """Return the linked settings of a lane by name, with its options one by one."""
    values = lane.model_dump(include={*linked(Lane)})
    of_method, of_rule = values.pop("options"), values.pop("acceptance_options")
    options = {f"option.{o.name}": of_method.get(o.name, o.default) for o in method_options(lane.method)}
    rules = {f"rule.{o.name}": of_rule.get(o.name, o.default) for o in rule_options(lane.acceptance)}
    return values | options | rules


def _lane_difference(lane: Lane, reference: Lane) -> dict[str, object]:
    """Return the settings of a lane that differ. Another method starts without model and options, as `change` does."""
    start: dict[str, object] = {"method": lane.method, "acceptance": lane.acceptance}
    if lane.method != reference.method:
        start |= {"model": None, "options": {}}
    if lane.acceptance != reference.acceptance:
        start["acceptance_options"] = {}
    named = {"method": reference.method, "acceptance": reference.acceptance}
    return _difference(_flat(lane), _flat(reference.model_copy(update=start)) | named)


def _difference(values: Mapping[str, object], start: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value != start[name]}


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else repr(value)
