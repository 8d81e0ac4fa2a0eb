import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling, to_probs
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.methods.heads import conventions
from specdemo.methods.heads.eagle import Eagle
from specdemo.methods.heads.formats.eagle import default_taps
from specdemo.models import packed as module
from specdemo.models.checkpoints import open_checkpoint
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from tests.generation import rows_of, train
from tests.models.tiny import VOCABULARY, build, texts

H, LAYERS, WORDS = 32, 3, 20  # sizes of the tiny Llama, and of the draft vocabulary
IDS = torch.arange(WORDS) * 3 + torch.arange(WORDS) % 2  # target ids of the draft vocabulary
LAYER = {"num_attention_heads": 4, "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY, "hidden_act": "silu"}
ID_LIST = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target():
    return HFTarget(build("llama"), name="tiny")


# --- reference: the head computed column by column without a cache ---


def norm(x, weight, eps=1e-5):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def rope(x, theta):
    """Apply RoPE to x [n, heads, size]."""
    angles = torch.arange(len(x))[:, None] * theta ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def decoder_layer(w, name, x, residual, theta, blind):
    q, k, v = (linear(w, f"{name}.self_attn.{p}_proj", x) for p in "qkv")
    q, k, v = q.unflatten(-1, (4, -1)), k.unflatten(-1, (2, -1)), v.unflatten(-1, (2, -1))
    if f"{name}.self_attn.q_norm.weight" in w:
        q, k = norm(q, w[f"{name}.self_attn.q_norm.weight"]), norm(k, w[f"{name}.self_attn.k_norm.weight"])
    q, k = rope(q, theta), rope(k, theta).repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    seen = torch.einsum("hqk,khd->qhd", scores.masked_fill(blind, -math.inf).softmax(-1), v.repeat_interleave(2, 1))
    state = residual + linear(w, f"{name}.self_attn.o_proj", seen.flatten(1))
    y = norm(state, w[f"{name}.post_attention_layernorm.weight"])
    gated = F.silu(linear(w, f"{name}.mlp.gate_proj", y)) * linear(w, f"{name}.mlp.up_proj", y)
    return state + linear(w, f"{name}.mlp.down_proj", gated)


class EagleReference:
    """A head computed column by column without a cache. w: tensors by their names in the file."""

    def __init__(self, target, w, taps=(-1,), before=False, feed_norm=False, theta=1e4, window=0, mask=None):
        self.mask = mask
        self.target, self.taps, self.before, self.feed_norm, self.theta = target, taps, before, feed_norm, theta
        self.window = window
        self.w = {name.replace("midlayer.", "layers.0."): t for name, t in w.items()}
        self.eagle1 = "layers.0.hidden_norm.weight" not in w and "midlayer.hidden_norm.weight" not in w

    def features(self, text):
        states = []
        handle = self.target.model.model.layers[-1].register_forward_hook(lambda *call: states.append(call[2][0]))
        every = [h[0] for h in self.target.model(torch.tensor([text]), output_hidden_states=True).hidden_states]
        handle.remove()
        every[-1:] = [states[0], every[-1]]  # transformers returns the last layer's output only after the norm
        return self.join([every[tap] for tap in self.taps])

    def join(self, taken):
        if self.eagle1:
            return taken[0]
        if "fc_norm.0.weight" in self.w:
            taken = [norm(h, self.w[f"fc_norm.{i}.weight"]) for i, h in enumerate(taken)]
        joined = torch.cat(taken, -1)
        if "input_norm.weight" in self.w:
            joined = norm(joined, self.w["input_norm.weight"])
        return linear(self.w, "fc", joined)

    def states(self, tokens, features, observed):
        """Return states [n, D] for the next tokens [n] and features [n, D]. Drafted columns see what the last observed
        one sees.
        """
        w, every = self.w, torch.arange(len(tokens))
        blind = every > every[:, None]
        if self.window:
            blind |= every <= every.clamp_max(observed - 1)[:, None] - self.window
        own = None if self.eagle1 else w.get("embed_tokens.weight")
        embedded = (self.target.embed.weight if own is None else own)[torch.tensor(tokens)]
        if self.eagle1:
            x = state = linear(w, "fc", torch.cat([embedded, features], -1))
            return decoder_layer(w, "layers.0", x, state, self.theta, blind)
        normed = norm(features, w["layers.0.hidden_norm.weight"])
        x = torch.cat([norm(embedded, w["layers.0.input_layernorm.weight"]), normed], -1)
        state = decoder_layer(w, "layers.0", x, normed if self.before else features, self.theta, blind)
        if "layers.1.input_layernorm.weight" in w:
            x = norm(state, w["layers.1.input_layernorm.weight"])
            state = decoder_layer(w, "layers.1", x, state, self.theta, blind)
        return state

    def logits(self, states):
        """Return logits over the target's vocabulary."""
        if self.eagle1:
            return states @ self.target.lm_head.weight.T
        small = norm(states, self.w["norm.weight"]) @ self.w["lm_head.weight"].T
        if "d2t" not in self.w:
            return small
        ids = torch.arange(len(self.w["d2t"])) + self.w["d2t"]
        return torch.full((len(states), VOCABULARY), -math.inf).index_copy_(1, ids, small)

    def ahead(self, text, drafted):
        """Return logits [V] after the text, which includes its root, and the draft tokens that follow it."""
        features, tokens = self.features(text[:-1]), list(text[1:])
        observed = len(tokens)
        states = self.states(tokens, features, observed)
        for token in drafted:
            back = norm(states[-1:], self.w["norm.weight"]) if self.feed_norm else states[-1:]
            if self.mask is not None:
                back, token = self.join([*self.w["mask_hidden"].reshape(3, 1, H)]), self.mask
            features, tokens = torch.cat([features, back]), [*tokens, token]
            states = self.states(tokens, features, observed)
        return self.logits(states[-1:])[0]


# --- files in public formats ---


def layer_tensors(name, inputs, size=8, qk_norm=False, special=()):
    rng = torch.Generator().manual_seed(len(name) + inputs)
    shapes = {
        "self_attn.q_proj": (4 * size, inputs),
        "self_attn.k_proj": (2 * size, inputs),
        "self_attn.v_proj": (2 * size, inputs),
        "self_attn.o_proj": (H, 4 * size),
        "mlp.gate_proj": (40, H),
        "mlp.up_proj": (40, H),
        "mlp.down_proj": (H, 40),
        "post_attention_layernorm": (H,),
        **dict.fromkeys(special, (H,)),
        **({"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)} if qk_norm else {}),
    }
    return {f"{name}.{n}.weight": 0.3 * torch.randn(s, generator=rng) + (len(s) == 1) for n, s in shapes.items()}


def matrix(*shape, seed=0):
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def eagle1():
    return {"fc.weight": matrix(H, 2 * H), **layer_tensors("layers.0", H)}


def eagle3(first="midlayer", words=WORDS, **kinds):
    tensors = {
        "fc.weight": matrix(H, 3 * H),
        **layer_tensors(first, 2 * H, special=("hidden_norm", "input_layernorm"), **kinds),
        "norm.weight": 1.0 + matrix(H, seed=1),
        "lm_head.weight": matrix(words, H, seed=2),
    }
    if words < VOCABULARY:
        tensors["d2t"] = IDS - torch.arange(words)
        tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool)
        tensors["t2d"][IDS] = True
    return tensors


def speculators(**changes):
    nested = {**LAYER, "model_type": "llama", "rope_theta": 5e5}
    verifier = {"name_or_path": "some/verifier"}
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": WORDS,
        "norm_before_residual": False,
        "transformer_layer_config": nested,
        "speculators_config": {"algorithm": "eagle3", "verifier": verifier},
        **changes,
    }


def windowed_config(window):
    config = speculators()
    kinds = {"layer_types": ["sliding_attention"], "sliding_window": window}
    config["transformer_layer_config"] |= kinds
    return config


def peagle(**changes):
    second = layer_tensors("layers.1", H, special=("input_layernorm",))
    config = speculators(**{"speculators_model_type": "peagle", "mask_token_id": 7, **changes})
    return config, {**eagle3("layers.0"), **second, "mask_hidden": matrix(1, 1, 3 * H, seed=9)}


def dialects():
    plain = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": WORDS}
    copied = {"embed_tokens.weight": matrix(VOCABULARY, H), "lm_head.weight": matrix(VOCABULARY, H)}
    own = {"embed_tokens.weight": matrix(VOCABULARY, H, seed=5)}
    buffers = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    second = layer_tensors("layers.1", H, special=("input_layernorm",))
    norms = {f"fc_norm.{i}.weight": 1.0 + matrix(H, seed=i) for i in range(3)}
    qwen = speculators(norm_before_residual=True)
    qwen["transformer_layer_config"] |= {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16}
    spread = {ID_LIST: [0, 1, 2]}
    return {
        "eagle1": (LAYER, {**eagle1(), "fc.bias": matrix(H)}, {}),
        "eagle1-copies": ({**LAYER, "bias": False, "rope_theta": 5e5}, {**eagle1(), **copied}, {"theta": 5e5}),
        "official": (plain, {**eagle3(), **buffers}, {}),
        "official-all-words": ({**plain, "draft_vocab_size": VOCABULARY}, eagle3(words=VOCABULARY), {}),
        "specforge": ({**plain, "eagle_config": {**spread, "use_aux_hidden_state": True}}, eagle3(size=16), {}),
        "speculators": (speculators(**spread), eagle3("layers.0"), {"theta": 5e5}),
        "deepspec": ({**plain, "target_layer_ids": [0, 1, 2]}, eagle3("layers.0"), {}),
        "speculators-window": (windowed_config(5), eagle3("layers.0"), {"theta": 5e5, "window": 5}),
        "speculators-qwen3": (
            qwen,
            {**eagle3("layers.0", size=16, qk_norm=True), **own},
            {"theta": 5e5, "before": True},
        ),
        "speculators-two-layers": (
            speculators(norm_before_fc=True),
            {**eagle3("layers.0"), **second, "input_norm.weight": 1.0 + matrix(3 * H)},
            {"theta": 5e5},
        ),
        "p-eagle-speculators": (*peagle(), {"theta": 5e5, "mask": 7}),
        "p-eagle": (
            {**plain, "ptd_token_id": 9},
            {**eagle3(), **second, **own, **norms, "mask_hidden": matrix(1, 3 * H, seed=9)},
            {"mask": 9},
        ),
        "eagle-3.1": (
            speculators(fc_norm=True, norm_output=True),
            {**eagle3("layers.0"), **norms},
            {"theta": 5e5, "feed_norm": True},
        ),
    }


def write(folder, config, tensors, pickled=False):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return str(folder)


def record(target, drafter, prompts, sampling=None, budget=None, tokens=14):
    """Run one generation. Return the texts and the draft of every step, and the final texts."""
    steps, written, propose = [], prompts.tolist(), drafter.propose

    def proposing(budget):
        draft = propose(budget)
        steps.append(([row.copy() for row in written], draft))
        return draft

    drafter.propose = proposing
    config = GenerationConfig(tokens, sampling or Sampling(), budget or Budget(3, 3), stop_token_ids=())
    for event in generate(target, drafter, prompts, config):
        written = [row + new for row, new in zip(written, event.emitted, strict=True)]
    return steps, written


def plain(target, prompts):
    return record(target, load_drafter("none", target), prompts)[1]


def quick_reference(target, head, **settings):
    way = head.convention
    settings |= {"window": max(way.windows), "theta": 5e5} if way.windows else {}
    return EagleReference(target, dict(head.state_dict()), way.taps, way.norm_before_residual, **settings)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dialect", dialects())
def test_drafts_of_every_dialect_match_the_reference(dialect, packed, target, tmp_path, monkeypatch):
    if packed and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(module, "PACKED_SIZE", 0)
    monkeypatch.setattr(module, "packing_pays", lambda dtype: packed)
    config, tensors, conventions = dialects()[dialect]
    source = write(tmp_path, config, tensors, pickled=dialect in ("eagle1", "official"))
    head = Eagle.load(source, target)
    taps = head.convention.taps
    if dialect.startswith("eagle1"):
        assert taps == (-1,)
    elif dialect in ("specforge", "speculators"):
        assert taps in ((0, 1, 2), (1, 2, 3)) and "% with layers 1, 2, 3" in head.note
    else:
        assert taps == ((1, 2, 3) if dialect == "deepspec" else (1, 1, 1)) and not head.note
    if head.convention.feature_first:  # random weights: the probe may choose either
        tensors["fc.weight"] = tensors["fc.weight"].roll(H, 1)
    reference = EagleReference(target, tensors, taps, **conventions)
    drafter = load_drafter("eagle", target, head, draft="chain")
    steps, _ = record(target, drafter, texts(1, 6))
    for (text,), draft in steps[:3]:
        for i, token in enumerate(draft.tokens[0].tolist()):
            logits = reference.ahead(text, draft.tokens[0, :i].tolist())
            assert token == int(logits.argmax())
            torch.testing.assert_close(draft.confidence[0, i], logits.softmax(-1)[token], rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module", params=["eagle1", "eagle3", "few words", "window"])
def head(request, target, tmp_path_factory):
    torch.manual_seed(3)
    if request.param == "window":
        return Eagle.load(write(tmp_path_factory.mktemp("near"), windowed_config(4), eagle3("layers.0")), target)
    kind = "eagle3" if request.param == "few words" else request.param
    made = Eagle.fresh(target, kind, draft_vocab=WORDS if request.param == "few words" else 0)
    for parameter in made.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, 0.3)
    return made


@pytest.mark.parametrize("draft", ["tree", "chain"])
def test_greedy_output_equals_plain_decoding(head, draft, target):
    prompts = texts(3, 9, seed=1)
    drafter = load_drafter("eagle", target, head, draft=draft, top_k=3)
    steps, written = record(target, drafter, prompts, budget=Budget(4, 9))
    assert written == plain(target, prompts)
    assert max(draft.nodes for _, draft in steps) == (9 if draft == "tree" else 4)


@pytest.mark.parametrize("draft", ["tree", "chain"])
def test_p_eagle_writes_the_targets_own_text_and_is_saved_as_it_was_read(draft, target, tmp_path):
    prompts = texts(3, 9, seed=1)
    drafter = load_drafter("eagle", target, write(tmp_path / "read", *peagle()), draft=draft)
    steps, written = record(target, drafter, prompts, budget=Budget(4, 9))
    assert written == plain(target, prompts)
    assert max(draft.nodes for _, draft in steps) == 4  # always a chain
    drafter.save(tmp_path / "saved", "tiny")
    again, _ = record(target, load_drafter("eagle", target, str(tmp_path / "saved")), prompts, budget=Budget(4, 9))
    assert [d.tokens.tolist() for _, d in again] == [d.tokens.tolist() for _, d in steps]


def ragged_steps(target, drafter, sampling=None):
    """Yield the texts and the draft of each step for two rows that accept different numbers of tokens."""
    text = texts(2, 16, seed=4)
    hidden = target.start(text, drafter.taps).hidden
    drafter.start(2, sampling or Sampling(), torch.Generator().manual_seed(0))
    read, rows = torch.zeros(2, 1, dtype=torch.int64), torch.arange(2)[:, None]
    for lengths in ([6, 6], [3, 1], [1, 4], [2, 2]):
        columns = (read + torch.arange(max(lengths))).clamp_max(14)
        # As in the loop.
        columns = torch.where(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], columns, read)
        seen = {tap: h[rows, columns] for tap, h in hidden.items()}
        drafter.observe(Progress(text[rows, columns], text[rows, columns + 1], lengths, seen))
        read = read + torch.tensor(lengths)[:, None]
        written = [row[: n + 1] for row, n in zip(text.tolist(), read[:, 0].tolist(), strict=True)]
        yield written, drafter.propose(Budget(3, 7))


