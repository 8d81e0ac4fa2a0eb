"""Facts about methods: their classes have them, and configs and engines' output name their method."""

import pytest

from specdemo.analysis.work import drafting, method_in, shape
from specdemo.methods import facts_of, method
from specdemo.methods.facts import FACTS, PREDICTED, method_of


@pytest.mark.parametrize("name", FACTS)
def test_class_of_a_method_has_the_facts_of_its_row(name):
    assert method(name).facts is facts_of(name) is FACTS[name] and method(name).title == FACTS[name].title


@pytest.mark.parametrize("name", sorted(FACTS.keys() - PREDICTED.keys()))
def test_adaptive_method_cannot_be_predicted(name):
    with pytest.raises(ValueError, match=f"^method '{name}' drafts adaptively and cannot be predicted; "):
        drafting(name, shape("llama-8b"), {}, {})


@pytest.mark.parametrize(
    "words, name",
    [
        ("EAGLE3", "eagle"),
        ("draft-simple", "draft_model"),
        ("STANDALONE", "draft_model"),
        ("NEXTN", "mtp"),
        ("qwen3_next_mtp", "mtp"),
        ("DSpark", "dflash"),
        ("gemma4_assistant", "gemma4_assistant"),
        ("ngram-simple and draft-eagle3", "eagle"),
        ("ngram-map-k4v", "ngram"),
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


def test_config_without_sizes_is_refused_in_one_line():
    with pytest.raises(ValueError, match="^this config.json lacks the sizes of a drafter for method 'dflash'; choose"):
        drafting("dflash", shape("llama-8b"), {"dflash_config": {"target_layer_ids": 3}}, {})
