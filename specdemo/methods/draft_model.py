"""Draft model: a smaller causal LM guesses a chain (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

The draft keeps a cache of its own that may lag: `propose` crops it to the longest common prefix of what it read and
what became history, and feeds the rest. Sampled drafts carry the q they were drawn from; greedy ones are one-hot. A
draft with another tokenizer than the target's guesses through a `Bridge`.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdemo.core.host import Reading, padded, to_device
from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import ABSENT, Draft, chain_parents
from specdemo.methods import expect, head_of
from specdemo.methods.base import Learner, NoOptions
from specdemo.methods.flags import Flags, Options, sglang_chain, vllm
from specdemo.methods.heads.choose import Choice, Vocabulary, Writing, replayed
from specdemo.methods.vocabularies import ENOUGH, Bridge, RowText
from specdemo.models.checkpoints import Checkpoint, outline_checkpoint
from specdemo.models.history import DraftPlan
from specdemo.models.hub import LoadProgress
from specdemo.models.load import Incomplete, LoadedModel, load_model, load_target
from specdemo.models.target import HFTarget
from specdemo.training.losses import likeliest

CATCHING_UP = 8  # tokens that a recorded draft reads at most before it writes; mostly it is one or two
AGAIN = 2  # tokens that a word which has begun may take
PROBES = (  # what tokenizers of one vocabulary may still cut differently
    "Once upon a time, there was a little girl named Lily.",
    "  two spaces\n\n\ta tab, CAPITALS and camelCase don't",
    "for i in range(10):\n    x[i] += 3.14159e-10  # 1234567",
    "naïve café, Ünïcödé, 日本語のテキスト, Привет, مرحبا, 🐉🏰",
    "e\u0301 is é twice; \u00a0 and \u200b hide",
)


def _llamacpp(model: str | None, k: int, options: Options) -> Flags:
    return ["--draft-model", str(model), "--k", str(k)]


class DraftModel(Learner):
    title = "Draft model"
    summary = "A small model writes ahead; the target checks its words in one pass."
    needs_model = True
    crosses: ClassVar[bool] = True  # to targets of another vocabulary
    serves: ClassVar = {"vllm": vllm("draft_model"), "sglang": sglang_chain("STANDALONE"), "llamacpp": _llamacpp}

    @classmethod
    def recognises(cls, checkpoint: Checkpoint) -> bool:
        return checkpoint.has("embed_tokens", "wte")

    @classmethod
    def load(cls, source: str, target: Target, progress: LoadProgress | None = None) -> LoadedModel:
        """On a CPU in fp32 whatever the target is in: one-token passes of a small draft are not faster in bf16."""
        try:
            return load_model(source, "auto", str(target.device), progress=progress)
        except ValueError as error:
            if isinstance(error, Incomplete) or head_of(source):
                expect(outline_checkpoint(source), "draft_model")  # heads are no whole model: name the method for them
            raise

    def __init__(self, target: Target, model: object, options: NoOptions | None = None) -> None:
        self.model = _as_target(model, target)
        self.head: nn.Module = self.model.model  # what is trained: the draft model whole
        self._bridge: Bridge | None = None
        self._by_text = False
        difference = unlike(target, self.model)
        if difference:
            assert isinstance(target, HFTarget)
            self._cross(target, difference)
        shared = None if self._bridge is None else self._bridge.shared
        self._words = Vocabulary(shared, target.vocab_size)
        self._target = target
        self.choice = Choice()

    def _cross(self, target: HFTarget, difference: str) -> None:
        """Speak through shared tokens where they hold most of what either model says, else through text."""
        if not self.crosses:
            raise ValueError(
                f"{self.model.name} has another tokenizer than {target.name}: {difference}; choose a draft of the same "
                "model family"
            )
        self._bridge = Bridge(target, self.model)
        ours, theirs = self._bridge.held(target, self.model)
        self._by_text = min(ours, theirs) < ENOUGH
        way = "writes text that is cut anew" if self._by_text else "drafts the shared tokens alone"
        self.note = (
            f"Its tokenizer is another ({difference}): it {way}. Shared are {100 * self._bridge.share:.0f} % of the "
            f"target's tokens, with {100 * ours:.0f} % of the target's probability and {100 * theirs:.0f} % of its own."
        )

    @property
    def max_length(self) -> int | None:
        return None if self._bridge else self.model.max_length  # whose tokens are others

    def unrecord(self) -> None:
        self.model.unrecord()

    @property
    def unrecorded(self) -> str:
        return self.model.note

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    @property
    def history_bytes(self) -> int:
        return self.model.history_bytes

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        """Every list has an entry per row."""
        self.choice = Choice(sampling, rng)
        self._history: list[list[int]] = [[] for _ in range(batch)]  # what the target has committed, the root last
        self._read: list[list[int]] = [[] for _ in range(batch)]  # what the draft's cache holds
        self._agreed = [0] * batch  # a prefix length known to be common to both
        self._written: Reading | None = None  # [B, N - 1] what it read of its own last draft
        self._texts = [RowText(self._bridge.theirs) for _ in range(batch)] if self._bridge else []
        self._roots = [0] * batch  # the target's ids of the last tokens, where there is a bridge
        self._begun = [b""] * batch  # the word its text ends with, which the draft reads anew

    def release(self) -> None:
        self.model.release()

    def observe(self, progress: Progress) -> None:
        if self._bridge:
            self._translate(self._bridge, progress.inputs.tolist(), progress.said())
            return
        if not self._history[0]:  # the prompt
            inputs = progress.inputs.tolist()
            self._history = [[*i, o[-1]] for i, o in zip(inputs, progress.said(), strict=True)]
            if progress.inputs.shape[1] < self.model.max_length:
                # as much room as the target has, where a cache that grows is recorded anew
                there = self._target.capacity if isinstance(self._target, HFTarget) and self.model.records else 0
                room = there - progress.inputs.shape[1]
                self.model.start(progress.inputs, reserve=room + CATCHING_UP if room > 0 else 0)
                self._read = inputs
                self._agreed = [len(i) for i in inputs]
            return
        for history, said in zip(self._history, progress.said(), strict=True):
            history += said

    def _translate(self, bridge: Bridge, inputs: list[list[int]], said: list[list[int]]) -> None:
        """What became history, as the draft reads it; the prompt goes into its cache as far as all rows have it."""
        first = not self._history[0]
        for row, (text, new) in enumerate(zip(self._texts, said, strict=True)):
            written = bridge.ours.begins(inputs[row] + new[-1:]) if first else bridge.ours.written(new)
            self._history[row] = text.extend(written)
            self._agreed[row] = min(self._agreed[row], len(text.ids))
            self._roots[row] = new[-1] if new else self._roots[row]
            if self._by_text and bridge.unfinished(self._roots[row]):
                self._history[row], self._begun[row] = text.before_word()
            else:
                self._begun[row] = b""
        shortest = min(map(len, self._history)) - 1
        if first and 0 < shortest < self.model.max_length:
            self._read = [ids[:shortest] for ids in self._history]
            self.model.start(torch.tensor(self._read, device=self.model.device))
            self._agreed = [min(shortest, len(text.ids)) for text in self._texts]

    def loss(self, batch: Progress) -> tuple[Tensor, dict[str, float]]:
        """Forward KL to the target, in nats per token up to the target's entropy (2310.08461, section 3)."""
        if self._bridge:
            raise ValueError(
                "a draft of another vocabulary cannot learn from the target's tokens; choose one of the same"
            )
        logits = self.head(batch.inputs, use_cache=False).logits.float()
        shared = min(logits.shape[-1], self._words.size)  # beyond are padding rows
        logits = logits[..., :shared].flatten(0, 1)
        wanted = batch.outputs.flatten() if batch.probs is None else batch.probs[..., :shared].flatten(0, 1)
        agree = (logits.argmax(-1) == likeliest(wanted)).float().mean()
        return nn.functional.cross_entropy(logits, wanted), {"agree_1": float(agree)}

    def propose(self, budget: Budget) -> Draft:
        longest = max(map(len, self._history))
        depth = min(budget.depth, budget.nodes, self.model.max_length - longest)
        if depth < 1 or not self._read[0]:  # the draft's context is shorter than the target's
            return Draft.empty(len(self._history), self.model.device)
        return self._write(depth, budget.enough)

    def _write(self, depth: int, enough: Callable[[list[float]], bool] | None = None) -> Draft:
        if self._bridge and self._by_text:
            return self._write_text(self._bridge, depth)
        missing = self._missing()
        draft = None if self._bridge else self._replayed(missing, depth)
        if draft is not None:
            self._written = Reading(draft.tokens[:, : depth - 1])
            return draft
        written = Writing(self.choice)
        written.take(self._known(self._catch_up(missing)[:, None]))
        written.follow(lambda tokens: self._known(self._read_on(self._spoken(tokens))), depth, enough)
        self._written = Reading(self._spoken(written.tokens[:, :-1]))
        return written.draft(self._words)

    def _replayed(self, missing: list[list[int]], depth: int) -> Draft | None:
        """The whole draft as one recorded pass; None: it is not recorded."""
        if not self.model.records or max(map(len, missing)) > CATCHING_UP:
            return None
        plan = DraftPlan(("chain", self.choice.sampling), depth, CATCHING_UP, keeps=True)
        tokens, counts = padded(missing, self.model.device, ABSENT), [len(m) for m in missing]
        draft = replayed(self.model, tokens, counts, plan, self.choice, self._words)
        if draft is not None:
            self._caught_up()
        return draft

    def _caught_up(self) -> None:
        self._read = [h.copy() for h in self._history]
        self._agreed = [len(h) for h in self._history]

    def _known(self, logits: Tensor) -> Tensor:
        """[.., draft's vocabulary] -> [.., W] of the tokens that the target has too"""
        return logits[..., self._bridge.there] if self._bridge else logits[..., : self._words.size]

    def _spoken(self, tokens: Tensor) -> Tensor:
        """Places among those -> the draft's ids"""
        return self._bridge.there[tokens] if self._bridge else tokens

    def _write_text(self, bridge: Bridge, depth: int) -> Draft:
        """The likeliest text, until it is `depth` tokens of the target's in every row. A word that has begun is read
        again: a model knows words by their first token."""
        logits, begun, said = self._catch_up(self._missing()), self._begun.copy(), []
        room = min(depth + AGAIN, self.model.max_length - max(map(len, self._history)))
        while True:
            said.append(self._agreeing(bridge, logits, begun))
            rows = torch.cat(said, 1).tolist()
            texts = [bridge.theirs.written(row)[len(word) :] for row, word in zip(rows, self._begun, strict=True)]
            drafted = [bridge.cut(root, text)[:depth] for root, text in zip(self._roots, texts, strict=True)]
            if len(said) >= room or min(map(len, drafted)) >= depth:
                break
            logits = self._read_on(said[-1])
        self._written = Reading(torch.cat(said, 1)[:, :-1])
        return Draft.chain(padded(drafted, self.model.device, ABSENT))

    def _agreeing(self, bridge: Bridge, logits: Tensor, begun: list[bytes]) -> Tensor:
        """The likeliest tokens [B, 1] that write what is left of a word; of it they leave the rest in `begun`."""
        best = bridge.known[logits[:, bridge.known].argmax(-1, keepdim=True)]
        for row, word in enumerate(begun):
            ids = bridge.theirs.agreeing(word) if word else []
            if ids:
                best[row, 0] = ids[int(logits[row, ids].argmax())]
                begun[row] = word[len(bridge.theirs.of[int(best[row, 0])]) :]
        return best

    def _missing(self) -> list[list[int]]:
        """Crop to the common prefix; per row what is to be read, the root last."""
        if self._written is not None:
            for read, new in zip(self._read, self._written.tolist(), strict=True):
                read += new
            self._written = None
        missing = []
        for row, (history, read) in enumerate(zip(self._history, self._read, strict=True)):
            top = min(len(read), len(history) - 1)  # the root is always read anew
            agreed = min(self._agreed[row], top)
            while agreed < top and read[agreed] == history[agreed]:
                agreed += 1
            self._agreed[row] = agreed
            missing.append(history[agreed:])
        if any(a < len(r) for a, r in zip(self._agreed, self._read, strict=True)):
            self.model.crop(self._agreed)
        return missing

    def _catch_up(self, missing: list[list[int]]) -> Tensor:
        """Read what is missing; logits [B, V] after the root."""
        tokens = padded(missing, self.model.device, ABSENT)
        logits = self.model.forward(tokens, chain_parents(len(missing), tokens.shape[1] - 1, tokens.device)).logits
        self.model.commit([list(range(len(m))) for m in missing])
        self._caught_up()
        if len(missing) == 1:
            return logits[:, -1]
        last = to_device([len(m) - 1 for m in missing], logits.device)
        return logits[torch.arange(len(missing), device=logits.device), last]

    def _read_on(self, tokens: Tensor) -> Tensor:
        """tokens [B, 1] -> logits [B, V]"""
        forward = self.model.forward(tokens, tokens[:, 1:])
        self.model.commit([[0]] * len(tokens))
        return forward.logits[:, -1]


