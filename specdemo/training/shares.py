"""Division of the minutes of a training among collecting teacher data, training and saving, from measured costs.

R rows of T tokens.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import nn

from specdemo.core.protocol import Target
from specdemo.core.suggest import counted
from specdemo.training.collect import Plan, TeacherData, continue_texts, fast_copy, record_target
from specdemo.training.fit import Schedule, TrainHistory, TrainRun, optimizers
from specdemo.training.heads import HELD_OUT_ROWS, columns, training_loss
from specdemo.training.losses import Trainable

COLLECTING = 0.5  # largest share of the minutes
MIN_ROWS = 32
MIN_STEPS, GOOD_STEPS = 50, 300  # the learning rate rises in the first; batches shrink until there are so many
PROBED_TOKENS = 8  # tokens generated to measure the cost of one
DISK = 150e6  # bytes per second when a checkpoint is written

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured seconds."""

    token: float = 0.0  # generating one token in each row of a shard
    row: float = 0.0  # recording the target's outputs on one row
    update: float = 0.0  # one step, independent of its batch
    trained: float = 0.0  # training on one token
    evaluation: float = 0.0
    saving: float = 0.0

    def collecting(self, plan: Plan, generated: bool) -> float:
        """Return the seconds for all rows of a plan and the validation text. generated: the target writes the text."""
        shards = ceil(plan.text_rows / plan.rows_per_shard) + 1 if generated else 0
        samples = ceil(plan.sampled_rows / max(1, plan.rows_per_shard // 2))
        return (shards + samples) * plan.context * self.token + (plan.text_rows + plan.sampled_rows) * self.row

    def step(self, batch_tokens: float) -> float:
        """Return the seconds of one training step."""
        return self.update + batch_tokens * self.trained


@dataclass(frozen=True, slots=True)
class Shares:
    """Teacher data to collect, seconds of training, and tokens per step (None: the default)."""

    plan: Plan
    seconds: float
    batch_tokens: int | None = None
    steps: int = 0
    saving: float = 0.0  # seconds
    evaluate_every: float = 0.0  # seconds

    def __str__(self) -> str:
        tokens = self.plan.context * (self.plan.text_rows + self.plan.sampled_rows)
        return f"{tokens:,} tokens of text and {counted(self.steps, 'training step')}"


@torch.random.fork_rng(devices=[])
def measure_costs(drafter: Trainable, target: Target, plan: Plan, clock: Clock = time.perf_counter) -> Costs:
    """Measure what collecting and training on this target cost. The head stays as it is.

    Raises ValueError for a target with fused layers, whose hidden states transformers cannot return.
    """
    if target.facts.kernels != "transformers":
        raise ValueError(f"{target.name} runs on fused layers; load it with kernels='transformers'")

    def seconds(run: Callable[[], object]) -> float:
        run()  # warms up
        begin = clock()
        run()
        return clock() - begin

    model, device = target.model, target.device
    tokens = torch.randint(target.vocab_size, (2, plan.context))
    recorded = TeacherData.of(record_target(model, tokens, plan.taps))
    prompts = torch.zeros(plan.rows_per_shard, 1, dtype=torch.int64, device=device)
    fast, heat = fast_copy(model), torch.ones(len(prompts), device=device)
    generator = torch.Generator(device).manual_seed(0)
    generated = seconds(lambda: continue_texts(fast, prompts, 1 + PROBED_TOKENS, heat, generator))
    head = nn.Module.float(drafter.head).requires_grad_(True)
    # learning rates of 0 change no weight
    run = TrainRun(head, optimizers(head, Schedule(0.0), target.vocab_size), TrainHistory())
    loss, batch = training_loss(drafter, target), columns(recorded, drafter.taps)

    def step(rows: int) -> float:
        return run.step(tuple(column[:rows] for column in batch), loss, 0.0, plan.context)

    one, two = seconds(lambda: step(1)), seconds(lambda: step(2))
    trained = max(two - one, one / 4) / plan.context
    evaluation = HELD_OUT_ROWS * plan.context * trained * 0.6  # without a backward pass, but at full width
    parameters = sum(parameter.numel() for parameter in head.parameters())
    return Costs(
        token=generated / PROBED_TOKENS,
        row=seconds(lambda: record_target(model, tokens[:1], plan.taps)),
        update=max(0.0, one - trained * plan.context),
        trained=trained,
        # the last evaluation and `measure`, the checkpoint with the optimizers' state, and the head
        evaluation=evaluation,
        saving=2 * evaluation + 14 * parameters / DISK,
    )


def divide(seconds: float, costs: Costs, plan: Plan, generated: bool, collected: bool, batch_tokens: int) -> Shares:
    """Divide the seconds. plan: with the most rows that are useful. collected: the teacher data exist.

    batch_tokens: most tokens per step. Raises TooShort if fewer than MIN_ROWS rows or MIN_STEPS steps fit.
    """

    def of(rows: int) -> Plan:
        return replace(plan, text_rows=rows, sampled_rows=rows // 3, rows_per_shard=min(rows, plan.rows_per_shard))

    def collecting(rows: int) -> float:
        return 0.0 if collected else costs.collecting(of(rows), generated)

    sizes = range(MIN_ROWS, max(MIN_ROWS, plan.text_rows) + 1, MIN_ROWS)
    least = costs.saving + (MIN_STEPS + 1) * costs.step(plan.context)
    most = min(COLLECTING * seconds, seconds - least)
    rows = max((n for n in sizes if collecting(n) <= most), default=MIN_ROWS)
    left = seconds - collecting(rows) - costs.saving
    tokens = min(batch_tokens, max(plan.context, int((max(0.0, left) / GOOD_STEPS - costs.update) / costs.trained)))
    shares = Shares(
        of(rows), left, tokens, max(0, int(left / costs.step(tokens))), costs.saving, 10.0 * costs.evaluation
    )
    if shares.steps < MIN_STEPS:
        raise TooShort(shares, collecting(MIN_ROWS) + least)
    return shares


class TooShort(ValueError):
    """The seconds are too few. needed: seconds that are enough."""

    def __init__(self, shares: Shares, needed: float) -> None:
        super().__init__(f"only {shares} would fit, and {MIN_STEPS} steps are needed")
        self.needed = needed