def test_tree_node_probabilities_match_full_forward(head, target):
    reference = quick_reference(target, head)
    for written, draft in ragged_steps(target, load_drafter("eagle", target, head, top_k=3)):
        assert draft.probs is None and draft.nodes == 7
        for row, text in enumerate(written):
            paths = [()]
            nodes = zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), draft.confidence[row], strict=True)
            for token, parent, confidence in nodes:
                q = reference.ahead(text, paths[parent]).softmax(-1)
                torch.testing.assert_close(confidence, q[token], rtol=1e-3, atol=1e-4)
                paths.append((*paths[parent], token))
            assert len(set(paths)) == len(paths) and max(map(len, paths)) <= 3
            first = {path[0] for path in paths if len(path) == 1}
            assert first == set(reference.ahead(text, ()).topk(len(first)).indices.tolist())


def test_sampled_chains_carry_what_they_were_drawn_from(head, target):
    check_probs_of_drawn_tokens(head, target, quick_reference(target, head))


def test_sampled_p_eagle_chains_do_too(target, tmp_path):
    head = Eagle.load(write(tmp_path, *peagle()), target)
    check_probs_of_drawn_tokens(head, target, quick_reference(target, head, mask=7, theta=5e5))


def check_probs_of_drawn_tokens(head, target, reference):
    sampling = Sampling(temperature=0.8, top_k=7)
    for written, draft in ragged_steps(target, load_drafter("eagle", target, head, draft="chain"), sampling):
        for row, text in enumerate(written):
            for i, (token, q) in enumerate(zip(draft.tokens[row].tolist(), draft.probs[row], strict=True)):
                logits = reference.ahead(text, draft.tokens[row, :i].tolist())
                torch.testing.assert_close(q, to_probs(logits, sampling), rtol=1e-3, atol=1e-4)
                assert q[token] > 0 and q.shape == (VOCABULARY,)


