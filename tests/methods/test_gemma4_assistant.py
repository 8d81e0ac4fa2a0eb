"""Gemma 4 assistants, compared with transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig, GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from specdemo.core.protocol import Budget, Progress
from specdemo.core.protocol import GenerationConfig as Generation
from specdemo.core.sampling import Sampling
from specdemo.engine.loop import generate
from specdemo.methods import detect_method, load_drafter
from specdemo.methods.heads.gemma4_assistant import Gemma4Assistant
from specdemo.methods.pairs import check_pair
from specdemo.models.checkpoints import open_checkpoint
from specdemo.models.ref import ModelRef
from specdemo.models.target import HFTarget
from tests.models.tiny import VOCABULARY, Replayed, build, texts

WINDOW = 6
KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@pytest.fixture(autouse=True)
def shared_layers(monkeypatch):
    """Let transformers 5.23 build an assistant: its check expects a layer with a cache, and assistants have none."""
    modes = Gemma4TextConfig.kv_sharing_modes

    def reuse(config):
        shared = config.num_kv_shared_layers == config.num_hidden_layers
        return ["reuse"] * config.num_hidden_layers if shared else modes.fget(config)

    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(reuse))


@pytest.fixture(scope="module")
def target():
    return HFTarget(build("gemma4"), name="some/gemma-4")


def official(centroids=0, **sizes):
    """Return transformers' assistant with random weights. 61 is a prime, so each centroid has one token."""
    text = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
    text |= {"layer_types": KINDS, "rope_parameters": ROPE, "sliding_window": WINDOW, "num_kv_shared_layers": 4}
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "pad_token_id": 0} | sizes
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**text),
        backbone_hidden_size=32,
        use_ordered_embeddings=bool(centroids),
        num_centroids=centroids or 2048,
        centroid_intermediate_top_k=20,
    )
    torch.manual_seed(5)
    model = Gemma4AssistantForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.7)
    if centroids:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCABULARY))
    return model.requires_grad_(False)


def saved(model, folder, **changes):
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= changes.pop("text_config", {})
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


@torch.no_grad()
def official_draft(assistant, target, text, k):
    """Return tokens [k] and logits [k, V] that transformers drafts after a text whose last token is the root."""
    generation = GenerationConfig(max_length=1000)
    assistant.generation_config.num_assistant_tokens = k
    generator = SinglePositionMultiTokenCandidateGenerator(assistant, target.embed, generation)
    outputs = target.model(text[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=True)
    tokens, logits = generator.get_candidates(text, {}, outputs, False, 0)
    return tokens[0, text.shape[1] :], logits[0]


def draft_after(target, drafter, text, k, committed=None):
    """Return the draft after a text that is read in one pass, or after `committed` tokens and one more pass."""
    drafter.start(1, Sampling(), torch.Generator())
    prompt, rest = text[:, : committed or -1], text[:, committed or -1 : -1]
    hidden = target.start(prompt, (-1,)).hidden
    drafter.observe(Progress(prompt, text[:, 1 : prompt.shape[1] + 1], [prompt.shape[1]], hidden))
    if rest.shape[1]:
        slots = rest.shape[1]
        hidden = target.forward(rest, torch.arange(slots - 1)[None], (-1,)).hidden
        target.commit([list(range(slots))])
        drafter.observe(Progress(rest, text[:, -slots:], [slots], hidden))
    logits, step = [], drafter.head.step
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(drafter.head, "step", lambda *a: logits.append(step(*a)) or logits[-1])
        draft = drafter.propose(Budget(k, k))
    return draft.tokens[0], torch.cat([one for one, _ in logits], 1)[0]


@pytest.mark.parametrize("committed", [None, 3])
@pytest.mark.parametrize("length", [4, 7, 8, 9, 25])
@pytest.mark.parametrize("centroids", [0, VOCABULARY])
def test_drafts_and_logits_are_those_of_transformers(target, tmp_path, length, committed, centroids):
    """Texts within the window, at its edges and beyond; read in one pass, and with a chain after the prompt."""
    assistant = official(centroids)
    drafter = Gemma4Assistant(target, saved(assistant, tmp_path))
    text = texts(1, length + 1, seed=length)
    expected_tokens, expected = official_draft(assistant, target, text, 5)
    tokens, logits = draft_after(target, drafter, text, 5, committed)
    assert tokens.tolist() == expected_tokens.tolist()
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert len(set(logits[0].tolist())) == (21 if centroids else VOCABULARY)  # 20 active tokens and all others


def test_rows_of_a_batch_draft_as_alone(target, tmp_path):
    drafter = Gemma4Assistant(target, saved(official(), tmp_path))
    prompts, steps = texts(2, 9), texts(2, 5, seed=3)
    drafter.start(2, Sampling(), torch.Generator())
    drafter.observe(Progress(prompts, prompts, [9, 9], target.start(prompts, (-1,)).hidden))
    hidden = target.forward(steps, torch.arange(4).expand(2, -1), (-1,)).hidden
    target.commit([[0], [0, 1, 2, 3]])
    drafter.observe(Progress(steps[:, :4], steps[:, 1:], [1, 4], {-1: hidden[-1][:, :4]}))
    tokens = drafter.propose(Budget(4, 4)).tokens
    for row, count in enumerate((1, 4)):
        text = torch.cat([prompts[row], steps[row, : count + 1]])[None]
        assert tokens[row].tolist() == draft_after(target, drafter, text, 4)[0].tolist()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8)])
