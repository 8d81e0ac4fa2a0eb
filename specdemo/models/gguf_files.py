"""GGUF files: names, headers, and checks before llama.cpp loads a file. Needs neither llama.cpp nor torch.

A name is a file (`model.gguf`), a folder of one model as LM Studio stores it, `ollama:MODEL[:TAG]`, or
`organisation/repository[@revision]:QUANTISATION` on the hub. A split model is named by any of its parts.
"""

import hashlib
import json
import math
import mmap
import os
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from specdemo.core.deployment import public
from specdemo.core.safe_io import check_regular, read_text
from specdemo.models import sources
from specdemo.models.sources import LoadProgress, Repository, cached_folder, fetch_folder, model_info, no_progress

ROPE_BASE = 10_000.0  # default of models without one in their config
SUFFIX = ".gguf"
OLLAMA = "ollama:"
DEFAULT_QUANTISATION = "Q4_K_M"  # as in llama.cpp
MAX_ENTRIES = 1 << 22  # of an array in a header; the largest vocabularies have 300,000 tokens
SHORT_ARRAY = 4096  # longest array of numbers to read
MANIFEST_BYTES = 1_000_000
SPLIT = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})(\.gguf)", re.IGNORECASE)
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?:[\w.-]+")
OLLAMA_NAME = re.compile(r"(?:[\w.-]+/){0,3}[\w.-]+(?::[\w.-]+)?")
NOT_MODELS = ("mmproj", "imatrix")  # parts of the names of other GGUF files
FILE_TYPES = {  # general.file_type, enum llama_ftype of llama.h
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
    39: "NVFP4",
    40: "Q1_0",
}
TENSOR_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 8: "Q8_0", 30: "BF16"}  # of files that state no file type
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # value types
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4  # of a tensor, GGML_MAX_DIMS
ALIGNMENT, FILE_TYPE, TOKENS = "general.alignment", "general.file_type", "tokenizer.ggml.tokens"
SIZES = (  # of an architecture
    "context_length block_count embedding_length attention.head_count attention.head_count_kv attention.key_length "
    "attention.value_length"
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

    @property
    def architecture(self) -> str:
        """Return the name of the architecture in llama.cpp; empty if the file has none."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def quantisation(self) -> str:
        """Return the name of the file type, such as Q4_K_M; empty if unknown."""
        stated = self.metadata.get(FILE_TYPE, -1)
        return FILE_TYPES.get(stated) or TENSOR_TYPES.get(self.tensor_type, "")

    @property
    def tokens(self) -> int:
        """Return the size of the vocabulary; 0 if the file has none."""
        stated = self.metadata.get(TOKENS, 0)
        return stated if isinstance(stated, int) else 0

    def number(self, key: str, default: int = 0) -> int:
        """Return a number of the architecture, of several layers the largest."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        return int(max(value, default=default) if isinstance(value, list) else value)

    def cache_bytes(self, bytes_per_number: float) -> int:
        """Return the size of the keys and values of one token."""
        heads = self.number("attention.head_count", 1)
        usual = self.number("embedding_length") // max(heads, 1)
        sizes = self.number("attention.key_length", usual) + self.number("attention.value_length", usual)
        numbers = self.number("block_count") * self.number("attention.head_count_kv", heads) * sizes
        return int(numbers * bytes_per_number)


def is_gguf(name: str) -> bool:
    """Return whether a name is that of a GGUF model. Uses no network."""
    if name.lower().endswith(SUFFIX) or name.startswith(OLLAMA):
        return True
    folder = Path(name).expanduser()
    if folder.is_dir():
        return bool(models_in(folder)) and not (folder / "config.json").is_file()
    return bool(HUB_NAME.fullmatch(name)) or (name.partition("@")[0].lower().endswith("-gguf") and name.count("/") == 1)


def fetch_parts(name: str, report: LoadProgress = no_progress) -> tuple[Path, ...]:
    """Return the files of a model, its first part first, after a download if it is on the hub.

    Raises ValueError, one line, if there is no such model or a part is missing. Public pages load no GGUF model.
    """
    if public():
        raise ValueError("a public page loads no GGUF models; run specdemo on your machine")
    source = _find(name)
    if isinstance(source, Repository):
        folder = fetch_folder(source, report)
        return tuple(folder / file for file in source.files)
    return all_parts(source)


def stored_bytes(name: str) -> int:
    """Return the size of a model's files without downloading them. Raises ValueError as `fetch_parts` does."""
    source = _find(name)
    sizes = source.files.values() if isinstance(source, Repository) else (p.stat().st_size for p in all_parts(source))
    return sum(sizes)


def local_header(name: str) -> Header | None:
    """Return the header of a model; None if it is not on this machine. Raises ValueError as `fetch_parts` does."""
    source = _find(name)
    if isinstance(source, Repository):
        if source.missing_bytes():
            return None
        source = fetch_folder(source, no_progress) / next(iter(source.files))
    return read_header(all_parts(source)[0])


def has_chat_template(name: str) -> bool | None:
    """Return True if a model on this machine, a GGUF file or another, has a chat template; None if it is not here."""
    file = Path(name).expanduser()
    if not name.lower().endswith(SUFFIX):
        return sources.has_chat_template(name)
    return "tokenizer.chat_template" in read_header(file).metadata if file.is_file() else None


def _find(name: str) -> Path | Repository:
    """Return a file of the model, or the files to download. Raises ValueError if there is none."""
    if name.startswith(OLLAMA):
        return ollama_blob(name.removeprefix(OLLAMA))
    path = Path(name).expanduser()
    if name.lower().endswith(SUFFIX) and not path.is_dir():
        if not path.is_file():
            raise ValueError(f"the file {name} does not exist")
        return path
    if path.is_dir():
        return _only_model(path)
    return gguf_on_hub(name)


def _only_model(folder: Path) -> Path:
    """Return the model in a folder. Raises ValueError unless there is exactly one."""
    models = models_in(folder)
    if len(models) != 1:
        found = f"has {len(models)} GGUF models ({', '.join(path.name for path in models)}); name one of the files"
        raise ValueError(f"{folder} {found if models else 'has no GGUF model'}")
    return models[0]


def models_in(folder: Path) -> list[Path]:
    """Return the models of a folder, of a split model the first part."""
    return [folder / name for name in _first_parts([path.name for path in sorted(folder.glob("*.gguf"))])]


def _first_parts(files: Sequence[str]) -> list[str]:
    """Return the files that are models, of a split model the first part."""
    models = (file for file in files if not any(word in file.lower() for word in NOT_MODELS))
    return [file for file in models if not (split := SPLIT.fullmatch(file)) or int(split[2]) == 1]


def part_names(file: str) -> list[str]:
    """Return the names of all parts of a split model, or only this one."""
    split = SPLIT.fullmatch(file)
    if not split:
        return [file]
    return [f"{split[1]}{number:05}{split[3]}{split[4]}{split[5]}" for number in range(1, int(split[4]) + 1)]


def all_parts(file: Path) -> tuple[Path, ...]:
    """Return all parts of a split model. Raises ValueError if one is missing."""
    parts = tuple(file.with_name(name) for name in part_names(file.name))
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ValueError(f"{file.name} lacks {missing[0]}, one of {len(parts)} parts; fetch the missing parts")
    return parts


def ollama_folder() -> Path:
    """Return Ollama's store."""
    return Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models").expanduser()


def ollama_blob(name: str) -> Path:
    """Return the file of a model in Ollama's store. Raises ValueError if it is not there."""
    if not OLLAMA_NAME.fullmatch(name):
        raise ValueError(f"{OLLAMA}{name} is not a name of Ollama; use ollama:MODEL or ollama:MODEL:TAG")
    model, _, tag = name.partition(":")
    path = ["registry.ollama.ai", "library", *model.split("/")][-3:]
    path = path if model.count("/") != 1 else ["registry.ollama.ai", *model.split("/")]
    manifest = ollama_folder().joinpath("manifests", *path, tag or "latest")
    if ".." in path or not manifest.is_file():
        raise ValueError(f"{OLLAMA}{name} is not in {ollama_folder()}; run: ollama pull {name}")
    digest = _model_digest(manifest)
    blobs = ollama_folder() / "blobs"
    found = next((blobs / file for file in (digest.replace(":", "-"), digest) if (blobs / file).is_file()), None)
    if found is None:
        raise ValueError(f"{OLLAMA}{name} has no GGUF weights in {blobs}; run: ollama pull {name}")
    return found


def _model_digest(manifest: Path) -> str:
    """Return the digest of a manifest's weights; empty if it has none."""
    try:
        layers = json.loads(read_text(manifest, MANIFEST_BYTES))["layers"]
        model = next((layer for layer in layers if layer["mediaType"].endswith("image.model")), {"digest": ""})
        return model["digest"] if re.fullmatch(r"sha256:[0-9a-f]{64}", model["digest"]) else ""
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{manifest} is not a manifest of Ollama; pull the model again") from None


def gguf_on_hub(name: str) -> Repository:
    """Return the files of a quantisation in a repository. Raises ValueError if the repository has no such files."""
    repository, _, quantisation = name.partition(":")
    if constants.HF_HUB_OFFLINE:
        folder = cached_folder(repository)
        files = {str(f.relative_to(folder)): f.stat().st_size for f in sorted(folder.rglob("*.gguf"))}
    else:
        siblings = model_info(repository).siblings or []
        files = {f.rfilename: f.size or 0 for f in siblings if f.rfilename.lower().endswith(SUFFIX)}
    chosen = _choose(name, _first_parts(list(files)), quantisation)
    absent = [part for part in part_names(chosen) if part not in files]
    if absent:
        raise ValueError(f"{repository} lacks {absent[0]}; choose another quantisation")
    return Repository(repository, {part: files[part] for part in part_names(chosen)}, {})


def _choose(name: str, files: Sequence[str], quantisation: str) -> str:
    """Return the file of a quantisation; without one, that of Q4_K_M or the first file, as llama.cpp does."""
    word = re.compile(rf"(?<![A-Z0-9_]){re.escape(quantisation or DEFAULT_QUANTISATION)}(?![A-Z0-9_])", re.IGNORECASE)
    found = next((file for file in files if word.search(file)), None)
    if not files:
        raise ValueError(f"{name} has no GGUF files on this machine or on the hub")
    if found is None and quantisation:
        raise ValueError(f"{name.partition(':')[0]} has no {quantisation}; choose one of {', '.join(files)}")
    return found or files[0]


def quantisation_in(file: str) -> str:
    """Return the quantisation in a file's name, such as Q4_K_M; empty if there is none."""
    found = re.search(r"(?<![A-Z0-9])(?:UD-)?(I?Q\d\w*|TQ\d_0|MXFP4\w*|B?F16|F32)(?![A-Z0-9])", file.upper())
    return found[1].partition("-")[0] if found else ""


def check_file(path: Path, name: str) -> Header:
    """Return the header of a file. Raises ValueError for another kind of file, for one that was cut short, and for a
    vocabulary at which llama.cpp ends the process (llama.cpp issue 25739)."""
    header = read_header(path)
    if header.repeated:
        raise ValueError(f"{name} has {header.repeated} tokens twice, which llama.cpp cannot load; choose another file")
    size = path.stat().st_size
    if size < header.data_bytes:
        raise ValueError(
            f"{name} is incomplete: {path.name} has {size:,} of {header.data_bytes:,} bytes; fetch it again"
        )
    return header


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
        except (struct.error, ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{path} cannot be read as GGUF ({reason}); fetch it again") from None


class _Reader:
    """Reader of a header. Reads past the end of the file raise struct.error."""

    def __init__(self, content: Any) -> None:
        self._content, self._position = content, 4
        self._vocabulary, self._repeated = "", 0

    def header(self) -> Header:
        version, tensors, entries = self._number("I"), self._number("Q"), self._number("Q")
        if version not in (2, 3) or max(tensors, entries) > MAX_ENTRIES:
            raise ValueError(f"version {version}, {tensors} tensors")
        metadata = {}
        for _ in range(entries):
            key = self._string().decode()
            if not key:
                raise ValueError("a key is empty")  # at which llama.cpp ends the process
            metadata[key] = self._value(self._number("I"), key)
        _check_numbers(metadata)
        weights: Counter[int] = Counter()
        end = 0
        sizes = _block_sizes()
        for _ in range(tensors):
            self._string()
            dimensions = self._number("I")
            if dimensions > MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions")
            numbers = math.prod(self._number("Q") for _ in range(dimensions))
            kind, offset = self._number("I"), self._number("Q")
            weights[kind] += numbers
            block, width = sizes.get(kind, (1, 0))
            end = max(end, offset + numbers // block * width)
        alignment = metadata.get(ALIGNMENT, 32)
        start = -(-self._position // alignment) * alignment
        most = max(weights, key=weights.__getitem__, default=-1)
        return Header(metadata, self._vocabulary, self._repeated, most, weights.total(), start + end if end else 0)

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from("<" + kind, self._content, self._position)
        self._position += struct.calcsize("<" + kind)
        return value

    def _string(self) -> bytes:
        begin = self._position + 8
        self._position = begin + self._number("Q")
        if self._position > len(self._content):
            raise ValueError("the header is cut short")
        return bytes(self._content[begin : self._position])

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._string().decode(errors="replace")
        return self._array(key) if kind == ARRAY else self._number(NUMBERS[kind])

    def _array(self, key: str) -> Any:
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
            return count
        if count <= SHORT_ARRAY:
            return [self._number(NUMBERS[kind]) for _ in range(count)]
        self._position += count * struct.calcsize("<" + NUMBERS[kind])
        return count


def _check_numbers(metadata: Mapping[str, Any]) -> None:
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