def _as_target(model: object, target: Target) -> HFTarget:
    if isinstance(model, HFTarget):
        return model
    if isinstance(model, PreTrainedModel):
        return load_target(model)
    loaded = model if isinstance(model, LoadedModel) else DraftModel.load(str(model), target)
    return loaded.target()


def unlike(target: Target, draft: HFTarget) -> str | None:
    """How the tokenizers differ; None where both models read token ids the same way. Vocabulary sizes may differ by
    padding rows as long as the tokenizers are the same.

    Raises ValueError with the reason where ids differ and one of the models has no tokenizer to tell what they mean.
    """
    ours = target.tokenizer if isinstance(target, HFTarget) else None
    theirs = draft.tokenizer
    if ours is not None and theirs is not None:
        return _difference(ours, theirs)
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"{draft.name or 'the draft model'} has a vocabulary of {draft.vocab_size}, {target.name or 'the target'} "
            f"one of {target.vocab_size}, and no tokenizer says what they mean; choose a draft of the same model family"
        )
    return None


def _difference(ours: PreTrainedTokenizerBase, theirs: PreTrainedTokenizerBase) -> str | None:
    """In the vocabulary, or in how PROBES and the special tokens are read; None when both are alike."""
    a, b = ours.get_vocab(), theirs.get_vocab()
    if a != b:
        other = sum(b.get(word) != index for word, index in a.items())
        if not other:
            return f"it knows {len(b) - len(a)} more tokens"
        word = min((w for w, i in a.items() if b.get(w) != i), key=a.__getitem__)
        there = b.get(word, "absent")
        return f"{other} of {len(a)} tokens differ (the first is {word!r}, id {a[word]} here, {there} there)"
    for text in (*PROBES, "".join(map(str, ours.all_special_tokens))):
        here, there = (t.encode(text, add_special_tokens=False) for t in (ours, theirs))
        if here != there:
            return f"it cuts {text[:24]!r} into {len(there)} tokens, others than these {len(here)}"
    return None
