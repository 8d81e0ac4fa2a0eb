"""DFlash: a small network predicts a block of masked tokens in one pass (Chen et al. 2602.06036). DFlash2 and
DSpark (2607.05147) add a final stage in which a token also depends on the tokens before it, and so does XPress
(2608.02438), which resolves all slots at once in a few passes. JetSpec (2606.18394) has causal layers.

B rows, A columns, S slots of a block, D draft tokens, N nodes or blocks, G key/value heads, V vocabulary, H hidden.

The target's hidden states of a token (`taps`) are projected to one context vector, which every drafter layer turns into
keys and values but not queries. A block consists of the embeddings of the anchor (the root) and of S - 1 mask tokens at
the next positions. Its slots attend to the context and to each other in both directions, so a block always has its
trained size, and draft tokens beyond the budget are dropped. Only the context stays in the KV cache.

Slots are sampled independently, each from its own q, or one after the other (DFlash2, DSpark), or in passes with the
same noise (XPress): a token depends on earlier noise and its own, so it is drawn from the q of the last pass.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, Qwen3Config

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.tree import Draft
from specdemo.kv.masks import AttentionKind
from specdemo.kv.view import View
from specdemo.methods import require_method, setting
from specdemo.methods.base import DraftOptions
from specdemo.methods.heads.formats import d2t_to_ids, rename_tensors
from specdemo.methods.heads.formats import dflash as files
from specdemo.methods.heads.formats.dflash import Design, spread_taps
from specdemo.methods.heads.formats.gguf import open_head
from specdemo.methods.heads.head import Head, Recipe
from specdemo.methods.heads.network import Network, move_to_target
from specdemo.methods.heads.runtime import DraftPass, HeadRuntime, last_columns, training_columns
from specdemo.methods.heads.sampler import MASKED_LOGIT, ChainBuilder, DraftVocab, TokenSampler, grow_tree
from specdemo.models.checkpoints import Checkpoint, write_checkpoint
from specdemo.models.layers import MLP, DecoderLayer, Rotary
from specdemo.models.packed import RMSNorm
from specdemo.models.ref import ModelRef
from specdemo.models.sources import LoadProgress
from specdemo.training.losses import argmax_targets, dpace_weights

NUM_TAPS = 3
# substrings of `architectures` in config.json; LiLiCorr is rejected in `files.read_designs`
CLASSES = ("DFlash", "DSpark", "Domino", "PEagle", "LiLiCorr", "XPress")
HEAD_SIZE = 64  # of an untrained drafter
BRANCHES = 10  # children per node, with a final stage
HINT = "fetch config.json and weights of the same revision, or choose a drafter in another format"

Memory = Tensor | None  # recurrent state of a final stage
StageOutput = tuple[Tensor, Memory]  # logits and state


class Convolution(nn.Module):
    """DFlash2: mixes input and output of a sublayer with the previous slots, with kernels computed from the slot."""

    def __init__(self, hidden_size: int, block_size: int, span: int, groups: int) -> None:
        super().__init__()
        self.block_size, self.span, self.groups = block_size, span, groups
        self.base_kernel = nn.Parameter(torch.zeros(2, span, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * span * groups, bias=False)

    def forward(self, states: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        kernels = self.kernel_projection(states).unflatten(-1, (2, self.span, self.groups))
        return self._filter(1, sublayer(self._filter(0, states, kernels)), kernels)

    def _filter(self, side: int, states: Tensor, kernels: Tensor) -> Tensor:
        """Filter states [B, N S, H] within each block."""
        width = states.shape[-1] // self.groups
        weights = self.base_kernel[side] + kernels[..., side, :, :].repeat_interleave(width, -1)
        blocks = states.unflatten(1, (-1, self.block_size))
        mixed = weights[..., 0, :] * states
        for lag in range(1, self.span):
            before = F.pad(blocks, (0, 0, lag, 0))[:, :, : self.block_size].flatten(1, 2)
            mixed = mixed + weights[..., lag, :] * before
        return mixed


class BlockLayer(DecoderLayer):
    """A decoder layer over the slots of blocks."""

    def __init__(self, design: Design, index: int, tensors: Mapping[str, Tensor]) -> None:
        body, (span, groups) = design.body, files.convolution_sizes(tensors)
        names = {"self_attn.q_norm.weight"}
        if body.attention_bias:
            names |= {f"self_attn.{part}_proj.bias" for part in "qkvo"}
        if "layers.0.self_attn.attention_sink_bias" in tensors:
            names |= {"self_attn.attention_sink_bias"}
        super().__init__(body, index, names, kind=design.attention_kinds[index])
        self.attention_conv = Convolution(body.hidden_size, design.block_size, span, groups) if span else None
        self.mlp_conv = Convolution(body.hidden_size, design.block_size, span, groups) if span else None

    def forward(self, x: Tensor, columns: View) -> Tensor:
        """x [B, N S, H] -> [B, N S, H]"""
        if self.attention_conv is None or self.mlp_conv is None:
            return super().forward(x, columns)
        x = x + self.attention_conv(self.input_layernorm(x), lambda states: self.attention(states, columns))
        out: Tensor = x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)
        return out


class Stage(nn.Module):
    """A final stage: makes the logits of a slot depend on the tokens before it in the block."""

    recurrent = False  # True: depends on more than the previous token

    def prepare(self, block: Tensor, previous: Tensor) -> StageOutput:
        """Return the states that `forward` reads, [..., S, H], and the memory for the first slot that predicts.

        block [..., S, H]: states of all slots. previous [...]: the token before the root.
        """
        return block, None

    def forward(self, slot: int, previous: Tensor, states: Tensor, logits: Tensor, memory: Memory) -> StageOutput:
        """Return the logits of a slot, and the memory for the next slot.

        slot: counted from the first slot that predicts. previous [...]: tokens, states [..., H], logits [..., W],
        memory [..., M]: of `prepare` for the first slot. Stages that are not recurrent accept several slots at once.
        """
        raise NotImplementedError


class CandidateSelector(Stage):
    """DFlash2: scores the most likely tokens of a slot by how well they follow the previous token."""

    def __init__(self, design: Design, vocab_size: int, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.candidates, rank = min(design.candidates, vocab_size), tensors[files.CODEBOOK].shape[1]
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(design.body.hidden_size, rank, bias=False)

    def forward(self, slot: int, previous: Tensor, states: Tensor, logits: Tensor, memory: Memory) -> StageOutput:
        scores, tokens = logits.topk(self.candidates)
        query = self.predecessor_codebook[previous] * self.hidden_projection(states)
        follow_scores = (self.successor_codebook[tokens] @ query[..., None]).squeeze(-1)
        return torch.full_like(logits, MASKED_LOGIT).scatter(-1, tokens, scores + follow_scores.float()), None


class MarkovHead(Stage):
    """DSpark: adds a low-rank bias that depends on the previous token.

    Variants gate the bias by the slot's state, or use a recurrent state over all previous tokens.
    """

    def __init__(self, design: Design, vocab_size: int, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        size, rank = design.body.hidden_size, tensors["markov_head.markov_w1.weight"].shape[1]
        self.markov_w1 = nn.Embedding(design.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        self.recurrent = "markov_head.joint_proj.weight" in tensors
        self.joint_proj = nn.Linear(2 * rank + size, 3 * rank) if self.recurrent else None
        gated = "markov_head.gate_proj.weight" in tensors and not self.recurrent
        self.gate_proj = nn.Linear(size + rank, rank) if gated else None

    def forward(self, slot: int, previous: Tensor, states: Tensor, logits: Tensor, memory: Memory) -> StageOutput:
        embedded = self.markov_w1(previous)
        if self.gate_proj is not None:
            embedded = torch.sigmoid(self.gate_proj(torch.cat([states, embedded], -1))) * embedded
        elif self.joint_proj is not None:
            memory = torch.zeros_like(embedded) if memory is None else memory
            gate, candidate, out = self.joint_proj(torch.cat([memory, embedded, states], -1)).chunk(3, -1)
            retain = torch.sigmoid(gate)
            embedded, memory = torch.tanh(out), retain * memory + (1 - retain) * torch.tanh(candidate)
        return logits + self.markov_w2(embedded).float(), memory


class Domino(Stage):
    """SpecForge: a GRU over the previous tokens corrects all slots but the first few."""

    recurrent = True

    def __init__(self, design: Design, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        inner = len(tensors["domino.prefix_gru.weight_ih_l0"]) // 3
        rank = len(tensors["domino.embed_proj.0.weight"])
        size, self.uncorrected_slots = design.body.hidden_size, design.uncorrected_slots
        self.prefix_gru = nn.GRU(size, inner, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(size + inner, rank, bias=False), nn.SiLU(), nn.Linear(rank, design.vocab_size, bias=False)
        )
        self.embedding: tuple[Tensor, ...] = ()  # the target's; a tuple, so that it is not registered

    def forward(self, slot: int, previous: Tensor, states: Tensor, logits: Tensor, memory: Memory) -> StageOutput:
        embedded = F.embedding(previous, self.embedding[0]).to(states.dtype)
        initial_state = None if memory is None else memory.reshape(1, -1, memory.shape[-1])
        state = self.prefix_gru(embedded.reshape(-1, 1, embedded.shape[-1]), initial_state)[0].view(*previous.shape, -1)
        if slot < self.uncorrected_slots:
            return logits, state
        return logits + self.embed_proj(torch.cat([states, state], -1)).float(), state


class XPress(Stage):
    """XPress: a low-rank bias that depends on all previous tokens, mixed over the slots of the block.

    R rank. Slot k has a latent [R] computed from its state, the mean state of the block and the token before it. The
    mixer adds the latents of slots 0..k, each channel with weights of its own.
    """

    recurrent = True

    def __init__(self, design: Design, vocab_size: int, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        size, rank = design.body.hidden_size, tensors[files.XPRESS].shape[1]
        inner = len(tensors["xpress_head.mlp.gate_proj.weight"])
        self.rank, self.from_anchor, self.passes = rank, design.from_anchor, design.passes
        self.shortlist = min(design.shortlist, vocab_size)
        self.w1 = nn.Embedding(design.vocab_size, rank)
        self.down_h, self.down_g = nn.Linear(size, rank, bias=False), nn.Linear(size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix = nn.ParameterDict({"L": torch.zeros(rank, design.block_size, design.block_size)})
        self.mlp = MLP(rank, inner, "silu")
        self.w2 = nn.Linear(rank, vocab_size, bias=False)

    def prepare(self, block: Tensor, previous: Tensor) -> StageOutput:
        mean = self.down_g(block.mean(-2, keepdim=True))
        states = torch.cat([self.down_h(block), mean.expand(*block.shape[:-1], -1)], -1)
        return states, None if self.from_anchor else self._latent(previous, states[..., 0, :])

    def forward(self, slot: int, previous: Tensor, states: Tensor, logits: Tensor, memory: Memory) -> StageOutput:
        latent = self._latent(previous, states)
        memory = latent if memory is None else torch.cat([memory, latent], -1)
        latents = memory.unflatten(-1, (-1, self.rank))
        last = latents.shape[-2] - 1
        mixed = latent + (self.mix["L"][:, last, : last + 1].mT * latents).sum(-2)
        return self._corrected(logits, mixed), memory

    def refine(self, previous: Tensor, states: Tensor, logits: Tensor, memory: Memory) -> Tensor:
        """Return the logits [B, D, W] of all slots in one pass, given previous tokens [B, D]."""
        latents = self._latent(previous, states)
        before = latents if memory is None else torch.cat([memory[:, None], latents], 1)
        slots, first = before.shape[1], before.shape[1] - latents.shape[1]
        mixer = self.mix["L"][:, :slots, :slots].tril()[:, first:]
        return self._corrected(logits, latents + torch.einsum("rkj,bjr->bkr", mixer, before))

    def _latent(self, previous: Tensor, states: Tensor) -> Tensor:
        latent: Tensor = self.in_proj(torch.cat([states, self.w1(previous)], -1))
        return latent

    def _corrected(self, logits: Tensor, mixed: Tensor) -> Tensor:
        """Add the bias, and keep only the most likely tokens of the block pass if the config says so."""
        corrected: Tensor = logits + self.w2(mixed + self.mlp(mixed)).float()
        if not self.shortlist:
            return corrected
        tokens = logits.topk(self.shortlist).indices
        return torch.full_like(logits, MASKED_LOGIT).scatter(-1, tokens, corrected.gather(-1, tokens))


def stage_logits(stage: Stage, previous: Tensor, states: Tensor, logits: Tensor, memory: Memory = None) -> Tensor:
    """Run a stage on all slots: previous tokens [..., D] -> logits [..., D, W]. states, memory: see `Stage.prepare`."""
    if not stage.recurrent:
        return stage.forward(0, previous, states, logits, None)[0]
    all_logits = []
    for slot in range(previous.shape[-1]):
        slot_logits, memory = stage(slot, previous[..., slot], states[..., slot, :], logits[..., slot, :], memory)
        all_logits.append(slot_logits)
    return torch.stack(all_logits, -2)


class DFlashDraftModel(Network):
    """Network of all DFlash variants. Tensor names are those of z-lab, DFlash2 and DeepSpec.

    tensors: of the checkpoint; they define which optional parts exist, and their sizes.
    """

    def __init__(self, design: Design, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.convention: Design = design
        size, eps, has_draft_vocab = design.body.hidden_size, design.body.rms_norm_eps, "d2t" in tensors
        draft_vocab_size = len(tensors["d2t"]) if has_draft_vocab else design.vocab_size
        self.fc = nn.Linear(len(design.taps) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(BlockLayer(design, i, tensors) for i in range(design.body.num_hidden_layers))
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, draft_vocab_size, bias=False) if has_draft_vocab else None
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64) if has_draft_vocab else None)
        self.candidate_selector = (
            CandidateSelector(design, draft_vocab_size, tensors) if files.CODEBOOK in tensors else None
        )
        self.markov_head = (
            MarkovHead(design, draft_vocab_size, tensors) if "markov_head.markov_w1.weight" in tensors else None
        )
        self.domino = Domino(design, tensors) if "domino.prefix_gru.weight_ih_l0" in tensors else None
        self.xpress_head = XPress(design, draft_vocab_size, tensors) if files.XPRESS in tensors else None
        self.mask_embedding = nn.Parameter(torch.zeros(size)) if "mask_embedding" in tensors else None

    @property
    def stage(self) -> Stage | None:
        """The final stage."""
        return self.candidate_selector or self.markov_head or self.domino or self.xpress_head

    def context(self, features: Tensor) -> Tensor:
        """Project target features [B, A, taps H] to context vectors [B, A, H], the input of all keys and values."""
        states: Tensor = self.hidden_norm(self.fc(features))
        return states

    def cache_context(self, features: Tensor, columns: View) -> None:
        """Write the keys and values of target features [B, A, taps H] to the cache."""
        states = self.context(features)
        for layer in cast(list[BlockLayer], self.layers):
            layer.self_attn.cache_keys_values(states, columns)

    def forward(self, x: Tensor, columns: View) -> Tensor:
        """x [B, N S, H] -> [B, N S, H]"""
        for layer in self.layers:
            x = layer(x, columns)
        out: Tensor = self.norm(x)
        return out

    def to_target_vocab(self, logits: Tensor) -> Tensor:
        """Scatter logits of the draft vocabulary to the target's."""
        if not isinstance(self.d2t, Tensor):
            return logits
        return DraftVocab(d2t_to_ids(self.d2t), self.convention.vocab_size).to_target_vocab(logits)


