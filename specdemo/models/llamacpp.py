"""GGUF models on llama.cpp: the library, its settings, and the weights of a model.

The library is called through the ctypes interface of `llama-cpp-python`.
"""

import ctypes
import re
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from importlib import import_module
from pathlib import Path

import numpy
import torch
from torch import Tensor

from specdemo.models.cpu_threads import thread_counts, thread_limit
from specdemo.models.errors import first_line
from specdemo.models.gguf_files import all_parts
from specdemo.models.gguf_header import ROLLBACK, Header, read_header
from specdemo.models.llamacpp_layers import Handle, Llama, layer_functions, state_functions
from specdemo.models.llamacpp_trial import Trial, check_llamacpp
from specdemo.models.sources import LoadProgress, no_progress, size_text

PACKAGE = "llama_cpp"
INSTALL = "pip install llama-cpp-python gguf"
BATCH_TOKENS = 512  # tokens per call of llama.cpp; a longer prompt takes several
OTHER_STATES = ("mimo2", "step35", "deepseek4")  # whose prediction layers read other states than those before lm_head
PREDICTION_TENSORS = ("eh_proj", "enorm", "hnorm")  # without these llama.cpp ends the process
PROBE_CELLS = 256  # of the context that is opened to learn what a model supports
FLASH_OFF = re.compile("flash.att.*(disabled|forcing off)", re.IGNORECASE)  # in the log
NO_FLASH = (
    "this model or build of llama.cpp has no flash attention; passes of several tokens then round otherwise than "
    "passes of one, so texts may differ after near-ties"
)
LOG_LINES = 64  # about flash attention, the last ones
INT64 = 27  # a tensor type, GGML_TYPE_I64
CACHE_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}  # ggml.h
CACHE_BYTES = {"f32": 4, "f16": 2, "q8_0": 34 / 32}
MAX_CONTEXT = 1 << 20  # tokens, for a file that states no context length


@cache
def library() -> Llama:
    """Return the module `llama_cpp`, without its log on the terminal. Raises ValueError if it is not installed, or
    ends the process that loads it."""
    check_llamacpp(Trial(PACKAGE))
    try:
        llama: Llama = import_module(PACKAGE)
        import_module("gguf")
    except ImportError:
        raise ValueError(f"GGUF models need llama.cpp; install it with: {INSTALL}") from None
    except (OSError, RuntimeError) as error:  # its shared library is missing, or built for another machine
        reason = first_line(error)
        raise ValueError(f"llama.cpp cannot be loaded ({reason}); install it again with: {INSTALL}") from None
    llama.flash_log = deque[str](maxlen=LOG_LINES)
    # the callback must live as long as the library, which keeps a pointer to it
    llama.callback = llama.llama_log_callback(partial(_keep, llama.flash_log))
    llama.llama_log_set(llama.callback, ctypes.c_void_p(0))
    llama.llama_backend_init()
    return llama


