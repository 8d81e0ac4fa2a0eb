"""List of the suites, for the command line and the page's Sweep tab.

A new suite is a class and an entry in SHIPPED. Reading the list needs no torch: `run` imports the measuring code.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from specdemo.bench.base import (
    PRESET,
    Axis,
    Decoding,
    Device,
    Dtype,
    Ks,
    Laned,
    Option,
    PresetId,
    Questioned,
    Report,
    Stop,
    Suite,
)
from specdemo.bench.load_options import Load
from specdemo.bench.prompts import COPYING
from specdemo.bench.result import TOKEN, Result
from specdemo.core.suggest import suggest
from specdemo.presets.files import DEFAULT, Preset, of_checkout, preset
from specdemo.presets.limits import LIMITS
from specdemo.presets.link import Linked

STORIES = "stories"
DRAFT_LENGTH = Axis("k", "draft length", "k, draft tokens per step")


class DraftLength(Questioned):
    """Measures the first lane of a preset at every draft length, and predicts all from one of them."""

    name = "k"
    title = "Draft length k"
    question = "How many tokens should a draft have? Runs the preset's first lane with short to long drafts."
    axis = DRAFT_LENGTH
    preset: PresetId = DEFAULT
    ks: Ks = range(1, 9)

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.sweeps import every_k

        chosen = preset(self.preset).with_changes(temperature=0.0)
        lane = chosen.lanes[0]
        return every_k(self, self.ks, chosen.target, {lane.name or chosen.id: lane}, report, cancelled)


class Methods(Questioned):
    """Compares all embedded presets with one greedy lane on the same target and prompts."""

    name = "methods"
    title = "Methods"
    question = "Which method is fastest? Runs every embedded preset with one lane on the same target and prompts."
    preset: PresetId = DEFAULT

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.sweeps import as_shipped, shipped_lanes

        target = preset(self.preset).target
        return as_shipped(self, target, shipped_lanes(target), self.prompts_or_file, report, cancelled)


class Batch(Laned):
    """Measures the first lane of a preset at increasing batch sizes, against plain decoding of the same batch."""

    name = "batch"
    title = "Batch size"
    question = "Where does the gain end? Runs the preset's first lane at increasing batch sizes."
    axis = Axis("batch", "batch size", "rows decoded together", doubling=True)
    measured_by = "specdemo.bench.sweeps:over_batches"


class PromptLength(Laned):
    """Measures the first lane of a preset after prompts of increasing length, up to the context limit."""

    name = "prompt"
    title = "Prompt length"
    question = "What does a long prompt change? Runs the preset's first lane after prompts of increasing length."
    axis = Axis("prompt tokens", "prompt length", "tokens", doubling=True)
    measured_by = "specdemo.bench.sweeps:over_lengths"


class Temperature(Laned):
    """Measures the first lane of a preset at increasing temperatures, with sampled and with greedy drafts."""

    name = "temperature"
    title = "Temperature"
    question = (
        "What does sampling cost? Runs the preset's first lane at increasing temperatures, with sampled and greedy"
        " drafts."
    )
    axis = Axis("temperature", "temperature", "temperature of target and sampled drafts")
    measured_by = "specdemo.bench.sweeps:over_temperatures"


class ThinkingMode(Laned):
    """Measures the first lane of a preset with the target's thinking on and off."""

    name = "thinking"
    title = "Thinking"
    question = "Does the drafter follow the target's thoughts? Runs the preset's first lane with thinking on and off."
    axis = Axis("thinking", "thinking", "thinking of the target")
    measured_by = "specdemo.bench.sweeps:over_thinking"


class DepthWidth(Questioned):
    """Compares draft models with one and with four layers and the same number of parameters (Yan et al. 2402.01528)."""

    name = "depth-width"
    title = "Depth or width"
    question = (
        "Which shape should a draft model have? One layer against four, with the same number of parameters, at every"
        " draft length."
    )
    axis = DRAFT_LENGTH
    ks: Ks = range(1, 9)

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.sweeps import DRAFTS, every_k

        return every_k(self, self.ks, STORIES, DRAFTS, report, cancelled)


class Embedded(Questioned):
    """Compares plain decoding with two draft models and prompt lookup, greedy, on the embedded models."""

    name = "embedded"
    axis = DRAFT_LENGTH
    ks: Ks = (4,)

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.sweeps import DRAFTS, LOOKUP, every_k

        return every_k(self, self.ks, STORIES, DRAFTS | LOOKUP, report, cancelled)