def test_drafts_of_cuda_graphs_are_the_eager_ones(target, tmp_path, sampling):
    source, recorder = saved(official(VOCABULARY), tmp_path), Replayed()
    config = Generation(30, sampling, budget=Budget(3, 3), stop_token_ids=())
    drafts = []
    for one in (target, HFTarget(target.model, capture=recorder)):
        events = generate(one, Gemma4Assistant(one, source), texts(2, 4), config)
        drafts.append([(event.drafted, event.emitted) for event in events])
        assert one.note == ""
    assert drafts[0] == drafts[1]
    assert recorder.replayed > 20


def test_assistants_of_one_target_have_graphs_of_their_own(target):
    assistants = [Gemma4Assistant.fresh(target) for _ in range(2)]
    config = Generation(12, budget=Budget(3, 3), stop_token_ids=())
    drafts = []
    for one in (target, HFTarget(target.model, capture=Replayed())):
        runs = [generate(one, Gemma4Assistant(one, assistant), texts(1, 4), config) for assistant in assistants]
        drafts.append([[event.drafted for event in run] for run in runs])
    assert drafts[0] == drafts[1] and drafts[0][0] != drafts[0][1]


def test_doctor_reads_the_headers_only(target, tmp_path):
    with torch.device("meta"):
        outline = HFTarget(type(target.model)(target.model.config))
    fit = check_pair(outline, ModelRef(saved(official(VOCABULARY), tmp_path)))
    assert (fit.method, fit.fits) == ("gemma4_assistant", True), fit.reason


def test_saved_assistants_load_in_transformers(target, tmp_path):
    assistant = official(VOCABULARY)
    drafter = Gemma4Assistant(target, Gemma4Assistant.read(open_checkpoint(saved(assistant, tmp_path / "a")), target))
    drafter.save(tmp_path / "b", "some/gemma-4")
    assert detect_method(open_checkpoint(str(tmp_path / "b"))) == "gemma4_assistant"
    loaded, info = Gemma4AssistantForCausalLM.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    text = texts(1, 9)
    expected, found = (official_draft(model.eval(), target, text, 3)[1] for model in (assistant, loaded))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backbone_hidden_size": 48}, "is for hidden size 48, the target has 32"),
        ({"text_config": {"enable_moe_block": True}}, "has enable_moe_block True, which is not supported"),
        ({"text_config": {"layer_types": None}}, "lacks 'layer_types'"),
        ({"text_config": {"layer_types": ["chunked_attention"] * 4}}, "reads the cache of chunked_attention layers"),
        (
            {"text_config": {"rope_parameters": ROPE | {"full_attention": {"rope_type": "yarn"}}}},
            "has rope_type 'yarn', which is not supported",
        ),
        ({"text_config": {"num_attention_heads": 3}}, "3 heads of size 8 in sliding_attention layers, the target's"),
        ({"use_ordered_embeddings": True, "num_centroids": 7}, "has 61 tokens for 7 centroids"),
    ],
)
def test_other_assistants_are_rejected(target, tmp_path, changes, reason):
    with pytest.raises(ValueError, match=reason):
        Gemma4Assistant.load(saved(official(), tmp_path, **changes), target)


def test_other_targets_and_damaged_files_are_rejected(target, tmp_path):
    source = saved(official(), tmp_path)
    with pytest.raises(ValueError, match="reads the cache of sliding_attention layers, the target has all"):
        load_drafter("gemma4_assistant", HFTarget(build("llama")), source)
    with pytest.raises(ValueError, match="reads the target's KV cache, which .* does not support"):
        load_drafter("gemma4_assistant", HFTarget(build("mamba")), source)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "q_norm" not in n}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor model.layers.\d.self_attn.q_norm.weight"):
        load_drafter("gemma4_assistant", target, source)
