"""EAGLE-3 heads as GGUF files (architecture `eagle3` of llama.cpp), read as checkpoints of their authors.

llama.cpp turns neighbouring numbers of a head's query and key together, transformers turns halves, so the converter has
permuted the rows of these matrices. Its `d2t` holds ids of the target, not offsets.
"""

import re

import torch
from torch import Tensor

from specdemo.core.shapes import Config
from specdemo.methods.heads.formats.eagle import LAYER_IDS
from specdemo.models.checkpoints import Checkpoint
from specdemo.models.gguf_files import check_file, fetch_parts
from specdemo.models.gguf_header import DRAFT, Header
from specdemo.models.llamacpp import read_tensor
from specdemo.models.sources import LoadProgress, no_progress

NAMES = {
    "fc": "fc",
    "output": "lm_head",
    "output_norm": "norm",
    "token_embd": "embed_tokens",
    "attn_norm": "midlayer.input_layernorm",
    "attn_norm_2": "midlayer.hidden_norm",
    "ffn_norm": "midlayer.post_attention_layernorm",
    "attn_q": "midlayer.self_attn.q_proj",
    "attn_k": "midlayer.self_attn.k_proj",
    "attn_v": "midlayer.self_attn.v_proj",
    "attn_output": "midlayer.self_attn.o_proj",
    "ffn_gate": "midlayer.mlp.gate_proj",
    "ffn_up": "midlayer.mlp.up_proj",
    "ffn_down": "midlayer.mlp.down_proj",
}
TENSOR_NAME = re.compile(r"(?:blk\.0\.)?(\w+)\.weight")


def open_eagle(source: str, progress: LoadProgress = no_progress) -> Checkpoint:
    """Open a head; its weights are dequantised.

    Raises ValueError, one line, for another file, and for tensors that are not read: scaled positions, norms of fc.
    """
    parts = fetch_parts(source, progress)
    header, path = check_file(parts[0], source), parts[0]
    if header.architecture != "eagle3":
        raise ValueError(f"{source} is no EAGLE-3 head (architecture {header.architecture}); choose another head")
    tensors: dict[str, Tensor] = {}
    for done, name in enumerate(header.tensors):
        progress(done / len(header.tensors), f"reading {path.name}")
        stored = TENSOR_NAME.fullmatch(name)
        if name != "d2t" and (stored is None or stored[1] not in NAMES):
            server = DRAFT.format("draft-eagle3").replace("FILE", path.name)
            raise ValueError(f"{source} has {name}, which specdemo cannot read; run it with: {server}")
        tensor = read_tensor(str(path), name)
        if stored is None:
            tensors[name] = tensor - torch.arange(len(tensor))
        else:
            heads = header.number("attention.head_count" if stored[1] == "attn_q" else "attention.head_count_kv")
            rotated = stored[1] in ("attn_q", "attn_k")
            tensors[f"{NAMES[stored[1]]}.weight"] = _halves(tensor, heads) if rotated else tensor
    return Checkpoint(source, _config(header), tensors, (path.name,))


def _halves(matrix: Tensor, heads: int) -> Tensor:
    """Return the rows of a matrix [heads E, X] in the order of transformers, per head the first of all pairs first."""
    rows: Tensor = matrix.unflatten(0, (heads, -1, 2))
    return rows.transpose(1, 2).flatten(0, 2).contiguous()


def _config(header: Header) -> Config:
    """Return the config of a head, with the layers that it reads counted as transformers' hidden_states."""
    taps, metadata = header.metadata.get("eagle3.target_layers"), header.metadata
    if not isinstance(taps, list) or not header.number("attention.head_count"):
        raise ValueError("an EAGLE-3 head states eagle3.target_layers and attention.head_count; fetch the file again")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_attention_heads": header.number("attention.head_count"),
        "rope_theta": float(metadata.get("eagle3.rope.freq_base", 10_000.0)),
        "rms_norm_eps": float(metadata.get("eagle3.attention.layer_norm_rms_epsilon", 1e-5)),
        "max_position_embeddings": header.number("context_length", 2048),
        "norm_before_residual": bool(metadata.get("eagle3.norm_before_residual", False)),
        LAYER_IDS: [int(tap) for tap in taps],
        "eagle_config": {LAYER_IDS: [int(tap) - 1 for tap in taps]},
    }
