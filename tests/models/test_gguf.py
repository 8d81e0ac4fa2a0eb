"""A GGUF file, read back by the `gguf` package."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.models.load import load_meta_target
from tests.gguf_export import GGUFVocab, write_gguf

gguf = pytest.importorskip("gguf")
SIZE = 40
WORDS = GGUFVocab([f"t{number}" for number in range(SIZE)], ["t 0"], frozenset({2}), 2)


def llama(**settings):
    config = LlamaConfig(vocab_size=SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, **settings)
    return LlamaForCausalLM(config)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.gguf"


def test_gguf_round_trip(file):
    model = llama(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, rms_norm_eps=1e-5)
    write_gguf(model, WORDS, file)
    read = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in read.fields.items()}
    assert fields["llama.attention.head_count_kv"] == 2 and fields["llama.rope.dimension_count"] == 8
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert fields["tokenizer.ggml.tokens"][7] == "t7" and fields["tokenizer.ggml.eos_token_id"] == 2
    assert [number for number, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == 3] == [2]
    tensors = {tensor.name: torch.tensor(tensor.data) for tensor in read.tensors}
    assert len(tensors) == 3 + 2 * 9
    layer = model.model.layers[1]
    assert tensors["output.weight"].equal(model.lm_head.weight)
    assert tensors["blk.1.attn_v.weight"].equal(layer.self_attn.v_proj.weight)
    keys = tensors["blk.1.attn_k.weight"].view(2, 4, 2, 32)  # the two values that RoPE rotates together are adjacent
    assert keys.transpose(1, 2).reshape(16, 32).equal(layer.self_attn.k_proj.weight)


def test_norms_stay_float32_in_half_precision(file):
    model = llama(num_attention_heads=4, tie_word_embeddings=True).to(torch.bfloat16)
    write_gguf(model, WORDS, file)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert "output.weight" not in tensors and tensors["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    down = tensors["blk.0.ffn_down.weight"]
    assert down.tensor_type == gguf.GGMLQuantizationType.BF16 and list(down.shape) == [48, 32]
    assert torch.tensor(down.data).view(torch.bfloat16).equal(model.model.layers[0].mlp.down_proj.weight)


def test_words_are_those_of_the_tokenizer():
    known = load_meta_target("stories").tokenizer
    words = GGUFVocab.of(known, len(known) + 2)
    assert words.tokens[:-2] == known.convert_ids_to_tokens(list(range(len(known))))
    assert words.tokens[-2:] == [f"[unused {len(known)}]", f"[unused {len(known) + 1}]"]
    assert (
        words.eos_token_id == known.eos_token_id
        and words.eos_token_id in words.special
        and len(words.merges[0].split(" ")) == 2
    )


def test_unsupported_model_is_one_line(file):
    scaled = llama(num_attention_heads=4, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ValueError, match="RoPE scaling"):
        write_gguf(scaled, WORDS, file)
    with pytest.raises(ValueError, match="byte-level BPE"):
        GGUFVocab.of(None, SIZE)
