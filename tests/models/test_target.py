"""Models as targets: for all draft trees and accepted paths, the logits equal those of the plain text."""

import copy
import gc
import weakref

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from specdemo.core.protocol import Budget, GenerationConfig, Target
from specdemo.core.tally import Tally
from specdemo.core.tree import ABSENT, Draft
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.target import HFTarget
from tests.models.tiny import CHAINS, SIZES, TREES, VOCABULARY, Replayed, build, fresh, texts

PROMPT = 13  # longer than every window of the tiny models
TREE = [0, 0, 1, 1, 2, 5, 0, 6]


@pytest.fixture(scope="module", params=TREES)
def tree_target(request):
    return HFTarget(build(request.param))


@pytest.fixture(scope="module", params=CHAINS)
def chain_target(request):
    return HFTarget(build(request.param))


@pytest.fixture(scope="module", params=[*TREES, *CHAINS])
def any_target(request):
    return HFTarget(build(request.param))


@pytest.fixture(scope="module")
def target():
    return HFTarget(build("llama"))


def path_to(slot, parents):
    path = [slot]
    while path[-1]:
        path.append(parents[path[-1] - 1])
    return path[::-1]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4)


def chain(nodes, rows=1):
    return torch.arange(nodes).expand(rows, nodes)


def check_next(target, rows):
    """Feed one more token, and check that every row's logits equal those of its whole text."""
    following = texts(len(rows), 1, seed=99)
    logits = target.forward(following, chain(0, len(rows))).logits
    for slot_logits, text, token in zip(logits, rows, following.tolist(), strict=True):
        close(slot_logits[0], fresh(target.model, text + token))


def keep(target, rows, tokens, path):
    target.commit(path)
    for row, row_tokens, lengths in zip(rows, tokens.tolist(), path, strict=True):
        row += [row_tokens[slot] for slot in lengths]
    assert target.length == [len(row) for row in rows]


@pytest.mark.parametrize("parents", [[], [0, 1, 2, 3], TREE])
def test_every_path_of_a_tree(tree_target, parents):
    prompt, tokens = texts(1, PROMPT), texts(1, len(parents) + 1, seed=1)
    tree_target.start(prompt)
    logits = tree_target.forward(tokens, torch.tensor([parents], dtype=torch.int64)).logits[0]
    for slot, slot_logits in enumerate(logits):
        path = path_to(slot, parents)
        close(slot_logits, fresh(tree_target.model, prompt[0].tolist() + tokens[0, path].tolist()))


def test_rows_may_have_trees_of_their_own(tree_target):
    prompts, tokens = texts(3, PROMPT), texts(3, 5, seed=1)
    trees = [[0, 1, 2, 3], [0, 0, 1, 2], [0, 0, 0, 0]]
    tree_target.start(prompts)
    logits = tree_target.forward(tokens, torch.tensor(trees)).logits
    for row, parents in enumerate(trees):
        for slot in range(5):
            text = prompts[row].tolist() + tokens[row, path_to(slot, parents)].tolist()
            close(logits[row, slot], fresh(tree_target.model, text))


def test_rows_of_a_batch_keep_paths_of_unequal_length(tree_target):
    rows = texts(3, PROMPT).tolist()
    tree_target.start(torch.tensor(rows), reserve=8)  # too little: the history has to grow
    for step, ends in enumerate([(0, 5, 8), (6, 0, 3), (4, 8, 0), (0, 0, 6), (2, 6, 1), (8, 0, 0)]):
        tokens = texts(3, len(TREE) + 1, seed=10 + step)
        logits = tree_target.forward(tokens, torch.tensor([TREE] * 3)).logits
        for row, text in enumerate(rows):
            close(logits[row, 5], fresh(tree_target.model, text + tokens[row, path_to(5, TREE)].tolist()))
        keep(tree_target, rows, tokens, [path_to(end, TREE) for end in ends])
    keep(tree_target, rows, tokens, [[], [], []])
    check_next(tree_target, rows)


