"""Online speculative decoding: the drafter is trained on the target's outputs while it drafts (Liu et al. 2310.07177).

B rows, A columns, V vocabulary. Every verification gives the target's distribution at each accepted token, so training
needs no further target passes. Every few steps the wrapped drafter's loss is minimised on the latest columns and on
some earlier texts. The trained weights are a copy, so other lanes are unaffected; they persist across generations.
Cached keys and values of older weights cost some acceptance, but the output stays exact.
"""

from collections import deque
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from time import perf_counter

import torch
from torch import Generator, Tensor, nn

from specdemo.core.protocol import Budget, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.tree import Draft
from specdemo.methods import BaseOptions, load_drafter, method, model_method, setting, wrappable
from specdemo.methods.measurements import acceptance_per_row
from specdemo.methods.wrapper import Wrapper
from specdemo.models.load import LoadedModel
from specdemo.training.losses import Trainable

WINDOW = 64  # columns of a text in one update
PAST_TEXTS = 8  # earlier texts whose last window is stored
PAST_TEXTS_PER_UPDATE = 3  # of these, used in each update, against forgetting and for a less noisy gradient
MIN_COLUMNS = 16  # a head that looks several tokens ahead cannot learn from less
DECAY = 0.98  # decay of the running acceptance rate per step

TextColumns = tuple[Tensor, ...]  # of one row: inputs [A], outputs [A], probs [A, V] and one [A, H] per tap


class OnlineOptions(BaseOptions):
    drafter: str = setting("draft_model", "the method to train", choices=wrappable("online"))
    every: int = setting(4, "target passes between two updates", low=1, high=128, step=1)
    lr: float = setting(0.0003, "learning rate of Adam", low=0.00001, high=0.1, step=0.0001)
    reset: bool = setting(False, "restore the initial weights at the start of every text")


