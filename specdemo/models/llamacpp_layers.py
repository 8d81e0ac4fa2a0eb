"""Inputs of the layers of a GGUF model, which drafters of PyTorch read.

libllama exports the functions for its own heads, under C++ names, and does not declare them in llama.h.
"""

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

KEEP = (
    "llama_set_embeddings_layer_inp",
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",  # Linux, macOS
    "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",  # Windows
)
READ = (
    "llama_get_embeddings_layer_inp",
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
    "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
)
KEEP_STATES = (  # of prediction layers; True, False: of all tokens
    "llama_set_embeddings_nextn",
    "_Z26llama_set_embeddings_nextnP13llama_contextbb",
    "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
)
READ_STATES = (
    "llama_get_embeddings_nextn",
    "_Z26llama_get_embeddings_nextnP13llama_context",
    "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
)
TOKENS = (1, 2, 1, 2)  # of the check
SAME = 0.98  # least cosine of one state in passes of different width; 8-bit activations give 0.9998

Llama = Any  # the module `llama_cpp`
Handle = Any  # a pointer of llama.cpp
Values = NDArray[numpy.float32]


class LayerFunctions(NamedTuple):
    """Functions of libllama for values of layers. Types: see `layer_functions` and `state_functions`."""

    keep: Callable[..., None]  # let a context keep them, or not
    read: Callable[..., Handle]  # a pointer to those of the last batch, without copying


def layer_functions(llama: Llama) -> LayerFunctions | None:
    """Return keep(context, layer, on) and read(context, layer) -> [T, H] for the inputs of layers; None if the library
    of the module `llama_cpp` has none."""
    return _functions(llama, (KEEP, ctypes.c_uint32, ctypes.c_bool), (READ, ctypes.c_uint32))


def state_functions(llama: Llama) -> LayerFunctions | None:
    """Return keep(context, on, last only) and read(context) -> [T, H] for the states of the context of a prediction
    layer; None if the library of the module `llama_cpp` has none."""
    return _functions(llama, (KEEP_STATES, ctypes.c_bool, ctypes.c_bool), (READ_STATES,))


def _functions(llama: Llama, *declarations: tuple[Any, ...]) -> LayerFunctions | None:
    """Return functions from their names and the types of their arguments after the context."""
    keep, read = (_exported(llama, names) for names, *_ in declarations)
    if keep is None or read is None:
        return None
    keep.argtypes, read.argtypes = ([ctypes.c_void_p, *types] for _, *types in declarations)
    keep.restype, read.restype = None, ctypes.POINTER(ctypes.c_float)
    return LayerFunctions(keep, read)


def _exported(llama: Llama, names: Sequence[str]) -> Any:
    """Return the function of libllama with one of the names; None if there is none."""
    library = getattr(getattr(llama, "llama_cpp", llama), "_lib", None)
    return next((function for name in names if (function := getattr(library, name, None))), None)


def prediction_runs(llama: Llama, model: Handle, context: Handle) -> bool:
    """Return True if the context of a prediction layer reads pairs of a token and a state. May end the process."""
    functions = state_functions(llama)
    if functions is None or not context:
        return False
    functions.keep(context, True, False)  # of all tokens
    states = numpy.zeros((1, int(llama.llama_model_n_embd(model))), numpy.float32)
    ids = (llama.llama_token * 1)()
    batch = llama.llama_batch_get_one(ids, 1)
    batch.embd = ctypes.cast(states.ctypes.data, type(batch.embd))
    return not llama.llama_decode(context, batch) and bool(functions.read(context))


def layer_inputs_agree(llama: Llama, model: Handle, context: Handle) -> bool:
    """Return True if an empty context returns the inputs of all layers, the same in passes of four tokens and of one.

    May end the process: llama.cpp aborts where the graph of an architecture does not keep them.
    """
    functions, width = layer_functions(llama), int(llama.llama_model_n_embd(model))
    if functions is None:
        return False
    layers = range(int(llama.llama_model_n_layer(model)))
    for layer in layers:
        functions.keep(context, layer, True)

    def decode(tokens: Sequence[int]) -> Values:
        """Return the inputs [L, T, H]."""
        ids = (llama.llama_token * len(tokens))(*tokens)
        if llama.llama_decode(context, llama.llama_batch_get_one(ids, len(tokens))):
            return numpy.zeros((len(layers), len(tokens), width), numpy.float32)
        pointers = [functions.read(context, layer) for layer in layers]
        shape = (len(tokens), width)
        return numpy.stack([numpy.ctypeslib.as_array(p, shape).copy() if p else numpy.zeros(shape) for p in pointers])

    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    wide = decode(TOKENS)
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    narrow = numpy.concatenate([decode([token]) for token in TOKENS], 1)
    embeddings = numpy.array_equal(wide[0, :2], wide[0, 2:]) and not numpy.array_equal(wide[0, 0], wide[0, 1])
    different = not any(numpy.array_equal(one, other) for one, other in pairwise(wide))
    return bool(embeddings and different and (_cosine(wide, narrow) > SAME).all())


def _cosine(one: Values, other: Values) -> Values:
    """Return the cosines [...] of vectors [..., H]; not a number where one is 0."""
    with numpy.errstate(invalid="ignore"):
        lengths = numpy.linalg.norm(one, axis=-1) * numpy.linalg.norm(other, axis=-1)
        cosine: Values = (one * other).sum(-1) / lengths
    return cosine
