"""EAGLE-3 heads as GGUF files: the shipped head against its own checkpoint, and against llama.cpp's own EAGLE-3."""

import ctypes
from dataclasses import replace

import numpy
import pytest
import torch

pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: pip install llama-cpp-python gguf")
pytest.importorskip("gguf")

from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.methods.heads.formats.gguf import NAMES
from specdemo.methods.pairs import check_pair
from specdemo.models.checkpoints import open_checkpoint
from specdemo.models.llamacpp import library
from specdemo.models.llamacpp_layers import state_functions
from specdemo.models.load import load_model, load_target
from specdemo.models.memory import gguf_footprint
from specdemo.presets.pair import pair
from tests.gguf_export import GGUFVocab, write_gguf
from tests.gguf_random import write_tensors

HEAD, HEADS = "stories-eagle-3", ("attn_q", "attn_k")
PROMPT = "Once upon a time, there was a little girl named Lily."


def metadata(config, width):
    heads = config["num_attention_heads"]
    return {
        "context_length": 2048,
        "embedding_length": width,
        "block_count": 1,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim") or width // heads,
        "attention.value_length": config.get("head_dim") or width // heads,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "target_layers": [*config["eagle_aux_hidden_state_layer_ids"]],
        "target_hidden_size": width,
        "norm_before_residual": bool(config.get("norm_before_residual")),
    }


def write_head(path, checkpoint, without=()):
    """Write a head as llama.cpp's converter does."""
    config, tensors = checkpoint.config, {}
    width = checkpoint.tensors["fc.weight"].shape[0]
    for name, theirs in NAMES.items():
        tensor = checkpoint.tensors.get(f"{theirs}.weight")
        if tensor is None or name in without:
            continue
        if name in HEADS:  # halves of each head become neighbours
            heads = config["num_attention_heads" if name == "attn_q" else "num_key_value_heads"]
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        block = "blk.0." if theirs.startswith("midlayer") else ""
        tensors[f"{block}{name}.weight"] = tensor.float().contiguous().numpy()
    if "d2t" in checkpoint.tensors:
        offsets = checkpoint.tensors["d2t"].long()
        tensors["d2t"] = (offsets + torch.arange(len(offsets))).numpy()
    write_tensors(path, "eagle3", metadata(config, width), tensors, 2048)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, loaded = tmp_path_factory.mktemp("heads"), load_model("stories", "float32", "cpu", kernels="transformers")
    vocab = GGUFVocab.of(loaded.tokenizer, int(loaded.model.config.vocab_size))
    write_gguf(loaded.model, vocab, folder / "stories.gguf")
    write_head(folder / "eagle3.gguf", open_checkpoint(HEAD))
    return folder


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder / "stories.gguf"))


@pytest.mark.parametrize("name", ["stories.gguf", "stories"])
def test_the_file_drafts_as_its_checkpoint(name, folder):
    target = load_target(str(folder / name) if name.endswith("gguf") else name)
    prompt, config = torch.tensor([target.tokenizer.encode(PROMPT)]), GenerationConfig(24, budget=Budget(4, 12))
    drafters = (load_drafter("eagle", target, head) for head in (str(folder / "eagle3.gguf"), HEAD))
    from_file, from_folder = (
        [(event.drafted, event.emitted) for event in generate(target, drafter, prompt, config)] for drafter in drafters
    )
    assert from_file == from_folder and len(from_file) < 20


