"""Compatibility of drafters and targets, from configs and file headers only."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.corpus import train_tokenizer
from specdemo.__main__ import main
from specdemo.bench import quality
from specdemo.methods import model_method
from specdemo.methods.pairs import check_pair, check_pairs, outline
from specdemo.models.load import load_meta_target
from specdemo.models.packaged import EMBEDDED, embedded_folder
from specdemo.models.ref import ModelRef
from specdemo.presets.drafters import drafters_of
from specdemo.presets.files import load_presets, preset, thinking_remarks
from tests.models.fake_hub import serve

BYTES = ("stories-bytes", "stories-bytes-heads")  # a separate target and its heads
OF_SMOLLM2 = {"smollm2-eagle-3": "eagle", "smollm2-mlp-speculator": "mlp_speculator"}


@pytest.fixture(scope="module")
def stories():
    return load_meta_target("stories")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """Save a target with the same tokenizer and half the width, and return its folder."""
    folder = tmp_path_factory.mktemp("narrow")
    save(folder, PreTrainedTokenizerFast.from_pretrained(ModelRef("stories").path), 2048)
    return str(folder)


def save(folder, tokenizer, vocab_size):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes)).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def test_all_that_ships_fits_its_target(stories):
    pairs = drafters_of(ModelRef("stories"), stories)
    assert {pair.drafter for pair in pairs} == {*EMBEDDED} - {"stories", "stories-bytes", "code"}
    assert {pair.drafter for pair in pairs if not pair.fits} == {
        "stories-bytes-heads",
        "code-eagle-1",
        *OF_SMOLLM2,
    }
    # The reader of the file is not given.
    assert all(
        check_pair(stories, ModelRef(name)).fits
        for name in EMBEDDED
        if name not in (*BYTES, "code", "code-eagle-1", *OF_SMOLLM2)
    )
    assert "hidden size 128" in check_pair(stories, ModelRef("stories-bytes-heads")).reason
    assert check_pair(load_meta_target("stories-bytes"), ModelRef("stories-bytes-heads")).fits
    code = check_pair(
        load_meta_target("code"), ModelRef("stories-mtp")
    )  # the same width, and a config without a target
    assert code.reason == "stories-mtp is for vocabulary 2048, the target has 4096; choose the target stories"


def test_mismatched_head_reports_the_reason(narrow):
    lanes = [lane for one in load_presets().values() for lane in one.lanes if lane.model and lane.model.embedded]
    known = [(model_method(lane.method, lane.options), lane.model) for lane in lanes]
    pairs = check_pairs(load_meta_target(narrow), known)
    listed = drafters_of(ModelRef(narrow))[:5]
    assert {*listed} == {replace(pair, place="embedded") for pair in pairs if pair.fits}
    assert [fit.shares_text for fit in listed] == sorted(fit.shares_text for fit in listed)  # another vocabulary last
    fits = {pair.drafter for pair in pairs if pair.fits}
    assert fits == {"stories-draft-wide", "stories-draft-deep", "stories-draft-other", "code-draft"}
    assert [pair.fits for pair in pairs] == sorted((pair.fits for pair in pairs), reverse=True)
    reasons = [pair.reason for pair in pairs if not pair.fits]
    assert len(reasons) == 10 and not any("\n" in reason for reason in reasons)
    assert sum("128" in reason for reason in reasons) == 9
    assert "stories-bytes-heads is for vocabulary 257, the target has 2048; choose the target stories-bytes" in reasons


def test_tokenizers_are_compared_by_vocabulary_and_by_what_they_do(stories, tmp_path):
    shipped = PreTrainedTokenizerFast.from_pretrained(ModelRef("stories").path)
    save(tmp_path / "padded", shipped, 2048 + 64)
    padded = check_pair(stories, ModelRef(tmp_path / "padded"))
    assert padded.fits and padded.reason == "same tokenizer; vocabulary 2112, the target's is 2048, the rest is padding"
    save(tmp_path / "other", PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(["other words"])), 2048)
    other = check_pair(stories, ModelRef(tmp_path / "other"))
    assert other.fits and re.match(
        r"shares \d+ % of the target's tokens, \d+ % of its own; another tokenizer: .* tokens differ",
        other.reason,
    )
    nested = check_pair(stories, ModelRef(tmp_path / "other"), "cascade")
    assert nested.fits is False and "choose a draft model of the same family" in nested.reason
    save(tmp_path / "merges", shipped, 2048)
    file = tmp_path / "merges" / "tokenizer.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    described["model"]["merges"] = described["model"]["merges"][:40]
    file.write_text(json.dumps(described), encoding="utf-8")
    pair = check_pair(stories, ModelRef(tmp_path / "merges"))
    assert pair.reason.startswith(
        "shares 100 % of the target's tokens, 100 % of its own; another tokenizer: 'Once upon a time, there ' has"
    )
    save(tmp_path / "mute", None, 512)
    assert "has a vocabulary of 512, stories one of 2048" in check_pair(stories, ModelRef(tmp_path / "mute")).reason


def test_positions_are_compared(stories, tmp_path):
    folder = tmp_path / "short"
    shutil.copytree(ModelRef("stories-draft-wide").path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 96}))
    pair = check_pair(stories, ModelRef(folder))
    assert pair.fits and pair.reason.endswith("reads 96 tokens, the target 512: it drafts nothing after them")
    assert "drafts nothing" not in check_pair(stories, ModelRef("stories-draft-wide")).reason


def test_the_format_is_checked_too(stories, tmp_path):
    shutil.copytree(ModelRef("stories-eagle-3").path, tmp_path / "head")
    for file in (tmp_path / "head").glob("*.safetensors*"):
        file.unlink()
    tensors = {}
    for file in sorted(ModelRef("stories-eagle-3").path.glob("*.safetensors")):
        tensors |= load_file(file)
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    pair = check_pair(stories, ModelRef(tmp_path / "head"))
    assert (pair.fits, pair.method) == (False, "eagle") and "lacks fc.weight" in pair.reason
    save_file({"a": torch.zeros(2)}, tmp_path / "head" / "model.safetensors")
    assert "is no speculator known here" in check_pair(stories, ModelRef(tmp_path / "head"), None).reason


def test_hub_drafters_are_recognised_by_their_header(stories, monkeypatch, tmp_path):
    files = {file.name: file.read_bytes() for file in ModelRef("stories-eagle-3").path.iterdir() if file.is_file()}
    pickled = {"config.json": b"{}", "medusa_lm_head.pt": b"x"}
    with serve({"org/head": files, "org/pickled": pickled}, monkeypatch, tmp_path) as server:
        assert check_pair(stories, ModelRef("org/head")).fits
        read = [(file, byte_range) for file, byte_range in server.requests if file.endswith(".safetensors")]
        assert read and all(byte_range for _, byte_range in read)
        candidates = {"org/pickled": "medusa", "org/none": "eagle", "org/head": "eagle"}
        pairs = check_pairs(stories, [(name, ModelRef(drafter)) for drafter, name in candidates.items()])
    assert [(pair.drafter, pair.fits) for pair in pairs] == [
        ("org/head", True),
        ("org/none", None),
        ("org/pickled", None),
    ]
    assert "download it to inspect them" in pairs[2].reason


def test_the_command_line_prints_a_table(narrow, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quality, "NEW_TOKENS", 24)
    assert main(["doctor", "stories", "stories-medusa"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["stories-medusa", "medusa", "fits"]
    assert re.fullmatch(r"memory +with stories-medusa: target .* MB, drafter .*; fits into the free .* GB", lines[3])
    (row,) = [line.split() for line in lines if line.startswith("story")]
    shares = [int(share) for share in row[1:-1:2]]
    assert shares == sorted(shares, reverse=True) and 30 < shares[0] < 60 and float(row[-1]) > 1.5
    assert not lines[lines.index(next(line for line in lines if line.startswith("all"))) + 1 :]  # nothing is wrong
    assert main(["doctor", narrow, "stories-medusa"]) == 2
    assert "no  stories-medusa is for hidden size 256 and vocabulary 2048" in capsys.readouterr().out
    assert main(["doctor", narrow]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 8
    assert not [line for line in lines if "stories-bytes-heads" in line]  # it is for another of the shipped models
    save(tmp_path, None, 512)
    assert main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path} has no tokenizer, so it does not run; put its tokenizer.js")
    assert main(["doctor", "storys"]) == 2
    assert "did you mean 'stories'" in capsys.readouterr().err


def test_files_of_llama_cpp_are_compared_by_their_vocabularies(smollm2_gguf, smollm2_folder, capsys):
    file, folder = outline(ModelRef(smollm2_gguf)), load_meta_target(smollm2_folder)
    for target, draft in ((file, smollm2_folder), (folder, smollm2_gguf)):
        pair = check_pair(target, ModelRef(draft))
        assert pair.fits and "same tokenizer" in pair.reason
    assert main(["doctor", smollm2_gguf]) == 0
    rows = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["none", "ngram", "fits"] in rows
    for head, method in OF_SMOLLM2.items():
        assert [head, method, "fits"] in rows
        assert check_pair(folder, ModelRef(head)).fits and check_pair(file, ModelRef(head)).fits
        named = {(fit.method, fit.drafter) for fit in drafters_of(ModelRef(smollm2_folder))}
        assert (method, head) in named  # it ships with a preset of another name


def test_what_is_wrong_with_a_head_is_named(tmp_path, capsys, monkeypatch):
    """Its second head says nothing, its first has the target's output rows, and its context is short."""
    monkeypatch.setattr(quality, "NEW_TOKENS", 40)
    folder = tmp_path / "head"
    shutil.copytree(embedded_folder() / "stories-medusa", folder)
    (file,) = [one for one in folder.glob("*.safetensors") if "lm_heads.1.weight" in load_file(one)]
    tensors = load_file(file)
    save_file(tensors | {"lm_heads.1.weight": torch.zeros_like(tensors["lm_heads.1.weight"])}, file)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"max_position_embeddings": 64, "sliding_window": 32, "use_sliding_window": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert main(["doctor", "stories", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "no draft token after position 1 is accepted: 4" in shown
    assert "max_position_embeddings is 64, and the target reads 512: later drafts may be worse." in shown
    assert "sliding_window" not in shown
    assert "lm_heads.1.weight is zero everywhere, as if it had not been trained." in shown


def test_head_with_a_damaged_config_does_not_fit(stories, tmp_path):
    shutil.copytree(embedded_folder() / "stories-medusa", tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "head" / "config.json").write_text(json.dumps(config | {"architectures": True}), encoding="utf-8")
    pair = check_pair(stories, ModelRef(tmp_path / "head"))
    assert pair.fits is False and "cannot be read" in pair.reason


def test_a_drafter_of_one_thinking_mode_is_named(stories, monkeypatch):
    known = preset("embedded-medusa").with_changes(thinking="off", lanes=[{"method": "medusa", "model": "org/head@1"}])
    monkeypatch.setattr("specdemo.presets.files.load_presets", lambda: {known.id: known})
    (line,) = thinking_remarks(ModelRef("stories"), [ModelRef("org/head"), ModelRef("stories-eagle-1")], stories)
    assert line.startswith("thinking: preset embedded-medusa runs org/head with --thinking off")
    assert thinking_remarks(ModelRef("other"), [ModelRef("org/head")], stories) == []
    monkeypatch.setattr(stories.tokenizer, "chat_template", "{{ 'on' if thinking else 'off' }}")
    assert "bench thinking" in thinking_remarks(ModelRef("other"), [], stories)[0]
