"""A model that does not fit into the memory of its process ends in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import resource, sys
import specdemo.presets.run, transformers.models.llama.modeling_llama
from pathlib import Path
from specdemo.__main__ import main
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + int(sys.argv[1]),) * 2)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the size of its process from /proc")
@pytest.mark.parametrize("more", [4_000_000, 150_000_000])
def test_a_model_without_room_is_one_line(more):
    """At the headers of its files, and while its weights are read."""
    command = [sys.executable, "-W", "ignore", "-c", BEGIN, str(more), "run", "embedded-draft"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("specdemo: ") and done.stderr.count("\n") == 1