def test_row_may_be_empty(any_target):
    rows = texts(2, PROMPT).tolist()
    any_target.start(torch.tensor(rows))
    for width in (1, 2):
        tokens = texts(2, width, seed=width)
        tokens[1] = ABSENT
        any_target.forward(tokens, chain(width - 1, 2), (-1,))
        keep(any_target, rows, tokens, [list(range(width)), []])
    check_next(any_target, rows)


def test_ragged_rows_leave_no_holes(target):
    target.start(texts(2, 10), reserve=40)
    allocated = target.history_bytes
    for _ in range(10):
        target.forward(texts(2, 4), chain(3, 2))
        target.commit([[0, 1, 2], [0]])
    assert target.length == [40, 20]
    assert target.history_bytes == allocated  # 10 + 40 columns: only the longest row counts


def test_crop_forgets_row_by_row(tree_target):
    rows = texts(2, PROMPT).tolist()
    tree_target.start(torch.tensor(rows))
    tokens = texts(2, 6, seed=4)
    tree_target.forward(tokens, chain(5, 2))
    tree_target.commit([[0, 1, 2, 3, 4, 5], [0, 1]])
    tree_target.crop([PROMPT + 2, PROMPT - 3])
    assert tree_target.length == [PROMPT + 2, PROMPT - 3]
    check_next(tree_target, [rows[0] + tokens[0, :2].tolist(), rows[1][:-3]])


def test_absent_slots_have_no_effect(tree_target):
    prompts, tokens = texts(2, PROMPT), texts(2, len(TREE) + 1, seed=5)
    parents = torch.tensor([TREE, TREE])
    tree_target.start(prompts)
    full = tree_target.forward(tokens, parents).logits
    cut = tokens.clone()
    cut[0, [5, 6, 8]] = ABSENT  # a branch of row 0
    cut[1, 1:] = ABSENT
    partly = tree_target.forward(cut, parents).logits
    close(partly[0, [0, 1, 2, 3, 4, 7]], full[0, [0, 1, 2, 3, 4, 7]])
    close(partly[1, 0], full[1, 0])


@pytest.mark.parametrize("steps", [(), (0, 3)])
def test_taps_are_the_hidden_states(tree_target, steps):
    model, prompt = tree_target.model, texts(1, PROMPT)
    last = tree_target.num_layers
    taps = (*range(last), -1)
    hidden = tree_target.start(prompt, taps).hidden
    text = prompt
    for nodes in steps:
        tokens = texts(1, nodes + 1, seed=nodes)
        hidden = tree_target.forward(tokens, chain(nodes), taps).hidden
        tree_target.commit([list(range(nodes + 1))])
        text = torch.cat([text, tokens], 1)
    expected = model(text, output_hidden_states=True, use_cache=False).hidden_states
    for tap in taps:
        close(hidden[tap], expected[tap][:, -hidden[tap].shape[1] :])  # the last ones are normed in transformers too


def test_the_last_layers_tap_is_before_the_norm_and_the_models_hooks_are_gone(target):
    forward = target.start(texts(1, PROMPT), (3, -1))
    close(target.model.model.norm(forward.hidden[3]), forward.hidden[-1])
    close(target.lm_head(forward.hidden[-1][:, -1:]), forward.logits)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.model.modules())


