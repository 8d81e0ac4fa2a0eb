"""References to models: names as settings, links and traces hold them, with what they name. Needs neither torch nor the
client of the hub.
"""

import os
import re
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from specdemo.core.safe_io import read_json
from specdemo.models import packaged
from specdemo.models.gguf_header import Header, read_header
from specdemo.models.packaged import EMBEDDED, embedded_folder

SUFFIX = ".gguf"
OLLAMA = "ollama:"
HUB_GGUF = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?:[\w.-]+")
WEIGHTS = ("*.gguf", "*.safetensors", "*.bin", "config.json")  # files of a model's folder that its hash covers
SAMPLES, SAMPLE_BYTES = 16, 1 << 16  # of each file; reading all of a large model takes a minute
SIZE = re.compile(r"(?<![\w.])((?:[AE]|\d+x)?\d+(?:\.\d+)?[KMBT])(?![\w.])", re.IGNORECASE)  # 0.5B, E4B, 8x7B
SCALE_BITS = 0.8  # bits per weight of scales and of wider tensors in GGUF files
UNSAID = ("instruct", "it", "chat", "gguf", "hf", "latest")  # words of names that a title leaves out
SPELLINGS = {"Smollm": "SmolLM", "Deepseek": "DeepSeek", "Gpt Oss": "gpt-oss", "Gpt": "GPT", "Eagle": "EAGLE"}


class ModelRef(str):
    """Name of a model. It is text in JSON, links and traces; its properties say what it names, without the network.

    Names are those of embedded models and of models from packages (models/packaged.py), folders, GGUF files,
    `ollama:MODEL[:TAG]`, and on the hub `organisation/repository[@revision]` or, for GGUF,
    `organisation/repository[@revision]:QUANTISATION`.
    """

    __slots__ = ()

    @property
    def embedded(self) -> bool:
        """Return whether the package contains the model."""
        return self in EMBEDDED

    @property
    def gguf(self) -> bool:
        """Return whether the model is one of GGUF files."""
        if self.is_gguf_file or self.startswith(OLLAMA):
            return True
        folder = Path(self).expanduser()
        if folder.is_dir():
            return any(folder.glob("*.gguf")) and not (folder / "config.json").is_file()
        of_gguf = self.partition("@")[0].lower().endswith("-gguf") and self.count("/") == 1
        return of_gguf or HUB_GGUF.fullmatch(self) is not None

    @property
    def is_gguf_file(self) -> bool:
        """Return whether the name is that of one GGUF file, from a package or in a folder."""
        return self.lower().endswith(SUFFIX)

    @property
    def path(self) -> Path | None:
        """Return the folder or file that the name states, which need not exist; None for a name of the hub or of
        Ollama, and for a model from a package that is not here."""
        file = packaged.local(self)
        if file is not None and not (self == packaged.SMOLLM2 and self.is_cached):
            return file
        folder = embedded_folder() / self
        if re.fullmatch(r"[\w.-]+", self) and (folder / "config.json").is_file():
            return folder
        return Path(self).expanduser() if self.is_path else None

    @property
    def location(self) -> str:
        """Return the folder or file that the name states, else the name."""
        return str(self.path or self)

    @property
    def is_path(self) -> bool:
        """Return whether the name is written as a path, or is that of an existing file or folder."""
        several = self.repository.count("/") > 1
        return self.startswith((".", "/", "~")) or os.sep * 2 in self or several or Path(self).exists()

    @property
    def is_cached(self) -> bool:
        """Return whether the hub's cache has the repository's weights, if they are one file."""
        from huggingface_hub import try_to_load_from_cache

        files = ("config.json", "tokenizer.json", "model.safetensors")
        cached = (try_to_load_from_cache(self.repository, file, revision=self.revision) for file in files)
        return all(isinstance(file, str) for file in cached)

    @property
    def repository(self) -> str:
        """Return the id on the hub, without revision and quantisation."""
        name = packaged.HUB_ID if self == packaged.SMOLLM2 else self
        return name.partition("@")[0].partition(":")[0]

    @property
    def revision(self) -> str | None:
        """Return the branch, tag or commit on the hub; None: the main branch."""
        return self.partition("@")[2].partition(":")[0] or None

    @property
    def quantisation(self) -> str:
        """Return the word after the colon that chooses a file of a GGUF repository; empty if there is none."""
        return self.partition(":")[2]

    @property
    def label(self) -> str:
        """Return the name without the folders of this machine."""
        marks = self.startswith(("/", "~", ".")) or "\\" in self or self.endswith(SUFFIX)
        return re.split(r"[/\\]", self.rstrip("/\\"))[-1] if marks or Path(self).exists() else str(self)

    @property
    def base_name(self) -> str:
        """Return the name without organisation, revision, quantisation and format, in lower case: that of all files of
        one model."""
        return self._stem.lower()

    @property
    def _stem(self) -> str:
        name = packaged.HUB_ID if self in packaged.DOWNLOADS else self
        last = name.rstrip("/").rpartition("/")[2]
        if self.startswith(OLLAMA):
            last = last.removeprefix(OLLAMA).replace(":", "-")
        last = last.partition("@")[0].partition(":")[0]
        last = re.sub(r"(?i)(-\d{5}-of-\d{5})?(\.|-)gguf$", "", last)
        quantisation = re.escape(quantisation_in(last))
        return re.sub(rf"(?i)([-._]+ud)?[-._]+{quantisation}$", "", last) if quantisation else last

    @property
    def short_name(self) -> str:
        """Return the name for people: family, size and type of the weights, such as `Qwen2.5 Coder 1.5B · Q4_K_M`.

        What the name of a GGUF file does not state is read from its header; one of unknown size keeps its name.
        """
        if self.embedded or (self.is_gguf_file and not self.size):
            return self.label
        words = " ".join(_capital(word) for word in self._words.split() if word.lower() not in UNSAID)
        for plain, spelling in SPELLINGS.items():
            words = re.sub(rf"\b{plain}", spelling, words)
        kind = quantisation_in(self.label) or (self._header.quantisation if self._header else "")
        return f"{words} · {kind}" if kind and self.gguf else words

    @property
    def size(self) -> str:
        """Return the number of parameters, such as 0.5B, from the name, the header of a GGUF file or the card of an
        embedded model; empty if unknown."""
        card = embedded_folder() / self / "provenance.json"
        if self.embedded and card.is_file():
            return f"{read_json(card)['parameters'] / 1e6:.2g}M"
        match = SIZE.search(self._words)
        return _capital(match[0]) if match else ""

    @property
    def estimated_bytes(self) -> tuple[float, float]:
        """Return about the bytes of all weights, and of those that a token reads, by the sizes and the type of the
        weights in the name; zeros if it states no size. Weights of no stated type have 16 bits."""
        bits = re.search(r"\d+", quantisation_in(self))
        width = 2.0 if bits is None else (int(bits[0]) + SCALE_BITS * (int(bits[0]) < 16)) / 8.0
        active = re.search(r"\bA[\d.]+B\b", self._words, re.IGNORECASE)  # of experts
        return width * _count(self.size), width * _count(active[0] if active else self.size)

    @property
    def _words(self) -> str:
        """Return family and size with spaces between words. A dot in a number stays."""
        name = self._stem
        if not SIZE.search(_spaced(name)) and self._header:
            family, size = (str(self._header.metadata.get(f"general.{key}") or "") for key in ("name", "size_label"))
            name = family if SIZE.search(_spaced(family)) else f"{family or name} {size}"
        return _spaced(name)

    @property
    def _header(self) -> Header | None:
        """Return the header of a GGUF file on this machine; None without one, or if it is damaged."""
        with suppress(ValueError, OSError):
            if self.is_gguf_file and self.path and self.path.is_file():
                return read_header(self.path)
        return None

    @property
    def link_name(self) -> str:
        """Return the name in links; of a model in files without folders, with its hash: `mine.gguf@1a2b3c4d5e6f`."""
        digits = self.content_hash
        return f"{self.label}@{digits}" if digits else self.label

    @property
    def content_hash(self) -> str:
        """Return 12 hex digits that identify the content of a model's files: the start of the SHA-256 of every file's
        size and of samples of it. Empty for a model that is not named by its file or folder."""
        path = Path(self).expanduser()
        if self.embedded or not path.exists():
            return ""
        files = sorted(file for mark in WEIGHTS for file in path.glob(mark)) if path.is_dir() else [path]
        return _hash_of(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=64)
