"""Loading of models by name. Safetensors only, no remote code; every failure is a ValueError with one line."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)

from specdemo.core.deployment import zero_gpu
from specdemo.core.protocol import Target
from specdemo.core.rounding import difference, spacing
from specdemo.core.safe_io import is_out_of_memory
from specdemo.core.suggest import suggest
from specdemo.models.auto_dtype import faster_precision, fitting_precision, is_measured
from specdemo.models.checkpoints import check_finite
from specdemo.models.cpu_plan import MEASURED, PROBE_TOKENS, CpuSettings
from specdemo.models.cpu_threads import one_thread, thread_counts, threads
from specdemo.models.devices import device_kind, same_kind
from specdemo.models.errors import WrongHistory, first_line, load_errors, tokenizer_errors
from specdemo.models.fused import fuse_layers
from specdemo.models.gguf_files import check_files, fetch_parts
from specdemo.models.gguf_tokenizer import GGUFTokenizer
from specdemo.models.llamacpp import LlamaCppModel, LlamaCppSettings
from specdemo.models.llamacpp_target import LlamaCppTarget
from specdemo.models.memory import (
    Precision,
    check_config_size,
    check_memory,
    estimate_footprint,
    free_bytes,
    resolve_placement,
)
from specdemo.models.packaged import is_embedded
from specdemo.models.pass_cost import fastest_threads, plan_passes
from specdemo.models.ref import ModelRef
from specdemo.models.sources import (
    NO_CONFIG,
    LoadProgress,
    check_folder,
    config_folder,
    fetch_folder,
    locate,
    no_progress,
    read_config,
)
from specdemo.models.target import HFTarget
from specdemo.models.text import sample_tokens

AutoClass = type[_BaseAutoModelClass]
_building = threading.RLock()
KERNELS = ("auto", "transformers")
SHARED_TOKENS = 4  # of two texts with other endings, with which look-ahead is noticed


@dataclass
class LoadedModel:
    """A model and its tokenizer. notes: what a user should know of a run on it, one sentence each."""

    model: Any  # transformers model; None for a GGUF model
    tokenizer: Any
    name: str
    notes: tuple[str, ...] = ()
    weights: LlamaCppModel | None = None  # of a GGUF model

    def target(self, tokenizer: PreTrainedTokenizerBase | None = None) -> Target:
        """Return a target with its own history on the shared weights."""
        if self.weights is not None:
            return LlamaCppTarget(self.weights, tokenizer or self.tokenizer, self.name, self.notes)
        return HFTarget(self.model, tokenizer or self.tokenizer, self.name, notes=self.notes)


def load_target(
    name_or_model: str | PreTrainedModel | LoadedModel,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: LoadProgress | None = None,
    kernels: str = "auto",
) -> Target:
    """Load a target by name, or wrap a loaded model. The options apply to names only."""
    if isinstance(name_or_model, PreTrainedModel):
        return _given(name_or_model, tokenizer)
    loaded = name_or_model
    if not isinstance(loaded, LoadedModel):
        loaded = load_model(str(loaded), dtype, device, quantization, progress, kernels)
    return loaded.target(tokenizer)


def _given(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> HFTarget:
    """Return the target of a loaded model. Raises ValueError for one that cannot generate."""
    name = str(model.config.name_or_path) or type(model).__name__
    check_config(name, model.config)
    with one_thread(model.device):
        check_model(name, model.eval(), tokenizer)
        note = _check_history(name, model, tokenizer)
    return HFTarget(model, tokenizer, notes=(note,) if note else ())


def _check_history(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the sentence of `HFTarget.check_history`. Raises ValueError, one line, for a model without a usable
    cache, and WrongHistory for one that continues a text with other tokens."""
    start = f"{name} cannot run here: a {model.config.model_type} model"
    with _failing(f"{start} uses its cache in a way that specdemo's cache does not support"):
        try:
            return HFTarget(model, tokenizer, name).check_history()
        except ValueError as error:
            wrong = error
    raise WrongHistory(f"{start} does not continue a text from specdemo's cache ({wrong}); choose another model")


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Translate errors of a model inside the block. what: the start of the message."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(f"{what} ({first_line(error)[:200]}); choose another model") from error


