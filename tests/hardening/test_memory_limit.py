"""One line for a model that does not fit into the memory of its process.

The limit is on address space, as `ulimit -v` sets it. With less than about 100 MB left, a library that starts a thread
or loads a file may end the process, so the second limit leaves more room than that, and the weights need more than that
room.
"""

import json
import shutil
import struct
from pathlib import Path

import pytest

from specdemo.models.shipped import embedded_folder
from tests import processes

BEGIN = """
import resource, sys
import specdemo.presets.run, transformers.models.llama.modeling_llama
from pathlib import Path
from specdemo.__main__ import main
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]),) * 2)
sys.exit(main(sys.argv[2:]))
"""
HERE = Path("/proc/self/statm").exists()
pytestmark = pytest.mark.skipif(not HERE, reason="reads the size of its process from /proc")


def run(more, *arguments):
    done = processes.run("-W", "ignore", "-c", BEGIN, more, "run", "embedded-ngram", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("specdemo: ") and done.stderr.count("\n") == 1
    return done.stderr


def test_a_model_without_room_for_its_headers_is_one_line():
    assert "does not fit into the memory" in run(4_000_000)


def test_a_model_without_room_for_its_weights_is_one_line(tmp_path):
    stories, folder = embedded_folder() / "stories", tmp_path / "wide"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(stories / name, folder)
    config = json.loads((stories / "config.json").read_text())
    vocabulary, width = 2**18, 2**10
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": vocabulary, "hidden_size": width}))
    size = 2 * vocabulary * width  # 0.5 GB mapped, 1 GB in float32
    entry = {"dtype": "BF16", "shape": [vocabulary, width], "data_offsets": [0, size]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)  # a sparse file, which takes no space on the disk
    assert "does not fit into the memory" in run(size + size // 2, "--target", str(folder), "--dtype", "float32")