def test_pending_columns_may_be_read_late(head, target):
    """A drafter without proposals in several steps drafts the same as one with a proposal in each."""
    drafter = load_drafter("eagle", target, head, draft="chain")
    text = texts(2, 12, seed=6)
    hidden = target.start(text[:, :-1], drafter.taps).hidden

    def observe(start, stop, lengths):
        columns = {tap: h[:, start:stop] for tap, h in hidden.items()}
        drafter.observe(Progress(text[:, start:stop], text[:, start + 1 : stop + 1], lengths, columns))

    drafter.start(2, Sampling(), torch.Generator())
    observe(0, 6, [6, 6])
    observe(6, 9, [3, 3])
    observe(9, 11, [2, 2])
    late = drafter.propose(Budget(3, 3))
    assert torch.equal(drafter.propose(Budget(3, 3)).tokens, late.tokens)  # a second proposal is the same
    drafter.start(2, Sampling(), torch.Generator())
    for start, stop in ((0, 6), (6, 9), (9, 11)):
        observe(start, stop, [stop - start] * 2)
        drafter.propose(Budget(2, 2))
    assert torch.equal(drafter.propose(Budget(3, 3)).tokens, late.tokens)
    assert drafter.history_bytes > 0
    drafter.release()
    assert drafter.history_bytes == 0