def test_the_context_is_never_exceeded():
    model = build("gpt2")  # learned positions: one too many raises inside the model
    target = HFTarget(model)
    assert target.max_length == 96
    rows = texts(2, 92).tolist()
    target.start(torch.tensor(rows))
    tokens = texts(2, 4, seed=2)
    target.forward(tokens, chain(3, 2))
    keep(target, rows, tokens, [[0, 1, 2], []])
    target.forward(texts(2, 4), chain(3, 2))  # slots beyond the context are unused
    check_next(target, rows)
    target.forward(texts(2, 2), chain(1, 2))
    with pytest.raises(ValueError, match="is 96 tokens, not 97"):
        target.commit([[0, 1], [0]])
    with pytest.raises(ValueError, match="is 96 tokens, not 97"):
        target.start(texts(1, 97))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_kernels_and_precisions(attention, dtype):
    model = build("gemma3").to(dtype)
    model.set_attn_implementation(attention)
    target = HFTarget(model)
    prompt, tokens = texts(1, PROMPT), texts(1, len(TREE) + 1, seed=1)
    target.start(prompt)
    logits = target.forward(tokens, torch.tensor([TREE])).logits[0]
    assert logits.isfinite().all()
    for slot, slot_logits in enumerate(logits):
        expected = fresh(model, prompt[0].tolist() + tokens[0, path_to(slot, TREE)].tolist())
        torch.testing.assert_close(slot_logits, expected, rtol=0, atol=2e-4 if dtype == torch.float32 else 0.3)


def test_release_frees_the_history(target):
    target.start(texts(1, PROMPT))
    assert target.history_bytes > 0
    slab = weakref.ref(target._history.store.slabs[0].keys)
    target.release()
    gc.collect()
    assert slab() is None
    assert target.history_bytes == 0 and target.length == []
    with pytest.raises(ValueError, match="call start"):
        target.forward(texts(1, 1), chain(0))


def test_target_properties():
    model = build("llama")
    model.generation_config.eos_token_id = [2, 5]
    target = HFTarget(model)
    assert isinstance(target, Target)
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (VOCABULARY, 32, 3)
    assert target.stop_token_ids == (2, 5) and target.capabilities.trees
    assert target.embed is model.get_input_embeddings() and target.lm_head is model.get_output_embeddings()
    assert target.weight_bytes == 4 * sum(p.numel() for p in model.parameters())


TURNS = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}<turn>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "stated", "ids"),
    [
        (TURNS, 1, (1, 3)),
        (TURNS, [1, 3], (1, 3)),
        (TURNS, None, (1, 3)),  # stated by the config
        (None, 1, (1,)),  # a text to complete
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", 1, (1,)),
        ("{{ raise_exception('no system prompt') }}", 1, (1,)),
    ],
)
def test_a_text_also_ends_where_the_chat_template_ends_a_turn(template, stated, ids):
    """Copies of chat models state only the token that ends a text."""
    model, words = build("llama"), {"<unk>": 0, "<end>": 1, "<s>": 2, "<turn>": 3, "Hello": 4}
    base = Tokenizer(WordLevel(words, unk_token="<unk>"))
    base.pre_tokenizer = WhitespaceSplit()
    base.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in [*words][:4]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, unk_token="<unk>", eos_token="<end>")
    tokenizer.chat_template = template
    model.generation_config.eos_token_id, model.config.eos_token_id = stated, 1
    target = HFTarget(model, tokenizer, notes=("a note",))
    note = "texts also end at <turn>, where the chat template ends a turn; the model's files name <end>"
    assert target.stop_token_ids == ids
    assert target.notes == (("a note", note) if ids == (1, 3) and stated != [1, 3] else ("a note",))
    assert HFTarget(model, tokenizer, notes=target.notes).notes == target.notes


def test_histories_out_of_reach_are_refused():
    model = RwkvForCausalLM(RwkvConfig(vocab_size=32, hidden_size=16, attention_hidden_size=16, num_hidden_layers=2))
    with pytest.raises(ValueError, match="rwkv model stores its history where it cannot be rolled back"):
        HFTarget(model)


def test_a_state_inside_the_model_is_noticed():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "lru_width": 32, "num_hidden_layers": 3}
    kinds = ["recurrent", "recurrent", "attention"]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_window_size": 6}
    torch.manual_seed(7)
    config = RecurrentGemmaConfig(vocab_size=VOCABULARY, **sizes, **heads, block_types=kinds)
    model = RecurrentGemmaForCausalLM(config)
    with pytest.raises(ValueError, match="a recurrent_gemma model cannot be continued from its cache"):
        HFTarget(model).start(texts(1, PROMPT))