def llamacpp_drafts(path, target, prompt, root, features, depth):
    """Return the greedy draft of llama.cpp's own EAGLE-3 and the probabilities of its tokens. features: [T, 3 H]."""
    llama, functions = library(), state_functions(library())
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    parameters = llama.llama_context_default_params()
    parameters.n_ctx, parameters.ctx_other, parameters.type_k, parameters.type_v = 256, target._context._handle, 0, 0
    parameters.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama.llama_init_from_model(model, parameters)
    functions.keep(context, True, False)

    def run(function, tokens, position, states):
        arrays = {
            "token": None if tokens is None else numpy.array(tokens, numpy.int32),
            "embd": numpy.ascontiguousarray(states, numpy.float32),
            "pos": numpy.arange(position, position + len(states), dtype=numpy.int32),
            "n_seq_id": numpy.ones(len(states), numpy.int32),
            "logits": numpy.ones(len(states), numpy.int8),
        }
        number = numpy.zeros(1, numpy.int32)
        arrays["seq_id"] = numpy.full(len(states), number.ctypes.data, numpy.uintp)
        batch = llama.llama_batch()
        batch.n_tokens = len(states)
        for name, values in arrays.items():
            if values is not None:
                setattr(batch, name, ctypes.cast(values.ctypes.data, type(getattr(batch, name))))
        assert function(context, batch) == 0
        return numpy.ctypeslib.as_array(functions.read(context), (len(states), target.hidden_size)).copy()

    states = run(llama.llama_encode, None, 0, features)
    tokens, position, draft = [*prompt[1:], root], 0, []
    for _ in range(depth):
        states = run(llama.llama_decode, tokens, position, states)
        logits = numpy.ctypeslib.as_array(llama.llama_get_logits(context), (len(tokens), target.vocab_size))[-1]
        probs = torch.from_numpy(logits.copy()).softmax(-1)
        position, states = position + len(tokens), states[-1:]
        tokens = [int(probs.argmax())]
        draft.append((tokens[0], float(probs.max())))
    llama.llama_free(context)
    llama.llama_model_free(model)
    return draft


@pytest.mark.parametrize("draft_vocabulary", [False, True])
def test_the_file_drafts_as_llamacpp(draft_vocabulary, target, folder):
    path, prompt = folder / "eagle3.gguf", target.tokenizer.encode(PROMPT)
    if draft_vocabulary:
        path, checkpoint = folder / "cut.gguf", open_checkpoint(HEAD)
        ids = torch.randperm(2048, generator=torch.Generator().manual_seed(0))[:1500].sort().values
        offsets = {"d2t": ids - torch.arange(1500), "lm_head.weight": checkpoint.tensors["lm_head.weight"][ids]}
        write_head(path, replace(checkpoint, tensors=checkpoint.tensors | offsets))
    drafter = load_drafter("eagle", target, str(path), draft="chain")
    forward = target.start(torch.tensor([prompt]), drafter.taps)
    root = int(forward.logits[0, -1].argmax())
    drafter.start(1, Sampling(), torch.Generator())
    drafter.observe(
        Progress(torch.tensor([prompt]), torch.tensor([[*prompt[1:], root]]), [len(prompt)], forward.hidden)
    )
    draft = drafter.propose(Budget(4, 4))
    features = torch.cat([forward.hidden[tap][0] for tap in drafter.head.convention.taps], -1).numpy()
    expected = llamacpp_drafts(path, target, prompt, root, features, 4)
    assert draft.tokens[0].tolist() == [token for token, _ in expected]
    assert draft.confidence[0].tolist() == pytest.approx([probability for _, probability in expected], abs=1e-3)


def test_it_is_chosen_by_its_header_and_other_files_are_one_line(target, folder, tmp_path):
    path = str(folder / "eagle3.gguf")
    assert [(lane.method, lane.model) for lane in pair(target.name, path).lanes] == [("eagle", path)]
    assert check_pair(target, path, "eagle").fits
    weights = sum(tensor.numel() for tensor in open_checkpoint(HEAD).tensors.values())
    assert gguf_footprint(path, target.settings).weights == 4 * weights
    write_head(tmp_path / "bad.gguf", open_checkpoint(HEAD), without=("fc",))
    with pytest.raises(ValueError, match="lacks fc.weight; choose an EAGLE head"):
        load_drafter("eagle", target, str(tmp_path / "bad.gguf"))
    with pytest.raises(ValueError, match=r"is no EAGLE-3 head \(architecture llama\); choose another head"):
        load_drafter("eagle", target, target.name)
