"""What a method's class says of servers: the arguments that make vLLM or SGLang draft so. Names of flags: vLLM
config/speculative.py and SGLang's speculative_decoding page, read in autumn 2026; both change, so `--help` of the
installed version decides.
"""

from collections.abc import Callable, Mapping

from specdemo.core.files import json_text

Flags = list[str]
Options = Mapping[str, object]  # all of the method's, with their defaults
EngineArgs = Callable[[str | None, int, Options], Flags]  # model (None: the target holds the heads), k, options


AT = "@"  # between a model's name and its revision

# methods that vLLM removed, and the first version without them; config/speculative.py
REMOVED = {"medusa": "0.33"}


class UnsupportedByEngine(Exception):
    """Why a server cannot run a method, in one sentence."""


def vllm(name: str) -> EngineArgs:
    """Serve lines of a method that vLLM knows under `name` and tells apart by nothing but model and k."""

    def flags(model: str | None, k: int, options: Options) -> Flags:
        return vllm_config(method=name, **({"model": model} if model else {}), num_speculative_tokens=k)

    return flags


def vllm_config(**values: object) -> Flags:
    """vLLM's `--speculative-config` with these values; a model's revision is a key of its own there."""
    model, _, revision = str(values.get("model", "")).partition(AT)
    values |= {"model": model, "revision": revision} if revision else {}
    return ["--speculative-config", json_text(values, separators=(",", ":"))]


def unsupported(reason: str) -> EngineArgs:
    """Serve lines of a method that a server once had."""

    def flags(model: str | None, k: int, options: Options) -> Flags:
        raise UnsupportedByEngine(reason)

    return flags


def sglang(algorithm: str, model: str | None = None, **more: object) -> Flags:
    """A chain of k drafts is k steps of one branch, and k + 1 tokens to verify."""
    path, _, revision = (model or "").partition(AT)
    paths = ["--speculative-draft-model-path", path] if path else []
    paths += ["--speculative-draft-model-revision", revision] if revision else []
    rest = [part for name, value in more.items() for part in (f"--speculative-{name.replace('_', '-')}", str(value))]
    return ["--speculative-algorithm", algorithm, *paths, *rest]


def sglang_chain(algorithm: str) -> EngineArgs:
    """Serve lines of a method that SGLang knows as `algorithm`, drafting a chain of k."""

    def flags(model: str | None, k: int, options: Options) -> Flags:
        return sglang(algorithm, model, num_steps=k, eagle_topk=1, num_draft_tokens=k + 1)

    return flags


def name_contains(model: str | None, text: str) -> bool:
    """Whether a model's name holds `word`, in whatever case."""
    return text in (model or "").lower()
