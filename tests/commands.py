"""First steps of a user: every embedded preset, a short training, and the peers.

For environments with other releases than the pinned ones. Needs no pytest; runs in an empty folder.

    python -P tests/commands.py        on the installed package, or on that in PYTHONPATH
"""

import subprocess
import sys
import warnings
from pathlib import Path

import specdemo
from specdemo.__main__ import main
from specdemo.presets.files import load_presets

warnings.simplefilter("error", FutureWarning)  # an interface of a dependency that will change


def differing(name: str, **options: object) -> list[str]:
    """Run a preset and return the lanes whose output should be that of plain decoding and is not."""
    trace = specdemo.run(name, max_new_tokens=16, **options)
    return [lane["lane"] for lane in trace.comparison if lane["identical"] is False]


if __name__ == "__main__":
    wrong = {name: differing(name, temperature=0.0) for name in load_presets() if name.startswith("embedded")}
    assert len(wrong) > 20 and not any(wrong.values()), wrong
    assert main(["train", "medusa", "--minutes", "2", "--out", "head"]) == 0
    assert main(["run", "embedded-medusa", "--model", "head", "--max-new-tokens", "8"]) == 0
    peers = ["bench", "peers", "--pair", "embedded", "--repeats", "1", "--new-tokens", "8"]
    subprocess.run([sys.executable, "-m", "specdemo", *peers], cwd=Path(__file__).parents[1], check=True)
