"""The catalogue of published drafters."""

import json
import re

import pytest

from specdemo.__main__ import main
from specdemo.methods import METHODS
from specdemo.models.ref import ModelRef
from specdemo.presets.drafters import CATALOGUE, all_published, drafts_for, published_drafters
from specdemo.presets.files import load_presets, read_yaml
from tests.models.test_gguf_files import gguf


def test_every_entry_has_a_source_and_a_kind_that_specdemo_reads_or_not():
    entries = all_published()
    assert len(entries) > 60 and len({(e.target, e.drafter) for e in entries}) == len(entries)
    assert all(entry.source.startswith("https://") for entry in entries)
    assert {entry.method for entry in entries} <= {*METHODS, ""}
    named = {"EAGLE-3", "MTP", "DFlash", "DSpark", "GGUF draft model", "draft model", "PARD"}
    assert named <= {entry.kind for entry in entries}


def test_every_entry_states_its_licence_or_that_it_is_unknown():
    entries = read_yaml(CATALOGUE)["drafters"]
    assert [entry["drafter"] for entry in entries if not entry.get("licence")] == []
    assert [entry["drafter"] for entry in entries if "computed" in entry and "gb" not in entry] == []
    assert not [cell for entry in all_published() for cell in entry.row().values() if cell in ("", "?")]


def test_drafters_that_only_other_engines_run_have_no_method():
    entries = {entry.drafter: entry for entry in all_published()}
    speculators, zlab = entries["RedHatAI/Qwen3-8B-speculator.dflash2"], entries["z-lab/Qwen3.8-27B-DFlash2"]
    assert (speculators.method, speculators.row()["engines"]) == ("", "vLLM")
    assert (zlab.method, zlab.row()["engines"]) == ("dflash", "specdemo, vLLM, SGLang, llama.cpp")


@pytest.mark.parametrize("preset", [p for p in load_presets().values() if p.group], ids=lambda p: p.id)
def test_presets_use_published_drafters(preset):
    known = {re.split("[@:]", entry.drafter)[0] for entry in published_drafters(ModelRef(preset.target))}
    assert {re.split("[@:]", lane.model)[0] for lane in preset.lanes if lane.model} <= known


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-8B@main",
        "Qwen/Qwen3-8B-GGUF:Q4_K_M",
        "ollama:qwen3:8b",
        "/models/Qwen3-8B-Q4_K_M.gguf",
        "Qwen3-8B-UD-Q4_K_XL-00001-of-00002.gguf",
        "Qwen3-8B-BF16.gguf",
    ],
)
def test_names_of_one_model(name):
    assert ModelRef(name).base_name == "qwen3-8b"


def test_gguf_drafters_come_first_for_gguf_targets(capsys):
    assert published_drafters(ModelRef("ollama:qwen3:8b"))[0].kind == "GGUF draft model"
    assert published_drafters(ModelRef("Qwen/Qwen3-8B"))[0].kind == "draft model"
    assert main(["drafters", "Qwen/Qwen3-8B", "--json"]) == 0
    rows = {row["drafter"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["z-lab/Qwen3-8B-DFlash-b16"]["trained"] == "without thinking"
    assert rows["Qwen/Qwen3-0.6B"] == {
        "drafter": "Qwen/Qwen3-0.6B",
        "kind": "draft model",
        "size": "1.5 GB",
        "format": "safetensors",
        "licence": "Apache 2.0",
        "engines": "specdemo, vLLM, SGLang, transformers",
        "trained": "unknown",
        "accepted": "unknown",
        "source": "https://github.com/vllm-project/vllm/issues/21278",
    }


@pytest.mark.parametrize(
    ("drafter", "size"),
    [
        ("Qwen/Qwen3-0.6B", "1.5 GB"),
        ("JetSpec/jetspec-qwen3-30b-a3b", "about 1 GB (computed from parameters)"),
        ("AngelSlim/Qwen3-4B_eagle3", "about 0.44 GB (computed from config)"),
        ("nvidia/gpt-oss-120b-Eagle3", "unknown"),
        ("Qwen/Qwen3.5-4B", "in the target"),
    ],
)
def test_sizes_say_whether_they_are_computed(drafter, size):
    assert {entry.row()["size"] for entry in all_published() if entry.drafter == drafter} == {size}


def test_recorded_acceptance_of_embedded_drafters():
    (wide,) = [entry for entry in published_drafters(ModelRef("stories")) if entry.drafter == "stories-draft-wide"]
    assert wide.acceptance.endswith("tokens per step in the recorded run") and wide.source == "preset embedded-draft"
    (head,) = [entry.row() for entry in published_drafters(ModelRef("smollm2")) if entry.drafter == "smollm2-eagle-3"]
    assert [head[name] for name in ("size", "licence", "trained")] == ["0.01 GB", "Apache 2.0", "on 3.8 million tokens"]


@pytest.mark.parametrize("name", ["small.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"])
def test_a_published_drafter_is_recognised(name, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(gguf(general__basename="smollm2", general__size_label="135M", general__name="Other 1B"))
    assert main(["drafters", str(path)]) == 0
    line = "HuggingFaceTB/SmolLM2-135M-Instruct drafts for HuggingFaceTB/SmolLM2-1.7B-Instruct"
    assert line in capsys.readouterr().out
    path.write_bytes(gguf(general__basename="smollm2", general__size_label="360M"))
    assert list(drafts_for(ModelRef(path))) == ([] if name == "small.gguf" else ["HuggingFaceTB/SmolLM2-135M-Instruct"])
    assert drafts_for(ModelRef("unsloth/Qwen3-0.6B-GGUF:Q8_0"))["Qwen/Qwen3-0.6B"][0] == "Qwen/Qwen3-1.7B"
    assert not drafts_for(ModelRef("Qwen/Qwen3.5-9B"))  # a target with its own heads


@pytest.mark.parametrize("command", ["drafters", "doctor"])
def test_rules_for_unknown_targets(command, capsys):
    assert main([command, "ollama:unknown:7b"]) == 0
    out = capsys.readouterr().out
    assert "No drafter of ollama:unknown:7b is in the catalogue" in out and "10 to 20 times smaller" in out
    assert "Targets of the catalogue" not in out
    assert main(["drafters", "Qwen/Qwen3-8B"]) == 0
    found = capsys.readouterr().out
    assert (
        "z-lab/Qwen3-8B-DFlash-b16\n  DFlash, size 2.1 GB, safetensors, licence MIT, trained without thinking;" in found
    )
    assert "unknown" not in found and max(map(len, found.splitlines())) <= 140
    assert main(["drafters", "olmoe"]) == 0
    assert "\nTargets of the catalogue with this name: allenai/OLMoE-1B-7B-0125-Instruct\n" in capsys.readouterr().out
