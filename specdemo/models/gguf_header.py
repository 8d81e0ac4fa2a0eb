"""Headers of GGUF files: metadata, sizes and the kind of model. Needs neither llama.cpp nor torch."""

import hashlib
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from specdemo.core.safe_io import check_regular
from specdemo.models.errors import first_line

MAX_ENTRIES = 1 << 22  # of an array in a header; the largest vocabularies have 300,000 tokens
SHORT_ARRAY = 4096  # longest array of numbers to read
# general.file_type (enum llama_ftype of llama.h) by number, with the types that llama.cpp has removed
FILE_TYPES = """
    F32 F16 Q4_0 Q4_1 Q4_1_SOME_F16 Q4_2 Q4_3 Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K
    IQ2_XXS IQ2_XS Q2_K_S IQ3_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16 Q4_0_4_4 Q4_0_4_8
    Q4_0_8_8 TQ1_0 TQ2_0 MXFP4 NVFP4 Q1_0
""".split()
TENSOR_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 8: "Q8_0", 30: "BF16"}  # of files that state no file type
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # value types
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4  # of a tensor, GGML_MAX_DIMS
EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"
LAYER_EMBEDDINGS = "per_layer_token_embd.weight"
RANK = 4  # pooling type of a model that scores texts, LLAMA_POOLING_TYPE_RANK
DRAFT = "llama-server -m MODEL.gguf --spec-type {} --spec-draft-model FILE"
HEADS = {  # words in the architecture of a head for another model -> its name, and what runs it
    "eagle": (
        "an EAGLE head of another model",
        f"specdemo run --target MODEL.gguf --model FILE, or {DRAFT.format('draft-eagle3')}",
    ),
    "dflash": (
        "a DFlash head of another model",
        f"specdemo run --target MODEL.gguf --model FILE, or {DRAFT.format('draft-dflash')}",
    ),
    "dspark": ("a DSpark head of another model", DRAFT.format("draft-dspark")),
    "assistant": ("an assistant head of another model", DRAFT.format("draft-mtp")),
    "mtp": (
        "a multi-token prediction head of another model",
        f"specdemo run --target MODEL.gguf --model FILE, or {DRAFT.format('draft-mtp')}",
    ),
}
OF_TARGET = ("target_layers", "extract_layers", "target_hidden_size")  # entries of other heads
TYPES = {  # general.type
    "adapter": ("a LoRA adapter", "llama-server -m MODEL.gguf --lora FILE"),
    "mmproj": ("a projector of images or sound", "llama-server -m MODEL.gguf --mmproj FILE"),
    "imatrix": ("an importance matrix", "llama-quantize --imatrix FILE"),
}
EMBEDDING = ("an embedding model", "llama-server -m FILE --embedding")
RERANKER = ("a reranker", "llama-server -m FILE --reranking")
NOT_CAUSAL = (
    "a model that does not write from left to right",
    "llama-diffusion-cli -m FILE, if it is a diffusion model",
)
PART = ("a part of a model, without its token embeddings", "the program that made it")
ENCODER = ("an encoder", "llama-server -m FILE --embedding")
ENCODERS = re.compile("bert|^t5|embed(ding)?$")  # in names of architectures
ALIGNMENT, FILE_TYPE, TOKENS = "general.alignment", "general.file_type", "tokenizer.ggml.tokens"
TAGS = "general.tags"
DELTA, DELTA_INTERVAL = ("qwen35", "qwen35moe", "qwen3next"), 4  # attention in every fourth layer
NO_ATTENTION = ("mamba", "mamba2")
COPIES = 3  # of the state of a text: at the ends of two prompts, and a newer one
ROLLBACK = 8  # draft tokens that a context takes back at once; each needs memory for a state
TAKEN_BACK = frozenset(  # architectures whose recurrent layers llama.cpp can take back, llm_arch_supports_rs_rollback
    "lfm2 lfm2moe qwen35 qwen35moe qwen4exp nemotron_h nemotron_h_moe deepseek4 kimi-k3 glm5-next bailingmoe3".split()
)
SIZES = (  # of an architecture
    "context_length block_count embedding_length attention.head_count attention.head_count_kv attention.key_length "
    "attention.value_length pooling_type nextn_predict_layers full_attention_interval ssm.conv_kernel ssm.inner_size "
    "ssm.state_size ssm.group_count shortconv.l_cache"
).split()


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata of a GGUF file. Long arrays are replaced by their length.

    vocabulary: a digest of the tokens without padding; equal for models with the same vocabulary. repeated: tokens that
    another one equals.
    """

    metadata: Mapping[str, Any]
    vocabulary: str
    repeated: int
    tensor_type: int  # of most weights, enum ggml_type of ggml.h
    weights: int  # number of weights
    data_bytes: int  # least size of the file; 0 if unknown
    tensors: Mapping[str, tuple[int, tuple[int, ...], int]]  # name -> enum ggml_type, shape, place in the file

    @property
    def architecture(self) -> str:
        """Return the name of the architecture in llama.cpp; empty if the file has none."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def quantisation(self) -> str:
        """Return the name of the file type, such as Q4_K_M; empty if unknown."""
        stated = self.metadata.get(FILE_TYPE, -1)
        if stated in range(len(FILE_TYPES)):
            return FILE_TYPES[int(stated)]
        return TENSOR_TYPES.get(self.tensor_type, "")

    @property
    def tokens(self) -> int:
        """Return the size of the vocabulary; 0 if the file has none."""
        stated = self.metadata.get(TOKENS, 0)
        return stated if isinstance(stated, int) else 0

    def number(self, key: str, default: int = 0) -> int:
        """Return a number of the architecture, of several layers the largest."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        return int(max(value, default=default) if isinstance(value, list) else value)

    @property
    def layer_sizes(self) -> dict[str, int]:
        """Return the sizes of a decoder layer under their names in a config.json, of several layers the largest."""
        hidden, heads = self.number("embedding_length"), self.number("attention.head_count", 1)
        return {
            "hidden_size": hidden,
            "intermediate_size": self.number("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.number("attention.head_count_kv", heads),
            "head_dim": self.number("attention.key_length", hidden // max(heads, 1)),
        }

    @property
    def _layers(self) -> list[int]:
        """Return the number of key/value heads of each layer; 0 without attention."""
        count = 1 if self.prediction_only else self.number("block_count") - self.number("nextn_predict_layers")
        stated = self.metadata.get(f"{self.architecture}.attention.head_count_kv")
        if isinstance(stated, list):
            return [int(heads) for heads in (stated[-1:] if self.prediction_only else stated[:count])]
        heads = self.layer_sizes["num_key_value_heads"]
        every = self.number("full_attention_interval", DELTA_INTERVAL if self.architecture in DELTA else 1)
        every = 1 if self.prediction_only else every
        if self.architecture in NO_ATTENTION:
            return [0] * count
        return [heads * ((number + 1) % max(every, 1) == 0) for number in range(count)]

    @property
    def head_numbers(self) -> int:
        """Return the numbers of the key and the value of one token in a head."""
        sizes = self.layer_sizes
        usual = sizes["hidden_size"] // max(sizes["num_attention_heads"], 1)
        return sizes["head_dim"] + self.number("attention.value_length", usual)

    def cache_bytes(self, bytes_per_number: float) -> int:
        """Return the size of the keys and values of one token."""
        return int(sum(self._layers) * self.head_numbers * bytes_per_number)

    @property
    def prediction_layer(self) -> str:
        """Return the start of the names of the tensors of the first prediction layer; empty if the file states none."""
        count = self.number("nextn_predict_layers")
        return f"blk.{self.number('block_count') - count}.nextn." if count else ""

    @property
    def prediction_only(self) -> bool:
        """Return True for a file that holds a prediction layer without the layers of its model."""
        return bool(self.prediction_layer) and not any(name.startswith("blk.0.") for name in self.tensors)

    @property
    def lane_bytes(self) -> int:
        """Return the size of the recurrent states of a lane with one text, also to take tokens back, and of copies."""
        return self.state_bytes * (1 + ROLLBACK * (self.architecture in TAKEN_BACK) + COPIES)

    @property
    def state_bytes(self) -> int:
        """Return the size of the recurrent state of one text; 0 for a model without recurrent layers."""
        inner, state = self.number("ssm.inner_size"), self.number("ssm.state_size")
        convolved = inner + 2 * self.number("ssm.group_count") * state
        numbers = (self.number("ssm.conv_kernel", 1) - 1) * convolved + state * inner
        numbers += (self.number("shortconv.l_cache", 1) - 1) * self.number("embedding_length")
        hidden = self.metadata.get(f"{self.architecture}.feed_forward_length")  # layers without attention may be these
        widths = hidden if isinstance(hidden, list) and inner else [0] * len(self._layers)
        everywhere = self.architecture == "falcon-h1"
        layers = sum(everywhere or not (heads or width) for heads, width in zip(self._layers, widths, strict=False))
        return 4 * layers * numbers


def other_kind(parts: Sequence[Header]) -> tuple[str, str] | None:
    """Return what a file is if it is no language model, and what runs it; None for a language model.

    parts: headers of all parts; the metadata are in the first.
    """
    header = parts[0]
    stated, architecture = str(header.metadata.get("general.type", "")), header.architecture
    kind = "mmproj" if architecture == "clip" else "imatrix" if "imatrix.datasets" in header.metadata else stated
    if kind in TYPES:
        return TYPES[kind]
    head = next((about for word, about in HEADS.items() if word in architecture), None)
    if head or any(f"{architecture}.{key}" in header.metadata for key in OF_TARGET):
        return head or ("a head of another model", DRAFT.format("TYPE"))
    if pooling := header.number("pooling_type"):
        return RERANKER if pooling == RANK else EMBEDDING
    if ENCODERS.search(architecture):
        return ENCODER
    if header.metadata.get(f"{architecture}.attention.causal") is False:
        return NOT_CAUSAL
    names = [name for part in parts for name in part.tensors]
    if any(name.startswith("blk.") for name in names) and not any(name.startswith("blk.0.") for name in names):
        return HEADS["mtp"]
    return None if EMBEDDINGS in names else PART


def token_bytes(parts: Mapping[Path, Header]) -> int:
    """Return the bytes of weights that a pass over one token reads. parts: the files of a model, the first one first.

    Of embeddings it reads one row, unless they are the output matrix too, and of experts those of a token.
    """
    header = next(iter(parts.values()))
    experts = header.number("expert_count")
    share = header.number("expert_used_count") / experts if experts else 1.0
    unread = {LAYER_EMBEDDINGS} | ({EMBEDDINGS} if any(OUTPUT in part.tensors for part in parts.values()) else set())
    total = 0.0
    for path, part in parts.items():
        places = sorted((place, name) for name, (_, _, place) in part.tensors.items())
        ends = [*(place for place, _ in places[1:]), path.stat().st_size]
        for (place, name), end in zip(places, ends, strict=True):
            total += 0 if name in unread else (end - place) * (share if "_exps." in name else 1.0)
    return int(total)


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file. Raises ValueError, one line, for another kind of file and for a damaged one."""
    check_regular(path)
    info = path.stat()
    return _read_header(path, info.st_size, info.st_mtime_ns)


