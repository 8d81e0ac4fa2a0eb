"""Prediction layers of GGUF files (tensors `blk.N.nextn.*`), which draft for the model that they were trained with.

A layer is in the model's own file or, with embeddings and lm_head, in a file of its own (`mtp-*.gguf`). Position p of
its context holds a pair: token p, and the target's state before lm_head (tap -1) after token p - 1.

T pairs of a call, V vocabulary, H hidden size.
"""

import weakref
from importlib import import_module
from math import prod
from pathlib import Path

from specdemo.models.gguf_files import check_file, fetch_parts
from specdemo.models.gguf_header import Header, read_header
from specdemo.models.llamacpp import (
    CACHE_BYTES,
    PACKAGE,
    LlamaCppModel,
    library,
    load_handle,
    prediction_layer,
)
from specdemo.models.llamacpp_context import Inputs, LlamaCppContext, OutputBuffer
from specdemo.models.llamacpp_layers import Values, state_functions
from specdemo.models.llamacpp_trial import Trial, check_llamacpp
from specdemo.models.ref import ModelRef
from specdemo.models.sources import LoadProgress, no_progress


class PredictionLayer:
    """Weights of a prediction layer for a model. handle: of the model itself, if the layer is in its file."""

    def __init__(self, source: ModelRef, model: LlamaCppModel, progress: LoadProgress = no_progress) -> None:
        """Raises ValueError, one line, for a file without a layer, and for one of another model."""
        parts = fetch_parts(source, progress)
        self.path, self.model = str(parts[0]), model
        header, target = check_file(parts[0], source), read_header(Path(model.path))
        layer = prediction_layer(self.path)
        width = "embedding_length"
        sizes = [("vocabulary", header.tokens, target.tokens), (width, header.number(width), target.number(width))]
        sizes += [("layers before it", _layers_before(header), _layers_before(target))]
        if other := next((f"{key} {one}, not {two}" for key, one, two in sizes if one and one != two), ""):
            raise ValueError(f"{source} is the prediction layer of another model: {other}; choose that of {model.path}")
        self.handle = model.handle
        if Path(self.path).resolve() != Path(model.path).resolve():
            trial = Trial(PACKAGE, str(Path(self.path).resolve()), [model.gpu_layers], prediction="only")
            check_llamacpp(trial, parts, progress)
            self.handle = load_handle(self.path, model.gpu_layers, True, progress)
            if not self.handle:
                raise ValueError(f"llama.cpp cannot load {source}; update llama-cpp-python, or choose another file")
            weakref.finalize(self, library().llama_model_free, self.handle)
        elif not model.prediction:
            raise ValueError(f"llama.cpp ended at the prediction layer of {source}; update llama-cpp-python")
        own, sizes_of = self.handle == model.handle, import_module("gguf").GGML_QUANT_SIZES
        tensors = [tensor for part in parts for tensor in read_header(part).tensors.items()]
        self.weight_bytes: int = sum(
            prod(shape) // sizes_of[kind][0] * sizes_of[kind][1]
            for name, (kind, shape, _) in tensors
            if not own or name.startswith(layer.removesuffix("nextn."))
        )
        numbers = target.layer_sizes["num_key_value_heads"] * target.head_numbers
        self.token_bytes = int(numbers * CACHE_BYTES[model.settings.cache_type])


class PredictionContext(LlamaCppContext):
    """KV cache of a prediction layer for some rows."""

    def __init__(self, layer: PredictionLayer, cells: int, rows: int) -> None:
        super().__init__(layer.model, cells, rows, layer)
        functions = state_functions(library())
        assert functions is not None  # checked by `prediction_layer`
        self._keep_states, self._read_states = functions
        self._own_states = OutputBuffer(layer.model.hidden_size)

    def read(self, inputs: Inputs, states: Values) -> tuple[Values, Values]:
        """Read at most BATCH_TOKENS pairs of tokens and states [T, H]; return logits [T, V] and the layer's own states
        [T, H]."""
        self._keep_states(self._handle, True, False)
        self._inputs.states[: len(states)] = states
        # without logits of some tokens, llama.cpp returns the states of others, or ends the process, per architecture
        count = self._run(inputs, True)
        own = self._own_states.read(self._read_states(self._handle), count)
        return self._logits.read(self._llama.llama_get_logits(self._handle), count), own

    def skip(self, inputs: Inputs, states: Values) -> None:
        """Read pairs of a prompt, for later ones."""
        self._keep_states(self._handle, False, False)
        self._inputs.states[: len(states)] = states
        self._run(inputs, False)


def _layers_before(header: Header) -> int:
    """Return the layers of a model without those for prediction, which are in `block_count` of a file that has them."""
    return header.number("block_count") - header.number("nextn_predict_layers")
