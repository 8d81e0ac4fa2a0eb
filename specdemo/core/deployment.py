"""Where the page runs."""

import os
from importlib.util import find_spec

FILES = "SPECDEMO_FILES"  # 0 where others can reach the page


def public() -> bool:
    """Return whether strangers can reach this page, as on a Space."""
    return os.environ.get("SPECDEMO_PUBLIC") == "1" or bool(os.environ.get("SPACE_ID"))


def zero_gpu() -> bool:
    """Return True on ZeroGPU of Hugging Face, where a GPU is attached to calls only."""
    enabled = os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")  # as `spaces` reads it
    return enabled and find_spec("spaces") is not None


def offers_files() -> bool:
    """Return whether the page offers the models in files of this machine: only this machine reaches it."""
    return os.environ.get(FILES) != "0" and not public()