def _hash_of(files: tuple[tuple[Path, int, int], ...]) -> str:
    digest = sha256()
    for file, size, _ in files:
        digest.update(b"%d:" % size)
        with file.open("rb") as opened:
            for i in range(SAMPLES):
                opened.seek(i * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()[:12]


def quantisation_in(file: str) -> str:
    """Return the quantisation in a file's name, such as Q4_K_M; empty if there is none."""
    match = re.search(r"(?<![A-Z0-9])(?:UD-)?(I?Q\d\w*|TQ\d_0|MXFP4\w*|B?F16|F32)(?![A-Z0-9])", file.upper())
    return match[1].partition("-")[0] if match else ""


def _spaced(name: str) -> str:
    return re.sub(r"[-_:\s]+|\.(?!\d)", " ", name).strip()


def _capital(word: str) -> str:
    if SIZE.fullmatch(word):
        return word.upper().replace("X", "x")
    return word[0].upper() + word[1:] if re.match("[a-z]{2}", word) else word


def _count(size: str) -> float:
    """Return the number of weights that a size such as 0.5B or 8x7B states; 0 for an empty one."""
    match = re.fullmatch(r"(?:(\d+)X|[AE])?([\d.]+)([KMBT])", size.upper())
    return float(match[1] or 1) * float(match[2]) * 1000.0 ** ("KMBT".index(match[3]) + 1) if match else 0.0
