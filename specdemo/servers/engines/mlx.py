"""The MLX servers. Names of flags and fields: mlx_lm/server.py (0.32) and mlx_vlm/server (0.7)."""

from collections.abc import Mapping
from typing import ClassVar

from specdemo.methods import EngineArgs, Flags, MethodOptions
from specdemo.models.ref import ModelRef
from specdemo.servers.counters import ServerStats, answer_stats, counts, fields_below
from specdemo.servers.engines.base import ServerConfig, ServingEngine, UnsupportedByEngine, address_flags


class _MLX(ServingEngine):
    def start(self, config: ServerConfig) -> Flags:
        if config.target.is_gguf_file:
            raise UnsupportedByEngine("MLX runs models in the format of Hugging Face, not GGUF files")
        return ["--model", config.target.location, *address_flags(config)[-4:]]


def _draft_model(model: str | None, k: int, options: MethodOptions) -> Flags:
    return ["--draft-model", str(model), "--num-draft-tokens", str(k)]


class MLXLM(_MLX):
    """mlx-lm's server. It batches no requests with a draft model, and its answers report no drafts."""

    name = "mlx-lm"
    title = "mlx-lm"
    program = "mlx_lm.server"
    install = "pip install mlx-lm (macOS; on Linux mlx-lm 'mlx[cpu]')"
    methods: ClassVar = {"draft_model": _draft_model}
    unsupported = "mlx-lm drafts with a draft model only"
    draft_length = "--num-draft-tokens {k}", "omit --draft-model"

    def served_name(self, target: ModelRef) -> str | None:
        return "default_model"  # the one of the command line; any other name is loaded from the hub

    def draft_request(self, model: str, k: int) -> dict[str, object]:
        return {"draft_model": model, "num_draft_tokens": k}


def _drafter(kind: str) -> EngineArgs:
    """Return the flags of a drafter. A block has the last verified token and k draft tokens."""

    def flags(model: str | None, k: int, options: MethodOptions) -> Flags:
        return ["--draft-model", str(model), "--draft-kind", kind, "--draft-block-size", str(k + 1)]

    return flags


class MLXVLM(_MLX):
    """mlx-vlm's server, which also serves models without vision."""

    name = "mlx-vlm"
    title = "mlx-vlm"
    program = "mlx_vlm.server"
    install = "pip install mlx-vlm (macOS)"
    draft_length = "--draft-block-size {block}", "omit --draft-model"
    methods: ClassVar = {
        "eagle": _drafter("eagle3"),
        "mtp": _drafter("mtp"),
        "dflash": _drafter("dflash"),
        "gemma4_assistant": _drafter("mtp"),
    }

    def served_name(self, target: ModelRef) -> str | None:
        return target.location  # another name would be loaded in its place

    def acceptance(self, chunk: Mapping[str, object]) -> ServerStats | None:
        timings = fields_below(chunk, "timings")
        if not isinstance(timings.get("draft_kind"), str):
            return None
        drafted, accepted, steps = counts(timings, "draft_n", "draft_n_accepted", "draft_rounds")
        return answer_stats(self.title, drafted, accepted, steps)