class Copying(Decoding):
    """Compares the methods without weights on prompts whose answer repeats the prompt."""

    name = "copying"

    def run(self, report: Report, cancelled: Stop) -> Result:
        from specdemo.bench.sweeps import as_shipped, shipped_lanes

        lanes = tuple(lane for lane in shipped_lanes() if lane.model is None)
        return as_shipped(self, STORIES, lanes, COPYING, report, cancelled)


class KindOfText(Decoding):
    """Compares kinds of text: stories, code, edits of code, and text unlike the training data."""

    name = "text"
    title = "Kind of text"
    question = (
        "How much depends on the text? The same methods on stories, code, edits, and text unlike the training data."
    )
    axis = Axis("text", "kind of text", "kind of text")
    measured_by = "specdemo.bench.sweeps:over_texts"


class Losslessness(Suite):
    """Tests whether the output of a preset's first lane has the same distribution as plain decoding."""

    name = "losslessness"
    axis = Axis(TOKEN, "token", "share of the continuations")
    measured_by = "specdemo.bench.losslessness:losslessness"
    preset: Annotated[str | Preset, PRESET] = "embedded-sampling"
    device: Device = "auto"
    dtype: Dtype = "auto"


SHIPPED: tuple[type[Suite], ...] = (
    DraftLength, Methods, Batch, PromptLength, Temperature, ThinkingMode, DepthWidth, Embedded, Copying, KindOfText,
    Losslessness, Load,
)  # fmt: skip
# defined in the folder `benchmarks` of a checkout
OF_THE_PROJECT = (
    "peers", "floor", "race-fairness", "gpu", "what-if",
)  # fmt: skip


@lru_cache(maxsize=1)
def suites() -> dict[str, type[Suite]]:
    """Return all suites by name: those of the package and, in a checkout, those that benchmark the project itself."""
    benchmarks = of_checkout("benchmarks")
    return {suite.name: suite for suite in (*SHIPPED, *(benchmarks.SUITES if benchmarks else ()))}


def known_suite(name: str) -> type[Suite]:
    """Return the suite of that name. Raise ValueError with a suggestion if there is none."""
    if name not in suites():
        if name in OF_THE_PROJECT:
            raise ValueError(f"suite {name!r} measures specdemo itself and needs a checkout of specdemo; run it there")
        raise ValueError(f"unknown suite {name!r}; {suggest(name, suites())}")
    return suites()[name]


def suite(name: str, **options: Any) -> Suite:
    """Return the suite with these options, the others at their defaults. Raise ValueError with one line."""
    chosen = known_suite(name)
    for option in options:
        if not takes(name, option):
            other = known_options()[option]
            raise ValueError(f"suite {name!r} has no option for the {other.noun}; omit {other.flag}")
    return chosen.build(options)


def known_options() -> Mapping[str, Option]:
    """Return the options of all suites by field."""
    return {name: option for suite in suites().values() for name, option in suite.options().items()}


def takes(name: str, option: str) -> bool:
    """Return whether a suite has that option."""
    return option in suites()[name].model_fields


def swept() -> dict[str, type[Suite]]:
    """Return the suites of the Sweep tab by name."""
    return {name: suite for name, suite in suites().items() if suite.question}


def _swept(name: str) -> str:
    if name not in swept():
        *others, last = map(repr, swept())
        raise ValueError(f"must be {', '.join(others)} or {last}, not {name[:60]!r}")
    return name


class Sweep(Linked):
    """Request of the Sweep tab: a suite on a preset's target. It names no model, so every visitor may run it."""

    sweep: Annotated[str, AfterValidator(_swept)] = "k"
    preset: Annotated[str, AfterValidator(lambda id: preset(id).id)] = DEFAULT
    repeats: int = Field(3, ge=1, le=LIMITS.sweep_repeats)
    new_tokens: int = Field(96, ge=8, le=LIMITS.max_new_tokens)

    def suite(self) -> Suite:
        """Return the suite. A suite with fixed models gets no preset."""
        chosen = {"preset": self.preset} if takes(self.sweep, "preset") else {}
        return suite(self.sweep, repeats=self.repeats, new_tokens=self.new_tokens, **chosen)