def load_model(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str | None = None,
    progress: LoadProgress | None = None,
    kernels: str = "auto",
    llamacpp: LlamaCppSettings | None = None,
    cpu: CpuSettings = MEASURED,
) -> LoadedModel:
    """Load a model and its tokenizer.

    dtype: auto, float32, bfloat16, float16 (or fp32, bf16, fp16). auto is bfloat16 on a GPU. On a CPU it is float32,
    and for a checkpoint in bfloat16 the faster of both (models/auto_dtype.py).
    device: auto or a name (core/suggest.py). quantization: 4bit, 8bit. kernels: auto (models/fused.py) or transformers
    (unmodified layers, which can be trained and saved). progress: may raise to stop. llamacpp: settings of GGUF models,
    for which dtype, device and quantization have no effect.

    A model that does not fit on one GPU is spread over all GPUs and main memory. Raises ValueError with one line that
    says how to fix it.
    """
    if kernels not in KERNELS:
        raise ValueError(f"unknown kernels {kernels!r}; {suggest(kernels, KERNELS)}")
    report, ref = progress or no_progress, ModelRef(name)
    if ref.gguf:
        if kernels == "transformers":
            raise ValueError(f"{name} is a GGUF file, which cannot be trained on; name the folder it was made from")
        return _load_gguf(ref, report, llamacpp)
    torch_device, precision = resolve_placement(dtype, device, quantization)
    report(0.0, f"looking for {name}")
    source = locate(ref, report=report)
    fitting = fitting_precision(source, precision, free_bytes(torch_device)[0]) if dtype == "auto" else precision
    notes = []
    if fitting != precision:
        notes.append("dtype auto is bfloat16: in float32 the model does not fit into the free memory")
    precision, needed = fitting, estimate_footprint(source, fitting).weights
    spread = check_memory(name, needed, torch_device, precision)
    folder = str(check_folder(fetch_folder(source, report), name))
    if dtype == "auto" and is_measured(source, precision, needed):
        report(0.58, f"measuring float32 and bfloat16 of {name}")
        precision, why = faster_precision(Path(folder), precision, padded=cpu.bit_exact == "on")
        notes.append(why)
    if not is_embedded(folder):
        _meta_target(name, folder)
    with _exclusive_build():
        try:
            loaded = _read(name, folder, torch_device, precision, spread, kernels, cpu, notes, report)
        except WrongHistory:
            exact = replace(precision, dtype=torch.float32)
            if dtype != "auto" or precision.bits or precision == exact:
                raise
            spread = check_memory(name, estimate_footprint(source, exact).weights, torch_device, exact)
            why = f"dtype auto is float32: in {str(precision.dtype)[6:]} the model does not continue a stored text here"
            loaded = _read(name, folder, torch_device, exact, spread, kernels, cpu, [why], report)
    report(1.0, f"{name} is ready")
    return loaded


def _load_gguf(name: ModelRef, report: LoadProgress, settings: LlamaCppSettings | None) -> LoadedModel:
    report(0.0, f"looking for {name}")
    parts = fetch_parts(name, report)
    check_files(parts, name)
    weights = LlamaCppModel(str(parts[0]), settings, lambda share, what: report(0.55 + 0.45 * share, what))
    loaded = LoadedModel(None, GGUFTokenizer(weights), name, weights.notes, weights)
    if not weights.given.threads:
        fastest_threads(loaded.target(), thread_counts())
    report(1.0, f"{name} is ready")
    return loaded