def test_chains_are_checked_where_trees_cannot_be(chain_target):
    assert not chain_target.capabilities.trees
    prompt, tokens = texts(1, PROMPT), texts(1, 5, seed=1)
    close(chain_target.start(prompt).logits[0, 0], fresh(chain_target.model, prompt[0].tolist()))
    logits = chain_target.forward(tokens, chain(4)).logits[0]
    for slot, slot_logits in enumerate(logits):
        close(slot_logits, fresh(chain_target.model, prompt[0].tolist() + tokens[0, : slot + 1].tolist()))


def test_chains_are_replayed_to_any_length(chain_target):
    rows = texts(3, PROMPT).tolist()
    chain_target.start(torch.tensor(rows))
    for step, lengths in enumerate([(5, 1, 0), (2, 5, 3), (0, 4, 1)]):
        tokens = texts(3, 5, seed=step)
        tokens[2, 4:] = ABSENT
        chain_target.forward(tokens, chain(4, 3))
        keep(chain_target, rows, tokens, [list(range(n)) for n in lengths])
    assert chain_target.history_bytes > 0
    check_next(chain_target, rows)


def test_replayed_rows_can_be_cropped(chain_target):
    rows = texts(2, PROMPT).tolist()
    chain_target.start(torch.tensor(rows))
    for step in range(4):
        tokens = texts(2, 1, seed=step)
        chain_target.forward(tokens, chain(0, 2))
        keep(chain_target, rows, tokens, [[0], [0]])
    chain_target.crop([PROMPT + 2, PROMPT - 4])
    check_next(chain_target, [rows[0][: PROMPT + 2], rows[1][: PROMPT - 4]])


def test_replayed_taps(chain_target):
    prompt, tokens = texts(1, PROMPT), texts(1, 3, seed=1)
    chain_target.start(prompt, (-1,))
    hidden = chain_target.forward(tokens, chain(2), (-1,)).hidden[-1]
    text = torch.cat([prompt, tokens], 1)
    close(hidden, chain_target.model(text, output_hidden_states=True, use_cache=False).hidden_states[-1][:, -3:])


def test_a_known_chain_needs_no_reading(target, monkeypatch):
    draft = Draft.chain(torch.tensor([[5, 6, 7]]))
    target.start(texts(1, PROMPT))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", None)
        target.forward(torch.cat([texts(1, 1), draft.tokens], 1), draft.parents)


def drafted(target, rows, layers, length, seed):
    """Feed a chain token by token to the first layers, and check the logits against a model cut off after these
    layers.
    """
    short = copy.deepcopy(target.model)
    decoder = next(m for m in short.modules() if any(isinstance(c, torch.nn.ModuleList) for c in m.children()))
    name, all_layers = next((n, c) for n, c in decoder.named_children() if isinstance(c, torch.nn.ModuleList))
    setattr(decoder, name, all_layers[:layers])
    chain = texts(len(rows), length, seed=seed)
    for end in range(1, length + 1):
        logits = target.early_exit_logits(chain[:, :end], layers)
        for slot_logits, text, new in zip(logits, rows, chain[:, :end].tolist(), strict=True):
            close(slot_logits, fresh(short, text + new))


def test_first_layers_continue_the_cache(tree_target):
    rows = texts(2, PROMPT).tolist()
    tree_target.start(torch.tensor(rows), reserve=2)  # too little: the history has to grow
    for step, path in enumerate([[[0, 1], [0, 1, 2, 3]], [[0], [0, 1]]]):
        drafted(tree_target, rows, 1 + step, 4, seed=step)
        tokens = texts(2, 4, seed=20 + step)
        logits = tree_target.forward(tokens, chain(3, 2)).logits
        for row, text in enumerate(rows):
            close(logits[row, 3], fresh(tree_target.model, text + tokens[row].tolist()))
        keep(tree_target, rows, tokens, path)
    drafted(tree_target, rows, 1, 2, seed=5)
    check_next(tree_target, rows)