# --- training ---


def windows(target, taps, rows=6, length=9):
    tokens = texts(rows, length + 1, seed=8)
    taps = tuple(sorted({*taps, -1}))
    hidden = target.start(tokens[:, :-1], taps).hidden
    probs = target.model(tokens[:, :-1]).logits.softmax(-1)
    return Progress(tokens[:, :-1], tokens[:, 1:], [length] * rows, hidden, probs)


def reference_loss(reference, head, batch, hard):
    """Return the loss column by column, with each unrolled step of EAGLE-3 on a sequence of its own."""
    columns, total, steps = batch.outputs.shape[1], 0.0, 1 if reference.eagle1 else 4
    for step in range(steps):
        losses, right = [], []
        for row, tokens in enumerate(batch.outputs.tolist()):
            features = reference.join([batch.hidden[tap][row] for tap in reference.taps])
            for column in range(step, columns - 1):
                fed = features[: column - step + 1]
                for _ in range(step):
                    fed = torch.cat([fed, reference.states(tokens[: len(fed)], fed, column - step + 1)[-1:]])
                states = reference.states(tokens[: column + 1], fed, column - step + 1)
                logits, p = reference.logits(states)[-1], batch.probs[row, column + 1]
                best = tokens[column + 1] if hard else int(p.argmax())
                right.append(int(logits.argmax()) == best)
                if logits[best] == -math.inf:
                    losses.append((torch.tensor(0.0), 0))
                    continue
                known = logits > -math.inf
                target = p[known] / p[known].sum()
                ce = -logits.log_softmax(-1)[best] if hard else -(target * logits[known].log_softmax(-1)).sum()
                losses.append((ce, 1))
                if reference.eagle1:
                    distance = F.smooth_l1_loss(states[-1], batch.hidden[-1][row, column + 1])
                    losses[-1] = (0.1 * ce + distance, 1)
        total += 0.8**step * sum(loss for loss, _ in losses) / sum(count for _, count in losses)
        yield total, sum(right) / len(right)