def _read(
    name: str,
    folder: str,
    torch_device: torch.device,
    precision: Precision,
    spread: bool,
    kernels: str,
    cpu: CpuSettings,
    notes: list[str],
    report: LoadProgress,
) -> LoadedModel:
    """notes: sentences for the user so far."""
    report(0.6, f"reading {name} in {str(precision.dtype).removeprefix('torch.')}")
    with load_errors(name):
        tokenizer = _tokenizer(folder)
        loaded = _auto_class(name, folder)[0].from_pretrained(
            folder,
            dtype=precision.dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            **_placement_kwargs(torch_device, precision, spread),
        )
    model, info = loaded
    _check_weights(name, model, info["missing_keys"])
    if precision.bits == 4 and device_kind(torch_device).host:
        _check_four_bits(model, name)
    if not precision.bits and not spread:
        nn.Module.to(model, torch_device)
    model.requires_grad_(False)
    with threads(max(cpu.counts)) if device_kind(torch_device).host else nullcontext():
        check_model(name, model, tokenizer)
        if kernels == "auto":
            embeddings: Any = model.get_input_embeddings()
            text = sample_tokens(tokenizer, PROBE_TOKENS, embeddings.weight.shape[0])
            report(0.75, f"choosing the layout of {name}")
            notes.append(fuse_layers(model, cpu.layout, text))
        report(0.85, f"checking the cache of {name}")
        notes.append(_check_history(name, model, tokenizer))
    device_kind(torch_device).empty_cache()  # the original matrices, which were concatenated
    report(0.9, f"choosing the passes of {name}")
    notes = [*notes, *plan_passes(HFTarget(model), cpu)]
    return LoadedModel(model, tokenizer, name, tuple(filter(None, notes)))


def load_meta_target(name: str) -> HFTarget:
    """Return the model without weights, on the meta device, with its tokenizer. Reads config files only.

    Raises ValueError with one line.
    """
    folder = str(config_folder(ModelRef(name)))
    model = _meta_target(name, folder).model
    with load_errors(name), _exclusive_build():
        return HFTarget(model, _tokenizer(folder), name)


def local_tokenizer(name: ModelRef) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a model, None if this machine has none. Raises ValueError with one line."""
    with load_errors(name):
        return _tokenizer(name.location)


def _meta_target(name: str, folder: str) -> HFTarget:
    """Return the target of a config without weights. Raises ValueError with one line, also if the config does not match
    the size of the files."""
    if not read_config(Path(folder)):
        raise ValueError(f"{name} {NO_CONFIG}")
    with load_errors(name), _exclusive_build():
        auto_class, config = _auto_class(name, folder)
        with torch.device("meta"):
            model = auto_class.from_config(config, trust_remote_code=False)
        target = HFTarget(model, name=name)
    check_config_size(name, Path(folder), model)
    return target


def _auto_class(name: str, folder: str) -> tuple[AutoClass, PreTrainedConfig]:
    """Return the auto class for a folder, and its config. transformers registers some multimodal models in one mapping
    only."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    check_config(name, config)
    check_class(name, config)
    # check_class accepts what is in one of two mappings
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText, config


class Incomplete(ValueError):
    """The files lack tensors of the model that their config describes."""


def _check_weights(name: str, model: PreTrainedModel, missing: set[str]) -> None:
    """Raise Incomplete if a tensor is absent, ValueError if one contains NaN or infinity."""
    if missing:
        first = min(missing)
        raise Incomplete(f"{name} lacks {len(missing)} tensors ({first} is the first); fetch the model again")
    check_finite(name, model.named_parameters())


@torch.no_grad()
def _check_four_bits(model: PreTrainedModel, name: str) -> None:
    """Run one pass: bitsandbytes raises there if its CPU kernels do not support a width."""
    try:
        model(torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"{name} does not run in 4 bit on this CPU ({first_line(error)}); choose 8bit or no quantization"
        ) from None


