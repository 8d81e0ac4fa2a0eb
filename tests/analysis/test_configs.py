"""Sizes from config.json alone, against the models that transformers builds from the same configs; device
profiles: the contents of a file, and the shipped ones."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DeepseekV3Config

from specdemo.analysis.configs import drafting, gguf_config, method_in, shape
from specdemo.costs.profiles import Profile, profile, profiles, read_profile, write_profile
from specdemo.costs.roofline import work
from specdemo.costs.shapes import reference_configs, shape_of
from specdemo.methods import facts_of, method
from specdemo.methods.facts import FACTS, method_of
from specdemo.models.gguf_header import Header
from specdemo.models.packaged import embedded_folder
from tests.models import tiny

SMALL = ("conv", "wpe", "bias")


def deepseek_v3():
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16}
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    layers = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
    return AutoModelForCausalLM.from_config(DeepseekV3Config(**sizes, **latent, **layers, **experts))


@pytest.mark.parametrize(("tied", "experts"), [(True, 0), (False, 0), (True, 4)])
def test_sizes_of_a_gguf_file_are_those_of_its_header(tied, experts):
    sizes = {"embedding_length": 32, "block_count": 2, "attention.head_count": 4, "attention.head_count_kv": 2}
    sizes |= {"feed_forward_length": 48, "expert_count": experts, "expert_feed_forward_length": 16 if experts else 0}
    metadata = {"general.architecture": "llama", "tokenizer.ggml.tokens": 61}
    metadata |= {f"llama.{name}": size for name, size in sizes.items()}
    attention, router = 2 * 32 * 32 + 2 * 32 * 16, 32 * experts
    layer = attention + router + (experts * 3 * 32 * 16 if experts else 3 * 32 * 48)
    weights = 2 * layer + 61 * 32 * (1 if tied else 2)
    found = shape_of(gguf_config(Header(metadata, "", 0, 2, weights, weights // 2, {})))
    assert found.parameters == weights and bool(found.embedding) != tied and found.experts == experts
    assert found.bits == found.head_bits == pytest.approx(4.0) and found.weight_bytes(2.0) == pytest.approx(weights / 2)


MADE = {name: getattr(tiny, name) for name in "llama qwen3 gemma3 mistral gpt2 gpt_oss qwen3_next qwen3_5".split()}


@pytest.mark.parametrize("name", [*MADE, "deepseek_v3"])
def test_matrices_are_counted_as_the_model_has_them(name):
    with torch.device("meta"):
        model = (MADE | {"deepseek_v3": deepseek_v3})[name]()
    matrices = {n: p.numel() for n, p in model.named_parameters() if p.ndim > 1 and not any(s in n for s in SMALL)}
    found = shape_of(model.config.to_dict(), name)
    # The gate of a shared expert is one row.
    assert found.parameters == pytest.approx(sum(matrices.values()), rel=0.003)


def test_the_shipped_models_are_known_by_name():
    stories = shape("stories")
    assert stories.parameters == pytest.approx(9.87e6, rel=1e-3)
    assert stories.kv_bytes(1, 4.0) == 2 * 12 * 256 * 4
    assert shape(str(embedded_folder() / "stories")).dense == stories.dense


MOE = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
MOE |= {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 100}


@given(st.integers(1, 64), st.integers(1, 64))
def test_a_batch_touches_more_experts_and_never_more_than_there_are(one, more):
    found = shape_of(MOE)
    assert found.touched(1) == pytest.approx(2)
    assert found.touched(one) <= found.touched(one + more) <= 16
    assert work(found, one, 1, 10, 2.0).bytes <= work(found, one + more, 1, 10, 2.0).bytes


def test_window_bounds_the_kv_cache():
    config = {"model_type": "x", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    config |= {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    found = shape_of(config)
    assert found.kv_bytes(100, 1.0) == 2 * 2 * 64 * (100 + 8)


@pytest.mark.parametrize(
    "config, bits",
    [
        ({"quant_method": "gptq", "bits": 4}, 4.25),
        ({"quant_method": "fp8"}, 8.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.13),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, 8),
        ({"quant_method": "something"}, None),
    ],
)
def test_weight_dtypes(config, bits):
    assert shape_of({**reference_configs()["llama-1b"], "quantization_config": config}).bits == bits


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": 2}, {**MOE, "hidden_size": "large"}])
def test_config_without_sizes_is_refused_in_one_line(config):
    with pytest.raises(ValueError, match=r"the config.json of x lacks the sizes"):
        shape_of(config, "x")


QUANTISED = {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize(
    "change, line",
    [
        ({"quantization_config": QUANTISED | {"config_groups": [1]}}, ""),
        ({"quantization_config": {"quant_method": "gptq", "bits": -5}}, ": bits must be a whole number from 1 to"),
        ({"num_key_value_heads": -1}, ": num_key_value_heads must be a whole number from 1 to 16,777,216, not -1"),
        ({"num_experts": 2, "num_experts_per_tok": 4}, ": its sizes contradict each other"),
        ({"num_hidden_layers": 0}, ": num_hidden_layers must be a whole number from 1"),
        ({"mlp_only_layers": [0, 1, 2]}, ": its sizes contradict each other"),
    ],
)
def test_a_hostile_config_is_refused_in_one_line(change, line):
    with pytest.raises(ValueError) as refused:
        shape_of(MOE | change, "x")
    assert str(refused.value).startswith(f"the config.json of x lacks the sizes of a language model{line}")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


def test_layer_types_of_a_larger_model_count_for_the_layers_there_are():
    config = MOE | {"sliding_window": 8, "layer_types": ["sliding_attention"] * 18, "num_hidden_layers": 1}
    assert [memory.layers for memory in shape_of(config).memory] == [1]


@pytest.mark.parametrize(
    "name, billions",
    [
        ("llama-1b", 1.236),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03),
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.76),
        ("lmsys/vicuna-33b-v1.3", 32.5),
        ("Qwen/Qwen3-30B-A3B", 30.5),
        ("openai/gpt-oss-120b", 116.8),
        ("deepseek-ai/DeepSeek-R1", 671.0),
        ("openbmb/MiniCPM3-4B", 4.07),
    ],
)
def test_well_known_models_have_the_parameters_they_are_known_for(name, billions):
    assert shape(name).parameters / 1e9 == pytest.approx(billions, rel=0.003)


@pytest.mark.parametrize("name", FACTS)
def test_class_of_a_method_has_the_facts_of_its_row(name):
    assert method(name).facts is facts_of(name) is FACTS[name] and method(name).title == FACTS[name].title


@pytest.mark.parametrize(
    "words, name",
    [
        ("EAGLE3", "eagle"),
        ("draft-simple", "draft_model"),
        ("NEXTN", "mtp"),
        ("DSpark", "dflash"),
        ("gemma4_assistant", "gemma4_assistant"),
        ("ngram-simple and draft-eagle3", "eagle"),
        ("lookup", "ngram"),
        ("unheard", ""),
    ],
)
def test_engines_name_of_a_method(words, name):
    assert method_of(words) == name


@pytest.mark.parametrize(
    "config, name",
    [
        ({"model_type": "llama"}, "draft_model"),
        ({"model_type": "qwen3", "pard_token": 151670, "spd_type": "pard"}, "pard"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}, "eagle"),
        ({"architectures": ["DFlashDraftModel"], "block_size": 16}, "dflash"),
        ({"medusa_num_heads": 4}, "medusa"),
        ({"model_type": "mlp_speculator"}, "mlp_speculator"),
        ({"num_nextn_predict_layers": 1}, "mtp"),
        ({"model_type": "gemma4_assistant", "backbone_hidden_size": 1536}, "gemma4_assistant"),
    ],
)
def test_config_names_its_method(config, name):
    assert method_in(config) == name


def test_config_of_a_drafter_without_sizes_is_refused_in_one_line():
    with pytest.raises(ValueError, match="^this config.json lacks the sizes of a drafter for method 'dflash'; choose"):
        drafting("dflash", shape("llama-8b"), {"dflash_config": {"target_layer_ids": 3}}, {})


ONE = {"value": 1.5, "source": "a test"}
LEAST = {
    "name": "a-card",
    "title": "A card",
    "kind": "gpu",
    "memory_gb": ONE,
    "bandwidth_gb_per_s": ONE,
    "compute_tflop_per_s": {"bfloat16": ONE},
}
PASSES = {"model": "llama-1b", "dtype": "bfloat16", "kernels": "fused", "context": 64, "ms": {1: {1: 2.0, 4: 3.0}}}


def test_a_profile_is_read_as_it_was_written(tmp_path):
    made = Profile.model_validate(LEAST | {"passes": [PASSES], "steps": [], "launch_us": ONE})
    write_profile(made, tmp_path / "a.json")
    assert read_profile(tmp_path / "a.json") == made == profile(str(tmp_path / "a.json"))
    assert made.passes[0].v(1) == {1: 1.0, 4: 1.5}


@pytest.mark.parametrize(
    "change, line",
    [
        ({"bandwidth_gb_per_s": {"value": 1.0}}, "bandwidth_gb_per_s.source: Field required"),
        ({"bandwidth_gb_per_s": {"value": 0.0, "source": "x"}}, "bandwidth_gb_per_s.value: Input should be greater"),
        ({"bandwith": ONE}, "bandwith: Extra inputs are not permitted"),
        ({"name": "A card"}, "name: String should match pattern"),
        ({"memory_gb": ONE | {"value": 1e-308}}, "memory_gb.value: Input should be"),
        ({"launch_us": ONE | {"value": 1e308}}, "launch_us.value: Input should be"),
        ({"launch_us": ONE | {"value": float("nan")}}, "launch_us.value: Input should be"),
        ({"passes": [PASSES | {"ms": {"0": {"1": 1.0}}}]}, "passes.0.ms.0"),
    ],
)
def test_invalid_profiles(tmp_path, change, line):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(LEAST | change))
    with pytest.raises(ValueError) as refused:
        read_profile(path)
    assert str(refused.value).startswith(f"{path} is not a profile: {line}")
    assert "\n" not in str(refused.value)


def test_every_number_that_ships_has_a_source():
    assert len(profiles()) >= 12
    for name, one in profiles().items():
        assert one.name == name
        assert one.measured or "datasheet" in one.bandwidth_gb_per_s.source


def test_a_profile_is_bounded_before_it_is_parsed(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(LEAST | {"title": "x" * 300_000}))
    monkeypatch.setattr(Profile, "model_validate_json", None)
    with pytest.raises(ValueError, match="bytes; the limit is 200,000"):
        read_profile(path)
