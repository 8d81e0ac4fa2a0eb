"""The MLX servers: command lines, and a real mlx-lm if SPECDEMO_MLX_LM is the path of its `mlx_lm.server`.

`pip install mlx-lm "mlx[cpu]"` installs it on Linux.
"""

import json
import os

import pytest

from specdemo.__main__ import main
from specdemo.models.ref import ModelRef
from specdemo.presets.files import preset
from specdemo.presets.serve import serve_commands
from specdemo.servers.engines import ENGINES

PROGRAM = os.environ.get("SPECDEMO_MLX_LM")


def test_mlx_lm_has_draft_models_only():
    baseline, drafting = (line for line in serve_commands(preset("embedded-draft"), "mlx-lm") if line.startswith("mlx"))
    assert baseline == f"mlx_lm.server --model {ModelRef('stories').path} --host 127.0.0.1 --port 8000"
    assert drafting.endswith(f"--port 8001 --draft-model {ModelRef('stories-draft-wide').path} --num-draft-tokens 4")
    comments = serve_commands(preset("embedded-ngram"), "mlx-lm")
    assert comments[-1].endswith("not served, mlx-lm drafts with a draft model only")
    gguf = preset("embedded-draft").with_changes(target="a.gguf", model="b.gguf")
    assert "not GGUF files" in serve_commands(gguf, "mlx-lm")[1]


def test_mlx_vlm_names_the_kind_of_its_drafter():
    line = serve_commands(preset("embedded-dflash"), "mlx-vlm")[4]
    k = preset("embedded-dflash").lanes[0].k
    assert line.startswith("mlx_vlm.server --model ") and line.endswith(
        f"--draft-kind dflash --draft-block-size {k + 1}"
    )
    assert serve_commands(preset("embedded-draft"), "mlx-vlm")[-1].endswith("mlx-vlm does not support this method")


def test_requests_name_the_model_of_the_command_line():
    assert ENGINES["mlx-lm"].served_name(ModelRef("stories")) == "default_model"
    assert ENGINES["mlx-vlm"].served_name(ModelRef("stories")) == ModelRef("stories").location
    assert ENGINES["vllm"].served_name(ModelRef("stories")) is None


@pytest.mark.skipif(PROGRAM is None, reason="SPECDEMO_MLX_LM names no mlx_lm.server")
def test_a_real_mlx_lm(tmp_path, monkeypatch):
    (tmp_path / "hub").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    out = tmp_path / "trace.json"
    command = ["--engine", "mlx-lm", "--command", PROGRAM, "--max-new-tokens", "24", "--out", str(out)]
    assert main(["run", "embedded-draft", *command]) == 0
    lanes = json.loads(out.read_text(encoding="utf-8"))["lanes"]
    assert lanes[0]["text"] == lanes[1]["text"] and lanes[0]["finish"] == "length"
    assert lanes[1]["remote"]["counters"] == {}  # it reports nothing about drafts
