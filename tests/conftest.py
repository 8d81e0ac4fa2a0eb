import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def tiny_llama():
    """vocabulary size -> a random one-layer Llama, the same every time."""

    def build(vocab_size):
        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=256,
        )
        return LlamaForCausalLM(config).eval()

    return build
