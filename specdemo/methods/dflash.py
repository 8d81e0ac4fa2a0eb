"""DFlash: a small network fills a whole block of masked tokens in one pass (Chen et al. 2602.06036); DFlash2 and DSpark
(2607.05147) are the same with a last stage in which a token also depends on the one before it.

B rows, A columns, S slots of a block, D drafted tokens, N nodes or blocks, G key/value heads, V vocabulary, H hidden.

What the target's layers say of a token (`taps`) becomes one context vector, and that becomes keys and values in every
layer of the drafter, never queries: the context costs two products per layer and is not read again. A block is the
embedding of the anchor, which is the root, and of S - 1 mask tokens, at the positions that follow the context; its
slots see the context and each other, both ways. So a block cut short would be another drafter: it always has its
trained size, and what exceeds the budget is left out. Only the context stays in the cache; nothing is ever rolled back.

Slots are drawn independently of each other, each with its own q, or (DFlash2, DSpark) one after the other. P-EAGLE is
not here: its body is EAGLE-3's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling, draw, to_probs
from specdemo.core.tree import Draft
from specdemo.methods import knob
from specdemo.methods.dflash_formats import Design, Kind, described, read, spread_taps
from specdemo.methods.grow import grow
from specdemo.methods.heads import NEVER, HeadDrafter, as_target, at_last, odd_tensors
from specdemo.models.cache import SPARE, SlabCache
from specdemo.models.checkpoints import Checkpoint, open_checkpoint, write_checkpoint
from specdemo.models.hub import LoadProgress, silent
from specdemo.models.packed import RMSNorm, dtype_of, pack

PROBE_ROWS, PROBE_COLUMNS = 8, 48  # of the target's own text, which tells one convention from another
TAPS = 3
HEAD_SIZE = 64  # of a fresh drafter
BRANCHES = 10  # children of a node, where they depend on it

Rope = tuple[Tensor, Tensor]  # cosine and signed sine, each [..., positions, head size]
KeysValues = tuple[Tensor, Tensor]  # each [B, G, columns, head size]
Chosen = tuple[Tensor, Tensor, Tensor | None]  # tokens [...], confidence [...], probs [..., V]


def _rotated(states: Tensor, rope: Rope) -> Tensor:
    cosine, sine = (part.to(states.dtype) for part in rope)
    return torch.addcmul(states * cosine, states.roll(states.shape[-1] // 2, -1), sine)


class Attention(nn.Module):
    def __init__(self, body: Qwen3Config) -> None:
        super().__init__()
        self.head_dim: int = body.head_dim
        self.grouped = body.num_attention_heads != body.num_key_value_heads
        inner, shared = (int(n or 1) * self.head_dim for n in (body.num_attention_heads, body.num_key_value_heads))
        self.q_proj = nn.Linear(body.hidden_size, inner, bias=body.attention_bias)
        self.k_proj = nn.Linear(body.hidden_size, shared, bias=body.attention_bias)
        self.v_proj = nn.Linear(body.hidden_size, shared, bias=body.attention_bias)
        self.o_proj = nn.Linear(inner, body.hidden_size, bias=body.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, body.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, body.rms_norm_eps)

    def keys_values(self, states: Tensor, rope: Rope) -> KeysValues:
        keys = self.k_norm(self._heads(self.k_proj(states)))
        return _rotated(keys.transpose(1, 2), rope), self._heads(self.v_proj(states)).transpose(1, 2)

    def forward(self, states: Tensor, keys: Tensor, values: Tensor, rope: Rope, mask: Tensor | None) -> Tensor:
        queries = _rotated(self.q_norm(self._heads(self.q_proj(states))).transpose(1, 2), rope)
        found = F.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=self.grouped)
        out: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return out

    def _heads(self, states: Tensor) -> Tensor:
        heads: Tensor = states.unflatten(-1, (-1, self.head_dim))
        return heads


class MLP(nn.Module):
    def __init__(self, body: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(body.hidden_size, body.intermediate_size, bias=False)
        self.up_proj = nn.Linear(body.hidden_size, body.intermediate_size, bias=False)
        self.down_proj = nn.Linear(body.intermediate_size, body.hidden_size, bias=False)
        self.act = ACT2FN[body.hidden_act]

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act(self.gate_proj(states)) * self.up_proj(states))
        return out


class Convolution(nn.Module):
    """DFlash2: what goes into a sublayer and what comes out of it, mixed with the slots before, by kernels that depend
    on the slot's own state."""

    def __init__(self, hidden_size: int, block_size: int, span: int, groups: int) -> None:
        super().__init__()
        self.block_size, self.span, self.groups = block_size, span, groups
        self.base_kernel = nn.Parameter(torch.zeros(2, span, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * span * groups, bias=False)

    def forward(self, states: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        kernels = self.kernel_projection(states).unflatten(-1, (2, self.span, self.groups))
        return self._filter(1, sublayer(self._filter(0, states, kernels)), kernels)

    def _filter(self, side: int, states: Tensor, kernels: Tensor) -> Tensor:
        """states [B, N S, H] -> the same shape; nothing comes from before a block's first slot."""
        width = states.shape[-1] // self.groups
        weights = self.base_kernel[side] + kernels[..., side, :, :].repeat_interleave(width, -1)
        blocks = states.unflatten(1, (-1, self.block_size))
        mixed = weights[..., 0, :] * states
        for lag in range(1, self.span):
            before = F.pad(blocks, (0, 0, lag, 0))[:, :, : self.block_size].flatten(1, 2)
            mixed = mixed + weights[..., lag, :] * before
        return mixed


class Layer(nn.Module):
    def __init__(self, design: Design) -> None:
        super().__init__()
        body, (span, groups) = design.body, design.convolution
        self.input_layernorm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        self.self_attn = Attention(body)
        self.post_attention_layernorm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        self.mlp = MLP(body)
        self.attention_conv = Convolution(body.hidden_size, design.block_size, span, groups) if span else None
        self.mlp_conv = Convolution(body.hidden_size, design.block_size, span, groups) if span else None

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None, among: Callable[..., KeysValues]) -> Tensor:
        def attend(states: Tensor) -> Tensor:
            keys, values = among(*self.self_attn.keys_values(states, rope))
            out: Tensor = self.self_attn(states, keys, values, rope, mask)
            return out

        x = x + _around(self.attention_conv, attend, self.input_layernorm(x))
        return x + _around(self.mlp_conv, self.mlp, self.post_attention_layernorm(x))


def _around(convolution: Convolution | None, sublayer: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    return sublayer(states) if convolution is None else convolution(states, sublayer)


class CandidateSelector(nn.Module):
    """DFlash2: of a slot's likeliest tokens, how well each follows the token before."""

    def __init__(self, hidden_size: int, vocab_size: int, rank: int, candidates: int) -> None:
        super().__init__()
        self.candidates = min(candidates, vocab_size)
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, previous: Tensor, states: Tensor, logits: Tensor) -> Tensor:
        scores, tokens = logits.topk(self.candidates)
        wanted = self.predecessor_codebook[previous] * self.hidden_projection(states)
        follow = (self.successor_codebook[tokens] @ wanted[..., None]).squeeze(-1)
        return torch.full_like(logits, NEVER).scatter(-1, tokens, scores + follow.float())


class MarkovHead(nn.Module):
    """DSpark: a bias on every token from the token before, of low rank."""

    def __init__(self, hidden_size: int, vocab_size: int, draft_vocab_size: int, rank: int, gated: bool) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if gated else None

    def forward(self, previous: Tensor, states: Tensor, logits: Tensor) -> Tensor:
        read = self.markov_w1(previous)
        if self.gate_proj is not None:
            read = torch.sigmoid(self.gate_proj(torch.cat([states, read], -1))) * read
        scores: Tensor = logits + self.markov_w2(read).float()
        return scores


class DFlashDraftModel(nn.Module):
    """Tensors are named as z-lab, DFlash2 and DeepSpec name them."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design, self.note = design, ""
        body, vocab_size = design.body, design.draft_vocab_size or design.vocab_size
        self.fc = nn.Linear(len(design.taps) * body.hidden_size, body.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(design) for _ in range(body.num_hidden_layers))
        self.norm = RMSNorm(body.hidden_size, body.rms_norm_eps)
        own = bool(design.draft_vocab_size)
        self.lm_head = nn.Linear(body.hidden_size, vocab_size, bias=False) if own else None
        self.register_buffer("d2t", torch.zeros(vocab_size, dtype=torch.int64) if own else None)
        rank, candidates = design.selector
        self.candidate_selector = CandidateSelector(body.hidden_size, vocab_size, rank, candidates) if rank else None
        rank, gated = design.markov_rank, design.markov_gated
        self.markov_head = MarkovHead(body.hidden_size, design.vocab_size, vocab_size, rank, gated) if rank else None

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self)

    @property
    def stage(self) -> CandidateSelector | MarkovHead | None:
        """What makes a token depend on the one before it."""
        return self.candidate_selector or self.markov_head

    def context(self, features: Tensor, rope: Rope) -> list[KeysValues]:
        """features [B, A, taps H] -> keys and values for every layer"""
        states = self.hidden_norm(self.fc(features))
        return [layer.self_attn.keys_values(states, rope) for layer in self._layers]

    def forward(
        self, x: Tensor, rope: Rope, masks: dict[Kind, Tensor | None], among: Callable[..., KeysValues]
    ) -> Tensor:
        """x [B, N S, H] -> the same; `among(keys, values, i)` puts those of the blocks beside those of the context."""
        for i, (layer, kind) in enumerate(zip(self._layers, self.design.kinds, strict=True)):
            x = layer(x, rope, masks[kind], lambda keys, values, i=i: among(keys, values, i))
        out: Tensor = self.norm(x)
        return out

    def whole(self, logits: Tensor) -> Tensor:
        """Logits over the draft's vocabulary -> over the target's."""
        if not isinstance(self.d2t, Tensor):
            return logits
        every = logits.new_full((*logits.shape[:-1], self.design.vocab_size), NEVER)
        ids = torch.arange(len(self.d2t), device=logits.device) + self.d2t
        return every.index_copy(-1, ids, logits)

    @property
    def _layers(self) -> list[Layer]:
        return cast(list[Layer], self.layers)


class DFlash(HeadDrafter):
    title = "DFlash"
    summary = "A small network guesses a whole block of words at once from what the target's layers say of the text."
    needs_model = True
    gamma: ClassVar[float] = 4.0  # a slot counts exp(1 / gamma) times as much in the loss as the one behind it

    @dataclass(frozen=True, slots=True)
    class Options:
        nodes: int = knob(0, "nodes of the draft tree; 0 drafts a chain", low=0, high=128, step=1)

    @staticmethod
    def load(source: str, target: Target, progress: LoadProgress | None = None) -> DFlashDraftModel:
        """Where a file does not say how it counts slots and layers, the target's own text decides, and `note` says so.

        Raises ValueError, one line, for other files and for a drafter of another target.
        """
        checkpoint = open_checkpoint(source, progress or silent)
        head, certain = _head(checkpoint, target)
        if not certain:
            _settle(head, target)
        return head

    @staticmethod
    def read(checkpoint: Checkpoint, target: Target) -> DFlashDraftModel:
        """What `load` makes of a checkpoint that is open, without asking the target's text."""
        return _head(checkpoint, target)[0]

    def __init__(self, target: Target, model: Any, options: Options | None = None) -> None:
        self.head: DFlashDraftModel = self.load(model, target) if isinstance(model, str) else model
        design = self.head.design
        self.taps, self.note = design.taps, self.head.note
        self._target, self._nodes = target, (options or self.Options()).nodes
        self._embedding = target.embed.get_parameter("weight")  # raw rows: some models scale what they look up
        self._rotary = Qwen3RotaryEmbedding(design.body)
        self._table: Rope = (torch.empty(0), torch.empty(0))
        self._sampling = Sampling()
        self._rng: Generator | None = None
        self._cache: SlabCache | None = None  # of the context alone
        self._root = torch.empty(0, dtype=torch.int64)  # [B]

    @classmethod
    def fresh(
        cls, target: Target, layers: int = 2, block_size: int = 8, taps: tuple[int, ...] | None = None
    ) -> DFlashDraftModel:
        """An untrained drafter that says at first what lm_head makes of the block's own embeddings.

        Its mask token is the first id without a word, if the vocabulary is padded, or else a stop token: either stands
        in no text. `taps` None: z-lab's choice of three.
        """
        size = target.hidden_size
        head_dim = min(HEAD_SIZE, size + size % 2)
        body = Qwen3Config(
            hidden_size=size,
            intermediate_size=3 * size,
            num_hidden_layers=layers,
            num_attention_heads=max(1, size // head_dim),
            num_key_value_heads=max(1, size // head_dim),
            head_dim=head_dim,
            max_position_embeddings=target.max_length,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
        design = Design(
            body=body,
            taps=taps or spread_taps(target.num_layers, TAPS),
            block_size=block_size,
            mask_token_id=_mask_token(target),
            vocab_size=target.vocab_size,
            kinds=((0, False),) * layers,
        )
        made = DFlashDraftModel(design)
        for name, parameter in made.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, 0.0, 0.02)
        as_target(made, target)
        return made

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        self._sampling = sampling
        self._rng = None if sampling.greedy else rng
        self._cache = None

    def release(self) -> None:
        self._cache = None

    def observe(self, progress: Progress) -> None:
        rows, columns = progress.inputs.shape
        if self._cache is None:
            self._cache = SlabCache(len(self.head.layers), rows, columns + SPARE, progress.inputs.device)
        self._cache.prepare(columns)
        context = self.head.context(self._features(progress).to(self.head.dtype), self._rope(self._cache, columns))
        for i, (keys, values) in enumerate(context):
            self._cache.update(keys, values, i)
        known = zip(self._cache.cursor.lengths, progress.lengths, strict=True)
        self._cache.set_lengths([old + new for old, new in known])
        self._root = at_last(progress, progress.outputs)

    def propose(self, budget: Budget) -> Draft:
        design = self.head.design
        depth = min(budget.depth, budget.nodes, design.drafts)
        if depth < 1:
            return Draft.empty(len(self._root), self._root.device)
        tokens = self._root.new_full((len(self._root), design.block_size), design.mask_token_id)
        tokens[:, 0] = self._root
        states = self._read(tokens)[:, design.first : design.first + depth]
        if self._nodes:
            return self._tree(states, self._logits(states), Budget(depth, budget.nodes))
        tokens, confidence, probs = self._chain(states, self._logits(states))
        return Draft.chain(tokens, probs, confidence)

    def _read(self, tokens: Tensor) -> Tensor:
        """A block [B, S] -> its states [B, S, H]; its keys and values lie behind the context until the next call writes
        over them."""
        assert self._cache is not None
        cache, slots = self._cache, tokens.shape[1]
        cache.prepare(slots)
        masks = {kind: _mask(kind, cache, slots) for kind in set(self.head.design.kinds)}
        states: Tensor = self.head(self._embed(tokens), self._rope(cache, slots), masks, cache.update)
        return states

    def _chain(self, states: Tensor, logits: Tensor) -> Chosen:
        """states [B, D, H], logits [B, D, V] before the last stage -> a token per slot"""
        stage, previous = self.head.stage, self._root
        if stage is None:
            return self._choose(logits)
        chosen: list[Chosen] = []
        for i in range(states.shape[1]):
            chosen.append(self._choose(stage(previous, states[:, i], logits[:, i])))
            previous = chosen[-1][0]
        tokens, confidence, probs = zip(*chosen, strict=True)
        return torch.stack(tokens, 1), torch.stack(confidence, 1), None if self._rng is None else torch.stack(probs, 1)

    def _choose(self, logits: Tensor) -> Chosen:
        logits = self.head.whole(logits)
        if self._rng is None:
            best, tokens = logits.max(-1)
            return tokens, (best - logits.logsumexp(-1)).exp(), None
        probs = to_probs(logits, self._sampling)
        tokens = draw(probs, self._rng)
        return tokens, probs.gather(-1, tokens[..., None]).squeeze(-1), probs

    def _tree(self, states: Tensor, logits: Tensor, budget: Budget) -> Draft:
        """The likeliest nodes."""
        stage, level = self.head.stage, count(1)
        if stage is None:
            return _independent_tree(self.head.whole(logits).log_softmax(-1), budget)

        def after(tokens: Tensor, slot: int) -> Tensor:
            there = (part[:, slot, None].expand(-1, tokens.shape[1], -1) for part in (states, logits))
            return self.head.whole(stage(tokens, *there)).log_softmax(-1)

        first = after(self._root[:, None], 0)[:, 0]
        return grow(first, lambda tokens, _: after(tokens, next(level)), budget, BRANCHES)

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy to the target's distribution (to the text where it is unknown) in blocks at random places, slot
        i of them weighted by exp(-i / gamma); at evenly spaced places while the head is in eval mode."""
        design, columns = self.head.design, batch.inputs.shape[1]
        anchors = self._anchors(batch.inputs)
        states = self._blocks(batch, anchors)[:, :, design.first :]
        asked = anchors[..., None] + torch.arange(design.drafts, device=anchors.device)  # [B, N, D]: whose outputs
        known, asked = asked < columns, asked.clamp_max(columns - 1)
        rows = torch.arange(len(asked), device=asked.device)[:, None, None]
        logits = self._logits(states)
        if self.head.stage is not None:
            logits = self.head.stage(batch.inputs[rows, asked], states, logits)
        logits = self.head.whole(logits)
        probs = batch.target_probs()
        wanted = batch.outputs[rows, asked] if probs is None else probs[rows, asked]
        nats = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(0, 2), reduction="none").view_as(known)
        weights = known * torch.exp(-torch.arange(design.drafts, device=known.device) / self.gamma)
        best = wanted if probs is None else wanted.argmax(-1)
        right = ((logits.argmax(-1) == best) & known).sum((0, 1)) / known.sum((0, 1)).clamp_min(1)
        metrics = {f"agree_{i}": share for i, share in enumerate(right.tolist(), start=1)}
        return (nats * weights).sum() / weights.sum(), metrics

    def _anchors(self, inputs: Tensor) -> Tensor:
        """Columns [B, N] of anchors, no two alike in a row, for about as many slots as there are columns."""
        rows, columns = inputs.shape
        places = max(1, columns - self.head.design.drafts)  # a block should end within the row
        number = min(places, max(1, columns // self.head.design.block_size))
        if self.head.training:
            return 1 + torch.rand(rows, places).argsort(1)[:, :number].to(inputs.device)
        return 1 + (torch.arange(number, device=inputs.device) * places // number).expand(rows, -1)

    def _blocks(self, batch: Progress, anchors: Tensor) -> Tensor:
        """The states [B, N, S, H] of blocks at anchors [B, N]; each sees what is before its anchor, and itself."""
        design, (rows, columns) = self.head.design, batch.inputs.shape
        features = self._features(batch).to(self.head.dtype)
        positions = (anchors[..., None] + torch.arange(design.block_size, device=anchors.device)).flatten(1)
        cosine, sine = self._rotations(columns + design.block_size, features.device)
        context = self.head.context(features, (cosine[:columns], sine[:columns]))
        tokens = torch.full_like(positions, design.mask_token_id)
        tokens[:, :: design.block_size] = batch.inputs.gather(1, anchors.clamp_max(columns - 1))

        def among(keys: Tensor, values: Tensor, i: int) -> KeysValues:
            return torch.cat([context[i][0], keys], 2), torch.cat([context[i][1], values], 2)

        rope = cosine[positions][:, None], sine[positions][:, None]
        masks = _training_masks(design, anchors, positions, columns)
        states: Tensor = self.head(self._embed(tokens), rope, masks, among)
        return states.view(rows, -1, design.block_size, states.shape[-1])

    def save(self, folder: Path, target_name: str) -> None:
        write_checkpoint(
            folder, described(self.head.design, target_name, self._target.num_layers), self.head.state_dict()
        )

    def _features(self, progress: Progress) -> Tensor:
        """[B, A, taps H]"""
        return torch.cat([progress.hidden[tap] for tap in self.taps], -1)

    def _embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._embedding).to(self.head.dtype) * self.head.design.embedding_scale

    def _logits(self, states: Tensor) -> Tensor:
        """states [..., H] -> fp32 logits over the draft's vocabulary, before the last stage"""
        design, own = self.head.design, self.head.lm_head
        states = states.contiguous()  # of a strided view the product takes several times as long
        logits: Tensor = self._target.lm_head(states.to(self._embedding.dtype)) if own is None else own(states)
        logits = logits.float() * design.output_multiplier
        return design.softcap * torch.tanh(logits / design.softcap) if design.softcap else logits

    def _rope(self, cache: SlabCache, columns: int) -> Rope:
        """The rotations of the next `columns` positions of every row."""
        cursor = cache.cursor
        table = self._rotations(cursor.capacity, cursor.device)
        if cursor.each is None:
            cosine, sine = (part.narrow(0, cursor.longest, columns) for part in table)
        else:
            positions = cursor.each[:, None] + torch.arange(columns, device=cursor.device)
            cosine, sine = (part[positions][:, None] for part in table)
        return cosine.to(self.head.dtype), sine.to(self.head.dtype)

    def _rotations(self, positions: int, device: torch.device) -> Rope:
        """Of at least so many positions, from 0."""
        if len(self._table[0]) < positions or self._table[0].device != device:
            frequencies = cast(Tensor, self._rotary.inv_freq).to(device)
            angles = torch.arange(positions, device=device)[:, None] * frequencies
            cosine, sine = (part * self._rotary.attention_scaling for part in (angles.cos(), angles.sin()))
            self._table = torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)
        return self._table


def _independent_tree(chances: Tensor, budget: Budget) -> Draft:
    """The likeliest nodes, log q [B, D, V] of independent slots given (DDTree, 2604.12989). All nodes of a level have
    the same R children, so the tree grows over ranks, and rank r of level i is number i R + r."""
    chances, ranked = chances.topk(min(budget.nodes, chances.shape[-1]))
    rows, depth, width = chances.shape
    apart = chances.new_full((rows, depth, depth, width), -torch.inf)
    apart.diagonal(dim1=1, dim2=2).copy_(chances.transpose(1, 2))
    levels = iter(apart.flatten(2).unbind(1))
    first = next(levels)
    tree = grow(first, lambda ranks, _: next(levels)[:, None].expand(-1, ranks.shape[1], -1), budget, width)
    return Draft(ranked.flatten(1).gather(1, tree.tokens), tree.parents, confidence=tree.confidence)


def _within(kind: Kind, queries: Tensor, keys: Tensor) -> Tensor:
    """Positions [B, S] and [B, W] or [W] -> [B, S, W]: whether the kind of layer lets a query see a key."""
    window, causal = kind
    distance = queries[..., None] - keys[..., None, :]
    near = distance.abs() < window if window else torch.ones_like(distance, dtype=torch.bool)
    return near & (distance >= 0) if causal else near


def _mask(kind: Kind, cache: SlabCache, slots: int) -> Tensor | None:
    """[B or 1, 1, S, W] for a block behind the context; None where nothing is hidden."""
    cursor, (window, causal) = cache.cursor, kind
    width = cursor.longest + slots
    if cursor.each is None and not causal and not 0 < window < width:
        return None
    lengths = torch.tensor([cursor.longest], device=cursor.device) if cursor.each is None else cursor.each
    columns = torch.arange(width, device=cursor.device)  # column and position are one
    queries = lengths[:, None] + columns[:slots]
    return (_within(kind, queries, columns) & (columns < lengths[:, None] + slots)[:, None])[:, None]


def _training_masks(design: Design, anchors: Tensor, positions: Tensor, columns: int) -> dict[Kind, Tensor | None]:
    """[B, 1, N S, A + N S] for blocks of slots at positions [B, N S], side by side behind A columns of context."""
    before = torch.arange(columns, device=anchors.device)
    context = before < anchors.repeat_interleave(design.block_size, 1)[..., None]
    owner = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(design.block_size)
    own = (owner[:, None] == owner).expand(len(anchors), -1, -1)
    seen = torch.cat([context, own], 2)
    keys = torch.cat([before.expand(len(anchors), -1), positions], 1)
    return {kind: (seen & _within(kind, positions, keys))[:, None] for kind in set(design.kinds)}


def _mask_token(target: Target) -> int:
    tokenizer = getattr(target, "tokenizer", None)
    if tokenizer is not None and len(tokenizer) < target.vocab_size:
        return len(tokenizer)
    return target.stop_token_ids[0] if target.stop_token_ids else 0


def _head(checkpoint: Checkpoint, target: Target) -> tuple[DFlashDraftModel, bool]:
    """The drafter, and whether the file says which convention it follows."""
    design, tensors, certain = read(checkpoint, target)
    with torch.device("meta"):
        head = DFlashDraftModel(design)
    _fill(head, tensors, checkpoint)
    return pack(as_target(head, target)), certain


def _fill(head: DFlashDraftModel, tensors: dict[str, Tensor], checkpoint: Checkpoint) -> None:
    """Raises ValueError when a tensor is missing, unknown or of another shape than the config says."""
    odd = odd_tensors(head, tensors)
    if odd:
        name, held, wanted = odd[0]
        raise ValueError(
            f"{checkpoint.name}: {name} is {held or 'missing'}, its config asks for {wanted or 'no such tensor'}; "
            f"fetch config.json and weights of one revision"
        )
    head.load_state_dict(tensors, assign=True)


def _settle(head: DFlashDraftModel, target: Target) -> None:
    """Keep the reading of the file that guesses the target's own text best."""
    given = head.design
    readings = [
        replace(given, taps=taps, from_anchor=from_anchor)
        for shift in (0, 1)
        if min(taps := tuple(tap - shift for tap in given.taps)) >= 0
        for from_anchor in (False, True)
    ]
    text = written(target, tuple({tap for design in readings for tap in design.taps}))

    def guessed(design: Design) -> float:
        head.design = design
        shares = torch.tensor(list(DFlash(target, head).loss(text)[1].values()))
        return float(shares.cumprod(0).sum())

    (most, best), (second, _) = sorted(((guessed(d), -i) for i, d in enumerate(readings)), reverse=True)[:2]
    head.design = design = readings[-best]
    slots = "every slot" if design.from_anchor else "the slots after the anchor"
    head.note = (
        f"the file does not say how it counts: with {slots} and layers {design.taps} of the target it guessed "
        f"{most:.1f} tokens of a block, read otherwise {second:.1f}"
    )


@torch.no_grad()
def written(target: Target, taps: tuple[int, ...]) -> Progress:
    """Texts drawn from the target behind a stop token, and what it finds likeliest at every place: written greedily, a
    text soon repeats itself, and then any reading does."""
    rng = Generator(target.device).manual_seed(0)
    first = target.stop_token_ids[0] if target.stop_token_ids else 0
    tokens = torch.full((PROBE_ROWS, 1), first, device=target.device)
    forward, texts, said = target.start(tokens), [tokens], []
    for _ in range(PROBE_COLUMNS):
        said.append(forward.logits[:, -1].argmax(-1))
        texts.append(draw(forward.logits[:, -1].float().softmax(-1), rng)[:, None])
        forward = target.forward(texts[-1], tokens[:, 1:])
        target.commit([[0]] * PROBE_ROWS)
    inputs = torch.cat(texts[:-1], 1)
    hidden = target.start(inputs, taps).hidden
    target.release()
    return Progress(inputs, torch.stack(said, 1), [PROBE_COLUMNS] * PROBE_ROWS, hidden)
