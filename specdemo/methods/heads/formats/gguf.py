"""EAGLE-3 and DFlash heads as GGUF files (architectures `eagle3` and `dflash` of llama.cpp), read as their authors'
checkpoints.

llama.cpp turns neighbouring numbers of an EAGLE-3's query and key together, transformers turns halves, so the converter
has permuted the rows of these matrices. Its `d2t` holds ids of the target, not offsets. The layers that a head reads
are counted as transformers' hidden_states.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from specdemo.costs.shapes import Config
from specdemo.methods.heads.formats.eagle import LAYER_IDS
from specdemo.models.checkpoints import Checkpoint
from specdemo.models.gguf_files import check_file, fetch_parts
from specdemo.models.gguf_header import DRAFT, Header
from specdemo.models.llamacpp import read_tensor
from specdemo.models.ref import ModelRef
from specdemo.models.sources import LoadProgress, no_progress

OUTSIDE = {"fc": "fc", "output": "lm_head", "output_norm": "norm", "token_embd": "embed_tokens"}
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAMES: Mapping[str, Mapping[str, str]] = {  # architecture -> name in the file (of layer N: blk.N) -> ours
    "eagle3": {**OUTSIDE, "blk.0.attn_norm_2": "midlayer.hidden_norm"}
    | {f"blk.0.{name}": f"midlayer.{ours}" for name, ours in LAYER.items()},
    "dflash": {**OUTSIDE, "enc.output_norm": "hidden_norm"}
    | {
        f"blk.N.{name}": f"layers.N.{ours}"
        for name, ours in {**LAYER, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}.items()
    },
}
NUMBER = re.compile(r"(?<=^blk\.)\d+")
MASK_TOKEN = "tokenizer.ggml.mask_token_id"
# entries of DFlash files that change the pass; llama-server reads them
UNREAD = (
    "attention.sliding_window attention.scale embedding_scale logit_scale final_logit_softcapping hidden_act".split()
)


def open_head(source: ModelRef, architecture: str, progress: LoadProgress = no_progress) -> Checkpoint:
    """Open a head of an architecture; its weights are dequantised.

    Raises ValueError, one line, for another file, and for tensors and entries that are not read.
    """
    parts = fetch_parts(source, progress)
    header, path = check_file(parts[0], source), parts[0]
    if header.architecture != architecture:
        raise ValueError(
            f"{source} is no {architecture} head (architecture {header.architecture}); choose another head"
        )
    server = DRAFT.format(f"draft-{architecture}").replace("FILE", path.name)
    unread = [key for key in UNREAD if header.metadata.get(f"dflash.{key}") not in (None, 0, 1.0, "silu")]
    tensors: dict[str, Tensor] = {}
    for done, name in enumerate(header.tensors):
        progress(done / len(header.tensors), f"reading {path.name}")
        number = NUMBER.search(name)
        key = (NUMBER.sub("N", name) if architecture == "dflash" else name).removesuffix(".weight")
        if name != "d2t" and key not in NAMES[architecture]:
            unread.append(name)
            continue
        tensor = read_tensor(str(path), name)
        if name == "d2t":
            tensors[name] = tensor - torch.arange(len(tensor))
            continue
        rotated = architecture == "eagle3" and key.endswith(("attn_q", "attn_k"))
        heads = header.layer_sizes["num_attention_heads" if key.endswith("attn_q") else "num_key_value_heads"]
        ours = NAMES[architecture][key].replace("N", number[0] if number else "")
        tensors[f"{ours}.weight"] = _halves(tensor, heads) if rotated else tensor
    if unread:
        raise ValueError(f"{source} has {unread[0]}, which specdemo cannot read; run it with: {server}")
    return Checkpoint(source, _config(header), tensors, (path.name,))


def _halves(matrix: Tensor, heads: int) -> Tensor:
    """Return the rows of a matrix [heads E, X] in the order of transformers, per head the first of all pairs first."""
    rows: Tensor = matrix.unflatten(0, (heads, -1, 2))
    return rows.transpose(1, 2).flatten(0, 2).contiguous()


def _config(header: Header) -> Config:
    """Return the config of a head."""
    kind, metadata = header.architecture, header.metadata
    taps = metadata.get(f"{kind}.target_layers")
    if not isinstance(taps, list) or not header.number("attention.head_count"):
        raise ValueError(f"a head states {kind}.target_layers and attention.head_count; fetch the file again")
    config = {
        "num_attention_heads": header.layer_sizes["num_attention_heads"],
        "rope_theta": float(metadata.get(f"{kind}.rope.freq_base", 10_000.0)),
        "rms_norm_eps": float(metadata.get(f"{kind}.attention.layer_norm_rms_epsilon", 1e-5)),
        "max_position_embeddings": header.number("context_length", 2048),
    }
    if kind == "eagle3":
        return config | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "norm_before_residual": bool(metadata.get("eagle3.norm_before_residual", False)),
            LAYER_IDS: [int(tap) for tap in taps],
            "eagle_config": {LAYER_IDS: [int(tap) - 1 for tap in taps]},
        }
    if MASK_TOKEN not in metadata:
        raise ValueError(f"a DFlash head states {MASK_TOKEN}; fetch the file again")
    return config | {
        "architectures": ["DFlashDraftModel"],
        **header.layer_sizes,
        "num_hidden_layers": header.number("block_count"),
        "block_size": header.number("block_size", 16),
        "dflash_config": {
            "mask_token_id": int(metadata[MASK_TOKEN]),
            "aux_hidden_state_layer_ids": [int(tap) for tap in taps],
            "causal": bool(metadata.get("dflash.attention.causal", False)),
        },
    }
