"""Drafting costs by name: the methods derive from the declared ones, and configs name their method."""

import pytest

from specdemo.analysis.drafts import drafting, method_in
from specdemo.analysis.work import shape
from specdemo.methods import METHODS, method
from specdemo.methods.drafting_cost import ADAPTIVE, DraftingCost


@pytest.mark.parametrize("name", sorted(DraftingCost.declared))
def test_method_derives_from_its_declared_cost(name):
    assert issubclass(method(name), DraftingCost.declared[name])
    assert method(name).title == DraftingCost.declared[name].title


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_method_cannot_be_predicted(name):
    assert name in METHODS
    with pytest.raises(ValueError, match=f"^method '{name}' drafts adaptively and cannot be predicted; "):
        drafting(name, shape("llama-8b"), {}, {})


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