@pytest.mark.parametrize("hard", [False, True])
def test_the_loss_reads_its_own_states_as_drafting_does(head, hard, target):
    batch = windows(target, head.convention.taps, rows=2, length=7)
    drafter = load_drafter("eagle", target, head)
    given = Progress(batch.inputs, batch.outputs, batch.lengths, batch.hidden, None if hard else batch.probs)
    loss, metrics = drafter.loss(given)
    *_, (total, _) = slow = list(reference_loss(quick_reference(target, head), head, batch, hard))
    torch.testing.assert_close(loss, total, rtol=1e-4, atol=1e-4)
    assert metrics == pytest.approx({f"agree_{i}": right for i, (_, right) in enumerate(slow, 1)})


@pytest.mark.parametrize("sizes", [{"kind": "eagle1"}, {"intermediate": 24}, {"draft_vocab": WORDS}], ids=str)
def test_training_lowers_the_loss_and_what_is_saved_loads_the_same(sizes, target, tmp_path):
    torch.manual_seed(0)
    head = Eagle.fresh(target, **sizes)
    assert all(p is not target.lm_head.weight and p is not target.embed.weight for p in head.parameters())
    batch = windows(target, head.convention.taps)
    losses, metrics = train(load_drafter("eagle", target, head), batch, 30)
    assert losses[-1] < 0.85 * losses[0]  # most of the remainder is the target's entropy
    assert len(metrics) == (1 if "kind" in sizes else 4)
    drafter = load_drafter("eagle", target, head, draft="chain")
    drafter.save(tmp_path, "some/target")
    config = json.loads((tmp_path / "config.json").read_text())
    if "kind" not in sizes:
        assert config[ID_LIST] == [1, 1, 1] and config["eagle_config"][ID_LIST] == [0, 0, 0]
        assert config["draft_vocab_size"] == sizes.get("draft_vocab", VOCABULARY)
    assert config["intermediate_size"] == sizes.get("intermediate", 48)
    loaded = Eagle.load(str(tmp_path), target)
    assert loaded.convention == head.convention
    again = load_drafter("eagle", target, loaded)
    torch.testing.assert_close(again.loss(batch)[0], drafter.loss(batch)[0])


