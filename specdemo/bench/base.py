"""Base classes of suites, and the options that they share. Only `Suite.run` needs torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import AfterValidator, BeforeValidator, PlainSerializer

from specdemo.bench.prompts import PROMPTS
from specdemo.bench.result import Result
from specdemo.core.generation import DTYPES, dtype_name
from specdemo.core.settings import Settings, setting
from specdemo.core.suggest import DEVICES, EMPTY
from specdemo.presets.files import DEFAULT, Preset, preset
from specdemo.presets.limits import LIMITS

SoFar = Callable[[], Result]
Stop = Callable[[], bool]  # returns True to stop

NEW_TOKENS = 96
REPEATS = 1000  # maximum
ROWS = 256  # batch size of the losslessness suite: continuations per repeat


class Report(Protocol):
    """Callback for the progress of a suite."""

    def __call__(self, share: float, what: str, so_far: SoFar | None = None, /) -> None:
        """Take the fraction done, the current activity, and after a measurement a function that returns the result of
        all measurements so far.
        """


class Tick(Protocol):
    """Callback for the progress of one repeat of a suite."""

    def __call__(self, share: float, so_far: SoFar | None = None, /) -> None:
        """Take the fraction of the repeat that is done, and `so_far` as in `Report`. Raises Cancelled if the user has
        stopped the suite.
        """


@dataclass(frozen=True, slots=True)
class Axis:
    """Meaning of the points of a suite's curves: a column of its rows, its label and its unit."""

    column: str
    title: str
    unit: str
    doubling: bool = False  # points double, so the axis is logarithmic


def _ks(value: Sequence[int]) -> Sequence[int]:
    if not (any(value) and all(0 <= k <= LIMITS.k for k in value)):
        raise ValueError(f"draft lengths must be from 1 to {LIMITS.k}, not {list(value)[:20]}; 0 is always measured")
    return value


def _prompts(value: Sequence[str]) -> Sequence[str]:
    if not (value and all(text.strip() for text in value)):
        raise ValueError(f"a prompt {EMPTY}")
    return value


def _ranges(text: object) -> object:
    """Parse draft lengths: `4` -> [4], `1-8` -> [1, ..., 8], `0,1,3` -> [0, 1, 3]."""
    if not isinstance(text, str):
        return [*text] if isinstance(text, range) else text
    ks: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            lengths = range(int(first), int(last or first) + 1)
        except ValueError:
            lengths = range(0)
        if not lengths or lengths[0] < 0 or lengths[-1] > LIMITS.k:
            raise ValueError(f"--k takes a draft length from 1 to {LIMITS.k}, or a range like 1-8, not {part[:40]!r}")
        ks += lengths
    return ks


DEVICE = setting("auto", f"Device: {DEVICES}.", metavar="NAME")
DTYPE = setting("auto", f"Data type: {DTYPES}.", metavar="NAME")
PROMPT = setting(None, "Prompt to use instead of the suite's; repeatable.", metavar="TEXT", flag="--prompt")
Dtype = Annotated[str, BeforeValidator(dtype_name)]
Prompts = Annotated[Sequence[str], AfterValidator(_prompts), PlainSerializer(len, when_used="json")] | None
File = Annotated[Path, PlainSerializer(lambda path: path.name, when_used="json")]
Ks = Annotated[Sequence[int], BeforeValidator(_ranges), AfterValidator(_ks), PlainSerializer(list, when_used="json")]


def repeats_field(default: int) -> Any:
    """Declare the number of repeats."""
    return setting(default, "Interleaved repeats.", 1, REPEATS)


def new_tokens_field(default: int) -> Any:
    """Declare the length of the output."""
    return setting(default, "Output tokens per prompt.", 2, LIMITS.max_new_tokens)


def preset_field(default: str = DEFAULT) -> Any:
    """Declare the preset of a suite."""
    return setting(default, "Preset whose target and first lane are measured.", metavar="ID")


class Suite(Settings):
    """One measurement; its fields are its options. Suites with title and question are among the page's sweeps."""

    name: ClassVar[str]
    title: ClassVar[str] = ""
    question: ClassVar[str] = ""
    order: ClassVar[int] = 100  # in lists, then by name
    axis: ClassVar[Axis | None] = None  # None: compare the lanes only
    repeats: int = repeats_field(5)

    def run(self, report: Report, cancelled: Stop) -> Result:
        """Measure. When `cancelled()` turns true the result covers the finished repeats. Raises ValueError with one
        line, also when there is none."""
        raise NotImplementedError

    def config(self, target: str) -> dict[str, object]:
        """Return the options and the target for the result's file."""
        return {
            "target": target,
            "temperature": 0.0,
            **self.model_dump(mode="json", exclude={"repeats"}, exclude_none=True),
        }


class OfPreset(Suite):
    """Suite of one comparison on a device."""

    preset: str | Preset = preset_field()
    device: str = DEVICE
    dtype: Dtype = DTYPE

    @property
    def comparison(self) -> Preset:
        """Return the preset, or the one of this name."""
        return self.preset if isinstance(self.preset, Preset) else preset(self.preset)


class Decoding(Suite):
    """Suite that generates texts of a fixed length on a device."""

    device: str = DEVICE
    dtype: Dtype = DTYPE
    new_tokens: int = new_tokens_field(NEW_TOKENS)


class LaneSuite(Decoding, OfPreset):
    """Suite of a preset on prompts, given or its own."""

    prompts: Prompts = PROMPT

    @property
    def texts(self) -> Sequence[str]:
        """Return the given prompts, or the default ones."""
        return self.prompts or PROMPTS
