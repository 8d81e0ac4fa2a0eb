"""Models that the page offers and accepts."""

import pytest

from specdemo.models.local_models import LocalModel
from specdemo.models.packaged import embedded_folder
from specdemo.models.ref import ModelRef
from specdemo.presets.files import load_presets, preset
from specdemo.presets.runnable import Machine
from specdemo.ui import controls, model_menus
from specdemo.ui.setup import changed, from_values, to_values
from tests.models.test_gguf_files import gguf


def test_options_that_name_models_may_name_those_of_the_list():
    lane = {"method": "router", "model": "stories-draft-wide", "options": {"drafts": "stories-draft-deep, ngram"}}
    assert changed("embedded-draft", {"lanes": [lane]}, False).lanes[0].options["drafts"]
    foreign = lane | {"options": {"drafts": "ngram,evil/model"}}
    with pytest.raises(ValueError, match="'evil/model' is not on this page's list"):
        changed("embedded-draft", {"lanes": [foreign]}, False)
    assert changed("embedded-draft", {"lanes": [foreign]}, True)


def test_a_draft_is_offered_that_fits():
    fitting = ["stories-draft-wide", "stories-draft-deep", "stories-draft-other", "code-draft"]  # the best first
    assert model_menus.fitting_models(ModelRef("stories"), "draft_model") == fitting
    assert "stories-draft-wide" in model_menus.fitting_models(
        ModelRef("stories-bytes"), "draft_model"
    )  # matched by text
    # Not available locally: the models that presets pair with it.
    assert model_menus.fitting_models(ModelRef("Qwen/Qwen3-8B"), "draft_model")
    assert {*model_menus.targets()} == {p.target for p in load_presets().values()}


def test_a_trained_head_is_offered_to_its_method_alone(monkeypatch):
    folder = str(embedded_folder() / "stories-medusa")
    monkeypatch.setattr(model_menus, "TRAINED", [ModelRef(folder)])
    assert folder in model_menus.fitting_models(ModelRef("stories"), "medusa")
    assert folder not in model_menus.fitting_models(ModelRef("stories"), "draft_model")
    assert folder not in model_menus.fitting_models(ModelRef("code"), "medusa")


def test_models_on_this_machine_are_offered_on_private_pages(tmp_path, monkeypatch):
    pair = {"big-Q4_K_M": 640, "small": 64}
    stored = {}
    for name, rows in pair.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(gguf(rows=rows))
        stored[str(path)] = LocalModel(ModelRef(path), "LM Studio", path, 5 * 10**9)
    monkeypatch.setattr(model_menus, "_stored_models", lambda target: stored)
    model_menus._pairs.cache_clear()
    big, small = stored
    assert model_menus.model_choices([big, "stories"]) == [
        ("big-Q4_K_M.gguf — in LM Studio, 5.0 GB", big),
        ("stories", "stories"),
    ]
    assert model_menus.fitting_models(ModelRef(big), "draft_model") == [small] and not model_menus.fitting_models(
        ModelRef(small), "draft_model"
    )
    assert model_menus.model_choices([small], big) == [("small.gguf — 10x smaller, in LM Studio, 5.0 GB", small)]
    assert "not smaller" in model_menus.unfit(ModelRef(small)) and not model_menus.unfit(ModelRef(big))
    changed = to_values(preset("embedded-draft")) | {"target": big, "model-1": small}
    assert from_values(changed).models == (big, small)
    assert controls._chat_looks(ModelRef(big), None)["gguf"]["visible"]
    monkeypatch.setenv("SPECDEMO_PUBLIC", "1")
    assert not controls._chat_looks(ModelRef(big), None)["gguf"]["visible"]
    assert model_menus.model_choices([big]) == [("big-Q4_K_M.gguf", big)]
    with pytest.raises(ValueError, match="is not on this page's list"):
        from_values(changed)


def test_published_drafters_of_a_target_are_offered(monkeypatch):
    model_menus._pairs.cache_clear()
    fitting = model_menus.fitting_models(ModelRef("Qwen/Qwen3-8B"), "dflash")
    assert "deepseek-ai/dspark_qwen3_8b_block7" in fitting and "JetSpec/jetspec-qwen3-8b" in fitting
    assert "published drafters for Qwen/Qwen3-8B" in model_menus.unfit(ModelRef("Qwen/Qwen3-8B"))
    assert "<img" not in model_menus.published(ModelRef("<img src=x>"))
    lane = {"method": "dflash", "model": "deepseek-ai/dspark_qwen3_8b_block7"}
    chosen = preset("qwen3-8b").with_changes(lanes=[lane])
    assert from_values(to_values(chosen)).models == chosen.models
    monkeypatch.setenv("SPECDEMO_PUBLIC", "1")
    with pytest.raises(ValueError, match="is not on this page's list"):
        from_values(to_values(chosen))


def test_a_public_page_reads_no_model_that_a_visitor_names(monkeypatch):
    monkeypatch.setenv("SPECDEMO_PUBLIC", "1")
    monkeypatch.setattr("specdemo.methods.pairs.outline", None)
    assert model_menus.fitting_models(ModelRef("/etc"), "draft_model") == []


def test_targets_are_those_here_then_those_that_fit_and_grey_ones_that_need_more(tmp_path, monkeypatch):
    path = tmp_path / "qwen3-0.6b-q4_k_m.gguf"
    local = LocalModel(ModelRef(path), "its folder", path, 4 * 10**8)
    monkeypatch.setattr(model_menus, "_stored_models", lambda target: {local.name: local})
    monkeypatch.setattr(model_menus, "read_gb_per_s", lambda threads: 20.0)
    machine = Machine(gpu_gb=0.0, logged_in=False, ram_gb=16.0, llamacpp=True)
    for module in ("specdemo.ui.model_menus", "specdemo.presets.runnable"):
        monkeypatch.setattr(f"{module}.this_machine", lambda: machine)
    labels = {name: label for label, name in model_menus.target_choices(ModelRef("stories"))}
    assert [*labels][:2] == ["stories", local.name] and labels[local.name].endswith(" — on this machine, 0.4 GB")
    fits, needs = "Qwen/Qwen3-4B-GGUF:Q4_K_M", "openai/gpt-oss-120b"
    assert labels[fits] == "Qwen3 4B · Q4_K_M — download about 2.4 GB, about 8.3 tokens/s"
    assert labels[needs] == "gpt-oss 120B — not here: needs a GPU with about 70 GB"
    assert [*labels].index(local.name) < [*labels].index(fits) < [*labels].index(needs)
    assert {*labels} == {*model_menus.targets(), local.name}
    monkeypatch.setenv("SPECDEMO_FILES", "0")  # others reach the page
    assert local.name not in {name: label for label, name in model_menus.target_choices(ModelRef("stories"))}
