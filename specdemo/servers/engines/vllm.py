"""vLLM. Names of flags: config/speculative.py, read in autumn 2026; `--help` of the installed version decides."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from subprocess import SubprocessError, run
from typing import ClassVar

from specdemo.core.atomic_io import json_text
from specdemo.core.safe_io import JsonObject
from specdemo.core.trace import Span
from specdemo.methods import EngineArgs, Flags, MethodOptions
from specdemo.servers.counters import (
    Samples,
    ServerStats,
    answer_stats,
    counts,
    delta,
    draft_counters,
    draft_names,
    fields_below,
    listed_counts,
)
from specdemo.servers.engines.base import (
    GPU_ONLY,
    Installed,
    ServerConfig,
    ServingEngine,
    UnsupportedByEngine,
    address_flags,
    default_options,
    name_contains,
    split_revision,
    target_flags,
)

PER_REQUEST = ["--per-request-spec-decode-metrics", "detailed"]
PER_REQUEST_SINCE = (0, 27)
CONFIG, ATTENTION = "--speculative-config", "--attention-backend"
# verifies the part of a draft that pays; it counts all draft tokens, and does not report how many it verified
ADAPTIVE = "enable_adaptive_verification"
VERIFIED_IN_PART = ("draft_model", "suffix", "mtp", "eagle", "dflash", "gemma4_assistant")
REMOVED = {"medusa": "0.33"}  # methods, and the first version without them
GPU_SHARE = 0.9  # share of a GPU's memory for all servers on it; vLLM's default for one server
PROBE_S = 120.0  # timeout; importing vLLM takes half a minute on a slow disk
PROBE = """
import json, torch, typing
from importlib.metadata import version
from vllm.config import speculative
from vllm.platforms import current_platform

def words(kind):
    return [w for a in typing.get_args(kind) for w in (words(a) if typing.get_args(a) else [a])]
print(json.dumps({"version": version("vllm"), "methods": words(speculative.SpeculativeMethod),
                  "gpus": 0 if current_platform.is_cpu() else torch.cuda.device_count()}, allow_nan=False))
"""
DRAFTS = "vllm:spec_decode_num_"  # v1/spec_decode/metrics.py
TIMES: dict[Span, str] = {
    "ttft_ms": "vllm:time_to_first_token_seconds",
    "decode_ms": "vllm:request_decode_time_seconds",
}
PARTS = ("sum", "count")


def speculative_config(**values: object) -> Flags:
    """Return `--speculative-config` with these values. A model's revision has a key of its own."""
    model, revision = split_revision(str(values.get("model", "")))
    values |= {"model": model, "revision": revision} if revision else {}
    return [CONFIG, json_text(values, separators=(",", ":"))]


def named(name: str) -> EngineArgs:
    """Return the flags of a method that vLLM knows as `name` and configures by model and k."""

    def flags(model: str | None, k: int, options: MethodOptions) -> Flags:
        return speculative_config(method=name, **({"model": model} if model else {}), num_speculative_tokens=k)

    return flags


def _pard(model: str | None, k: int, options: MethodOptions) -> Flags:
    return speculative_config(method="draft_model", model=model, num_speculative_tokens=k, parallel_drafting=True)


def _ngram(model: str | None, k: int, options: MethodOptions) -> Flags:
    sizes = {"prompt_lookup_min": options["min_n"], "prompt_lookup_max": options["max_n"]}
    return speculative_config(method="ngram", num_speculative_tokens=k, **sizes)


def _mlp_speculator(model: str | None, k: int, options: MethodOptions) -> Flags:
    raise UnsupportedByEngine("vLLM 0.32 and later no longer have it")


def _eagle(model: str | None, k: int, options: MethodOptions) -> Flags:
    if name_contains(model, "p-eagle"):
        return speculative_config(method="eagle3", model=model, num_speculative_tokens=k, parallel_drafting=True)
    method = "eagle3" if name_contains(model, "eagle3", "eagle-3") else "eagle"
    return speculative_config(method=method, model=model, num_speculative_tokens=k)


def _dflash(model: str | None, k: int, options: MethodOptions) -> Flags:
    for method in ("dspark", "xpress"):
        if name_contains(model, method):
            return speculative_config(method=method, model=model, num_speculative_tokens=k)
    config = speculative_config(method="dflash", model=model, num_speculative_tokens=k)
    return [*config, ATTENTION, "flash_attn"]


def _adaptive(model: str | None, k: int, options: MethodOptions) -> Flags:
    """Return the flags of a drafter whose drafts vLLM verifies as far as that pays (docs, "Adaptive Verification")."""
    inner = options["drafter"]
    if inner not in VERIFIED_IN_PART:
        raise UnsupportedByEngine(f"vLLM verifies drafts in part for {', '.join(VERIFIED_IN_PART)}, not for {inner}")
    command = VLLM.methods[inner](model, k, default_options(inner))
    command[command.index(CONFIG) + 1] = json_text(_config(command) | {ADAPTIVE: True}, separators=(",", ":"))
    return command


def _config(command: Sequence[str]) -> JsonObject:
    """Return the speculative config of a command, empty for plain decoding."""
    config: JsonObject = json.loads(command[command.index(CONFIG) + 1]) if CONFIG in command else {}
    return config


def _release(installed: Installed) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", installed.version)[:2])


