"""Published files of heads, a direct computation of their logits, and drafters that read a given text."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import inf

import torch
from safetensors.torch import save_file
from scipy.stats import chi2
from torch.nn import functional as F

from specdemo.core.protocol import Budget, GenerationConfig, Progress
from specdemo.core.sampling import Sampling
from specdemo.core.tree import chain_parents
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models.target import HFTarget
from tests.generation import output, rows_of
from tests.methods.test_exact_sampling import DRAWS, expected, joint
from tests.models.tiny import build, texts

SHORT = Budget(1, 1)


@cache
def target_of(family="llama"):
    """Return a tiny target that all tests share."""
    return HFTarget(build(family), name=f"some/{family}")


@cache
@torch.no_grad()
def hidden_states(target, text):
    """Return the embeddings and the output of every layer, each [T, H]. Index -1 is the last output after the norm."""
    outputs = []
    hook = target.model.model.layers[-1].register_forward_hook(lambda *call: outputs.append(call[2]))
    states = [h[0] for h in target.model(torch.tensor([text]), output_hidden_states=True).hidden_states]
    hook.remove()
    last = outputs[0] if isinstance(outputs[0], torch.Tensor) else outputs[0][0]
    return [*states[:-1], last.view_as(states[-1]), states[-1]]


class Reference:
    """A direct computation of a head's logits, without a cache and one text at a time.

    Subclasses define `logits`.
    """

    def __init__(self, target, tensors):
        self.target, self.w = target, tensors

    def hidden(self, text, tap=-1):
        """Return the target's hidden states [T - 1, H] of all tokens before the root."""
        return hidden_states(self.target, tuple(text[:-1]))[tap]

    def logits(self, text, drafted):
        """Return the logits [V] after a text, whose last token is the root, and the draft tokens that follow it."""
        raise NotImplementedError

    def loss(self, text, drafted, following):
        """Return the loss to the probabilities of `following` [V], or None if its argmax cannot be drafted."""
        logits = self.logits(text, drafted)
        known = logits > -inf
        if not known[following.argmax()]:
            return None
        return -(following[known] / following[known].sum() * logits[known].log_softmax(-1)).sum()


@dataclass(frozen=True)
class Published:
    """A file of a head.

    reference: takes the loaded head. longest: draft tokens of a budget of 6. caches: the head has a KV cache. unsaved:
    the reason why it cannot be saved.
    """

    method: str
    config: dict
    tensors: dict
    reference: Callable
    longest: int = 6
    family: str = "llama"
    file: str = "model.safetensors"
    caches: bool = True
    trains: bool = True
    unsaved: str = ""

    @property
    def target(self):
        return target_of(self.family)


