"""Draft model: a smaller causal LM drafts a chain (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

The draft model's KV cache may lack recent tokens: `propose` crops it to the longest common prefix and reads the rest.
Sampled drafts carry the q they were drawn from; greedy ones are one-hot. A draft model with another tokenizer drafts
through a `VocabBridge`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from transformers import PreTrainedModel

from specdemo.core.host_copy import AsyncHostCopy, padded, to_device
from specdemo.core.protocol import Budget, Enough, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT, Draft, chain_parents
from specdemo.costs.drafting import MASK_TOKEN
from specdemo.methods import detect_head, require_method
from specdemo.methods.base import DraftOptions, Method
from specdemo.methods.heads.sampler import ChainBuilder, DraftVocab, TokenSampler, run_chain_graph
from specdemo.methods.vocabularies import RowText, VocabBridge, tokenizer_difference
from specdemo.models.checkpoints import Checkpoint, open_meta_checkpoint, write_checkpoint
from specdemo.models.load import Incomplete, LoadedModel, load_model, load_target
from specdemo.models.ref import ModelRef
from specdemo.models.shared import DraftPlan, graph_target
from specdemo.models.sources import LoadProgress
from specdemo.training.losses import Objective

USUALLY_MISSING = 2  # tokens: after a draft the correction token, or the last draft token and the bonus token
MAX_CATCH_UP = (
    8  # largest number of missing tokens that a CUDA graph reads; more are missing after steps without a draft
)


class DraftModel(Method, method="draft_model"):
    summary = "A small model drafts several tokens; the target verifies them in one pass."
    needs_model = True
    cross_vocabulary: ClassVar[bool] = True
    parallel: ClassVar[bool] = False  # whether it drafts with the mask tokens of a PARD model
    Options = DraftOptions
    objective: Objective = Objective()

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        return checkpoint.has("embed_tokens", "wte")

    @classmethod
    def check(cls, checkpoint: Checkpoint, vocab_size: int) -> None:
        """Raise ValueError, one line, for a config that this method cannot draft with."""

    @classmethod
    def load(cls, source: str, target: Target, progress: LoadProgress | None = None) -> LoadedModel:
        """Load the draft model. On a CPU it runs in fp32, because one-token passes of a small model gain nothing from
        bf16.
        """
        try:
            settings = getattr(target, "settings", None)  # of GGUF models
            return load_model(source, "auto", str(target.device), progress=progress, llamacpp=settings)
        except ValueError as error:
            if isinstance(error, Incomplete) or detect_head(ModelRef(source)):
                require_method(open_meta_checkpoint(source), "draft_model")  # the error names the method of a head
            raise

    @classmethod
    def load_trainable(cls, source: str, target: Target, progress: LoadProgress | None = None) -> LoadedModel:
        """Load the draft model in fp32, with the separate weights that training needs."""
        return load_model(source, "float32", str(target.device), progress=progress, kernels="transformers")

    def __init__(self, target: Target, model: object, options: DraftOptions | None = None) -> None:
        self.model = _to_target(model, target)
        self.parts, self.name = (self.model,), self.model.name
        self.head: nn.Module = self.model.model  # training updates the whole draft model
        self.mask_token: object = getattr(getattr(self.model.model, "config", None), MASK_TOKEN, None)
        if self.mask_token is not None and not self.parallel:
            self.note = "This is a PARD model; method 'pard' drafts all its tokens in one pass."
        self._bridge: VocabBridge | None = None
        difference = tokenizer_difference(target, self.model)
        if difference:
            self._set_up_bridge(target, difference)
        shared_ids = None if self._bridge is None else self._bridge.target_ids
        self._draft_vocab = DraftVocab(shared_ids, target.vocab_size)
        self._target = target
        self.sampler = TokenSampler()

    def _set_up_bridge(self, target: Target, difference: str) -> None:
        """Draft the tokens that both vocabularies have. Raises ValueError where there are none."""
        if not self.cross_vocabulary:
            raise ValueError(
                f"{self.model.name} has another tokenizer than {target.name}: {difference}; choose a draft model of "
                "the same family"
            )
        self._bridge = VocabBridge(target, self.model)
        if not self._bridge.target_overlap:
            raise ValueError(
                f"{self.model.name} shares no token with {target.name}; choose a draft model of the same family"
            )
        target_mass, draft_mass = self._bridge.shared_mass(target, self.model)
        overlap = self._bridge.target_overlap
        self.note = (
            f"{self.note} The draft model has another tokenizer and drafts only the shared tokens. "
            f"{100 * overlap:.0f} % of the target's tokens are shared; they hold {100 * target_mass:.0f} % of the "
            f"target's probability and {100 * draft_mass:.0f} % of the draft model's. One of the same family drafts "
            f"more. Difference: {difference}."
        ).lstrip()

    @property
    def max_length(self) -> int | None:
        return self.model.max_length

    @property
    def graph_note(self) -> str:
        return self.model.note

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        """Begin a new generation. Every list has one entry per row."""
        self.sampler = TokenSampler(sampling, rng)
        self._history: list[list[int]] = [[] for _ in range(batch)]  # committed tokens, the root last
        self._cached_ids: list[list[int]] = [[] for _ in range(batch)]  # tokens in the draft model's KV cache
        self._common_lengths = [0] * batch  # length of the common prefix of both, as far as known
        self._pending_draft: AsyncHostCopy | None = None  # [B, N - 1] draft tokens that are in the cache
        self._row_texts = [RowText(self._bridge.draft_tokens) for _ in range(batch)] if self._bridge else []

    def release(self) -> None:
        self.model.release()

    def observe(self, progress: Progress) -> None:
        if self._bridge:
            self._observe_translated(self._bridge, progress.inputs.tolist(), progress.output_ids())
            return
        if not self._history[0]:  # the prompt
            inputs = progress.inputs.tolist()
            self._history = [[*i, o[-1]] for i, o in zip(inputs, progress.output_ids(), strict=True)]
            if progress.inputs.shape[1] < self.model.max_length:
                # the target's capacity, because growing the cache would capture the CUDA graphs again
                capacity = self._target.capacity if graph_target(self.model) else 0
                room = capacity - progress.inputs.shape[1]
                self.model.start(progress.inputs, reserve=room + MAX_CATCH_UP if room > 0 else 0)
                self._cached_ids = inputs
                self._common_lengths = [len(i) for i in inputs]
            return
        for history, new_ids in zip(self._history, progress.output_ids(), strict=True):
            history += new_ids

    def _observe_translated(self, bridge: VocabBridge, inputs: list[list[int]], output_ids: list[list[int]]) -> None:
        """Add new tokens in the draft model's vocabulary. Prefill its cache with the prompt, up to the shortest row."""
        is_prompt = not self._history[0]
        for row, (text, new_ids) in enumerate(zip(self._row_texts, output_ids, strict=True)):
            new_bytes = (
                bridge.target_tokens.decode_from_start(inputs[row] + new_ids[-1:])
                if is_prompt
                else bridge.target_tokens.decode(new_ids)
            )
            self._history[row] = text.extend(new_bytes)
            self._common_lengths[row] = min(self._common_lengths[row], len(text.ids))
        shortest = min(map(len, self._history)) - 1
        if is_prompt and 0 < shortest < self.model.max_length:
            self._cached_ids = [ids[:shortest] for ids in self._history]
            self.model.start(torch.tensor(self._cached_ids, device=self.model.device))
            self._common_lengths = [min(shortest, len(text.ids)) for text in self._row_texts]

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """Return the loss to the target's distribution (or the text). With cross-entropy, its gradient is that of the
        forward KL (2310.08461, section 3).
        """
        if self._bridge:
            raise ValueError(
                "a draft model with another vocabulary cannot learn from the target's tokens; choose one with the same"
            )
        logits = self.head(batch.inputs, use_cache=False).logits
        vocab_size = min(logits.shape[-1], self._draft_vocab.size)  # the rest are padding rows
        labels = batch.outputs if batch.probs is None else batch.probs[..., :vocab_size]
        return self.objective.steps_loss([self.objective.compare(logits[..., :vocab_size], labels)], [1.0])

    def measure(self, batch: Progress) -> None:
        """See `Trainable.measure`."""

    def save(self, folder: Path, target_name: str) -> None:
        """Write a Hugging Face folder with the tokenizer."""
        model: PreTrainedModel = self.model.model
        dtype = str(model.dtype).removeprefix("torch.")
        # named_parameters yields tied tensors once
        write_checkpoint(folder, model.config.to_dict() | {"dtype": dtype}, dict(model.named_parameters()))
        if self.model.tokenizer is not None:
            self.model.tokenizer.save_pretrained(folder)

    def propose(self, budget: Budget) -> Draft:
        longest = max(map(len, self._history))
        depth = min(budget.chain, self.model.max_length - longest)
        if depth < 1 or not self._cached_ids[0]:  # the text is longer than the draft model's context
            return Draft.empty(len(self._history), self.model.device)
        return self._draft(depth, budget.enough)

    def _draft(self, depth: int, enough: Enough | None = None) -> Draft:
        missing = self._crop_to_common()
        if not self._bridge:
            draft = self._draft_graphed(missing, depth) or self._draft_greedy(missing, depth, enough)
            if draft is not None:
                return draft
        builder = ChainBuilder(self.sampler, self._draft_vocab, enough)
        builder.append(self._shared_logits(self._catch_up(missing)))
        builder.extend(lambda tokens: self._shared_logits(self._decode_step(self._to_draft_ids(tokens))), depth)
        self._pending_draft = AsyncHostCopy(self._to_draft_ids(builder.tokens[:, :-1]))
        return builder.build()

    def capture_graphs(self, budget: Budget) -> None:
        depth = budget.chain
        if self._bridge or not self._cached_ids[0] or max(map(len, self._history)) + depth > self.model.max_length:
            return
        for room in (USUALLY_MISSING, MAX_CATCH_UP):
            draft = self._draft_graphed(self._crop_to_common(), depth, room)
            if draft is not None:
                self._pending_draft = AsyncHostCopy(draft.tokens[:, : depth - 1])

    def _draft_graphed(
        self, missing: list[list[int]], depth: int, min_room: int = USUALLY_MISSING, first: int = 0
    ) -> Draft | None:
        """Draft by one CUDA graph replay; None if graphs are disabled or too many tokens are missing. first: number of
        draft tokens before."""
        longest = max(map(len, missing))
        model = graph_target(self.model)
        if model is None or longest > MAX_CATCH_UP:
            return None
        room = min_room if longest <= min_room else MAX_CATCH_UP
        plan = DraftPlan(("chain", self.sampler.kind, room), depth, room, commits=True)
        tokens, counts = padded(missing, self.model.device, ABSENT), [len(m) for m in missing]
        draft = run_chain_graph(model, tokens, counts, plan, self.sampler, self._draft_vocab, first)
        if draft is not None:
            self._mark_cached()
            self._pending_draft = AsyncHostCopy(draft.tokens[:, : depth - 1])
        return draft

    def _draft_greedy(self, missing: list[list[int]], depth: int, enough: Enough | None) -> Draft | None:
        """Draft a greedy chain in one call of the model; None if that is not possible."""
        if self.sampler.active_rng or enough or len(missing) > 1 or len(missing[0]) > MAX_CATCH_UP:
            return None
        drafted = self.model.draft_greedy(missing[0], depth, self._draft_vocab.size)
        if drafted is None:
            return None
        tokens, probs = drafted
        self._mark_cached()
        self._cached_ids[0] += tokens[:-1]
        return Draft.chain(torch.tensor([tokens]), confidence=torch.tensor([probs]))

    def _mark_cached(self) -> None:
        self._cached_ids = [h.copy() for h in self._history]
        self._common_lengths = [len(h) for h in self._history]

    def _shared_logits(self, logits: Tensor) -> Tensor:
        """Select the logits [.., W] of tokens that the target shares."""
        return logits[..., self._bridge.draft_ids] if self._bridge else logits[..., : self._draft_vocab.size]

    def _to_draft_ids(self, tokens: Tensor) -> Tensor:
        return self._bridge.draft_ids[tokens] if self._bridge else tokens

    def _crop_to_common(self) -> list[list[int]]:
        """Crop the cache to the common prefix; return the tokens to read per row, the root last."""
        if self._pending_draft is not None:
            for read, new in zip(self._cached_ids, self._pending_draft.tolist(), strict=True):
                read += new
            self._pending_draft = None
        missing = []
        for row, (history, read) in enumerate(zip(self._history, self._cached_ids, strict=True)):
            limit = min(len(read), len(history) - 1)  # the root is always read, for its logits
            common = min(self._common_lengths[row], limit)
            while common < limit and read[common] == history[common]:
                common += 1
            self._common_lengths[row] = common
            missing.append(history[common:])
        if any(a < len(r) for a, r in zip(self._common_lengths, self._cached_ids, strict=True)):
            self.model.crop(self._common_lengths)
        return missing

    def _catch_up(self, missing: list[list[int]], ahead: Sequence[int] = ()) -> Tensor:
        """Read the missing tokens and G tokens ahead; return logits [B, 1 + G, V] from the root on."""
        logits = self._read(missing, [ahead] * len(missing))
        self.model.commit([list(range(len(m))) for m in missing])
        self._mark_cached()
        return logits

    def _read(self, missing: list[list[int]], ahead: Sequence[Sequence[int]]) -> Tensor:
        """Read the missing tokens, the root last, and tokens ahead of it [B, G], without a commit.

        Return logits [B, 1 + G, V] from the root on; a single row ends with its last token that is not ABSENT.
        """
        rows = [m + [t for t in a if t != ABSENT] for m, a in zip(missing, ahead, strict=True)]
        tokens = padded(rows, self.model.device, ABSENT)
        logits = self.model.forward(tokens, chain_parents(len(rows), tokens.shape[1] - 1, tokens.device)).logits
        if len(rows) == 1:
            return logits[:, len(missing[0]) - 1 :]
        roots = to_device([[len(m) - 1] for m in missing], logits.device)
        columns = (roots + torch.arange(1 + len(ahead[0]), device=logits.device)).clamp_max(tokens.shape[1] - 1)
        return logits[torch.arange(len(rows), device=logits.device)[:, None], columns]

    def _decode_step(self, tokens: Tensor) -> Tensor:
        """Decode one step: tokens [B, 1] -> logits [B, V]."""
        forward = self.model.forward(tokens, tokens[:, 1:])
        self.model.commit([[0]] * len(tokens))
        return forward.logits[:, -1]


def _to_target(model: object, target: Target) -> Target:
    if isinstance(model, Target):
        return model
    if isinstance(model, PreTrainedModel):
        return load_target(model)
    loaded = model if isinstance(model, LoadedModel) else DraftModel.load(str(model), target)
    return loaded.target()
