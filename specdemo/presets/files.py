"""Presets: one YAML file each, with a comparison and its requirements, and their recorded runs: traces written by
`specdemo run PRESET --out`, which the page shows before the first run, and where no run is possible. Reading them needs
neither torch nor transformers.

Types, ranges and method names are checked when a file is read. Checks that need the code of a method (its options,
whether it takes a model) follow when the preset is changed or run. Every error is a ValueError with one line.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import yaml
from pydantic import Field

from specdemo.core.atomic_io import json_text, write_text
from specdemo.core.safe_io import FILE_BYTES, read_limited, read_text
from specdemo.core.settings import settings
from specdemo.core.suggest import counted, program, short_repr, suggest
from specdemo.core.trace import RunTrace, from_json, to_json
from specdemo.engine.comparison import Comparison, Lane, Name, validate_method_name
from specdemo.methods import METHODS, model_method
from specdemo.models import packaged
from specdemo.models.packaged import EMBEDDED
from specdemo.models.ref import ModelRef
from specdemo.servers.address import listed
from specdemo.servers.engines import ENGINES

if TYPE_CHECKING:  # imports torch
    from specdemo.core.protocol import Target

INSTALLED = Path(__file__).parent / "installed"  # location of the presets in a wheel
FOLDER = INSTALLED if INSTALLED.is_dir() else Path(__file__).parents[2] / "presets"
DEFAULT = "embedded-draft"

YAML_BYTES = 1_000_000

_OF_LANES = [name for name, declared in settings(Lane).items() if declared.help]
SETTINGS = (*settings(Comparison), "lanes", *_OF_LANES)


class Preset(Comparison):
    """A comparison that is ready to run, with its purpose and requirements."""

    title: Name
    chip: Name = ""  # short title on the page's button; presets without one are only in the list
    description: str = ""
    work: str = ""  # kind of work that the prompt asks for
    # for presets whose models are downloaded
    # memory that is sufficient, of a GPU unless it is RAM
    group: Literal["8 GB RAM", "16 GB RAM", "32 GB RAM", "16 GB", "24 GB", "80 GB"] | None = None
    memory_gb: float | None = Field(None, gt=0.0)  # estimate for weights and KV caches
    gated: bool = False  # the hub requires a login and an accepted licence
    licence: str = ""  # of the target

    @property
    def models(self) -> tuple[ModelRef, ...]:
        """Return all models, the target first."""
        return self.target, *(model for lane in self.lanes for model in lane.models)

    @property
    def embedded(self) -> bool:
        """Return True if only embedded models are used, so that nothing is downloaded."""
        return all(model.embedded for model in self.models)

    @property
    def here(self) -> bool:
        """Return True if all models are embedded or were made earlier from a package."""
        return all(model.embedded or packaged.local(model) for model in self.models)

    @property
    def methods(self) -> list[str]:
        """Return the methods of the lanes without duplicates."""
        return list(dict.fromkeys(lane.method for lane in self.lanes))

    def with_changes(self, **changes: object) -> "Preset":
        """Return the comparison with other values of any of SETTINGS.

        `k`, `acceptance` and its options apply to every lane. `method` leaves a single lane; `model` and `options` need
        a single lane.
        """
        for name in changes:
            if name not in SETTINGS:
                raise ValueError(f"unknown setting {short_repr(name)}; {suggest(name, SETTINGS)}")
        of_lanes = {name: changes.pop(name) for name in _OF_LANES if name in changes}
        if changes.get("target", self.target) != self.target and "lanes" not in changes:
            of_lanes = {"k": 0} | of_lanes  # the preset's length was chosen for its own target
        if of_lanes:
            lanes = self.changed(lanes=changes["lanes"]).lanes if "lanes" in changes else self.lanes
            changes["lanes"] = _change_lanes(lanes, of_lanes, changes.get("target", self.target))
        return self.changed(**changes)

    def on_servers(self, servers: Sequence[str], served_model: str | None = None) -> "Preset":
        """Return the comparison with the servers assigned to the lanes in order; one server more is for the baseline
        and comes first.

        Raises ValueError for more servers than that.
        """
        if len(servers) > len(self.lanes) + 1:
            places = counted(len(self.lanes), "lane")
            raise ValueError(f"{len(servers)} servers for {places} and the baseline; give fewer")
        first = list(servers[: -len(self.lanes)])
        named = dict(zip(range(len(self.lanes)), servers[len(first) :], strict=False))
        if not servers:
            return self
        lanes = [
            lane.model_dump() | ({"server": named[i], "served_model": served_model} if i in named else {})
            for i, lane in enumerate(self.lanes)
        ]
        baseline = {"server": first[0], "served_model": served_model} if first else {}
        return self.changed(lanes=lanes, **baseline)

    def check_servers(self, named: Sequence[str]) -> None:
        """Raise ValueError, with how to name the others, if `named` are too few for the lanes that run on servers."""
        servers = [lane.server for lane in self.all_lanes if lane.server and lane.server not in ENGINES]
        missing = [server for server in servers if server not in listed()]
        if not missing:
            return
        order = "the baseline's first, then one per lane" if self.server else "one per lane, in order"
        line = " ".join(f"--server {server}" for server in [*named, *["http://HOST:PORT"] * len(missing)])
        needed = counted(len(servers), "server")
        raise ValueError(f"{self.id} needs {needed}, {order}; {len(missing)} missing, give {line}")


def _change_lanes(lanes: list[Lane], changes: dict[str, object], target: object) -> list[dict[str, object]]:
    if "method" in changes:
        name, model = validate_method_name(str(changes["method"])), changes.get("model")
        k, shown = lanes[0].k, (lane for p in load_presets().values() if p.target == target for lane in p.lanes)
        usual = (lane.model_copy(update={"k": k}) for lane in shown)  # with the model and options of another preset
        fitting = (lane for lane in chain(lanes, usual) if lane.method == name and (lane.model or not model))
        lanes = [next(fitting, Lane(method=name, k=k))]
    alone = [name for name in ("model", "options") if name in changes]
    if alone and len(lanes) > 1:
        raise ValueError(f"{alone[0]} applies to one lane and this preset has {len(lanes)}; set the method as well")
    new_rule: dict[str, object] = {"acceptance_options": {}}
    return [
        lane.model_dump()
        | ({"model": None} if _other_drafter(lane, changes.get("options")) else {})
        | (new_rule if changes.get("acceptance", lane.acceptance) != lane.acceptance else {})
        | changes
        for lane in lanes
    ]


def _other_drafter(lane: Lane, options: object) -> bool:
    """Return whether new options name another method to draft than that of the lane's model."""
    drafter = str(options.get("drafter")) if isinstance(options, Mapping) else ""
    return drafter in METHODS and model_method(drafter) != model_method(lane.method, lane.options)


