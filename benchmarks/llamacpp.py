"""llama.cpp as a peer, if the packages `xllamacpp` and `gguf` are installed: the same Llama weights in float32 on the
CPU.

Its vocabulary spells each token as `t` and the id, so that its output can be read back as token ids.
"""

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from tests.gguf_export import GGUFVocab, write_gguf

CONTEXT = 1024
PACKAGES = ("xllamacpp", "gguf")


def export(model: PreTrainedModel, file: Path) -> str:
    """Write a model as GGUF and return the path. Raises ValueError for a model that llama.cpp cannot run here."""
    if type(model) is not LlamaForCausalLM or model.device.type != "cpu" or model.dtype != torch.float32:
        raise ValueError("llama.cpp is left out: the comparison needs a Llama in float32 on a CPU")
    words = [f"t{number}" for number in range(model.config.vocab_size)]
    write_gguf(model, GGUFVocab(words, ["t 0"]), file)
    return str(file)


class LlamaCpp:
    """Greedy decoding by llama.cpp's own loop, with as many threads as torch."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Convert and load the model. Raises ValueError, one line, if llama.cpp cannot take part."""
        if missing := [name for name in PACKAGES if find_spec(name) is None]:
            raise ValueError(f"llama.cpp's own loop needs {' and '.join(missing)}; pip install {' '.join(missing)}")
        library = import_module("xllamacpp")
        settings = library.CommonParams()
        settings.load_mode = library.llama_load_mode.LLAMA_LOAD_MODE_NONE  # loads the complete file, which is deleted
        settings.n_ctx, settings.n_parallel = min(CONTEXT, model.config.max_position_embeddings), 1
        settings.n_gpu_layers, settings.verbosity = 0, -1
        with TemporaryDirectory() as folder:
            settings.model.path = export(model, Path(folder) / "model.gguf")
            settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = torch.get_num_threads()
            settings.cache_type_k = settings.cache_type_v = library.ggml_type.GGML_TYPE_F32
            # flash attention is slow with a float32 cache
            settings.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            self._server = library.Server(settings)

    def __call__(self, prompt: Tensor, new_tokens: int) -> list[int]:
        body = {"prompt": prompt[0].tolist(), "n_predict": new_tokens, "temperature": 0, "ignore_eos": True}
        answer = self._server.handle_completions({**body, "cache_prompt": False})
        return [int(number) for number in re.findall(r"t(\d+)", answer["choices"][0]["text"])]
