"""Server of llama.cpp on a CPU, from the package `xllamacpp`: `python -m specdemo.servers.llamacpp MODEL --port N`.

llama.cpp reads only GGUF. MODEL and the draft model may be GGUF files; other models are exported to GGUF files, which
are deleted once they are loaded. llama.cpp contains no pre-tokenizer of the embedded models, so an exported model takes
token ids.
"""

import sys
import threading
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from specdemo.core.signals import sigterm_as_exit
from specdemo.models.gguf import GGUFVocab, check_pair, context_length, write_gguf
from specdemo.models.gguf_files import fetch_parts, is_gguf
from specdemo.models.load import load_model
from specdemo.servers.engines.llamacpp import LlamaCpp
from specdemo.servers.lane import TOKEN_IDS

CONTEXT = 4096  # largest context, in tokens


def main(arguments: list[str] | None = None) -> None:
    """Run the server until it is ended. Exits with one line if it cannot start."""
    parser = ArgumentParser(prog="specdemo.servers.llamacpp")
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--draft-model")
    parser.add_argument("--ngram", type=int, help="length of the n-gram to match, in tokens")
    parser.add_argument("--k", type=int, default=0, help="number of draft tokens")
    options = parser.parse_args(arguments)
    try:
        with sigterm_as_exit():
            LlamaCpp().check_installed()
            check_pair(options.model, options.draft_model, options.dtype)
            with TemporaryDirectory() as folder:
                server = import_module("xllamacpp").Server(_settings(options, Path(folder)))  # starts its own threads
            print(f"llama.cpp answers at {server.listening_address}", flush=True)
            threading.Event().wait()
    except (ValueError, RuntimeError) as error:
        sys.exit(" ".join(str(error).split()))


@dataclass(frozen=True, slots=True)
class _Model:
    """A GGUF file. exported: it was written from a transformers model."""

    path: str
    context: int
    in_float32: bool = False
    exported: bool = False


def _settings(arguments: Namespace, folder: Path) -> object:
    library = import_module("xllamacpp")
    settings = library.CommonParams()
    target = _model(arguments.model, arguments.dtype, folder / "target.gguf")
    settings.hostnames, settings.port, settings.ui = [arguments.host], arguments.port, False
    settings.model_alias, settings.model_tags = {arguments.model}, {TOKEN_IDS} if target.exported else set()
    settings.endpoint_metrics, settings.cache_prompt, settings.verbosity = True, False, -1
    # loads complete files, which are deleted afterwards
    settings.load_mode = library.llama_load_mode.LLAMA_LOAD_MODE_NONE
    settings.n_parallel, settings.n_gpu_layers = 1, 0
    settings.model.path = target.path
    settings.n_ctx = min(CONTEXT, target.context)
    drafting = settings.speculative
    if arguments.draft_model:
        draft = _model(arguments.draft_model, arguments.dtype, folder / "draft.gguf")
        drafting.types = [library.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        drafting.draft.mparams.path, drafting.draft.n_max = draft.path, arguments.k
    elif arguments.ngram:
        drafting.types = [library.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        drafting.ngram_simple.size_n, drafting.ngram_simple.size_m = arguments.ngram, arguments.k
    if target.in_float32:  # flash attention is slow with a float32 cache; the default cache is half precision
        settings.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for part in (settings, drafting.draft):
        part.cpuparams.n_threads = part.cpuparams_batch.n_threads = torch.get_num_threads()
        if target.in_float32:
            part.cache_type_k = part.cache_type_v = library.ggml_type.GGML_TYPE_F32
    return settings


def _model(name: str, dtype: str, file: Path) -> _Model:
    """Return the GGUF file of a model: the file of that name, or one that is written from the model."""
    if is_gguf(name):
        path = str(fetch_parts(name)[0])
        return _Model(path, context_length(path))
    loaded = load_model(name, dtype, "cpu", kernels="transformers")
    config = loaded.model.config
    words = GGUFVocab.of(loaded.tokenizer, int(config.vocab_size or 0))
    write_gguf(loaded.model, words, file)
    context = int(config.max_position_embeddings or CONTEXT)
    return _Model(str(file), context, loaded.model.dtype == torch.float32, exported=True)


if __name__ == "__main__":
    main()
