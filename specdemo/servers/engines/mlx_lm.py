"""mlx-lm. Names of flags and fields: mlx_lm/server.py (0.32). Its answers report nothing about drafts."""

from typing import ClassVar

from specdemo.methods import Flags, MethodOptions
from specdemo.servers.engines.base import ServerConfig, ServingEngine, UnsupportedByEngine, address_flags, model_path


def mlx_address(config: ServerConfig) -> Flags:
    """Return the flags for host and port, which the MLX servers share. Raises UnsupportedByEngine for GGUF files."""
    if config.target.lower().endswith(".gguf"):
        raise UnsupportedByEngine("MLX runs models in the format of Hugging Face, not GGUF files")
    return address_flags(config)[-4:]


def _draft_model(model: str | None, k: int, options: MethodOptions) -> Flags:
    return ["--draft-model", str(model), "--num-draft-tokens", str(k)]


class MLXLM(ServingEngine):
    """mlx-lm's server. It does not batch requests that use a draft model."""

    name = "mlx-lm"
    title = "mlx-lm"
    program = "mlx_lm.server"
    install = "pip install mlx-lm (macOS; on Linux mlx-lm 'mlx[cpu]')"
    methods: ClassVar = {"draft_model": _draft_model}
    unsupported = "mlx-lm drafts with a draft model only"
    concurrent = False

    def served_name(self, target: str) -> str | None:
        return "default_model"  # the one of the command line; any other name is loaded from the hub

    def start(self, config: ServerConfig) -> Flags:
        return ["--model", model_path(config.target), *mlx_address(config)]

    def draft_length_setting(self, k: int, method: str = "", drafter: str = "") -> str:
        return f"--num-draft-tokens {k}" if k else "omit --draft-model"

    def draft_request(self, model: str, k: int) -> dict[str, object]:
        return {"draft_model": model, "num_draft_tokens": k}
