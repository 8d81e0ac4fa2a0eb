"""`python -m specdemo.servers.llamacpp MODEL --port N`: llama.cpp's own server, of the package `xllamacpp`, on a CPU.

It reads GGUF alone, so MODEL, and the draft's, become files that are gone again when they are loaded. None of the rules
to split a text that are compiled into it is that of the embedded models, so it tells that it wants token ids.
"""

import sys
import threading
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from specdemo.core.signals import tidy
from specdemo.models.gguf import Words, write_gguf
from specdemo.models.load import load_model
from specdemo.servers.lane import TOKEN_IDS
from specdemo.servers.started import check_llamacpp

CONTEXT = 4096  # tokens, at most


def main(arguments: list[str] | None = None) -> None:
    """Serves until it is ended. Exits with one line where it cannot."""
    parser = ArgumentParser(prog="specdemo.servers.llamacpp")
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-model")
    parser.add_argument("--ngram", type=int, help="tokens that have to occur again")
    parser.add_argument("--k", type=int, default=0, help="tokens that are drafted")
    asked = parser.parse_args(arguments)
    try:
        with tidy():
            check_llamacpp()
            with TemporaryDirectory() as folder:
                server = import_module("xllamacpp").Server(_settings(asked, Path(folder)))  # in threads of its own
            print(f"llama.cpp answers at {server.listening_address}", flush=True)
            threading.Event().wait()
    except (ValueError, RuntimeError) as error:
        sys.exit(" ".join(str(error).split()))


def _settings(asked: Namespace, folder: Path) -> object:
    library = import_module("xllamacpp")
    settings = library.CommonParams()
    settings.hostnames, settings.port, settings.ui = [asked.host], asked.port, False
    settings.model_alias, settings.model_tags = {asked.model}, {TOKEN_IDS}
    settings.endpoint_metrics, settings.cache_prompt, settings.verbosity = True, False, -1
    settings.load_mode = library.llama_load_mode.LLAMA_LOAD_MODE_NONE  # whole, so that the files can go
    settings.n_parallel, settings.n_gpu_layers = 1, 0
    settings.model.path = str(folder / "target.gguf")
    target, words = _written(asked.model, asked.dtype, folder / "target.gguf")
    settings.n_ctx = min(CONTEXT, int(target.config.max_position_embeddings or CONTEXT))
    drafting = settings.speculative
    if asked.draft_model:
        drafting.types = [library.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        drafting.draft.mparams.path, drafting.draft.n_max = str(folder / "draft.gguf"), asked.k
        if _written(asked.draft_model, asked.dtype, folder / "draft.gguf")[1].tokens != words.tokens:
            raise ValueError(f"llama.cpp drafts in the target's own words; those of {asked.draft_model} are others")
    elif asked.ngram:
        drafting.types = [library.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        drafting.ngram_simple.size_n, drafting.ngram_simple.size_m = asked.ngram, asked.k
    if target.dtype == torch.float32:  # its caches are in half precision unless told, and over others this is slow
        settings.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for part in (settings, drafting.draft):
        part.cpuparams.n_threads = part.cpuparams_batch.n_threads = torch.get_num_threads()
        if target.dtype == torch.float32:
            part.cache_type_k = part.cache_type_v = library.ggml_type.GGML_TYPE_F32
    return settings


def _written(name: str, dtype: str, file: Path) -> tuple[PreTrainedModel, Words]:
    loaded = load_model(name, dtype, "cpu", kernels="transformers")
    words = Words.of(loaded.tokenizer, int(loaded.model.config.vocab_size or 0))
    write_gguf(loaded.model, words, file)
    return loaded.model, words


if __name__ == "__main__":
    main()
