"""EAGLE-3 and DFlash heads as GGUF files: the shipped heads against their own checkpoints, and against llama.cpp's."""

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
from specdemo.models.ref import ModelRef
from specdemo.presets.pair import pair
from tests.gguf_export import GGUFVocab, write_gguf
from tests.gguf_random import write_tensors

SHIPPED = {"eagle3": ("eagle", "stories-eagle-3"), "dflash": ("dflash", "stories-dflash")}
PROMPT = "Once upon a time, there was a little girl named Lily."


def metadata(config, width):
    heads, head_dim = config["num_attention_heads"], config.get("head_dim")
    inner = config.get("dflash_config") or {}
    taps = [tap + 1 for tap in inner["target_layer_ids"]] if inner else config["eagle_aux_hidden_state_layer_ids"]
    return {
        "context_length": 2048,
        "embedding_length": width,
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim or width // heads,
        "attention.value_length": head_dim or width // heads,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_theta"]),
        "target_layers": [*taps],
        **({"block_size": config["block_size"]} if inner else {"target_hidden_size": width}),
    }


def write_head(path, architecture, checkpoint, without=(), **more):
    """Write a head as llama.cpp's converter does."""
    config, tensors = checkpoint.config, {}
    width = checkpoint.tensors["fc.weight"].shape[0]
    for pattern, ours in NAMES[architecture].items():
        for number in range(config["num_hidden_layers"]):
            name, tensor = (
                pattern.replace("N", f"{number}"),
                checkpoint.tensors.get(f"{ours.replace('N', str(number))}.weight"),
            )
            if tensor is None or pattern in without:
                continue
            if architecture == "eagle3" and name.endswith(("attn_q", "attn_k")):  # halves of heads become neighbours
                heads = config["num_attention_heads" if name.endswith("q") else "num_key_value_heads"]
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            tensors[f"{name}.weight"] = tensor.float().contiguous().numpy()
    if "d2t" in checkpoint.tensors:
        offsets = checkpoint.tensors["d2t"].long()
        tensors["d2t"] = (offsets + torch.arange(len(offsets))).numpy()
    mask = (config.get("dflash_config") or {}).get("mask_token_id")
    write_tensors(path, architecture, metadata(config, width) | more, tensors, 2048, mask)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, loaded = tmp_path_factory.mktemp("heads"), load_model("stories", "float32", "cpu", kernels="transformers")
    vocab = GGUFVocab.of(loaded.tokenizer, int(loaded.model.config.vocab_size))
    write_gguf(loaded.model, vocab, folder / "stories.gguf")
    for architecture, (_, head) in SHIPPED.items():
        write_head(folder / f"{architecture}.gguf", architecture, open_checkpoint(head))
    return folder


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder / "stories.gguf"))


@pytest.mark.parametrize("architecture", SHIPPED)
@pytest.mark.parametrize("name", ["stories.gguf", "stories"])
def test_the_file_drafts_as_its_checkpoint(name, architecture, folder):
    target, (method, head) = load_target(str(folder / name) if "." in name else name), SHIPPED[architecture]
    prompt, config = torch.tensor([target.tokenizer.encode(PROMPT)]), GenerationConfig(24, budget=Budget(4, 12))
    drafters = (load_drafter(method, target, each) for each in (str(folder / f"{architecture}.gguf"), head))
    from_file, from_folder = (
        [(event.drafted, event.emitted) for event in generate(target, drafter, prompt, config)] for drafter in drafters
    )
    assert from_file == from_folder and len(from_file) < 20