class VLLM(ServingEngine):
    """vLLM's OpenAI server, from an environment of its own, because it needs another version of torch."""

    name = "vllm"
    title = "vLLM"
    program = "vllm"
    install = (
        f"python3 -m venv vllm && vllm/bin/pip install vllm ({GPU_ONLY}; for a CPU see docs/servers.md), "
        "then pass --command vllm/bin/vllm"
    )
    methods: ClassVar = {
        "draft_model": named("draft_model"),
        "pard": _pard,
        "ngram": _ngram,
        "suffix": named("suffix"),
        "medusa": named("medusa"),
        "mlp_speculator": _mlp_speculator,
        "mtp": named("mtp"),
        "eagle": _eagle,
        "dflash": _dflash,
        "gemma4_assistant": named("mtp"),
        "adaptive": _adaptive,
    }
    counts_unverified: ClassVar = frozenset({"adaptive"})
    full_draft_cache = '"kv_cache_dtype": "auto" in the speculative config'
    parallel = "--tensor-parallel-size"
    # docs/features/batch_invariance; issue 54506
    same_bits = (
        "VLLM_BATCH_INVARIANT=1 in the environment makes a text independent of other requests, more slowly and on GPUs "
        "only; it does not cover passes over one and over k + 1 tokens yet, so drafted text may part at near-ties"
    )
    quantization: ClassVar = {"4bit": ["--quantization", "bitsandbytes"]}
    # a small KV cache is enough, because a lane sends one request at a time
    environment: ClassVar = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **ServingEngine.environment}
    generated, running = "vllm:generation_tokens", "vllm:num_requests_running"
    metrics = draft_names(DRAFTS) | {generated, *(f"{name}_{part}" for name in TIMES.values() for part in PARTS)}

    def probe(self, path: str) -> Installed | None:
        """Query the Python in the program's folder; None if it does not answer."""
        return _probe(path)

    def start(self, config: ServerConfig) -> Flags:
        path, flags = target_flags(config, self.quantization)
        return ["serve", path, *flags, "--no-enable-prefix-caching", *address_flags(config)]

    def note(self, config: ServerConfig) -> str:
        drafting = _config(self.draft_flags(config))
        if drafting.get(ADAPTIVE):
            return "needs a GPU, and no --enforce-eager"
        method = drafting.get("method")
        return f"needs vLLM before {REMOVED[method]}, which removed {method}" if method in REMOVED else ""

    def rejection(self, command: Sequence[str], installed: Installed | None) -> str:
        config = _config(command)
        method = config.get("method")
        if installed is not None and not installed.gpus and config.get(ADAPTIVE):
            return "vLLM verifies drafts in part in CUDA graphs only, not on a CPU"
        if installed is None or not method or method in installed.methods:
            return ""
        fix = f"; install vllm<{REMOVED[method]}" if method in REMOVED else ""
        return f"vLLM {installed.version} has no method {method!r}{fix}"

    def fit(
        self, command: list[str], installed: Installed | None, place: int, servers: int, gpus: int
    ) -> tuple[list[str], dict[str, str]]:
        """Give each server GPUs of its own if there are enough, else a share of their memory. A CPU has one attention
        backend.
        """
        if installed is None:
            return command, {}
        if CONFIG in command and _release(installed) >= PER_REQUEST_SINCE:
            command = [*command, *PER_REQUEST]
        if not installed.gpus:
            at = command.index(ATTENTION) if ATTENTION in command else len(command)
            return command[:at] + command[at + 2 :], {}
        if installed.gpus >= servers * gpus:
            return command, {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(place * gpus, (place + 1) * gpus)))}
        return [*command, "--gpu-memory-utilization", f"{GPU_SHARE / servers:.2f}"], {}

    def draft_length_setting(self, k: int, method: str = "", drafter: str = "") -> str:
        if not k:
            return f"omit {CONFIG}"
        named = {name: value for name, value in (("method", method), ("model", drafter)) if value}
        return shlex.join(speculative_config(**named, num_speculative_tokens=k))

    def statistics(self, old: Samples, new: Samples) -> ServerStats | None:
        requests = f"{TIMES['ttft_ms']}_count"
        stats = draft_counters(old, new, DRAFTS, self.title, self.generated, requests)
        times = _times(old, new)
        return replace(stats or ServerStats(), times=times) if stats or times else None

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        """Read the last chunk (docs, "Per-Request Acceptance Metrics")."""
        details = fields_below(chunk, "metrics", "speculative_decoding")
        drafted, accepted, steps = counts(details, "num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps")
        drafts, names = None, ("per_step_drafted", "per_step_accepted")
        by_step = [values for name in names if (values := listed_counts(details, name)) is not None]
        if len(by_step) == 2 and len(by_step[0]) == len(by_step[1]):
            drafts = list(zip(*by_step, strict=True))
        histogram = listed_counts(details, "acceptance_histogram")
        return answer_stats(self.title, drafted, accepted, steps, histogram, drafts)


@lru_cache
def _probe(path: str) -> Installed | None:
    python = Path(path).parent / "python"
    if not python.exists():
        return None
    try:
        output = run([str(python), "-c", PROBE], capture_output=True, timeout=PROBE_S, check=True).stdout
        return Installed(**json.loads(output.splitlines()[-1]))
    except (OSError, SubprocessError, ValueError, TypeError, IndexError):
        return None


def _times(old: Samples, new: Samples) -> dict[Span, float]:
    """Return the times of a single request; empty if there were several, or none was timed."""
    times: dict[Span, float] = {}
    for span, name in TIMES.items():
        seconds = delta(old, new, f"{name}_sum")
        if seconds is not None and delta(old, new, f"{name}_count") == 1:
            times[span] = round(1000.0 * seconds, 3)
    return times if len(times) == len(TIMES) else {}