class Online(Wrapper, method="online"):
    learns = True
    summary = "Trains the drafter on the target's verification results while it runs, so its acceptance rate rises."

    Options = OnlineOptions

    def __init__(self, target: Target, model: object = None, options: OnlineOptions | None = None) -> None:
        self._options = options = options or self.Options()
        super().__init__(load_drafter(options.drafter, target, _copy(options.drafter, target, model)))
        drafter = self.drafters[0]
        if not isinstance(drafter, Trainable):
            raise ValueError(
                f"{options.drafter!r} has no weights to train; choose a drafter with weights, such as 'draft_model'"
            )
        self._drafter = drafter
        self._trainer = _Trainer(drafter.head, options.lr)
        self._initial_weights = [w.detach().clone() for w in self._trainer.weights] if options.reset else []
        self._vocab_size = target.vocab_size
        self._text: list[list[TextColumns]] = []
        self._past: deque[TextColumns] = deque(maxlen=PAST_TEXTS)
        self._accepted = self._drafted = 0.0

    def start(self, batch: int, sampling: Sampling, rng: Generator) -> None:
        super().start(batch, sampling, rng)
        self._text = [[] for _ in range(batch)]
        self._draft: Draft | None = None  # None until the prompt has been observed
        self._steps = 0
        self._train_ms = 0.0
        if self._options.reset:
            self._reset_weights()

    def release(self) -> None:
        super().release()
        windows = [self._window(row) for row, text in enumerate(self._text) if text]
        self._past += [window for window in windows if len(window[0]) == WINDOW]
        self._text = []

    def propose(self, budget: Budget) -> Draft:
        """Draft. Notes: updates, train_ms since the last draft, train_loss of the last update, and accepted, the
        recent acceptance rate.
        """
        self._depth = budget.depth
        draft = super().propose(budget)
        notes = {**draft.notes, "updates": self._trainer.updates, "train_ms": self._train_ms}
        if self._trainer.updates:
            notes["train_loss"] = self._trainer.loss
        if self._drafted:
            notes["accepted"] = self._accepted / self._drafted
        self._train_ms = 0.0
        self._draft = replace(draft, notes=notes)
        return self._draft

    def observe(self, progress: Progress) -> None:
        super().observe(progress)
        self._store(progress)
        if self._draft is None:
            return
        for drafted, accepted in acceptance_per_row(self._draft, self._depth, progress.lengths):
            self._drafted = DECAY * self._drafted + drafted
            self._accepted = DECAY * self._accepted + accepted
        self._steps += 1
        if self._steps % self._options.every == 0:
            self._update([row for row, length in enumerate(progress.lengths) if length])

    @torch.no_grad()
    def _reset_weights(self) -> None:
        for weight, initial in zip(self._trainer.weights, self._initial_weights, strict=True):
            weight.copy_(initial)
        self._trainer = _Trainer(self._drafter.head, self._options.lr)
        self._past.clear()
        self._accepted = self._drafted = 0.0

    def _store(self, progress: Progress) -> None:
        probs = progress.target_probs()
        for row, length in enumerate(progress.lengths):
            new = slice(max(0, length - WINDOW), length)
            outputs = progress.outputs[row, new]
            target_probs = (
                nn.functional.one_hot(outputs, self._vocab_size).float() if probs is None else probs[row, new]
            )
            hidden = (progress.hidden[tap][row, new] for tap in self.taps)
            self._text[row].append((progress.inputs[row, new], outputs, target_probs, *hidden))

    def _window(self, row: int) -> TextColumns:
        """Merge the stored columns of a row and return the last WINDOW."""
        window = tuple(torch.cat(parts)[-WINDOW:] for parts in zip(*self._text[row], strict=True))
        self._text[row] = [window]
        return window

    def _update(self, rows: list[int]) -> None:
        """Take one optimiser step on the latest text of these rows and on some past texts."""
        started = perf_counter()
        latest = [self._window(row) for row in rows]
        length = min((len(window[0]) for window in latest), default=0)
        if length < MIN_COLUMNS:
            return
        self._past.rotate(PAST_TEXTS_PER_UPDATE)
        windows = [
            [column[-length:] for column in window] for window in (*latest, *islice(self._past, PAST_TEXTS_PER_UPDATE))
        ]
        inputs, outputs, probs, *hidden = (torch.stack(columns) for columns in zip(*windows, strict=True))
        batch = Progress(inputs, outputs, [length] * len(windows), dict(zip(self.taps, hidden, strict=True)), probs)
        with torch.enable_grad():
            self._trainer.step(self._drafter.loss(batch)[0])
        self._train_ms = 1000.0 * (perf_counter() - started)


class _Trainer:
    """Adam with fp32 master weights, because small steps would vanish in bf16."""

    def __init__(self, module: nn.Module, lr: float) -> None:
        self.updates, self.loss = 0, 0.0
        self.weights = [w.requires_grad_(True) for w in module.parameters() if w.is_floating_point()]
        self._masters = [w if w.dtype == torch.float32 else w.detach().float() for w in self.weights]
        self._adam = torch.optim.Adam(self._masters, lr)

    def step(self, loss: Tensor) -> None:
        for weight in self.weights:
            weight.grad = None
        loss.backward()
        for weight, master in zip(self.weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._adam.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self._masters, strict=True):
                weight.copy_(master)
        self.updates += 1
        self.loss = float(loss.detach())  # waits for the device, so that the measured time is complete


def _copy(drafter: str, target: Target, model: object) -> object:
    """Load or copy the model. Modules of the target are shared, not copied."""
    loaded = method(model_method(drafter)).load(model, target) if isinstance(model, str) else model
    if isinstance(loaded, LoadedModel) and loaded.model is None:
        raise ValueError(f"{loaded.name} is a GGUF model, which cannot learn; choose a draft model with safetensors")
    shared = [target, target.embed, target.lm_head]
    if isinstance(loaded, LoadedModel | Target):
        shared.append(loaded.tokenizer)
    shared += [*target.embed.parameters(), *target.lm_head.parameters()]
    return deepcopy(loaded, {id(obj): obj for obj in shared})
