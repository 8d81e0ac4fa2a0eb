"""GPU operations per step of every method, counted on the simulated device.

`python -m tests.gpu.pretend [--json] [WORD..]` counts the methods whose name contains one of the words.

Launches are operations that the host starts one by one while the clock runs; replayed graphs are counted separately.
Syncs are waits of the host for the device. Sizes are tiny, since counts do not depend on them; layers, drafts and trees
are those of the table in tests/gpu/test_counts.py.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.sampling import Sampling
from specdemo.core.tree import chain_parents
from specdemo.engine.loop import generate, warm_up
from specdemo.methods import load_drafter
from specdemo.methods.heads import medusa
from specdemo.methods.heads.dflash import DFlash
from specdemo.methods.heads.eagle import Eagle
from specdemo.methods.heads.gemma4_assistant import Gemma4Assistant
from specdemo.methods.heads.medusa import Medusa
from specdemo.methods.heads.mlp_speculator import MLPSpeculator
from specdemo.methods.heads.mtp import MTP
from specdemo.models.fused import fuse_layers
from specdemo.models.target import HFTarget
from tests.gpu.device import OnDevice, move, pretended

SKIPPED, COUNTED, TOKENS = 2, 8, 64  # steps skipped, steps counted, tokens per text
GREEDY, WARM = Sampling(), Sampling(0.8)
SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "head_dim": 8}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 2048, "pad_token_id": 0, "eos_token_id": 2}


@dataclass
class GpuCase:
    """One row of the table."""

    name: str
    method: str
    budget: Budget
    sampling: Sampling = GREEDY
    model: str = ""  # the drafter's model, by its name in `Models`
    options: dict[str, Any] = field(default_factory=dict)
    target: str = "target"
    repeats: bool = False  # a repetitive text, without which some methods draft nothing


CASES = [
    GpuCase("plain", "none", Budget(0, 0)),
    GpuCase("plain T=0.8", "none", Budget(0, 0), WARM),
    GpuCase("draft_model k=5", "draft_model", Budget(5, 5), model="draft"),
    GpuCase("draft_model k=5 T=0.8", "draft_model", Budget(5, 5), WARM, "draft"),
    GpuCase("ngram k=6", "ngram", Budget(6, 6), repeats=True),
    GpuCase("suffix k=6", "suffix", Budget(6, 6), repeats=True),
    GpuCase("eagle-3 tree k=6 nodes=32", "eagle", Budget(6, 32), model="eagle", options={"nodes": 32}),
    GpuCase("eagle-3 chain k=5", "eagle", Budget(5, 5), model="eagle", options={"draft": "chain"}),
    GpuCase("eagle-3 chain k=5 T=0.8", "eagle", Budget(5, 5), WARM, "eagle", {"draft": "chain"}),
    GpuCase("mtp k=3", "mtp", Budget(3, 3), model="mtp"),
    GpuCase("layer_skip k=4", "layer_skip", Budget(4, 4)),
    GpuCase("gemma4_assistant k=4", "gemma4_assistant", Budget(4, 4), model="assistant"),
    GpuCase("gemma4_assistant k=4 T=0.8", "gemma4_assistant", Budget(4, 4), WARM, "assistant"),
    GpuCase("dflash block=16", "dflash", Budget(15, 15), model="dflash"),
    GpuCase("medusa tree nodes=24", "medusa", Budget(4, 24), model="medusa", options={"nodes": 24}),
    GpuCase("mlp_speculator k=4", "mlp_speculator", Budget(4, 4), model="mlp"),
    GpuCase("lookahead", "lookahead", Budget(4, 56)),
    GpuCase("cascade ngram k=4", "cascade", Budget(4, 4), model="draft", repeats=True),
    GpuCase("unfused 36 layers, plain", "none", Budget(0, 0), target="unfused"),
]


@dataclass
class Counts:
    """Counts of one step, averaged over `COUNTED` steps."""

    name: str
    launches: float = 0.0
    syncs: float = 0.0
    replays: float = 0.0
    accepting: float = 0.0  # share of the steps that accept draft tokens
    recordings_in_race: int = 0
    note: str = ""
    laps: dict[str, Counter[str]] = field(default_factory=dict, repr=False)  # launches and waits by lap


class Models:
    """Models that are made once in main memory and copied to the device of each world."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._made: dict[str, Any] = {"target": qwen(6, 1), "draft": qwen(3, 2), "unfused": qwen(36, 1)}
        there = HFTarget(self._made["target"])
        heads = {
            "eagle": Eagle.fresh(there, "eagle3", draft_vocab=96),
            "mtp": MTP.fresh(there),
            "assistant": Gemma4Assistant.fresh(there, centroids=8),
            "dflash": DFlash.fresh(there, layers=5, block_size=16),
            "medusa": Medusa.fresh(there, heads=4),
            "mlp": MLPSpeculator.fresh(there, n_predict=4),
        }
        self._made |= heads
        for cache in (chain_parents, medusa._shape_tensors):
            cache.cache_clear()
        for made in self._made.values():
            move(made, "cuda:0")
        for name in ("target", "draft"):
            fuse_layers(self._made[name])
        for head in heads.values():
            head.fuse()

    def target(self, name: str) -> HFTarget:
        return HFTarget(self._made[name])

    def __getitem__(self, name: str) -> Any:
        made = self._made[name] if name else None
        return HFTarget(made) if isinstance(made, Qwen3ForCausalLM) else made