def _keep(log: deque[str], level: int, line: bytes, _: object) -> None:
    """Keep a line of llama.cpp's log that is about flash attention."""
    if b"lash" in line:
        log.append(line.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class LlamaCppSettings:
    """Settings that all lanes of a comparison share.

    gpu_layers: layers on the GPU; -1: all that fit. threads: 0: the fastest number. context: most tokens of a lane; 0:
    as the file states. cache_type: of keys and values; auto: f32 for F32 files, else f16.
    flash_attention: without it a token's logits depend on the width of its pass; not used with f32, which it would
    round to f16.
    """

    gpu_layers: int = -1
    threads: int = 0
    context: int = 0
    cache_type: str = "auto"
    flash_attention: bool = True

    def __post_init__(self) -> None:
        if self.cache_type == "q8_0" and not self.flash_attention:
            raise ValueError("cache type q8_0 needs flash attention; turn it on, or choose cache type f16")

    def resolved(self, path: Path) -> "LlamaCppSettings":
        """Return the settings with the automatic choices for a file."""
        header = read_header(path)
        cache_type = cache_type_of(header, self.cache_type)
        length = header.number("context_length", MAX_CONTEXT)
        flash, context = self.flash_attention and cache_type != "f32", min(self.context or length, length)
        return replace(self, cache_type=cache_type, context=context, flash_attention=flash)


def cache_type_of(header: Header, setting: str) -> str:
    """Return the type of the KV cache: the chosen one, for `auto` f32 for F32 files, else f16."""
    if setting != "auto":
        return setting
    return "f32" if header.quantisation == "F32" else "f16"


class LlamaCppModel:
    """Weights of one GGUF model, shared by targets."""

    def __init__(
        self, path: str, settings: LlamaCppSettings | None = None, progress: LoadProgress = no_progress
    ) -> None:
        """path: of a split model the first part. progress: may raise to stop.

        Raises ValueError if llama.cpp cannot load the file, and for a model that cannot be a target.
        """
        llama = library()
        self.path, self.given = path, settings or LlamaCppSettings()
        self.settings = self.given.resolved(Path(path))
        self.threads = self.given.threads or max(thread_counts())  # see `LlamaCppTarget.threads`
        self.handle, self.gpu_layers = self._load(progress)
        weakref.finalize(self, llama.llama_model_free, self.handle)
        self.recurrent = bool(llama.llama_model_is_recurrent(self.handle) or llama.llama_model_is_hybrid(self.handle))
        if llama.llama_model_has_encoder(self.handle) or not llama.llama_model_has_decoder(self.handle):
            raise ValueError(f"{path} does not continue text; choose a language model with a decoder only")
        self.vocab = llama.llama_model_get_vocab(self.handle)
        context, flash = open_context(self.handle, self.settings, PROBE_CELLS, 1, ROLLBACK * self.recurrent)
        if not context:
            architecture = read_header(Path(path)).architecture
            raise ValueError(
                f"llama.cpp cannot open a context of {path} (architecture {architecture}) by itself; update "
                "llama-cpp-python, or choose another file"
            )
        self.rollback = int(llama.llama_n_rs_seq(context)) if self.recurrent else 0
        self.vocab_size = int(llama.llama_vocab_n_tokens(self.vocab))
        self.hidden_size = int(llama.llama_model_n_embd(self.handle))
        self.output_tap = not self.recurrent or _keeps_logits(context, self.vocab_size)
        self.states_alone = self.prediction and _returns_states_alone(context, self.hidden_size)
        llama.llama_free(context)
        self.state_bytes = read_header(Path(path)).state_bytes
        self.notes: tuple[str, ...] = () if flash == self.settings.flash_attention else (NO_FLASH,)
        self.notes += (_recurrent_note(self.rollback, self.state_bytes),) if self.recurrent else ()
        self.settings = replace(self.settings, flash_attention=flash)
        self.num_layers = int(llama.llama_model_n_layer(self.handle))
        self.max_length = self.settings.context
        self.weight_bytes = int(llama.llama_model_size(self.handle))
        self.pass_ms: dict[int, float] = {}  # see `Target`
        self.token_bytes = read_header(Path(path)).cache_bytes(CACHE_BYTES[self.settings.cache_type])
        size = ctypes.create_string_buffer(256)
        llama.llama_model_desc(self.handle, size, 256)
        self.description = size.value.decode(errors="replace")  # such as "llama 8B Q4_K - Medium"

    def _load(self, progress: LoadProgress) -> tuple[Handle, int]:
        """Return the handle, and the number of layers on the GPU. With too little memory there, use fewer layers."""
        header = read_header(Path(self.path))
        every = header.number("block_count") + 1  # with the output layer
        gpu_layers = self.settings.gpu_layers
        if not library().llama_supports_gpu_offload():
            layers = [0]
        else:
            layers = [every * share // 4 for share in (4, 3, 2, 1, 0)] if gpu_layers < 0 else [min(gpu_layers, every)]
        self.layer_inputs = self._try_out(layers, progress)
        for count in layers:
            handle = load_handle(self.path, count, self.prediction, progress)
            if handle:
                return handle, count
        raise ValueError(
            f"llama.cpp cannot load {self.path} (architecture {header.architecture or 'unknown'}); update "
            "llama-cpp-python, or choose another GGUF file"
        )

    def _try_out(self, layers: list[int], progress: LoadProgress) -> bool:
        """Try the file in another process; return True if the inputs of its layers can be read. Sets `prediction`:
        whether it has a prediction layer that runs."""
        file = Path(self.path).resolve()
        rollback = ROLLBACK if read_header(file).state_bytes else 0
        trial = Trial(PACKAGE, str(file), layers, self.settings.flash_attention, rollback=rollback)
        parts = all_parts(Path(self.path))
        with_inputs = (True, False) if layer_functions(library()) else (False,)
        runs = [False]
        with suppress(ValueError):
            runs = [True, False] if prediction_layer(self.path) else runs
        for self.prediction in runs:
            for layer_inputs in with_inputs:
                each = trial._replace(layer_inputs=layer_inputs, prediction="also" if self.prediction else "")
                if each == trial:
                    break
                with suppress(ValueError):
                    check_llamacpp(each, parts, progress)
                    return layer_inputs
        check_llamacpp(trial, parts, progress)
        return False

    @property
    def taps(self) -> frozenset[int]:
        """Return the taps that a pass can return, see `core.protocol.Forward`."""
        return frozenset(range(-int(self.output_tap), self.num_layers if self.layer_inputs else 0))

    @property
    def used_threads(self) -> int:
        """Return the number of CPU threads of a pass."""
        return min(self.threads, thread_limit.threads)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Return all tokens that end a text."""
        llama = library()
        return tuple(t for t in range(self.vocab_size) if llama.llama_vocab_is_eog(self.vocab, t))


def load_handle(path: str, gpu_layers: int, prediction: bool, progress: LoadProgress) -> Handle:
    """Return the weights of a file, with its prediction layer or without; None if llama.cpp cannot load it.

    Raises the errors of `progress`.
    """
    llama, stopped = library(), []

    def report(share: float, _: object) -> bool:
        try:
            progress(share, f"reading {Path(path).name}, {share:.0%}")
        except Exception as error:  # must not pass through llama.cpp
            stopped.append(error)
        return not stopped

    parameters = llama.llama_model_default_params()
    parameters.n_gpu_layers, parameters.load_mtp = gpu_layers, prediction
    callback = llama.llama_progress_callback(report)
    parameters.progress_callback = callback
    handle = llama.llama_model_load_from_file(path.encode(), parameters)
    if stopped:
        if handle:
            llama.llama_model_free(handle)
        raise stopped[0]
    return handle


def prediction_layer(path: str) -> str:
    """Return the start of the names of a file's prediction layer, with which llama.cpp can draft.

    Raises ValueError, one line, for a file without one, and for one at which llama.cpp would end the process.
    """
    header, name = read_header(Path(path)), Path(path).name
    layer, count = header.prediction_layer, header.number("nextn_predict_layers")
    fix = "download a file of the same model with MTP in its name, or an mtp-*.gguf"
    if not layer:
        raise ValueError(f"{name} has no prediction layer (blk.N.nextn.*); {fix}")
    server = "llama-server runs it with --spec-type draft-mtp"
    if count > 1 or header.architecture in OTHER_STATES:
        what = f"{count} prediction layers" if count > 1 else f"a prediction layer of {header.architecture}"
        raise ValueError(f"{name} has {what}, which specdemo cannot run; {server}")
    lacking = [tensor for tensor in PREDICTION_TENSORS if part_with(path, f"{layer}{tensor}.weight") is None]
    if lacking:
        raise ValueError(f"{name} states a prediction layer and lacks {layer}{lacking[0]}.weight; {fix}")
    if state_functions(library()) is None or not hasattr(library(), "LLAMA_CONTEXT_TYPE_MTP"):
        raise ValueError(f"this llama.cpp has no prediction layers; update it: {INSTALL}")
    return layer


def open_context(
    handle: Handle,
    settings: LlamaCppSettings,
    cells: int,
    sequences: int,
    rollback: int = 0,
    prediction: bool = False,
) -> tuple[Handle, bool]:
    """Return a context of a model, None if llama.cpp refuses it, and True if it uses flash attention.

    cells: size of the KV cache in tokens. sequences: most sequences that share it. rollback: tokens that recurrent
    layers can take back, each at the cost of a state per sequence. prediction: for the prediction layer.
    """
    llama = library()
    parameters = llama.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = cells, BATCH_TOKENS, BATCH_TOKENS
    parameters.n_threads = parameters.n_threads_batch = settings.threads or max(thread_counts())
    parameters.n_seq_max, parameters.kv_unified, parameters.n_rs_seq = sequences, True, rollback
    parameters.type_k = parameters.type_v = CACHE_TYPES[settings.cache_type]
    if prediction:
        parameters.ctx_type = llama.LLAMA_CONTEXT_TYPE_MTP
    off, auto = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED, llama.LLAMA_FLASH_ATTN_TYPE_AUTO
    parameters.flash_attn_type = auto if settings.flash_attention else off  # auto: on where the device supports it
    llama.flash_log.clear()
    context = llama.llama_init_from_model(handle, parameters)
    return context, settings.flash_attention and not any(map(FLASH_OFF.search, llama.flash_log))


def _keeps_logits(context: Handle, vocabulary: int) -> bool:
    """Return True if a context returns logits beside the input of lm_head; llama.cpp's lfm2 does not."""
    llama = library()
    logits: list[numpy.ndarray] = []
    for embeddings in (False, True):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        llama.llama_set_embeddings(context, embeddings)
        llama.llama_decode(context, llama.llama_batch_get_one((llama.llama_token * 1)(), 1))
        logits.append(numpy.ctypeslib.as_array(llama.llama_get_logits(context), (vocabulary,)).copy())
    return bool(abs(logits[0] - logits[1]).max() <= 1e-2 * logits[0].std())


def _returns_states_alone(context: Handle, width: int) -> bool:
    """Return True if a context returns the input of lm_head for tokens without logits too, as for prediction layers: a
    prompt then needs no logits, which take 0.5 GB for 512 tokens of a vocabulary of 250,000."""
    llama, functions = library(), state_functions(library())
    assert functions is not None  # checked by `prediction_layer`
    states = []
    for alone in (False, True):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        llama.llama_set_embeddings(context, not alone)
        functions.keep(context, alone, False)
        llama.llama_decode(context, llama.llama_batch_get_one((llama.llama_token * 3)(1, 2, 3), 3))
        pointer = functions.read(context) if alone else llama.llama_get_embeddings_ith(context, 2)
        if not pointer:
            return False
        states.append(numpy.ctypeslib.as_array(pointer, (3 if alone else 1, width))[-1].copy())
    return bool(abs(states[0] - states[1]).max() <= 1e-3 * states[0].std())


def _recurrent_note(rollback: int, state_bytes: int) -> str:
    """Return what drafts cost on a model with recurrent layers."""
    if rollback:
        kept = size_text((1 + rollback) * state_bytes)
        return (
            f"recurrent layers: drafts are chains, and llama.cpp takes up to {rollback} draft tokens back, from {kept} "
            "of states per lane; longer drafts cost a copy of the state, and a second pass after a rejection"
        )
    return (
        "recurrent layers from which llama.cpp cannot take draft tokens back: drafts are chains, each starts with a "
        f"copy of {size_text(state_bytes)}, and a rejection costs a second pass"
    )


def part_with(path: str, name: str) -> Path | None:
    """Return the file of a model that has the named matrix; None if there is none."""
    return next((part for part in all_parts(Path(path)) if name in read_header(part).tensors), None)


def read_tensor(path: str, name: str) -> Tensor:
    """Return the named tensor of a model, in fp32 unless it holds integers of 64 bits."""
    part = part_with(path, name)
    if part is None:
        raise ValueError(f"{path} has no {name}; choose another GGUF file")
    kind, shape, place = read_header(part).tensors[name]
    if kind == INT64:
        return torch.from_numpy(numpy.array(numpy.memmap(part, numpy.int64, "r", place, shape)))
    gguf = import_module("gguf")
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    data = numpy.memmap(part, numpy.uint8, "r", place, (*shape[:-1], shape[-1] // numbers * size))
    values = import_module("gguf.quants").dequantize(data, gguf.GGMLQuantizationType(kind))
    return torch.from_numpy(numpy.array(values, dtype=numpy.float32))