@lru_cache(maxsize=1024)
def _read_header(path: Path, size: int, changed_ns: int) -> Header:
    """size, changed_ns: cache keys, so that a changed file is read again."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file; fetch it again")
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(content).header()
        except struct.error:
            raise ValueError(f"{path} is truncated: its header ends after {size:,} bytes; download it again") from None
        except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read as GGUF ({first_line(error)}); fetch it again") from None


class _Reader:
    """Reader of a header. Reads past the end of the file raise struct.error."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._position = content, 4
        self._vocabulary, self._repeated = "", 0

    def header(self) -> Header:
        version, count, entries = self._number("I"), self._number("Q"), self._number("Q")
        if version not in (2, 3) or max(count, entries) > MAX_ENTRIES:
            raise ValueError(f"version {version}, {count} tensors")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string().decode()
            if not key:
                raise ValueError("a key is empty")  # at which llama.cpp ends the process
            metadata[key] = self._value(self._number("I"), key)
        _check_numbers(metadata)
        weights: Counter[int] = Counter()
        tensors = {}
        end = 0
        sizes = _block_sizes()
        for _ in range(count):
            name = self._string().decode(errors="replace")
            dimensions = self._number("I")
            if dimensions > MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions")
            shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
            numbers = math.prod(shape)
            kind, offset = self._number("I"), self._number("Q")
            tensors[name] = kind, shape, offset
            weights[kind] += numbers
            block, width = sizes.get(kind, (1, 0))
            end = max(end, offset + numbers // block * width)
        alignment = metadata.get(ALIGNMENT, 32)
        start = -(-self._position // alignment) * alignment
        most = max(weights, key=weights.__getitem__, default=-1)
        return Header(
            metadata,
            self._vocabulary,
            self._repeated,
            most,
            weights.total(),
            start + end if end else 0,
            {name: (kind, shape, start + offset) for name, (kind, shape, offset) in tensors.items()},
        )

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from("<" + kind, self._content, self._position)
        self._position += struct.calcsize("<" + kind)
        return value

    def _string(self) -> bytes:
        begin = self._position + 8
        self._position = begin + self._number("Q")
        if self._position > len(self._content):
            raise struct.error("the string continues after the end")
        return bytes(self._content[begin : self._position])

    def _value(self, kind: int, key: str) -> object:
        if kind == STRING:
            return self._string().decode(errors="replace")
        return self._array(key) if kind == ARRAY else self._number(NUMBERS[kind])

    def _array(self, key: str) -> object:
        kind, count = self._number("I"), self._number("Q")
        if count > MAX_ENTRIES:
            raise ValueError(f"{count} entries")
        if kind == STRING:
            texts = [self._string() for _ in range(count)]
            if key == TOKENS:
                digest = hashlib.sha256()
                for text in texts:
                    if not text.startswith(b"[PAD"):  # added up to a multiple of the vocabulary size
                        digest.update(b"%d:%b" % (len(text), text))
                self._vocabulary = digest.hexdigest()
                named = [text for text in texts if text]  # llama.cpp names empty ones by their number
                self._repeated = len(named) - len({*named})
            return [text.decode(errors="replace") for text in texts] if key == TAGS else count
        if count <= SHORT_ARRAY:
            return [self._number(NUMBERS[kind]) for _ in range(count)]
        self._position += count * struct.calcsize("<" + NUMBERS[kind])
        return count


def _check_numbers(metadata: Mapping[str, object]) -> None:
    """Raise ValueError if an entry that is read as a number is none."""
    sizes = {f"{metadata.get('general.architecture')}.{size}" for size in SIZES}
    for key in {ALIGNMENT, FILE_TYPE, *sizes} & metadata.keys():
        value = metadata[key]
        numbers = value if key in sizes and isinstance(value, list) else [value]
        if not all(isinstance(number, int) and number >= (key == ALIGNMENT) for number in numbers):
            raise ValueError(f"{key} is not a whole number")


def _block_sizes() -> Mapping[int, tuple[int, int]]:
    """Return tensor type -> numbers and bytes per block; empty without the package `gguf`."""
    try:
        sizes: Mapping[int, tuple[int, int]] = import_module("gguf").GGML_QUANT_SIZES
    except ImportError:
        return {}
    return sizes