def test_the_first_layers_alone_of_a_model_with_device_hooks():
    target = HFTarget(build("llama"))
    target.model.forward = target.model.forward  # as accelerate does: bound to the whole model
    target.start(texts(1, PROMPT))
    drafted(target, texts(1, PROMPT).tolist(), 1, 2, seed=5)


def test_a_model_of_chains_does_not_run_its_first_layers_alone(chain_target):
    chain_target.start(texts(1, PROMPT))
    with pytest.raises(ValueError, match="cannot run only its first layers"):
        chain_target.early_exit_logits(texts(1, 1), 1)


def mixture(name):
    """Return a model of experts with the standard names, and a function that returns its router's logits."""
    torch.manual_seed(3)
    sizes = {**SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    made = {
        "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=6, num_experts_per_tok=2)),
        "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2)),
        "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=6, decoder_sparse_step=1)),
    }
    model = made[name]().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model.requires_grad_(False)


@pytest.mark.parametrize("name", ["olmoe", "mixtral", "qwen3_moe"])
def test_a_pass_returns_the_experts_that_the_router_chose(name):
    model = mixture(name)
    target = HFTarget(model)
    assert target.num_experts == 6
    prompts, following = texts(2, 5), texts(2, 4, seed=1)
    target.start(prompts)
    forward = target.forward(following, torch.arange(3).expand(2, -1), (-1,))
    whole = model(torch.cat([prompts, following], 1), output_router_logits=True, use_cache=False)
    for layer, logits in enumerate(whole.router_logits):
        expected = logits.view(2, 9, 6)[:, 5:].topk(2).indices.sort(-1).values
        assert torch.equal(forward.experts[:, :, layer].sort(-1).values, expected)
    assert forward.experts.shape == (2, 4, 3, 2)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_cuda_graphs_return_the_experts_too():
    model = mixture("olmoe")
    prompts, following = texts(2, 5), [texts(2, 4, seed=seed) for seed in (1, 2, 3)]
    chosen = []
    for target in (HFTarget(model), HFTarget(model, capture=Replayed())):
        target.start(prompts)
        chosen.append([target.forward(tokens, torch.arange(3).expand(2, -1), (-1,)).experts for tokens in following])
    assert target.uses_cuda_graphs and not target.note
    assert all(map(torch.equal, *chosen))


def test_dense_models_have_no_experts(target):
    target.start(texts(1, 5))
    assert target.forward(texts(1, 1), torch.empty(1, 0, dtype=torch.int64)).experts is None
    assert target.num_experts == 0


def test_steps_count_the_experts_that_their_tokens_touched():
    target = HFTarget(mixture("olmoe"))
    seen = []
    forward = target.forward
    target.forward = lambda *a: seen.append((a[0], forward(*a))) or seen[-1][1]
    drafter = load_drafter("layer_skip", target)
    config = GenerationConfig(12, budget=Budget(3, 3), stop_token_ids=())
    prefill, *steps = generate(target, drafter, texts(1, 6), config)
    assert "experts" not in prefill.notes
    for step, (tokens, passed) in zip(steps, seen, strict=True):
        sets = [set(passed.experts[0, :, layer].flatten().tolist()) for layer in range(3)]
        assert step.notes["experts"] == round(sum(map(len, sets)) / 3, 2)
        assert (step.notes["experts_per_token"], step.notes["experts_in_all"]) == (2, 6)
        assert tokens.shape[1] == 1 or step.notes["experts"] > 2
    numbers = Tally.of([prefill, *steps]).numbers()
    assert numbers["experts_touched"] == round(sum(step.notes["experts"] for step in steps) / len(steps), 4)
    plain = generate(target, load_drafter("none", target), texts(1, 6), config)
    assert {step.notes["experts"] for step in plain if step.index} == {2}
    assert "experts_touched" not in Tally.of([prefill]).numbers()
