"""How vLLM and SGLang are told to run a method. Names of flags: vLLM config/speculative.py and SGLang's
speculative_decoding page, read in autumn 2026; both change, so `--help` of the installed version decides."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from specdemo.methods import BASELINE

Engine = Literal["vllm", "sglang"]
Flags = list[str]
Options = Mapping[str, Any]
Write = Callable[[str | None, int, Options], Flags]  # model, k, options -> arguments


class NotServed(Exception):
    """Why a server cannot run a method, in one sentence."""


def speculation_flags(engine: Engine, method: str, model: str | None, k: int, options: Options) -> Flags:
    """The arguments that make a server draft as a lane does; none for plain decoding.

    model: None where the target itself holds the heads. options: all of the method's, with their defaults.
    Raises NotServed.
    """
    if method == BASELINE:
        return []
    table = _VLLM if engine == "vllm" else _SGLANG
    if method not in table:
        raise NotServed(f"{_TITLES[engine]} has no such method")
    return table[method](model, k, options)


_TITLES = {"vllm": "vLLM", "sglang": "SGLang"}


def _vllm(name: str) -> Write:
    def flags(model: str | None, k: int, options: Options) -> Flags:
        return _config(method=name, **({"model": model} if model else {}), num_speculative_tokens=k)

    return flags


def _config(**values: Any) -> Flags:
    return ["--speculative-config", json.dumps(values, separators=(",", ":"))]


def _vllm_ngram(model: str | None, k: int, options: Options) -> Flags:
    sizes = {"prompt_lookup_min": options["min_n"], "prompt_lookup_max": options["max_n"]}
    return _config(method="ngram", num_speculative_tokens=k, **sizes)


def _vllm_eagle(model: str | None, k: int, options: Options) -> Flags:
    if _says(model, "p-eagle"):
        return _config(method="eagle3", model=model, num_speculative_tokens=k, parallel_drafting=True)
    return _config(method="eagle3" if _third(model) else "eagle", model=model, num_speculative_tokens=k)


def _vllm_dflash(model: str | None, k: int, options: Options) -> Flags:
    if _says(model, "dspark"):
        return _config(method="dspark", model=model, num_speculative_tokens=k)
    return [*_config(method="dflash", model=model, num_speculative_tokens=k), "--attention-backend", "flash_attn"]


def _sglang(algorithm: str, model: str | None = None, **more: Any) -> Flags:
    """A chain of k drafts is k steps of one branch, and k + 1 tokens to verify."""
    paths = ["--speculative-draft-model-path", model] if model else []
    rest = [part for name, value in more.items() for part in (f"--speculative-{name.replace('_', '-')}", str(value))]
    return ["--speculative-algorithm", algorithm, *paths, *rest]


def _sglang_chain(algorithm: str) -> Write:
    def flags(model: str | None, k: int, options: Options) -> Flags:
        return _sglang(algorithm, model, num_steps=k, eagle_topk=1, num_draft_tokens=k + 1)

    return flags


def _sglang_eagle(model: str | None, k: int, options: Options) -> Flags:
    algorithm = "EAGLE3" if _third(model) else "EAGLE"
    if options["draft"] == "chain":
        return _sglang_chain(algorithm)(model, k, options)
    return _sglang(algorithm, model, num_steps=k, eagle_topk=options["top_k"], num_draft_tokens=options["nodes"] + 1)


def _sglang_dflash(model: str | None, k: int, options: Options) -> Flags:
    if _says(model, "dspark"):
        raise NotServed("SGLang documents DSpark for DeepSeek-V4 checkpoints only")
    return _sglang("DFLASH", model, num_draft_tokens=k + 1)


def _sglang_ngram(model: str | None, k: int, options: Options) -> Flags:
    return _sglang("NGRAM", num_draft_tokens=k + 1)


def _says(model: str | None, word: str) -> bool:
    return word in (model or "").lower()


def _third(model: str | None) -> bool:
    """EAGLE-3, which a server has to be told by name."""
    return _says(model, "eagle3") or _says(model, "eagle-3")


_VLLM: dict[str, Write] = {
    "draft_model": _vllm("draft_model"),
    "ngram": _vllm_ngram,
    "suffix": _vllm("suffix"),
    "medusa": _vllm("medusa"),
    "mlp_speculator": _vllm("mlp_speculator"),
    "mtp": _vllm("mtp"),
    "eagle": _vllm_eagle,
    "dflash": _vllm_dflash,
}
_SGLANG: dict[str, Write] = {
    "draft_model": _sglang_chain("STANDALONE"),
    "ngram": _sglang_ngram,
    "mtp": _sglang_chain("NEXTN"),
    "eagle": _sglang_eagle,
    "dflash": _sglang_dflash,
}