def qwen(layers: int, seed: int) -> Any:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=layers, **SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return model.to(torch.bfloat16).requires_grad_(False)


class Laps:
    """A stopwatch that counts operations."""

    wall_ms: float | None = None
    waited_ms: float | None = None

    def __init__(self, world: Any) -> None:
        self._world, self.counting = world, False
        self.steps = 0
        self.totals = Counter[str]()
        self.laps: dict[str, Counter[str]] = {}
        self._before = self._now()

    def _now(self) -> tuple[Counter[str], Counter[str], int]:
        return self._world.kernels.copy(), self._world.waits.copy(), self._world.replays

    def start(self) -> None:
        self._before = self._now()

    def lap(self, name: str) -> None:
        before, self._before = self._before, self._now()
        if self.counting:
            kernels, waits = self._before[0] - before[0], self._before[1] - before[1]
            self.totals += Counter(launches=kernels.total(), syncs=waits.total(), replays=self._before[2] - before[2])
            self.laps[name] = self.laps.get(name, Counter()) + kernels + waits

    def read(self) -> dict[str, float]:
        self.steps += self.counting
        return {"draft": 1.0, "verify": 1.0}


def prompt_of(case: GpuCase) -> Any:
    text = torch.arange(3, 13).repeat(6)[None]
    if not case.repeats:
        text = torch.randint(3, 100, (1, 40), generator=torch.Generator().manual_seed(3))
    return OnDevice(text, torch.device("cuda:0"))


def count(world: Any, models: Models, case: GpuCase) -> Counts:
    """Count the operations per step of a lane after its warm-up, as in a race."""
    target = models.target(case.target)
    drafter = load_drafter(case.method, target, models[case.model], **case.options)
    config = GenerationConfig(TOKENS, sampling=case.sampling, budget=case.budget, stop_token_ids=())
    prompt = prompt_of(case)
    warm_up(target, drafter, prompt, config)
    for width in range(2 + case.budget.depth):  # made once per number of accepted tokens, which depends on rounding
        chain_parents(1, width, prompt.device)
    recorded, laps = len(world.recorded), Laps(world)
    with closing(generate(target, drafter, prompt, config, stopwatch=laps)) as steps:
        for _ in islice(steps, 1 + SKIPPED):
            pass
        laps.counting = True
        accepting = sum(len(event.path[0]) > 1 for event in islice(steps, COUNTED))
        laps.counting = False
        for _ in steps:  # until the end, where drafts get shorter
            pass
    per_step = {name: laps.totals[name] / laps.steps for name in ("launches", "syncs", "replays")}
    in_race = len(world.recorded) - recorded
    per_step["accepting"] = accepting / COUNTED
    return Counts(case.name, **per_step, recordings_in_race=in_race, note=target.note, laps=laps.laps)


def counted(chosen: Callable[[GpuCase], bool] = lambda case: True) -> list[Counts]:
    with pretended() as world:
        models = Models()
        return [count(world, models, case) for case in CASES if chosen(case)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = counted(lambda case: not arguments.words or any(word in case.name for word in arguments.words))
    if arguments.json:
        fields = ("name", "launches", "syncs", "replays", "recordings_in_race", "note")
        json.dump([{name: getattr(row, name) for name in fields} for row in found], sys.stdout, indent=1)
        return
    for row in found:
        numbers = f"{row.launches:7.1f} launches {row.syncs:5.1f} syncs {row.replays:5.1f} replays"
        print(f"{row.name:28} {numbers} {row.recordings_in_race:3} recordings in the race {row.note}")
        if arguments.words:
            for lap, what in row.laps.items():
                print(f"    {lap:8}", ", ".join(f"{name} {n / COUNTED:.1f}" for name, n in what.most_common()))


if __name__ == "__main__":
    main()