class DFlashOptions(DraftOptions):
    nodes: int = setting(0, "nodes of the draft tree; 0 drafts a chain", low=0, high=256, step=1)


class DFlash(Head[DFlashDraftModel], method="dflash", tree=lambda options: options.nodes or None):
    summary = "A small network drafts a block of tokens in one pass from the target's hidden states."
    recipes: ClassVar = {"dflash": Recipe("DFlash, blocks of 8", {"block_size": 8})}
    config_keys = files.KEYS
    gamma: ClassVar[float] = 4.0  # slot i has weight exp(-i / gamma) in the loss

    Options = DFlashOptions

    options: DFlashOptions

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        config, names = checkpoint.config, checkpoint.tensors.keys()
        family = config.get("speculators_model_type")
        if family:
            return family in ("dflash", "dspark", "xpress")
        by_class = any(part in str(name) for name in config.get("architectures") or () for part in CLASSES)
        by_names = {"hidden_norm.weight", "fc.weight", "norm.weight"} <= names
        return "dflash_config" in config or by_class or by_names or checkpoint.has("encoder.output_norm_enc.")

    @classmethod
    def open(cls, source: ModelRef, target: Target, progress: LoadProgress) -> Checkpoint:
        return open_head(source, "dflash", progress) if source.gguf else super().open(source, target, progress)

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: Target) -> DFlashDraftModel:
        checkpoint = replace(checkpoint, tensors=rename_tensors(checkpoint.tensors, files.NAMES))
        require_method(checkpoint, "dflash")
        tensors, designs = files.read_designs(checkpoint, target)
        with torch.device("meta"):
            head = DFlashDraftModel(designs[0], tensors)
        head.conventions, head.note = designs, files.remarks(checkpoint.config, designs[0])
        return head.load_tensors(tensors, checkpoint, target, HINT)

    def __init__(self, target: Target, model: DFlashDraftModel | str, options: DFlashOptions | None = None) -> None:
        super().__init__(target, model, options)
        head = self.head
        self.taps = head.convention.taps
        self._target = target
        # the raw weight, because the embedding modules of some models scale their output
        self._embedding = target.embed.get_parameter("weight")
        if head.domino is not None:
            head.domino.embedding = (self._embedding,)
        self._root = self._before_root = torch.empty(0, dtype=torch.int64)  # [B]

    def read_bytes(self, k: int) -> int:
        return self.weight_bytes  # one pass drafts all tokens

    def new_runtime(self, target: Target) -> HeadRuntime:
        self._angles = Rotary.of_config(self.head.convention.body, target.device)
        return HeadRuntime(target, self.head.dtype, len(self.head.layers), self._angles)  # caches the context only

    @classmethod
    def fresh(
        cls, target: Target, layers: int = 2, block_size: int = 8, taps: tuple[int, ...] | None = None
    ) -> DFlashDraftModel:
        """Return an untrained drafter, which outputs lm_head of the block's embeddings.

        The mask token is the first padding id of the vocabulary, else a stop token, since neither occurs inside a text.
        taps: None uses z-lab's default of three.
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
            taps=taps or spread_taps(target.num_layers, NUM_TAPS),
            block_size=block_size,
            mask_token_id=_mask_token(target),
            vocab_size=target.vocab_size,
            attention_kinds=((0, False),) * layers,
        )
        head = DFlashDraftModel(design, {})
        for name, parameter in head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, 0.0, 0.02)
        return move_to_target(head, target)

    def observe(self, progress: Progress) -> None:
        self.runtime.observe(progress.lengths, self.target_features(progress))
        self._root = last_columns(progress, progress.outputs)
        self._before_root = last_columns(progress, progress.inputs)

    def propose(self, budget: Budget) -> Draft:
        design = self.head.convention
        depth = min(budget.chain, design.num_drafts)
        if depth < 1:
            return Draft.empty(len(self._root), self._root.device)
        inputs, nodes = (self._root, self._before_root), budget.nodes if self.options.nodes else 0
        return self.runtime.draft(
            self._draft_block, depth, self.sampler, *inputs, nodes=nodes, max_columns=design.block_size
        )

    def _draft_block(self, draft: DraftPass, root: Tensor, before_root: Tensor) -> Draft:
        design, stage = self.head.convention, self.head.stage
        if draft.inputs:
            draft.columns.run(self.head.cache_context, *draft.inputs)
        tokens = root.new_full((len(root), design.block_size), design.mask_token_id)
        tokens[:, 0] = root
        block = draft.columns.chain(design.block_size).run(self._block, tokens)
        slots = slice(design.first_slot, design.first_slot + draft.depth)
        logits = self._logits(block[:, slots])
        states, memory = stage.prepare(block, before_root) if stage else (block, None)
        if draft.nodes:  # all nodes share one block
            return self._tree(draft.sampler, root, states[:, slots], logits, memory, Budget(draft.depth, draft.nodes))
        return self._chain(draft.sampler, root, states[:, slots], logits, memory)

    def _block(self, tokens: Tensor, columns: View) -> Tensor:
        states: Tensor = self.head(self._embed(tokens), columns)
        return states

    def _chain(self, sampler: TokenSampler, root: Tensor, states: Tensor, logits: Tensor, memory: Memory) -> Draft:
        """Draft one token per slot from states [B, D, H] and logits [B, D, V] before the final stage."""
        previous, builder, stage = root, ChainBuilder(sampler), self.head.stage
        if isinstance(stage, XPress):
            return self._jacobi(stage, sampler, root, states, logits, memory)
        if stage is None:
            builder.append(self.head.to_target_vocab(logits))
            return builder.build()
        for i in range(states.shape[1]):
            slot_logits, memory = stage(i, previous, states[:, i], logits[:, i], memory)
            previous = builder.append(self.head.to_target_vocab(slot_logits)[:, None])[:, 0]
        return builder.build()

    def _jacobi(
        self, stage: XPress, sampler: TokenSampler, root: Tensor, states: Tensor, logits: Tensor, memory: Memory
    ) -> Draft:
        """Draft all slots in parallel. In every pass they read the tokens of the last, drawn with the same noise."""
        distribution = sampler.draft_distribution(self.head.to_target_vocab(logits))
        draw = sampler.repeatable_draw(distribution)
        for _ in range(stage.passes):
            previous = torch.cat([root[:, None], draw(distribution)[:, :-1]], 1)
            refined = stage.refine(previous, states, logits, memory)
            distribution = sampler.draft_distribution(self.head.to_target_vocab(refined))
        return sampler.make_draft(draw(distribution), distribution)

    def _tree(
        self, sampler: TokenSampler, root: Tensor, states: Tensor, logits: Tensor, memory: Memory, budget: Budget
    ) -> Draft:
        """Draft the most likely nodes. memory [B, M]: of the root."""
        slots, stage = count(), self.head.stage
        if stage is None:
            log_probs = sampler.log_probs(self.head.to_target_vocab(logits), levels=None)
            return _independent_tree(log_probs, budget)
        memory = None if memory is None else memory[:, None]  # of the nodes of the last level
        rows = torch.arange(len(states), device=states.device)[:, None]

        def expand(tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal memory
            slot = next(slots)
            state, slot_logits = (part[:, slot, None].expand(-1, tokens.shape[1], -1) for part in (states, logits))
            next_logits, memory = stage(
                slot, tokens, state, slot_logits, None if memory is None else memory[rows, parents]
            )
            return sampler.log_probs(self.head.to_target_vocab(next_logits), slot)

        root_log_probs = expand(root[:, None], torch.zeros_like(root)[:, None])[:, 0]
        return grow_tree(root_log_probs, expand, budget, BRANCHES)

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """Loss to the target's distribution (or the text) in blocks at random anchors, slot i weighted by
        exp(-i / gamma) or by D-PACE. In eval mode the anchors are evenly spaced.
        """
        design, columns = self.head.convention, batch.inputs.shape[1]
        anchors = self._anchors(batch.inputs)
        block, stage = self._block_states(batch, anchors), self.head.stage
        # [B, N, D]: whose outputs
        label_columns = anchors[..., None] + torch.arange(design.num_drafts, device=anchors.device)
        in_range, label_columns = label_columns < columns, label_columns.clamp_max(columns - 1)
        rows = torch.arange(len(label_columns), device=label_columns.device)[:, None, None]
        logits = self._logits(block[:, :, design.first_slot :])
        if stage is not None:
            states, memory = stage.prepare(block, batch.inputs.gather(1, anchors - 1))
            states = states[:, :, design.first_slot :]
            logits = stage_logits(stage, batch.inputs[rows, label_columns], states, logits, memory)
        logits = self.head.to_target_vocab(logits)
        labels = batch.labels()[rows, label_columns]
        valid = in_range.flatten(0, 1)
        losses, confidence = self.objective.token_losses(logits.flatten(0, 1), labels.flatten(0, 1), valid)
        if self.objective.weights == "dpace":
            weights = dpace_weights(confidence, valid)
        else:
            weights = valid * torch.exp(-torch.arange(design.num_drafts, device=valid.device) / self.gamma)
        agreement = ((logits.argmax(-1) == argmax_targets(labels)) & in_range).sum((0, 1)) / in_range.sum(
            (0, 1)
        ).clamp_min(1)
        metrics = {f"agree_{i}": share for i, share in enumerate(agreement.tolist(), start=1)}
        return (losses * weights).sum() / weights.sum(), metrics

    def _anchors(self, inputs: Tensor) -> Tensor:
        """Choose distinct anchor columns [B, N], so that the blocks have about as many slots as there are columns."""
        rows, columns = inputs.shape
        places = max(1, columns - self.head.convention.num_drafts)  # so that blocks end within the row
        number = min(places, max(1, columns // self.head.convention.block_size))
        if self.head.training:
            return 1 + torch.rand(rows, places).argsort(1)[:, :number].to(inputs.device)
        return 1 + (torch.arange(number, device=inputs.device) * places // number).expand(rows, -1)

    def _block_states(self, batch: Progress, anchors: Tensor) -> Tensor:
        """Return the states [B, N, S, H] of blocks at anchors [B, N]. A block sees the context before its anchor."""
        design, (rows, columns) = self.head.convention, batch.inputs.shape
        positions = (anchors[..., None] + torch.arange(design.block_size, device=anchors.device)).flatten(1)
        end, cache = columns + design.block_size, DynamicCache()
        context = torch.arange(columns, device=anchors.device)[None]
        self.head.cache_context(self.target_features(batch), training_columns(context, self._angles, end, cache=cache))
        tokens = torch.full_like(positions, design.mask_token_id)
        tokens[:, :: design.block_size] = batch.inputs.gather(1, anchors.clamp_max(columns - 1))
        masks = _training_masks(design, anchors, positions, columns)
        block_columns = View(positions, masks.get, cache, self._angles(positions, end))
        states: Tensor = self.head(self._embed(tokens), block_columns)
        return states.view(rows, -1, design.block_size, states.shape[-1])

    def save(self, folder: Path, target_name: str) -> None:
        tensors = self.head.state_dict()
        write_checkpoint(
            folder, files.to_config(self.head.convention, tensors, target_name, self._target.num_layers), tensors
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        design, mask_embedding = self.head.convention, self.head.mask_embedding
        tokens_in_range = tokens.clamp_max(len(self._embedding) - 1)
        rows = F.embedding(tokens_in_range, self._embedding).to(self.head.dtype)
        if mask_embedding is not None:
            rows = torch.where((tokens == design.mask_token_id)[..., None], mask_embedding, rows)
        return rows * design.embedding_scale

    def _logits(self, states: Tensor) -> Tensor:
        """Return fp32 logits of states [..., H] over the draft vocabulary, before the final stage."""
        design, lm_head = self.head.convention, self.head.lm_head
        states = states.contiguous()  # the matrix product is several times slower on a strided view
        logits: Tensor = self._target.lm_head(states.to(self._embedding.dtype)) if lm_head is None else lm_head(states)
        logits = logits.float() * design.output_multiplier
        return design.softcap * torch.tanh(logits / design.softcap) if design.softcap else logits


def _independent_tree(log_probs: Tensor, budget: Budget) -> Draft:
    """Draft the most likely nodes of independent slots with log q [B, D, V] (DDTree, 2604.12989).

    All nodes of a level have the same R children, so the tree is grown over ranks: rank r of level i has index i R + r.
    """
    log_probs, ranked = log_probs.topk(min(budget.nodes, log_probs.shape[-1]))
    rows, depth, width = log_probs.shape
    by_level = log_probs.new_full((rows, depth, depth, width), -torch.inf)
    by_level.diagonal(dim1=1, dim2=2).copy_(log_probs.transpose(1, 2))
    levels = iter(by_level.flatten(2).unbind(1))
    first = next(levels)
    tree = grow_tree(first, lambda ranks, _: next(levels)[:, None].expand(-1, ranks.shape[1], -1), budget, width)
    return Draft(ranked.flatten(1).gather(1, tree.tokens), tree.parents, confidence=tree.confidence)


def _training_masks(
    design: Design, anchors: Tensor, positions: Tensor, columns: int
) -> dict[AttentionKind, Tensor | None]:
    """Return masks [B, 1, N S, A + N S] for blocks at positions [B, N S] that follow A context columns."""
    context_positions = torch.arange(columns, device=anchors.device)
    context = context_positions < anchors.repeat_interleave(design.block_size, 1)[..., None]
    block_of_slot = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(design.block_size)
    same_block = (block_of_slot[:, None] == block_of_slot).expand(len(anchors), -1, -1)
    visible = torch.cat([context, same_block], 2)
    keys = torch.cat([context_positions.expand(len(anchors), -1), positions], 1)
    distance = positions[..., None] - keys[:, None]
    masks: dict[AttentionKind, Tensor | None] = {}
    for window, causal in set(design.attention_kinds):
        in_window = visible & (distance.abs() < window) if window else visible
        masks[window, causal] = (in_window & (distance >= 0) if causal else in_window)[:, None]
    return masks


def _mask_token(target: Target) -> int:
    if target.tokenizer is not None and len(target.tokenizer) < target.vocab_size:
        return len(target.tokenizer)
    return target.stop_token_ids[0] if target.stop_token_ids else 0