class LlamaCppHead:
    """A head in llama.cpp. Batches have tokens, states or both."""

    def __init__(self, path, target):
        self.llama, self.functions = library(), state_functions(library())
        self.model = self.llama.llama_model_load_from_file(str(path).encode(), self.llama.llama_model_default_params())
        parameters = self.llama.llama_context_default_params()
        parameters.n_ctx, parameters.ctx_other = 256, target._context._handle
        parameters.type_k = parameters.type_v = 0
        parameters.flash_attn_type = self.llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = self.llama.llama_init_from_model(self.model, parameters)
        self.functions.keep(self.context, True, False)
        self.hidden_size, self.vocab_size = target.hidden_size, target.vocab_size

    def run(self, function, tokens, position, states):
        count = len(tokens if states is None else states)
        number = numpy.zeros(1, numpy.int32)
        arrays = {
            "token": None if tokens is None else numpy.array(tokens, numpy.int32),
            "embd": None if states is None else numpy.ascontiguousarray(states, numpy.float32),
            "pos": numpy.arange(position, position + count, dtype=numpy.int32),
            "n_seq_id": numpy.ones(count, numpy.int32),
            "logits": numpy.ones(count, numpy.int8),
            "seq_id": numpy.full(count, number.ctypes.data, numpy.uintp),
        }
        batch = self.llama.llama_batch()
        batch.n_tokens = count
        for name, values in arrays.items():
            if values is not None:
                setattr(batch, name, ctypes.cast(values.ctypes.data, type(getattr(batch, name))))
        assert function(self.context, batch) == 0

    def states(self, count):
        return numpy.ctypeslib.as_array(self.functions.read(self.context), (count, self.hidden_size)).copy()

    def probs(self, count):
        logits = self.llama.llama_get_logits(self.context)
        return torch.from_numpy(numpy.ctypeslib.as_array(logits, (count, self.vocab_size)).copy()).softmax(-1)

    def eagle3(self, prompt, root, features, depth):
        """Return the most likely tokens of a draft [depth], with their probabilities."""
        self.run(self.llama.llama_encode, None, 0, features)
        states, tokens, position, best = self.states(len(features)), [*prompt[1:], root], 0, []
        for _ in range(depth):
            self.run(self.llama.llama_decode, tokens, position, states)
            position, states = position + len(tokens), self.states(len(tokens))[-1:]
            best.append(self.probs(len(tokens))[-1])
            tokens = [int(best[-1].argmax())]
        return torch.stack(best).max(-1)

    def dflash(self, prompt, root, features, depth):
        self.llama.llama_set_causal_attn(self.context, False)
        self.run(self.llama.llama_decode, None, 0, features)
        block = [root, *[self.llama.llama_vocab_mask(self.llama.llama_model_get_vocab(self.model))] * 7]
        self.run(self.llama.llama_decode, block, len(prompt), None)
        return self.probs(len(block))[1 : 1 + depth].max(-1)

    def free(self):
        self.llama.llama_free(self.context)
        self.llama.llama_model_free(self.model)


@pytest.mark.parametrize(("architecture", "draft_vocabulary"), [("eagle3", False), ("eagle3", True), ("dflash", False)])
def test_the_file_drafts_as_llamacpp(architecture, draft_vocabulary, target, folder):
    path, prompt = folder / f"{architecture}.gguf", target.tokenizer.encode(PROMPT)
    method, head = SHIPPED[architecture]
    if draft_vocabulary:
        path, checkpoint = folder / "cut.gguf", open_checkpoint(head)
        ids = torch.randperm(2048, generator=torch.Generator().manual_seed(0))[:1500].sort().values
        offsets = {"d2t": ids - torch.arange(1500), "lm_head.weight": checkpoint.tensors["lm_head.weight"][ids]}
        write_head(path, architecture, replace(checkpoint, tensors=checkpoint.tensors | offsets))
    options = {"draft": "chain"} if method == "eagle" else {}
    drafter = load_drafter(method, target, str(path), **options)
    forward = target.start(torch.tensor([prompt]), drafter.taps)
    root = int(forward.logits[0, -1].argmax())
    drafter.start(1, Sampling(), torch.Generator())
    inputs, outputs = torch.tensor([prompt]), torch.tensor([[*prompt[1:], root]])
    drafter.observe(Progress(inputs, outputs, [len(prompt)], forward.hidden))
    draft = drafter.propose(Budget(4, 4))
    features = torch.cat([forward.hidden[tap][0] for tap in drafter.head.convention.taps], -1).numpy()
    other = LlamaCppHead(path, target)
    probabilities, tokens = getattr(other, architecture)(prompt, root, features, 4)
    other.free()
    assert draft.tokens[0].tolist() == tokens.tolist()
    assert draft.confidence[0].tolist() == pytest.approx(probabilities.tolist(), abs=1e-3)


def test_it_is_chosen_by_its_header_and_other_files_are_one_line(target, folder, tmp_path):
    for architecture, (method, head) in SHIPPED.items():
        path = str(folder / f"{architecture}.gguf")
        assert [(lane.method, lane.model) for lane in pair(ModelRef(target.name), ModelRef(path)).lanes] == [
            (method, path)
        ]
        assert check_pair(target, ModelRef(path), method).fits
        weights = sum(tensor.numel() for tensor in open_checkpoint(head).tensors.values())
        assert gguf_footprint(ModelRef(path), target.settings).weights == 4 * weights
    bad = tmp_path / "bad.gguf"
    write_head(bad, "eagle3", open_checkpoint("stories-eagle-3"), without=("fc",))
    with pytest.raises(ValueError, match="lacks fc.weight; choose an EAGLE head"):
        load_drafter("eagle", target, str(bad))
    write_head(bad, "dflash", open_checkpoint("stories-dflash"), final_logit_softcapping=30.0)
    with pytest.raises(ValueError, match="has final_logit_softcapping, which specdemo cannot read; run it with: llama"):
        load_drafter("dflash", target, str(bad))
    with pytest.raises(ValueError, match=r"is no eagle3 head \(architecture llama\); choose"):
        load_drafter("eagle", target, target.name)