def of_checkout(name: str) -> ModuleType | None:
    """Import a module that only a checkout has, `benchmarks` or `recipes.train`; None in an installed package."""
    checkout = FOLDER.parent
    if not (checkout / name.partition(".")[0]).is_dir():
        return None
    if str(checkout) not in sys.path:  # an editable install
        sys.path.insert(0, str(checkout))
    return import_module(name)


def require(extra: str, *modules: str) -> None:
    """Raise ValueError with the pip command if a package of an extra of the installation is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        command = f'"specdemo[{extra}]"' if FOLDER == INSTALLED else "-r requirements.txt"
        raise ValueError(f"this needs {' and '.join(missing)}; run: pip install {command}")


def read_yaml(path: Path) -> object:
    """Read a YAML file of the project. Raises ValueError, one line with the file's name."""
    text = read_text(path, YAML_BYTES)
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not YAML: {str(error).partition(chr(10))[0]}") from None


def read_presets(path: Path) -> list[Preset]:
    """Read the presets of a file: one, or one per entry of `variants`, which holds its settings by name.

    {variant} in other settings is replaced by the name, which is also the end of the id. Raises ValueError naming the
    file.
    """
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise ValueError(f"{path.name} is not a preset: it must contain 'name: value' lines")
    variants = data.pop("variants", None)
    try:
        if variants is None:
            return [Preset.build({"id": path.stem, **data})]
        if not isinstance(variants, dict) or not all(isinstance(own, dict) for own in variants.values()):
            raise ValueError("variants must be settings by name")
        text = json_text(data)
        return [_variant(path.stem, text, str(name), own) for name, own in variants.items()]
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def _variant(stem: str, text: str, name: str, own: Mapping[str, object]) -> Preset:
    id = f"{stem}-{name.lower().replace('_', '-')}"
    return Preset.build({"id": id, **json.loads(text.replace("{variant}", name)), **own})


