"""Server arguments of a method, for vLLM and SGLang. Flag names are from vLLM's config/speculative.py and SGLang's page
on speculative decoding in autumn 2026; both change, so check `--help` of the installed version.
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
    """Reason why a server cannot run a method, in one sentence."""


def vllm(name: str) -> EngineArgs:
    """Return the arguments of a method that vLLM knows as `name` and that needs only a model and k."""

    def flags(model: str | None, k: int, options: Options) -> Flags:
        return vllm_config(method=name, **({"model": model} if model else {}), num_speculative_tokens=k)

    return flags


def vllm_config(**values: object) -> Flags:
    """Return vLLM's `--speculative-config` with these values; the revision of a model has a separate key."""
    model, _, revision = str(values.get("model", "")).partition(AT)
    values |= {"model": model, "revision": revision} if revision else {}
    return ["--speculative-config", json_text(values, separators=(",", ":"))]


def unsupported(reason: str) -> EngineArgs:
    """Return arguments that raise UnsupportedByEngine, for a method that an engine has removed."""

    def flags(model: str | None, k: int, options: Options) -> Flags:
        raise UnsupportedByEngine(reason)

    return flags


def sglang(algorithm: str, model: str | None = None, **more: object) -> Flags:
    """Return SGLang's arguments. A chain of k draft tokens has k steps, one branch and k + 1 tokens to verify."""
    path, _, revision = (model or "").partition(AT)
    paths = ["--speculative-draft-model-path", path] if path else []
    paths += ["--speculative-draft-model-revision", revision] if revision else []
    rest = [part for name, value in more.items() for part in (f"--speculative-{name.replace('_', '-')}", str(value))]
    return ["--speculative-algorithm", algorithm, *paths, *rest]


def sglang_chain(algorithm: str) -> EngineArgs:
    """Return the arguments of a method that SGLang knows as `algorithm` and that drafts a chain."""

    def flags(model: str | None, k: int, options: Options) -> Flags:
        return sglang(algorithm, model, num_steps=k, eagle_topk=1, num_draft_tokens=k + 1)

    return flags


def name_contains(model: str | None, text: str) -> bool:
    """Return True if the name of a model contains `text`, in any case."""
    return text in (model or "").lower()