@contextmanager
def _exclusive_build() -> Iterator[None]:
    """Let one thread at a time build a model, without the progress bars and reports of transformers.

    While transformers builds a model it changes global state: torch's default precision, how tensors are initialised,
    which weights are tied. So do `one_thread` and the verbosity set here."""
    log = transformers.utils.logging
    with _building:
        bars, verbosity = log.is_progress_bar_enabled(), log.get_verbosity()
        log.disable_progress_bar()
        log.set_verbosity_error()
        try:
            yield
        finally:
            log.set_verbosity(verbosity)
            if bars:
                log.enable_progress_bar()


def _placement_kwargs(device: torch.device, precision: Precision, spread: bool) -> dict[str, object]:
    """Return the arguments of transformers' `from_pretrained` for devices and bitsandbytes."""
    where = same_kind(device)[0]
    # straight to the device, without a copy of all weights in main memory; ZeroGPU has no device yet
    direct = bool(precision.bits) or (device_kind(device).separate_memory and not zero_gpu())
    kwargs: dict[str, object] = {"device_map": "auto" if spread else {"": where}} if spread or direct else {}
    if precision.bits:
        kwargs["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=precision.bits == 4,
            load_in_8bit=precision.bits == 8,
            # above 0, outlier columns run in 16 bits for all tokens of a pass, so that the logits of a token would
            # depend on the tokens it is verified with
            llm_int8_threshold=0.0,
            bnb_4bit_compute_dtype=precision.dtype,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
        )
        # bitsandbytes logs a cast at every product of every layer
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    return kwargs


def _tokenizer(folder: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer. None if the folder has none, as a drafter needs none."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((Path(folder) / name).is_file() for name in names):
        return None
    with tokenizer_errors("its tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    return tokenizer


def check_config(name: str, config: PreTrainedConfig) -> None:
    """Raise ValueError for an encoder, an encoder-decoder, and a model that generates no text."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder model ({kind}), and specdemo runs decoder-only models; choose one of these, "
            "such as a Llama or Qwen3"
        )
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", True) is False:
        raise _encoder(name, kind)


def check_class(name: str, config: PreTrainedConfig) -> None:
    """Raise ValueError where transformers has no class that generates text for the config of a folder."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ValueError(
            f"{name} does not generate text: transformers has no causal language model of type {config.model_type}; "
            "choose a model that has one, such as a Llama or Qwen3"
        )


@torch.no_grad()
def check_model(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Raise ValueError unless a forward pass of the model works, and its logits do not depend on later tokens by more
    than rounding."""
    embed: Any = model.get_input_embeddings()
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{name} has no language-model head ({type(model).__name__}); load it with AutoModelForCausalLM"
        )
    device = embed.weight.device
    config, vocab_size = model.config.get_text_config(decoder=True), embed.weight.shape[0]
    limit = getattr(config, "max_position_embeddings", None) or 2 * SHARED_TOKENS
    text = torch.tensor(sample_tokens(tokenizer, min(2 * SHARED_TOKENS, limit), vocab_size))
    shared = (len(text) + 1) // 2
    other = torch.cat([text[:shared], (text[shared:] + 1) % vocab_size])
    texts = torch.stack([text, other]).to("cpu" if embed.weight.is_meta else device)
    kind = model.config.model_type
    with _failing(f"{name} cannot generate: transformers fails in a forward pass of this {kind} model"):
        both, alone = (model(rows).logits[:, :shared].float() for rows in (texts, texts[:1]))
    if both.isnan().any() or both.isposinf().any():
        dtype = str(model.dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} cannot generate: its logits in {dtype} are NaN or infinite; choose another dtype or model"
        )
    eps = spacing(model.dtype, bool(getattr(model, "is_quantized", False)))
    layers = int(config.num_hidden_layers)
    if not difference(both[0], both[1], [(both[0], alone[0])], eps, layers).is_rounding:
        raise _encoder(name, kind)


def _encoder(name: str, kind: str) -> ValueError:
    return ValueError(
        f"{name} is an encoder ({kind}): its predictions depend on later tokens, so it cannot generate text; choose a "
        "causal language model, such as a Llama or Qwen3"
    )