@lru_cache(maxsize=1)
def load_presets() -> dict[str, Preset]:
    """Return all presets by id: the default, other embedded ones, then those with downloads by memory, first those
    that need no GPU."""
    presets = [preset for path in FOLDER.glob("*.yaml") for preset in read_presets(path)]
    if not presets:
        raise ValueError(f"no presets in {FOLDER}; reinstall specdemo")
    presets.sort(key=lambda p: (p.id != DEFAULT, not p.embedded, _order(p), p.id))
    return {preset.id: preset for preset in presets}


def _order(preset: Preset) -> tuple[bool, int]:
    """Return the place of a preset's group: no GPU before a GPU, little memory before much."""
    size, _, kind = (preset.group or "0 GB RAM").partition(" GB")
    return not kind, int(size)


def preset(id: str) -> Preset:
    """Return the preset of that id; - and _ are equal. Raises ValueError with a suggestion."""
    if not isinstance(id, str):
        raise ValueError(f"the name of a preset must be text, not {short_repr(id)}")
    presets = load_presets()
    id = next((candidate for candidate in presets if candidate.replace("_", "-") == id.replace("_", "-")), id)
    if id not in presets:
        raise ValueError(f"unknown preset {short_repr(id)}; {suggest(id, presets)}")
    return presets[id]


def allowed_models(presets: Mapping[str, Preset]) -> tuple[ModelRef, ...]:
    """Return the models that a visitor may choose: embedded models and those of the presets."""
    embedded = map(ModelRef, EMBEDDED)
    return tuple(dict.fromkeys([*embedded, *(model for p in presets.values() for model in p.models)]))


def thinking_remarks(target: ModelRef, drafters: Sequence[ModelRef], known: "Target") -> list[str]:
    """Return one line per drafter that presets run with thinking on or off, and one if the target can think."""
    from specdemo.models.text import has_thinking_modes

    siblings = [p for p in load_presets().values() if p.target.repository == target.repository]
    lanes = [(p, lane) for p in siblings if p.thinking != "default" for lane in p.lanes]
    modes = {lane.model.repository: p for p, lane in lanes if lane.model}
    remarks = [
        f"thinking: preset {p.id} runs {name} with --thinking {p.thinking}; acceptance may drop in the other mode"
        for name in drafters
        if (p := modes.get(name.repository))
    ]
    if known.tokenizer is not None and has_thinking_modes(known.tokenizer):
        remarks.append("thinking: the target can think; bench thinking compares the acceptance in both modes")
    return remarks


def save_trace(trace: RunTrace, out: str | Path) -> None:
    """Write a trace. Raises ValueError, one line, if that fails."""
    write_text(out, to_json(trace) + "\n")


def load_trace(path: str | Path) -> RunTrace:
    """Read and check a stored trace. Raises ValueError with one line."""
    advice = f"with {program()} run PRESET --out FILE"
    try:
        content = read_limited(path, FILE_BYTES)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}; record a trace {advice}") from None
    try:
        return from_json(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; record it again {advice}") from None


def is_recorded(preset_id: str) -> bool:
    """Return whether there is a recorded run of a preset."""
    return _recording(preset_id).is_file()


@lru_cache
def recorded(preset_id: str) -> RunTrace | None:
    """Return the recorded run of a preset; None if there is none. Raises ValueError for a damaged file."""
    return load_trace(_recording(preset_id)) if is_recorded(preset_id) else None


def _recording(preset_id: str) -> Path:
    return FOLDER / "recorded" / f"{preset_id}.json"