def test_saved_files_have_the_authors_names(target, tmp_path):
    load_drafter("eagle", target, Eagle.fresh(target, draft_vocab=WORDS)).save(tmp_path / "3", "some/target")
    saved = open_checkpoint(str(tmp_path / "3")).tensors
    assert {n: t.shape for n, t in saved.items() if "mlp" not in n} == {
        n: t.shape for n, t in eagle3().items() if "mlp" not in n
    }
    places = torch.arange(WORDS) + saved["d2t"]
    assert bool(saved["t2d"][places].all()) and int(saved["t2d"].sum()) == WORDS
    load_drafter("eagle", target, Eagle.fresh(target, "eagle1")).save(tmp_path / "1", "some/target")
    assert set(open_checkpoint(str(tmp_path / "1")).tensors) == set(eagle1())


# --- files that leave the convention open ---


@pytest.mark.parametrize("lists", ["top", "inner"])
@pytest.mark.parametrize("before", [False, True])
def test_best_convention_is_selected(lists, before, target, tmp_path):
    torch.manual_seed(1)
    head = Eagle.fresh(target)
    head.convention = type(head.convention)((1, 2, 3), before)
    train(load_drafter("eagle", target, head), conventions.sample_target_text(target, (1, 2, 3)), 40)
    config = speculators() if lists == "top" else dict(LAYER)
    if lists == "top":
        config["transformer_layer_config"].pop("rope_theta")
        config.pop("norm_before_residual")
    else:
        config["norm_before_residual"] = before
    for ids in ([1, 2, 3], [0, 1, 2]):
        inner = {"eagle_config": {ID_LIST: ids}} if lists == "inner" else {ID_LIST: ids}
        tensors = {n.replace("layers.0.", "midlayer."): t for n, t in head.state_dict().items()}
        loaded = Eagle.load(write(tmp_path, config | inner, tensors), target)
        assert loaded.convention == head.convention
        if lists == "top" or ids == [0, 1, 2]:  # otherwise it would read a layer 4
            residual = "normed" if before else "plain"
            assert loaded.note.startswith(f"Convention: layers 1, 2, 3 and the {residual} residual. The file")
        assert load_drafter("eagle", target, loaded).note == loaded.note


