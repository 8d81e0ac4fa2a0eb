"""Device profiles: memory, compute and launch costs. Every number has a unit in its name and a source, a datasheet or a
measurement. `specdemo/profiles/NAME.json` are the shipped profiles.
"""

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specdemo.core.atomic_io import write_text
from specdemo.core.safe_io import read_bytes
from specdemo.core.suggest import suggest

FOLDER = Path(__file__).parents[1] / "profiles"

NAME = r"^[a-z0-9][a-z0-9.-]*$"
# A measured profile has 10 kB; the fit evaluates every measured pass some 1,000 times.
MAX_BYTES = 200_000
# Figures of any device, and milliseconds: within these limits no prediction overflows.
Positive = Annotated[float, Field(ge=1e-6, le=1e9)]
Count = Annotated[int, Field(ge=1, le=1 << 24)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Figure(_Strict):
    """A number with its source; the unit is in the name of the field."""

    value: Positive
    source: str = Field(min_length=1, max_length=300)


class Passes(_Strict):
    """Measured passes of one model: v(n, batch) is ms[batch][n] over ms[batch][1]."""

    model: str  # a name in known.json
    dtype: str
    kernels: str
    context: Count  # tokens in the KV cache, per row
    ms: dict[Count, dict[Count, Positive]]  # batch size -> slots per row -> milliseconds
    uneven: dict[Count, dict[Count, Positive]] = {}  # rows of different lengths; of profiles before version 0.2

    def v(self, batch: int) -> dict[int, float]:
        """Return slots -> time of a pass over them, in units of a pass over one slot. Raises KeyError for an unmeasured
        batch size.
        """
        alone = self.ms[batch][1]
        return {slots: ms / alone for slots, ms in self.ms[batch].items()}


class MeasuredStep(_Strict):
    """Measured step of one method: milliseconds by part."""

    model: str
    method: str
    dtype: str
    draft: str = ""  # name of the draft model's shape
    batch: Count = 1
    context: Count = 80  # mean number of tokens in the KV cache
    k: Annotated[int, Field(ge=0, le=64)] = 0  # length of a complete chain; 0: none, or unknown
    ms: dict[str, Annotated[float, Field(ge=0.0, le=1e9)]]
    drafted: Annotated[float, Field(ge=0.0, le=1e6)]  # tokens per step
    kept: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0  # accepted draft tokens per step


class Provenance(_Strict):
    """When and with which versions the numbers of a profile were measured."""

    date: str
    commit: str | None = None
    versions: dict[str, str] = {}
    by: str  # the command


class Profile(_Strict):
    """Profile of a device. None: unknown. Without `measured` all numbers are from a datasheet."""

    format: Literal[1] = 1
    name: str = Field(pattern=NAME)
    title: str = Field(min_length=1)
    kind: Literal["gpu", "cpu"]
    memory_gb: Figure
    bandwidth_gb_per_s: Figure  # of the device's memory
    compute_tflop_per_s: dict[str, Figure]  # dense matrix products, by dtype
    launch_us: Figure | None = None  # launch of one operation from Python
    wait_us: Figure | None = None  # launch of an operation and waiting for it
    link_gb_per_s: Figure | None = None  # from main memory to the device
    step_overhead: Figure | None = None  # time of an engine's step / time of its forward passes
    passes: tuple[Passes, ...] = ()
    steps: tuple[MeasuredStep, ...] = ()
    measured: Provenance | None = None


@lru_cache(maxsize=1)
def profiles() -> dict[str, Profile]:
    """Return the shipped profiles by name."""
    return {path.stem: read_profile(path) for path in sorted(FOLDER.glob("*.json"))}


def profile(name: str) -> Profile:
    """Return a profile of the package, or of a file. Raises ValueError with one line that suggests the nearest name."""
    if name.endswith(".json"):
        return read_profile(Path(name))
    if name not in profiles():
        raise ValueError(f"unknown device {name[:60]!r}; {suggest(name[:60], profiles())}")
    return profiles()[name]


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises ValueError, one line with the file's name."""
    text = read_bytes(path, MAX_BYTES, "choose a profile")
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path} is not a profile: {where or 'the file'}: {first['msg']}") from None


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile. Raises ValueError, one line, if that fails."""
    write_text(path, profile.model_dump_json(indent=1, exclude_none=True) + "\n")
