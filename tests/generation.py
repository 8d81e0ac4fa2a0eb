"""Texts of a generation, and the training of a drafter's head."""

import torch

from specdemo.engine.loop import generate


def rows_of(events):
    """Return the output tokens of every row."""
    return [[t for e in events for t in e.emitted[row]] for row in range(len(events[0].emitted))]


def output(target, drafter, prompt, config, **how):
    """Return the output tokens of every row of a generation."""
    return rows_of(list(generate(target, drafter, prompt, config, **how)))


def train(drafter, batch, steps=60):
    """Train the head on one batch. Return the losses and the metrics of the last step."""
    drafter.head.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(drafter.head.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss, metrics = drafter.loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    drafter.head.eval().requires_grad_(False)
    return losses, metrics
