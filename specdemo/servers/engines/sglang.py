"""SGLang. Names of flags: its page on speculative decoding, adaptive_spec_params.py and adaptive_step_router.py, read
in autumn 2026; `--help` of the installed version decides.
"""

import shutil
from collections.abc import Mapping
from subprocess import run
from typing import ClassVar

from specdemo.core.trace import Counter
from specdemo.methods import EngineArgs, Flags, MethodOptions
from specdemo.servers.counters import (
    Samples,
    ServerStats,
    answer_stats,
    counts,
    delta,
    fields_below,
    gauge,
    listed_counts,
)
from specdemo.servers.engines.base import (
    GPU_ONLY,
    ServerConfig,
    ServingEngine,
    address_flags,
    name_contains,
    split_revision,
    target_flags,
)

ALGORITHM = "--speculative-algorithm"
CORPUS, BUDGET = "--speculative-ngram-external-corpus-path", "--speculative-ngram-external-sam-budget"
CORPUS_FILE = "corpus.jsonl"
RATE, LENGTH, TOKENS, PASSES = (
    f"sglang:{name}" for name in ("spec_accept_rate", "spec_accept_length", "generation_tokens", "spec_verify_calls")
)


def speculative_flags(algorithm: str, model: str | None = None, **values: object) -> Flags:
    """Return the flags of an algorithm, its model and its options."""
    path, revision = split_revision(model or "")
    flags = [ALGORITHM, algorithm]
    flags += ["--speculative-draft-model-path", path] if path else []
    flags += ["--speculative-draft-model-revision", revision] if revision else []
    return flags + [
        part for name, value in values.items() for part in (f"--speculative-{name.replace('_', '-')}", str(value))
    ]


def chain(algorithm: str) -> EngineArgs:
    """Return the flags of a chain of k draft tokens: k steps of one branch, and k + 1 tokens to verify."""

    def flags(model: str | None, k: int, options: MethodOptions) -> Flags:
        return speculative_flags(algorithm, model, num_steps=k, eagle_topk=1, num_draft_tokens=k + 1)

    return flags


def _ngram(model: str | None, k: int, options: MethodOptions) -> Flags:
    flags = speculative_flags("NGRAM", num_draft_tokens=k + 1)
    # its file has a text per line, as a JSON string; the budget, tokens of a draft from it, is 0 by default: none
    return [*flags, CORPUS, CORPUS_FILE, BUDGET, str((k + 1) // 2)] if options["corpus"] else flags


def _eagle(model: str | None, k: int, options: MethodOptions) -> Flags:
    algorithm = "EAGLE3" if name_contains(model, "eagle3", "eagle-3") else "EAGLE"
    if options["draft"] == "chain":
        return chain(algorithm)(model, k, options)
    tree = {"eagle_topk": options["top_k"], "num_draft_tokens": options["nodes"] + 1}
    return speculative_flags(algorithm, model, num_steps=k, **tree)


def _dflash(model: str | None, k: int, options: MethodOptions) -> Flags:
    if name_contains(model, "dspark"):
        return speculative_flags("DSPARK", model, dspark_block_size=k)
    return speculative_flags("DFLASH", model, num_draft_tokens=k + 1)


def _unverified(details: Mapping[str, object], drafted: int, accepted: int, steps: int) -> int:
    """Return the draft tokens that DSpark's schedule left out of the verification; 0 if they are not reported. Its
    histogram has the steps by the tokens that they verified, the root included."""
    caps = listed_counts(details, "spec_cap_lens_histogram") or []
    verified = sum(n * count for n, count in enumerate(caps)) - steps
    return drafted - verified if caps and sum(caps) == steps and accepted <= verified <= drafted else 0


class SGLang(ServingEngine):
    """SGLang's OpenAI server, from an environment of its own, because it needs another version of torch."""

    name = "sglang"
    title = "SGLang"
    program = "python"
    install = (
        f"python3 -m venv sglang && sglang/bin/pip install sglang ({GPU_ONLY}), then pass --command sglang/bin/python"
    )
    methods: ClassVar = {
        "draft_model": chain("STANDALONE"),
        "ngram": _ngram,
        "mtp": chain("NEXTN"),
        "eagle": _eagle,
        "dflash": _dflash,
        "gemma4_assistant": chain("NEXTN"),  # SGLang switches to FROZEN_KV_MTP for an assistant
    }
    corpus = CORPUS
    parallel = "--tp-size"
    full_draft_cache = "--speculative-draft-kv-cache-dtype bfloat16"
    # docs/advanced_features/deterministic_inference; pull request 11789
    same_bits = (
        "--enable-deterministic-inference makes a text independent of other requests, more slowly; with speculation "
        "add --attention-backend triton"
    )
    metrics = frozenset({RATE, LENGTH, TOKENS, PASSES})
    generated, running, speed = TOKENS, "sglang:num_running_reqs", "sglang:gen_throughput"
    request: ClassVar = {"return_spec_tokens_details": True}

    def is_installed(self) -> bool:
        """Return whether the `python` on PATH can import SGLang."""
        python = shutil.which(self.program)
        look = "import sys; from importlib.util import find_spec; sys.exit(find_spec('sglang') is None)"
        return python is not None and run([python, "-c", look], capture_output=True).returncode == 0

    def note(self, config: ServerConfig) -> str:
        return f"first jq -Rs . FILE > {CORPUS_FILE}" if config.options.get("corpus") else ""

    def start(self, config: ServerConfig) -> Flags:
        path, flags = target_flags(config, self.quantization)
        start = ["-m", "sglang.launch_server", "--model-path", path, "--enable-metrics"]
        return [*start, *flags, "--disable-radix-cache", *address_flags(config)]

    def draft_length_setting(self, k: int, method: str = "", drafter: str = "") -> str:
        if not k:
            return f"omit {ALGORITHM}"
        if method == "ngram":
            return f"--speculative-num-draft-tokens {k + 1}"
        return f"--speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"

    def statistics(self, old: Samples, new: Samples) -> ServerStats | None:
        """Read the verified passes, which some versions count; the rest are gauges over the last log interval, 0 when
        idle.
        """
        rate, length = gauge(new, RATE), gauge(new, LENGTH)
        tokens, passes = delta(old, new, TOKENS), delta(old, new, PASSES)
        source = "tokens per pass is a gauge over the last log interval"
        if tokens and passes:
            length, source = tokens / passes, "generated tokens / verify calls over the run"
        rate = None if rate and rate > 1 else rate
        if rate is None and length is None:
            return None
        counters: dict[Counter, float | None] = {"acceptance_rate": rate, "tokens_per_step": length}
        return ServerStats(
            {name: round(value, 4) for name, value in counters.items() if value is not None},
            [],
            "SGLang's metrics: the acceptance rate is a gauge over the last log interval, and some versions include "
            f"the bonus token; {source}; requests of other users are included",
        )

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        """Read the counts of srt/entrypoints/openai/protocol.py, `SpecTokensDetails`."""
        details = fields_below(chunk, "sglext", "spec_tokens_details")
        names = ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_verify_ct")
        drafted, accepted, steps = counts(details, *names)
        unverified = _unverified(details, drafted or 0, accepted or 0, steps or 0)
        verified, histogram = drafted and drafted - unverified, listed_counts(details, "spec_correct_drafts_histogram")
        return answer_stats(self.title, verified, accepted, steps, histogram, unverified=unverified)
