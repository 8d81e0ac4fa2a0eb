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
TOKENS = (1, 2, 1, 2)  # of the check
SAME = 0.98  # least cosine of one state in passes of different width; 8-bit activations give 0.9998

Llama = Any  # the module `llama_cpp`
Handle = Any  # a pointer of llama.cpp
Values = NDArray[numpy.float32]


class LayerFunctions(NamedTuple):
    """Functions of libllama."""

    keep: Callable[[Handle, int, bool], None]  # let a context keep the input of a layer, or not
    read: Callable[[Handle, int], Handle]  # a pointer to it [tokens of the last batch, H], without copying


def layer_functions(llama: Llama) -> LayerFunctions | None:
    """Return the functions of the module `llama_cpp`; None if its library has none."""
    library = getattr(getattr(llama, "llama_cpp", llama), "_lib", None)
    keep, read = (next((f for name in names if (f := getattr(library, name, None))), None) for names in (KEEP, READ))
    if keep is None or read is None:
        return None
    keep.argtypes, keep.restype = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool], None
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_uint32], ctypes.POINTER(ctypes.c_float)
    return LayerFunctions(keep, read)


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