def folder_with(path, tensors, config, file="model.safetensors"):
    """Write a checkpoint and return its folder."""
    path.mkdir(exist_ok=True)
    save = save_file if file.endswith(".safetensors") else torch.save
    save({name: tensor.contiguous() for name, tensor in tensors.items()}, path / file)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def randoms(shapes, scale=0.3, seed=3):
    """Return random tensors by name. Vectors of norms are far from one, so that a missing norm shows."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=rng) * scale + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def without(tensors, part):
    return {name: tensor for name, tensor in tensors.items() if part not in name}


def ragged_steps(target, drafter, budget, sampling=None):
    """Yield the texts and the draft of each step, while two rows accept different numbers of tokens of a given text.

    Every pass also reads tokens that are then rejected. One step has no draft, and one a short draft, which is not
    yielded. A text is None if its row is finished.
    """
    rows, text = torch.arange(2)[:, None], texts(2, 24, seed=4)
    drafter.start(2, sampling or Sampling(), torch.Generator().manual_seed(0))
    read = [6, 6]
    hidden = target.start(text[:, :6], drafter.taps).hidden
    drafter.observe(Progress(text[:, :6], text[:, 1:7], read, hidden))
    yield [row[:7] for row in text.tolist()], drafter.propose(budget)
    steps = [([3, 1], budget), ([1, 4], None), ([2, 2], budget), ([1, 2], SHORT), ([2, 0], budget), ([1, 3], budget)]
    for lengths, wanted in steps:
        columns = torch.tensor(read)[:, None] + torch.arange(5)
        slots = text[rows, columns]
        hidden = target.forward(slots, chain_parents(2, 4, torch.device("cpu")), drafter.taps).hidden
        target.commit([list(range(length)) for length in lengths])
        width = max(lengths)
        taken = {tap: h[:, :width] for tap, h in hidden.items()}
        drafter.observe(Progress(slots[:, :width], slots[:, 1 : width + 1], lengths, taken))
        read = [old + length for old, length in zip(read, lengths, strict=True)]
        draft = drafter.propose(wanted) if wanted else None
        if draft and wanted is not SHORT:
            ends = zip(text.tolist(), read, lengths, strict=True)
            yield [row[: end + 1] if length else None for row, end, length in ends], draft


def paths_of(draft, row=0):
    """Return the tokens from the root to every slot of a draft."""
    paths = [()]
    for token, parent in zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths


def batch_of(target, taps, tokens, probs=True):
    """Return a training batch of texts [B, T]."""
    hidden = {tap: h[:, :-1].float() for tap, h in target.start(tokens, taps).hidden.items()}
    p = target.model(tokens).logits.softmax(-1)[:, :-1] if probs else None
    return Progress(tokens[:, :-1], tokens[:, 1:], [tokens.shape[1] - 1] * len(tokens), hidden, p)


def example(target, *taps, rows=4, columns=24):
    """Return a training batch of texts that the target continued greedily."""
    return batch_of(target, taps or (-1,), greedy_texts(target, rows, columns))


@cache
def greedy_texts(target, rows, columns):
    tokens = texts(rows, 4)
    for _ in range(columns - 3):
        tokens = torch.cat([tokens, target.model(tokens).logits[:, -1:].argmax(-1)], 1)
    return tokens


def check_greedy(target, drafter, nodes=12):
    """Check that the output is the target's, and return the numbers of accepted draft tokens that occurred."""
    prompts = texts(4, 4)
    config = GenerationConfig(24, budget=Budget(4, nodes), stop_token_ids=())
    events = list(generate(target, drafter, prompts, config))
    assert rows_of(events) == output(target, load_drafter("none", target), prompts, config)
    return {len(path) - 1 for e in events for path in e.path}


def check_sampling(drafter, target):
    """Check by chi-square that the first two tokens follow the target's distribution."""
    counts, expected_counts = joint(target, drafter, "lossless", 2), expected(target, 2) * DRAWS
    assert float(((counts - expected_counts) ** 2 / expected_counts).sum()) < chi2.ppf(0.9999, len(expected_counts) - 1)


def rotate(x, theta, start=0):
    """Apply RoPE to x [T, heads, size] at positions from `start` on."""
    angles = (start + torch.arange(len(x)))[:, None] / theta ** (torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    z = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([z.real, z.imag], -1)


def rms_norm(x, weight, eps=1e-6):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def gated_mlp(w, name, x):
    return linear(w, f"{name}.down_proj", F.silu(linear(w, f"{name}.gate_proj", x)) * linear(w, f"{name}.up_proj", x))


def attention(w, name, x, blind, theta, size, context=None, eps=1e-6, sink=-inf):
    """Return the attention of x [S, D] over `context` and x, in heads of `size`.

    blind [S, T]: keys that a query does not see. sink: logit of an additional key without a value, per head.
    """
    keys = x if context is None else torch.cat([context, x])
    q, k, v = (
        linear(w, f"{name}.{part}_proj", states).unflatten(-1, (-1, size))
        for part, states in (("q", x), ("k", keys), ("v", keys))
    )
    if f"{name}.q_norm.weight" in w:
        q, k = rms_norm(q, w[f"{name}.q_norm.weight"], eps), rms_norm(k, w[f"{name}.k_norm.weight"], eps)
    q, k = rotate(q, theta, len(keys) - len(x)), rotate(k, theta)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q, k) / size**0.5).masked_fill(blind, -inf)
    empty = torch.as_tensor(sink).expand(q.shape[1])[:, None, None].expand(-1, len(x), 1)
    weights = torch.cat([scores, empty], -1).softmax(-1)[..., :-1]
    return linear(w, f"{name}.o_proj", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
