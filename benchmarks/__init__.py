"""Benchmarks of the project itself: suites of `python -m specdemo bench` that come with the checkout alone."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specdemo.bench.base import Decoding, Report, Suite
from specdemo.bench.result import Result


@dataclass(frozen=True, kw_only=True)
class Peers(Decoding):
    """The engine against transformers, a bare loop and llama.cpp, and against its own forwards replayed."""

    name = "peers"
    pair: str | None = None  # None: the largest that fits

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.pairs import make_pair
        from benchmarks.peers import compete
        from specdemo.models.machine import one_thread

        report(0.0, "making the models")
        pair = make_pair(self.pair, self.device, self.dtype)
        with one_thread(pair.target.device):  # every peer has as many as the engine
            return compete(pair, self.repeats, self.new_tokens, report, cancelled)


@dataclass(frozen=True, kw_only=True)
class Beside(Suite):
    """The engine beside vLLM or llama.cpp on a CPU: a preset's baseline and first lane on both, greedy, in turns."""

    name = "beside"
    preset: str = "embedded-draft"
    engine: str | None = None
    command: str | None = None
    dtype: str = "float32"
    new_tokens: int = 112

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.beside import beside

        return beside(self, report, cancelled)


@dataclass(frozen=True, kw_only=True)
class Vocabularies(Suite):
    """A draft of another vocabulary: same tokens, same distribution, speed against universal assisted generation."""

    name = "other-vocabulary"
    new_tokens: int = 96

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        import torch

        from benchmarks.vocabularies import vocabularies
        from specdemo.models.machine import one_thread

        with one_thread(torch.device("cpu")):
            return vocabularies(self.repeats, self.new_tokens, report, cancelled)


@dataclass(frozen=True, kw_only=True)
class Lengths(Suite):
    """How near does `adaptive` come to the best fixed draft length? Per kind of text, every k and adaptive in turns."""

    name = "lengths"
    repeats: int = 8
    new_tokens: int = 64

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        import torch

        from benchmarks.lengths import lengths
        from specdemo.models.machine import one_thread

        with one_thread(torch.device("cpu")):
            return lengths(self.repeats, self.new_tokens, report, cancelled)


@dataclass(frozen=True, kw_only=True)
class Floor(Decoding):
    """The engine's step against its own forwards replayed: plain, a chain and a tree, greedy and sampling."""

    name = "floor"
    pair: str = "embedded"
    new_tokens: int = 64

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.floor import floor
        from benchmarks.pairs import make_pair
        from specdemo.models.machine import one_thread

        pair = make_pair(self.pair, self.device, self.dtype)
        with one_thread(pair.target.device):
            return floor(pair, self.repeats, self.new_tokens, report, cancelled)


@dataclass(frozen=True, kw_only=True)
class RaceFairness(Suite):
    """Does a slow lane slow the other one's clock? A plain lane races a draft lane, once as it is, once stalled."""

    name = "race-fairness"

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.fairness import race_fairness

        return race_fairness(self.repeats, report, cancelled)


@dataclass(frozen=True, kw_only=True)
class Gpu(Suite):
    """What a GPU is worth, section by section into the folder --out; a further call goes on where this one ended."""

    name = "gpu"
    repeats: int = 3
    device: str = "auto"
    minutes: float = 8.0
    folder: Path = Path("runs") / "gpu"

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.gpu.run import measure

        return measure(self.folder, self.device, self.minutes, self.repeats, report, cancelled)


@dataclass(frozen=True, kw_only=True)
class Coverage(Suite):
    """How often does the 95 % interval hold the truth? In so many simulated runs each, race and sequential."""

    name = "coverage"
    repeats: int = 1000

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.trust import coverage

        return coverage(self.repeats, report, cancelled)


@dataclass(frozen=True, kw_only=True)
class Noise(Suite):
    """What do other programs do to a speed-up? Runs of the default preset alone and beside two busy loops."""

    name = "noise"
    repeats: int = 20

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.trust import beside

        return beside(self.repeats, report, cancelled)


@dataclass(frozen=True, kw_only=True)
class Paces(Suite):
    """Does it matter how a server sends its text? The same text token by token, in bunches of ten, and all at once."""

    name = "paces"

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.trust import paces

        return paces(self.repeats, report, cancelled)


@dataclass(frozen=True, kw_only=True)
class WhatIf(Suite):
    """Is a prediction right? One pair profiles this CPU; other pairs, methods, k and batches are predicted and run."""

    name = "what-if"
    repeats: int = 2
    new_tokens: int = 48

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        import torch

        from benchmarks.what_if import what_if
        from specdemo.bench.device import measure_profile
        from specdemo.models.machine import one_thread

        profile = measure_profile("cpu", "here")
        with one_thread(torch.device("cpu")):
            return what_if(profile, self.repeats, self.new_tokens, report, cancelled)


@dataclass(frozen=True, kw_only=True)
class Published(Suite):
    """Is a prediction right? Speed-ups that others published, predicted from shapes, datasheets and acceptance."""

    name = "published"
    repeats: int = 1

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.published import published

        return published()


SUITES: tuple[type[Suite], ...] = (
    Peers,
    Beside,
    Vocabularies,
    Lengths,
    Floor,
    RaceFairness,
    Coverage,
    Noise,
    Paces,
    Gpu,
    WhatIf,
    Published,
)
