"""Benchmarks of the project itself, available as suites of `python -m specdemo bench` in a checkout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from specdemo.bench.base import DEVICE, Decoding, Report, Suite, new_tokens_field, repeats_field
from specdemo.bench.result import Result
from specdemo.core.settings import setting


def _pair(default: str | None) -> Any:
    return setting(default, "Pair of models: embedded, 8m, 98m, 342m or 8b.", metavar="NAME")


class Peers(Decoding):
    """The engine against transformers and llama.cpp, and against its own forward passes alone."""

    name = "peers"
    pair: str | None = _pair(None)  # None: the largest that fits

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.pairs import make_pair
        from benchmarks.peers import compete
        from specdemo.models.cpu_threads import one_thread

        report(0.0, "creating the models")
        pair = make_pair(self.pair, self.device, self.dtype)
        with one_thread(pair.target.device):  # all peers use as many threads as the engine
            return compete(pair, self.repeats, self.new_tokens, report, cancelled)


class Floor(Decoding):
    """Engine steps against their own forward passes alone: plain, a chain and a tree, greedy and sampled."""

    name = "floor"
    pair: str = _pair("embedded")
    new_tokens: int = new_tokens_field(64)

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.floor import floor
        from benchmarks.pairs import make_pair
        from specdemo.models.cpu_threads import one_thread

        pair = make_pair(self.pair, self.device, self.dtype)
        with one_thread(pair.target.device):
            return floor(pair, self.repeats, self.new_tokens, report, cancelled)


class RaceFairness(Suite):
    """Does a slow lane change the other lane's clock? A plain lane races a draft lane, once unchanged and once slowed
    down.
    """

    name = "race-fairness"

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.fairness import race_fairness

        return race_fairness(self.repeats, report, cancelled)


class BusyCore(Suite):
    """How much slower is a model where another program takes a core? Plain decoding and prompt lookup, with one thread
    and with all.
    """

    name = "busy-core"
    target: str = setting("smollm2", "Model.", metavar="MODEL")
    new_tokens: int = new_tokens_field(96)

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.busy import busy_core

        return busy_core(self.target, self.repeats, self.new_tokens, report, cancelled)


class Gpu(Suite):
    """A complete GPU benchmark, section by section, in the folder --out. Another call resumes it."""

    name = "gpu"
    repeats: int = repeats_field(3)
    device: str = DEVICE
    minutes: float = setting(
        8.0, "Time limit of this call in minutes; 0 writes a report of the existing results.", 0.0, 600.0
    )
    folder: Path = setting(Path("runs") / "gpu", "Folder to write to.", flag="--out")
    plan: Literal["all", "first", "qwen", "llama"] = setting(
        "all", "first: correctness, attention and contexts; qwen, llama: methods at 8B; all."
    )
    commit: str = setting("", "Commit of the code, for a copy without its git folder.")

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.gpu.run import measure

        limits = self.folder, self.device, self.minutes, self.repeats
        return measure(*limits, report, cancelled, plan=self.plan, commit=self.commit)


class Models(Decoding):
    """Real models by kind of work, next to transformers' and llama.cpp's own loops, in the folder --out. Another call
    resumes it.
    """

    name = "models"
    new_tokens: int = new_tokens_field(48)
    prompts: int = setting(8, "Prompts per kind of work.", 3, 8)
    minutes: float = setting(25.0, "Time limit of this call in minutes.", 0.0, 600.0)
    models: str = setting("", "Only models whose names contain this text.", metavar="TEXT")
    work: str = setting("", "Only this kind of work, for example chat.", metavar="NAME")
    folder: Path = setting(Path("runs") / "models", "Folder to write to.", flag="--out")

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.models import measure

        return measure(self, report, cancelled)


class Page(Suite):
    """CPU time of the page and of a browser while lanes race, at 10 and at 200 tokens/s, and frames/s of a playback.
    Needs Chromium and playwright.
    """

    name = "page"

    def run(self, report: Report, cancelled: Callable[[], bool]) -> Result:
        from benchmarks.page import page_cost

        return page_cost(self.repeats, report, cancelled)


SUITES: tuple[type[Suite], ...] = (Peers, Floor, RaceFairness, BusyCore, Gpu, Models, Page)
