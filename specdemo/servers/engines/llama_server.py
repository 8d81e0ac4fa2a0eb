"""llama.cpp's own program `llama-server`. Names of flags: common/arg.cpp of build 11549; `--help` of the installed one
decides which kinds of speculation it has.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from operator import mul
from pathlib import Path
from subprocess import SubprocessError, run
from typing import ClassVar

from specdemo.core.trace import Span
from specdemo.methods import EngineArgs, Flags, MethodOptions
from specdemo.models.ref import ModelRef
from specdemo.servers.counters import (
    Samples,
    ServerStats,
    answer_stats,
    counts,
    draft_counters,
    draft_names,
    fields_below,
    milliseconds,
)
from specdemo.servers.engines.base import (
    Installed,
    ServerConfig,
    ServingEngine,
    UnsupportedByEngine,
    address_flags,
    default_options,
    name_contains,
)

DRAFTS, GENERATED = "llamacpp:spec_decode_num_", "llamacpp:tokens_predicted"
NGRAM = 3  # preferred length of an n-gram, in tokens
TYPE, LENGTH, SYNTHETIC = "--spec-type", "--spec-draft-n-max", "--spec-synth"
KIND = re.compile(r"\b(?:draft|ngram)(?:-[a-z0-9]+)+\b")
HELP_S = 20.0  # timeout


def _source(name: str, file: str, repository: str) -> Flags:
    """Return the flags of a GGUF file, or of a GGUF repository of the hub with or without `:quantization`."""
    path, ref = Path(name).expanduser(), ModelRef(name)
    if path.is_file():
        return [file, str(path)]
    if not ref.gguf or ref.is_gguf_file:
        raise UnsupportedByEngine(f"llama-server runs GGUF files and repositories, and {name} is none of them")
    return [repository, name]


def _drafter(kind: str) -> EngineArgs:
    def flags(model: str | None, k: int, options: MethodOptions) -> Flags:
        source = _source(model, "--spec-draft-model", "--spec-draft-hf") if model else []
        return [TYPE, kind, *source, LENGTH, str(k)]

    return flags


def _synthetic(model: str | None, k: int, options: MethodOptions) -> Flags:
    """Return the flags of a drafter whose tokens are accepted at random (pull request 27711)."""
    inner = options["drafter"]
    if inner not in DRAFTERS:
        names = ", ".join(f"drafter={name}" for name in DRAFTERS)
        raise UnsupportedByEngine(f"llama-server accepts at random what a drafter drafts; add one of {names}")
    flags = DRAFTERS[inner](model, k, default_options(inner))
    if options["length"]:
        return [*flags, f"{SYNTHETIC}-len", f"{options['length']:g}"]
    rates = [float(rate) for rate in options["rates"].split(",")]
    reached = accumulate([*rates, *rates[-1:] * (k - len(rates))][:k], mul)  # its rates are unconditional
    return [*flags, f"{SYNTHETIC}-rates", ",".join(f"{rate:.4g}" for rate in reached)]


def _dflash(model: str | None, k: int, options: MethodOptions) -> Flags:
    return _drafter("draft-dspark" if name_contains(model, "dspark") else "draft-dflash")(model, k, options)


def nearest_ngram(options: MethodOptions) -> int:
    """Return the size of n-grams, of which llama.cpp supports one: the allowed one nearest to NGRAM."""
    return int(min(max(options["min_n"], NGRAM), options["max_n"]))


def _ngram(model: str | None, k: int, options: MethodOptions) -> Flags:
    size = str(nearest_ngram(options))
    return [TYPE, "ngram-simple", "--spec-ngram-simple-size-n", size, "--spec-ngram-simple-size-m", str(k)]


def _gated(model: str | None, k: int, options: MethodOptions) -> Flags:
    """Return the flags of a drafter after ngram-mod, of which the first with a draft is used. The least length of
    ngram-mod is 48, unless it is set."""
    inner = str(options["drafter"])
    if inner not in DRAFTERS or inner == "ngram":
        raise UnsupportedByEngine(f"llama-server does not combine {inner} with a lookup")
    if options["lookup"] != "suffix":
        raise UnsupportedByEngine("llama-server combines one lookup with drafters, ngram-mod; leave lookup at suffix")
    longest = min(k, int(options["length"]) or k)  # of the drafter
    kind, *rest = DRAFTERS[inner](model, longest, default_options(inner))[1:]
    return [TYPE, f"{kind},ngram-mod", *rest, "--spec-ngram-mod-n-min", "1"]


DRAFTERS: Mapping[str, EngineArgs] = {
    "draft_model": _drafter("draft-simple"),
    "eagle": _drafter("draft-eagle3"),
    "mtp": _drafter("draft-mtp"),
    "dflash": _dflash,
    "ngram": _ngram,
}


class LlamaServer(ServingEngine):
    """The program `llama-server`, with GGUF files."""

    name = "llama-server"
    title = "llama-server"
    program = "llama-server"
    install = "brew install llama.cpp (or see https://github.com/ggml-org/llama.cpp)"
    methods: ClassVar = {**DRAFTERS, "gated": _gated, "synthetic": _synthetic}
    p_min = "--spec-draft-p-min"
    full_draft_cache = "-ctkd f16 -ctvd f16"
    draft_length = f"{LENGTH} {{k}}", f"omit {TYPE} and --spec-draft-model (in older versions -md)"
    metrics = draft_names(DRAFTS) | {GENERATED}
    request: ClassVar = {"timings_per_token": True}
    generated, running = GENERATED, "llamacpp:requests_processing"
    speed = "llamacpp:predicted_tokens_seconds"

    def start(self, config: ServerConfig) -> Flags:
        source = _source(config.target, "-m", "-hf")
        own = ["--alias", config.target, "--metrics", "--no-cache-prompt", "--parallel", "1"]
        return [*source, *own, *address_flags(config)[-4:]]

    def draft_length_setting(self, k: int, method: str = "", drafter: str = "") -> str:
        """Lookups have lengths of their own. That of ngram-mod drops drafts below a least length, 48 by default."""
        if k and "ngram-mod" in method:
            return f"--spec-ngram-mod-n-max {k} --spec-ngram-mod-n-min 1"
        return f"--spec-ngram-simple-size-m {k}" if k and "ngram-simple" in method else super().draft_length_setting(k)

    def probe(self, path: str) -> Installed | None:
        return _probe(path)

    def statistics(self, old: Samples, new: Samples) -> ServerStats | None:
        return draft_counters(old, new, DRAFTS, "llama.cpp", GENERATED)

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        """Read the statistics so far: of every chunk with `timings_per_token`, else of the last one."""
        timings = fields_below(chunk, "timings")
        if not isinstance(chunk.get("timings"), Mapping) or "draft_kind" in timings:  # those of mlx-vlm
            return None
        times: dict[Span, float] = {}
        reading, decoding = milliseconds(timings, "prompt_ms", "predicted_ms")
        if reading is not None and decoding is not None:
            times = {"ttft_ms": reading, "decode_ms": decoding}
        drafted, accepted = counts(timings, "draft_n", "draft_n_accepted")
        stats = answer_stats("llama.cpp", drafted, accepted) if drafted else None
        return replace(stats or ServerStats(), times=times, running=True)

    def rejection(self, command: Sequence[str], installed: Installed | None) -> str:
        kinds = command[command.index(TYPE) + 1].split(",") if TYPE in command else []
        lacking = [kind for kind in kinds if installed and kind not in installed.methods]
        if installed is None or not lacking:
            return ""
        return f"llama-server {installed.version} has no {TYPE} {lacking[0]}; install a newer build"


@lru_cache
def _probe(path: str) -> Installed | None:
    """Return the version and the kinds of speculation that `--help` lists; None if the program fails."""
    try:
        version, listed = (
            run([path, flag], capture_output=True, text=True, errors="replace", timeout=HELP_S, check=True)
            for flag in ("--version", "--help")
        )
    except (OSError, SubprocessError):
        return None
    number = re.search(r"version: (\S+)", version.stdout + version.stderr)
    text = listed.stdout.partition(TYPE)[2][:1000]
    return Installed(number[1] if number else "of unknown version", sorted(set(KIND.findall(text))), 0)
