"""Models in memory: the most recently used ones within a budget, all freed with the session."""

import json
import os
import shutil
import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.engine import session as engine
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.messages import Note
from specdemo.engine.session import Session
from specdemo.models import load, memory
from specdemo.models.errors import Cancelled
from specdemo.presets.files import preset
from tests.gpu.device import pretended
from tests.models.test_text import byte_level

MEGABYTES = 4  # size of each model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    tokenizer = byte_level()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    made = []
    for seed in range(3):
        torch.manual_seed(seed)
        path = tmp_path_factory.mktemp(f"model-{seed}")
        LlamaForCausalLM(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
        made.append(str(path))
    return made


def spec(target, *lanes, **changes):
    settings = {"prompt": "Once upon a time", "max_new_tokens": 4, **changes}
    return Comparison(id="test", target=target, lanes=[*lanes] or [Lane(method="ngram")], **settings)


def names(session):
    return [Path(name).name[:7] for name, _ in session.loaded()]


def resident():
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def test_models_stay_until_others_need_the_room(folders):
    a, b, c = folders
    one = memory.estimate_footprint(Path(a), memory.Precision(torch.float32)).weights
    session = Session(budget_bytes=int(2.5 * one))
    session.load(spec(a))
    first = weakref.ref(session._models[session._target].model.model)
    session.load(spec(b))
    assert names(session) == ["model-1", "model-0"]
    session.load(spec(a))
    assert names(session) == ["model-0", "model-1"] and first() is session._models[session._target].model.model
    session.load(spec(c))  # b is the least recently used
    assert names(session) == ["model-2", "model-0"]
    assert all(size == one for _, size in session.loaded())


def test_unloading_a_target_unloads_its_drafters(folders):
    a, b, c = folders
    session = Session(budget_bytes=1)
    session.load(spec(a, Lane(method="online", model=b, options={"drafter": "draft_model"})))
    assert names(session) == ["model-0", "model-1"]
    references = [weakref.ref(loaded.model.model) for loaded in session._models.values()]
    session.load(spec(c))
    assert names(session) == ["model-2"]
    assert [ref() for ref in references] == [None, None]
    session.unload()
    assert session.loaded() == [] and not session._learners


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's count of memory")
def test_switches_leak_no_memory(folders):
    session = Session(budget_bytes=1)
    seen = []
    for switch in range(20):
        draft = Lane(method="ngram") if switch % 5 else Lane(method="draft_model", model=folders[(switch + 1) % 3], k=2)
        session.load(spec(folders[switch % 3], draft))
        seen += [weakref.ref(loaded.model.model) for loaded in session._models.values()]
        if switch == 5:
            before = resident()
    assert resident() - before < 10 * MEGABYTES  # 14 switches load about 66 MB
    session.unload()
    assert [ref for ref in seen if ref() is not None] == []


def test_models_that_do_not_fit_together_are_rejected_before_loading(folders, monkeypatch):
    a, b, _ = folders
    need = memory.estimate_footprint(Path(a), memory.Precision(torch.float32)).weights
    monkeypatch.setattr("specdemo.models.memory.free_bytes", lambda where: [int(1.5 * need)])
    monkeypatch.setattr(engine, "load_model", None)
    with pytest.raises(ValueError, match=f"^{a} with {b} needs about 7.2 MB in float32, .* smaller model$"):
        Session().load(spec(a, Lane(method="draft_model", model=b)))


def test_auto_is_bfloat16_where_a_run_does_not_fit_in_float32(folders, tmp_path, monkeypatch):
    copied = shutil.copytree(folders[0], tmp_path / "model")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    need = memory.estimate_footprint(copied, memory.Precision(torch.float32)).weights
    for module in (memory, engine, load):
        monkeypatch.setattr(module, "free_bytes", lambda where: [int(0.9 * need)])
    session = Session()
    run = spec(str(copied)).changed(dtype="auto")
    assert "does not fit" not in session.memory(run)
    session.load(run)
    assert session.target().dtype == torch.bfloat16
    with pytest.raises(ValueError, match="needs about .* in float32"):
        Session().load(run.changed(dtype="float32"))


def test_graph_memory_is_counted_before_loading():
    run, little = (
        preset("embedded-draft").with_changes(device="cuda:0"),
        (300 << 20, 300 << 20),
    )  # enough for the models
    with (
        pretended(),
        patch.object(torch.cuda, "mem_get_info", lambda device=None: little),
        pytest.raises(ValueError, match="choose quantization 4bit or a smaller model"),
    ):
        Session().place_models(run)


def test_loading_can_be_cancelled(folders):
    session = Session()
    calls = []
    with pytest.raises(Cancelled, match="^stopped while "):
        list(session.stream(spec(folders[0]), cancelled=lambda: len(calls) > 1 or calls.append(1)))
    assert not session.lock.locked() and session.loaded() == []
    assert session.run(spec(folders[0])).lanes[1].finish == "length"


def test_model_on_several_devices_is_reported(folders, monkeypatch):
    session = Session()
    monkeypatch.setattr(engine, "device_map_summary", lambda model: "cuda:0: embed_tokens; cpu: lm_head")
    messages = list(session.stream(spec(folders[0])))
    notes = [m for m in messages if isinstance(m, Note)]
    assert notes[0].lane is None and "does not fit into one device: cuda:0: embed_tokens" in notes[0].text
    assert messages[-1].trace.notes == [notes[0].text]
