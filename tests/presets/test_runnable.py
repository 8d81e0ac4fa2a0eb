"""Presets with hub models: the reason why one cannot run, and the nearest one that can."""

import json

import pytest

from specdemo.presets.files import load_presets
from specdemo.presets.runnable import Machine, nearest_runnable, why_not
from specdemo.ui.setup import about, row_data, to_values

PRESETS = load_presets()
DOWNLOADED = [p for p in PRESETS.values() if not p.embedded and p.server is None]
NONE, SMALL, LARGE = Machine(0, False), Machine(16, False), Machine(85, True, 128, True)


def test_there_are_pairs_for_every_card():
    groups = ["8 GB RAM", "16 GB RAM", "32 GB RAM", "16 GB", "24 GB", "80 GB"]
    assert list(dict.fromkeys(p.group for p in DOWNLOADED)) == groups
    assert all(len([p for p in DOWNLOADED if p.group == g]) >= 5 for g in groups)
    families = {"Qwen/Qwen3", "meta-llama/", "openai/gpt-oss", "google/gemma", "lmsys/vicuna"}
    assert all(any(p.target.startswith(family) for p in DOWNLOADED) for family in families)
    assert {"medusa", "eagle", "draft_model"} <= {m for p in DOWNLOADED if "vicuna" in p.id for m in p.methods}


@pytest.mark.parametrize("chosen", DOWNLOADED, ids=lambda p: p.id)
def test_download_size_is_reported(chosen):
    assert chosen.group and chosen.licence and chosen.memory_gb
    assert chosen.memory_gb < int(chosen.group.split()[0])
    assert chosen.gated == chosen.target.startswith(("meta-llama/", "facebook/", "google/gemma-3"))


def test_unrunnable_preset_reports_the_reason():
    assert why_not(PRESETS["embedded-draft"], NONE) == ""
    assert why_not(PRESETS["qwen3-8b"], NONE) == "it needs a GPU with about 20 GB, and this machine has none"
    assert why_not(PRESETS["qwen3-8b"], SMALL) == "it needs about 20 GB of GPU memory, and this machine has 16"
    assert "meta-llama/Llama-3.1-8B-Instruct is gated: accept its licence" in why_not(
        PRESETS["llama-3.1-8b"], Machine(85, False)
    )
    assert [p.id for p in PRESETS.values() if why_not(p, LARGE)] == []


def test_presets_without_a_gpu():
    for ram, groups in ((16, ("8 GB RAM", "16 GB RAM")), (32, ("8 GB RAM", "16 GB RAM", "32 GB RAM"))):
        able = [p.id for p in DOWNLOADED if not why_not(p, Machine(0, False, ram, True))]
        assert able == [p.id for p in DOWNLOADED if p.group in groups]
    eight = PRESETS["gguf-qwen3-8b-q8-0"]
    assert eight.models == ("Qwen/Qwen3-8B-GGUF:Q8_0", "unsloth/Qwen3-0.6B-GGUF:Q8_0")
    assert why_not(eight, Machine(0, False, 8, True)) == "it needs about 11 GB of memory, and this machine has 8"
    assert why_not(eight, Machine(0, False, 16)) == "it needs llama.cpp: pip install llama-cpp-python gguf"
    assert not why_not(PRESETS["smollm2-1.7b"], Machine(0, False, 8))


def test_nearest_preset_uses_available_models():
    assert nearest_runnable(PRESETS["gpt-oss-20b"], NONE).id == "embedded-code"  # EAGLE and a lookup
    assert nearest_runnable(PRESETS["qwen3-8b"], SMALL).id == "qwen3-8b-4bit"
    assert nearest_runnable(PRESETS["layerskip-1b"], NONE).id == "embedded-layer-skip"
    assert all(nearest_runnable(p, LARGE) == p for p in DOWNLOADED)


def test_page_reports_it(monkeypatch):
    monkeypatch.setattr("specdemo.presets.runnable.this_machine", lambda: NONE)
    data = json.loads(row_data(to_values(PRESETS["embedded-draft"]), ""))
    assert (data["obstacle"], data["instead"]) == ("", None)
    data = json.loads(row_data(to_values(PRESETS["llama-3.1-8b"]), ""))
    assert data["obstacle"] == "This machine cannot run it: it needs a GPU with about 20 GB, and this machine has none."
    assert data["instead"] == ["embedded-draft", "Draft model"]
    assert "about 20 GB of memory, gated: needs a login, Llama 3.1 Community License" in about(PRESETS["llama-3.1-8b"])
