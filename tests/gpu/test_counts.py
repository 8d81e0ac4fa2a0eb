"""Limits on launches and synchronisations per step of each method, counted on the simulated GPU.

Launches are operations that the host starts one by one while the clock runs; a replayed graph is not one of them.
Models are tiny, since counts do not depend on sizes.
`python -m tests.gpu.test_counts` prints the counts.
"""

from collections import Counter

import pytest
import torch

from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.sampling import Sampling
from specdemo.core.tree import chain_parents
from specdemo.engine import loop
from tests.gpu.device import pretended
from tests.gpu.test_graphs import fused_target, make_drafter_for

# method, temperature, depth, nodes, options; launches outside graphs, and syncs, of a step whose draft tokens are all
# rejected. Which are accepted depends on how the CPU rounds bfloat16; joining them with the next token is one launch
ROWS = [
    ("none", 0.0, 0, 0, {}, 4, 0),
    ("none", 0.8, 0, 0, {}, 10, 0),
    ("draft_model", 0.0, 5, 5, {}, 12, 1),
    ("draft_model", 0.8, 5, 5, {}, 43, 2),
    ("ngram", 0.0, 6, 6, {}, 6, 1),
    ("suffix", 0.0, 6, 6, {}, 7, 1),
    ("eagle", 0.0, 6, 32, {"nodes": 32}, 19, 1),
    ("eagle", 0.0, 5, 5, {"draft": "chain"}, 15, 1),
    ("eagle", 0.8, 5, 5, {"draft": "chain"}, 46, 2),
    ("mtp", 0.0, 3, 3, {}, 15, 1),
    ("layer_skip", 0.0, 4, 4, {}, 11, 1),
    ("gemma4_assistant", 0.8, 4, 4, {}, 44, 2),
    ("dflash", 0.0, 5, 5, {}, 17, 1),
    ("medusa", 0.0, 3, 24, {"nodes": 24}, 17, 1),
    ("mlp_speculator", 0.0, 3, 3, {}, 12, 1),
    ("lookahead", 0.0, 4, 56, {}, 14, 2),
    ("cascade", 0.0, 4, 4, {}, 31, 3),
]


class Laps:
    """A stopwatch that counts operations."""

    wall_ms = waited_ms = None

    def __init__(self, world):
        self.world, self.steps, self.total = world, 0, Counter()
        self.start()

    def start(self):
        self.before = {name: getattr(self.world, name) for name in ("launches", "syncs", "replays")}

    def lap(self, name):
        before = self.before
        self.start()
        self.total += Counter(self.before) - Counter(before)

    def read(self):
        self.steps += 1
        return {"draft": 1.0, "verify": 1.0}


def counted(world, method, temperature, depth, nodes, options):
    """Return counts per step of a lane after its warm-up, as in a race, and the number of captures in the race."""
    target = fused_target("qwen3", torch.bfloat16)
    drafter = make_drafter_for(method, target, **options)
    config = GenerationConfig(40, sampling=Sampling(temperature), budget=Budget(depth, nodes), stop_token_ids=())
    prompt = torch.arange(3, 13).repeat(4)[None].cuda()  # without repetitions some methods draft nothing
    loop.warm_up(target, drafter, prompt, config)
    for width in range(2 + depth):  # made once per number of accepted tokens, which depends on rounding
        chain_parents(1, width, prompt.device)
    recorded, laps = len(world.recorded), Laps(world)
    steps = loop.generate(target, drafter, prompt, config, stopwatch=laps)
    for _ in range(3):
        next(steps)
    laps.total, laps.steps = Counter(), 0
    accepting = sum(len(next(steps).path[0]) > 1 for _ in range(6))
    per_step = {name: count / laps.steps for name, count in (laps.total - Counter(launches=accepting)).items()}
    list(steps)  # until the end, where drafts get shorter
    assert target.note == drafter.graph_note == ""
    return Counter(per_step), len(world.recorded) - recorded


IN_EVERY_COMMIT = ("none", "draft_model", "dflash")


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row[0] in IN_EVERY_COMMIT else pytest.mark.release) for row in ROWS],
    ids=lambda row: f"{row[0]} {row[1]} {row[3]}",
)
def test_a_step_starts_few_operations_and_hardly_waits(row, monkeypatch):
    monkeypatch.setattr(loop, "WARM_UP_TOKENS", 3)  # all shapes of later steps must be captured in advance
    *case, launches, syncs = row
    with pretended() as world:
        step, recorded = counted(world, *case)
    assert step["launches"] <= launches
    assert step["syncs"] <= syncs
    assert step["replays"] >= 1
    assert recorded == 0


if __name__ == "__main__":
    for *case, _, _ in ROWS:
        with pretended() as world:
            print(*case, dict(counted(world, *case)[0]))
