"""Models that cannot generate, rejected on loading as an object and as a folder; all others load."""

import re

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertGenerationConfig,
    BertGenerationDecoder,
    BertLMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    LlamaModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from specdemo.methods.draft_model import DraftModel
from specdemo.models import fused
from specdemo.models.load import check_model, load_meta_target, load_model, load_target
from tests.models.tiny import CALLED, CHAINS, HYBRIDS, LOOPED, SIZES, TREES, build

BERT = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
NOTE = r"passes after a stored text move \S+% of the .*, transformers' own passes of other widths \S+%"
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BART = {f"{side}_{part}": size for side in ("encoder", "decoder") for part, size in (("layers", 1), ("ffn_dim", 48))}
MAMBA = {"num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4}


def bert(**more):
    return BertLMHeadModel(BertConfig(**BERT, **more))


def bert_generation():
    return BertGenerationDecoder(BertGenerationConfig(**BERT, **TOKENS))


def t5():
    return T5ForConditionalGeneration(T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4))


def bart():
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return BartForConditionalGeneration(BartConfig(vocab_size=61, d_model=32, **BART, **heads))


def modern_bert():
    return ModernBertForMaskedLM(ModernBertConfig(**BERT, **TOKENS, cls_token_id=1, sep_token_id=2))


def jamba(**more):
    return JambaForCausalLM(JambaConfig(**SIZES, **MAMBA, **more))


def gpt_neox():
    """Return a GPT-NeoX model. Its config has is_decoder=False, like an encoder's."""
    return GPTNeoXForCausalLM(GPTNeoXConfig(**BERT, **TOKENS))


def line_of(load, name):
    with pytest.raises(ValueError) as caught:
        load(name)
    line = str(caught.value)
    assert "\n" not in line and "choose" in line
    return line


@pytest.mark.parametrize(
    ("make", "reason", "outlined"),
    [
        (bert, "is an encoder (bert): its predictions depend on later tokens", True),
        (bert_generation, "is an encoder (bert-generation): its predictions depend on later tokens", False),
        (t5, "is an encoder-decoder model (t5)", True),
        (bart, "is an encoder-decoder model (bart)", True),
        (jamba, "cannot generate: transformers fails in a forward pass of this jamba model (", False),
    ],
)
def test_what_cannot_generate_is_refused_as_object_and_folder(tmp_path, make, reason, outlined):
    """outlined: the config alone shows the reason."""
    torch.manual_seed(0)
    model = make()
    assert line_of(load_target, model).startswith(f"{type(model).__name__} {reason}")
    model.save_pretrained(tmp_path)
    for load in (load_target, load_model, *([load_meta_target] if outlined else [])):
        assert line_of(load, str(tmp_path)).startswith(f"{tmp_path} {reason}")


def test_what_cannot_generate_is_no_draft_model_either():
    target = load_target(build("llama"))
    with pytest.raises(ValueError, match="^BertLMHeadModel is an encoder"):
        DraftModel(target, bert())


@pytest.mark.parametrize("size", [2, 4, 7, 61])
def test_an_encoder_is_noticed_with_any_vocabulary_and_an_unknown_text(size):
    torch.manual_seed(0)
    model = BertGenerationDecoder(BertGenerationConfig(**{**BERT, "vocab_size": size}, pad_token_id=0))
    for tokenizer in (None, lambda *_, **__: {"input_ids": [0] * 24}):
        with pytest.raises(ValueError, match="^BertGenerationDecoder is an encoder"):
            check_model("BertGenerationDecoder", model.eval(), tokenizer)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neo", "llama", "qwen3_next"])
@pytest.mark.parametrize("length", [1, 2])
def test_models_with_short_contexts_load(tmp_path, monkeypatch, name, length):
    monkeypatch.setattr("specdemo.models.cpu_plan.thread_counts", lambda: (1, 2))
    config = build(name).config
    config.max_position_embeddings = length
    model = type(build(name))(config)
    model.save_pretrained(tmp_path)
    for given in (model, str(tmp_path)):
        assert load_target(given).max_length == length


def test_logits_that_are_no_numbers_are_named():
    model = build("llama").half()
    model.model.norm.weight *= 60_000.0
    assert line_of(load_target, model).endswith(
        "its logits in float16 are NaN or infinite; choose another dtype or model"
    )


def test_a_type_without_a_causal_model_is_refused(tmp_path):
    modern_bert().save_pretrained(tmp_path)
    for load in (load_target, load_meta_target):
        line = line_of(load, str(tmp_path))
        assert line.startswith(f"{tmp_path} does not generate text: transformers has no causal language model")


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ValueError, match=r"^LlamaModel has no language-model head \(LlamaModel\); load it with Auto"):
        load_target(LlamaModel(build("llama").config))


@pytest.mark.parametrize("name", [*TREES, *CHAINS, *HYBRIDS, *CALLED])
def test_every_kind_of_history_loads_as_object_and_folder(tmp_path, name):
    model = build(name)
    assert load_target(model).model is model
    model.save_pretrained(tmp_path)
    assert (
        load_target(str(tmp_path)).vocab_size == load_meta_target(str(tmp_path)).vocab_size == model.config.vocab_size
    )


@pytest.mark.parametrize("name", LOOPED)
def test_a_model_that_reads_its_cache_in_its_own_way_is_refused(tmp_path, name):
    model = build(name)
    model.save_pretrained(tmp_path)
    for given in (model, str(tmp_path)):
        line = line_of(load_target, given)
        assert "cannot run here: a dory model uses its cache in a way that specdemo's cache does not support (" in line


def test_a_target_whose_layers_forget_is_refused(monkeypatch):
    run, model = fused.FusedLayer.run, build("llama_dynamic")
    monkeypatch.setattr(fused, "_same_output", lambda *_: True)
    fused.fuse_layers(model)
    monkeypatch.setattr(fused.FusedLayer, "run", lambda self, x, rope, mask, _: run(self, x, rope, None, None))
    with pytest.raises(ValueError, match=r"it writes \[\d+\], transformers' layers write \[\d+\]\); choose"):
        load_target(model)


@pytest.mark.parametrize(("share", "told"), [(1e-6, False), (0.02, True)])
def test_a_doubt_is_a_note_and_no_refusal(monkeypatch, share, told):
    """share: of its size by which a layer changes its output in passes after a stored text."""
    run, model = fused.FusedLayer.run, build("llama_dynamic")
    fused.fuse_layers(model)

    def changed(self, x, rope, mask, cache):
        out = run(self, x, rope, mask, cache)
        stored = cache is not None and cache.get_seq_length() > x.shape[1]
        return out * (1.0 + share * torch.randn(out.shape, generator=torch.manual_seed(1))) if stored else out

    monkeypatch.setattr(fused.FusedLayer, "run", changed)
    notes = load_target(model).notes
    assert len(notes) == told
    assert all(re.fullmatch(NOTE, note) and " 0%" not in note for note in notes)


@pytest.mark.parametrize(
    "make", [gpt_neox, lambda: bert(is_decoder=True), lambda: jamba(attn_layer_period=2, attn_layer_offset=1)]
)
def test_similar_models_that_generate_load(tmp_path, make):
    model = make()
    assert load_target(model).model is model
    model.save_pretrained(tmp_path)
    assert load_target(str(tmp_path)).model.config.model_type == model.config.model_type


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_not_mistaken_for_look_ahead(dtype):
    for name in ("llama", "gpt_oss", "qwen3_next"):
        assert load_target(build(name).to(dtype)).dtype == dtype