def test_either_order_of_fc_is_found(target, tmp_path):
    torch.manual_seed(1)
    head = Eagle.fresh(target, "eagle1")
    train(load_drafter("eagle", target, head), conventions.sample_target_text(target, (-1,)), 40)
    tensors = dict(head.state_dict())
    assert not Eagle.load(write(tmp_path, LAYER, tensors), target).convention.feature_first
    swapped = Eagle.load(write(tmp_path, LAYER, tensors | {"fc.weight": tensors["fc.weight"].roll(H, 1)}), target)
    assert swapped.convention.feature_first and "fc over feature and embedding" in swapped.note
    load_drafter("eagle", target, swapped).save(tmp_path / "saved", "tiny")
    assert not Eagle.load(str(tmp_path / "saved"), target).convention.feature_first


def test_default_taps():
    assert [default_taps(n) for n in (12, 32, 36, 4, 3, 1)] == [
        (2, 6, 9),
        (2, 16, 29),
        (2, 18, 33),
        (2, 2, 2),
        (1, 1, 1),
        (1, 1, 1),
    ]


def test_files_that_do_not_fit_are_refused_with_the_fix(target, tmp_path):
    tensors, config = eagle3("layers.0"), speculators()

    def refused(match, config=config, tensors=tensors, target=target):
        with pytest.raises(ValueError, match=match) as caught:
            Eagle.load(write(tmp_path, config, tensors), target)
        assert "\n" not in str(caught.value)

    refused("hidden size 32, the target has 8; choose the target some/verifier", target=ToyTarget(61))
    refused("vocabulary 60, the target has 61", tensors={**tensors, "t2d": torch.ones(60, dtype=torch.bool)})
    refused("reads layer 7, the target has 3", {**config, ID_LIST: [2, 5, 7]})
    refused("gadget.weight: expected shape none, found", tensors={**tensors, "gadget.weight": torch.ones(3)})
    refused("norm.weight: expected shape .* found none", tensors={n: t for n, t in tensors.items() if "post_" not in n})
    refused("has activation gelu", speculators(transformer_layer_config={**LAYER, "hidden_act": "gelu"}))
    refused("add it to its config.json", speculators(transformer_layer_config={"vocab_size": VOCABULARY}))
    refused("lacks fc.weight", tensors={n: t for n, t in tensors.items() if n != "fc.weight"})
    refused("is P-EAGLE, but lacks mask_hidden", speculators(speculators_model_type="peagle", mask_token_id=7))
    refused("is P-EAGLE, but lacks mask_token_id in its config", *peagle(mask_token_id=None))
    refused("mask token 61 of .* is not in a vocabulary of 61", *peagle(mask_token_id=61))
    with pytest.raises(ValueError, match="choose eagle3 or eagle1"):
        Eagle.fresh(target, "eagle2")
    with pytest.raises(ValueError, match="leave draft_vocab out"):
        Eagle.fresh(target, "eagle1", draft_vocab=5)


def test_rows_that_end_early_draft_nothing_that_counts(target):
    head = Eagle.fresh(target)
    prompts = texts(3, 9, seed=1)
    stop = plain(target, prompts)[0][11]
    config = GenerationConfig(14, Sampling(), Budget(4, 8), stop_token_ids=(stop,))
    both = [
        rows_of(list(generate(target, load_drafter(name, target, *model), prompts, config)))
        for name, model in (("none", ()), ("eagle", (head,)))
    ]
    assert both[0] == both[1] and len({len(row) for row in both[0]}) > 1


def test_specforge_feedback_convention_is_detected(target, tmp_path):
    config = {**LAYER, "draft_vocab_size": WORDS, "norm_output": True}
    head = Eagle.load(write(tmp_path, config, eagle3()), target)
    assert [reading.norm_output for reading in head.conventions] == [True, False] and "fed back normed" in head.note


def test_target_layer_windows_do_not_apply_to_heads(target, tmp_path):
    config = {**LAYER, "draft_vocab_size": WORDS, "layer_types": ["sliding_attention"] * 3, "sliding_window": 4}
    assert Eagle.load(write(tmp_path, config, eagle3()), target).windows == (0,)


def test_eagle_1_of_speculators_is_named(target, tmp_path):
    with pytest.raises(ValueError, match="is EAGLE-1 in speculators' format, not supported"):
        Eagle.load(write(tmp_path, {"speculators_model_type": "eagle"}, {"fusion_fc.weight": matrix(H, 2 * H)}), target)
