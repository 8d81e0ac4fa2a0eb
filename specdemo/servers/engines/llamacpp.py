"""llama.cpp on a CPU, as the package `xllamacpp` contains it; servers/llamacpp.py is the program."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import ClassVar

from pydantic import BaseModel

from specdemo.core.trace import Span
from specdemo.methods import Flags, MethodOptions
from specdemo.servers.counters import (
    Count,
    Milliseconds,
    Samples,
    ServerStats,
    answer_stats,
    draft_counters,
    draft_names,
    reported,
)
from specdemo.servers.engines.base import ServerConfig, ServingEngine, UnsupportedByEngine, address_flags

PACKAGES = ("xllamacpp", "gguf")
DRAFTS = "llamacpp:spec_decode_num_"
NGRAM = 3  # preferred length of an n-gram, in tokens
MODELS = "llama.cpp runs Llama models without bias and RoPE scaling, and GGUF files"


def _draft_model(model: str | None, k: int, options: MethodOptions) -> Flags:
    return ["--draft-model", str(model), "--k", str(k)]


def nearest_ngram(options: MethodOptions) -> int:
    """Return the size of n-grams, of which llama.cpp supports one: the allowed one nearest to NGRAM."""
    return int(min(max(options["min_n"], NGRAM), options["max_n"]))


def _ngram(model: str | None, k: int, options: MethodOptions) -> Flags:
    return ["--ngram", str(nearest_ngram(options)), "--k", str(k)]


class _Timings(BaseModel):
    """Statistics of one answer so far: in every chunk with `timings_per_token`, else in the last one."""

    draft_n: Count = None
    draft_n_accepted: Count = None
    prompt_ms: Milliseconds = None
    predicted_ms: Milliseconds = None
    draft_kind: object = None  # only of mlx-vlm


class LlamaCpp(ServingEngine):
    """llama.cpp's server."""

    name = "llamacpp"
    title = "llama.cpp"
    server = "llama-server"
    program = sys.executable
    install = f"{shlex.quote(sys.executable)} -m pip install {' '.join(PACKAGES)}"
    methods: ClassVar = {"draft_model": _draft_model, "ngram": _ngram}
    unsupported = "specdemo starts it only with a draft model or prompt lookup"
    metrics = draft_names(DRAFTS)
    request: ClassVar = {"timings_per_token": True}

    def is_installed(self) -> bool:
        return all(map(find_spec, PACKAGES))

    def start(self, config: ServerConfig) -> Flags:
        return ["-m", "specdemo.servers.llamacpp", config.target, *address_flags(config)]

    def note(self, config: ServerConfig) -> str:
        """Return a note if the models' configs are not known. Raises UnsupportedByEngine for models that cannot run."""
        from specdemo.models.gguf import check_pair  # needs torch
        from specdemo.models.gguf_files import is_gguf
        from specdemo.models.sources import config_folder

        for name in (config.target, config.model):
            try:
                if name and not is_gguf(name):
                    config_folder(name)
            except ValueError:
                return f"not checked, since the config of {name} is not on this machine; {MODELS}"
        try:
            check_pair(config.target, config.model, config.dtype)
        except ValueError as error:
            raise UnsupportedByEngine(str(error)) from None
        return ""

    def statistics(self, old: Samples, new: Samples) -> ServerStats | None:
        return draft_counters(old, new, DRAFTS, self.title)

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        timings = reported(_Timings, chunk, "timings")
        if timings is None or "draft_kind" in timings.model_fields_set:
            return None
        times: dict[Span, float] = {}
        if timings.prompt_ms is not None and timings.predicted_ms is not None:
            times = {"ttft_ms": timings.prompt_ms, "decode_ms": timings.predicted_ms}
        stats = answer_stats(self.title, timings.draft_n, timings.draft_n_accepted) if timings.draft_n else None
        return replace(stats or ServerStats(), times=times, running=True)
