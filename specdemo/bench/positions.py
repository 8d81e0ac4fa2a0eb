"""Acceptance at increasing positions in a text."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from specdemo.bench.base import Decoding, Report, Stop
from specdemo.bench.result import Result
from specdemo.bench.sweeps import room, tokenizer
from specdemo.core.estimate import bootstrap
from specdemo.core.protocol import GenerationConfig, Target
from specdemo.core.tally import Tally, ratio
from specdemo.engine.comparison import Lane
from specdemo.engine.lanes import lane_name
from specdemo.engine.loop import generate
from specdemo.engine.session import environment
from specdemo.methods import build_drafter
from specdemo.methods.pairs import load_target
from specdemo.models.text import encode
from specdemo.presets.files import preset
from specdemo.presets.limits import LIMITS


def positions(
    suite: Decoding, preset_id: str, files: Sequence[Path], places: int, report: Report, cancelled: Stop
) -> Result:
    """Return a row per lane and position: acceptance rate, and mean accepted length with a 95 % interval over places.

    files: texts; a place lies in each of the first `places` that are long enough.

    Raises ValueError if it was cancelled before the first position was complete.
    """
    base = preset(preset_id)
    target = load_target(base.target, suite.dtype, suite.device, base.quantization)
    longest = min(room(target, suite), LIMITS.prompt)
    texts = _texts(target, files, places, longest)
    lanes = {lane_name(lane): lane for lane in base.with_changes(temperature=0.0).lanes}
    rows: list[dict[str, object]] = []
    lengths = _lengths(longest)
    for number, length in enumerate(lengths):
        measured = []
        for index, (name, lane) in enumerate(lanes.items()):
            report((number + index / len(lanes)) / len(lengths), f"{length} tokens before the draft: {name}")
            tallies = _tallies(suite, target, lane, [text[:, -length:] for text in texts], cancelled)
            measured.append(_row(name, length, tallies))
        if cancelled():
            break
        rows += measured
    if not rows:
        raise ValueError("stopped before the first position was complete, so nothing was measured")
    remark = (
        f"{len(texts)} places in Python files of specdemo, each continued by {suite.new_tokens} tokens, greedy; the "
        "same places at every position. Brackets: 95 % bootstrap interval over places. Nothing was timed."
    )
    return Result(suite.name, 1, suite.config(base.target), environment(target), rows, [remark], "position")


def _lengths(longest: int) -> list[int]:
    """Return the powers of two from 32 on, with a step between two of them, and the longest possible length."""
    doubled = [32 << i for i in range(longest.bit_length())]
    steps = sorted({*doubled, *(3 * n // 2 for n in doubled)})
    return [*(n for n in steps if n < longest), longest]


def _texts(target: Target, files: Sequence[Path], places: int, longest: int) -> list[Tensor]:
    """Return at most `places` texts [1, longest] from different files. Raises ValueError for fewer than two."""
    encoded = (encode(tokenizer(target), file.read_text(encoding="utf-8"), 1 << 24) for file in files)
    texts = [ids[:longest] for ids in islice((ids for ids in encoded if len(ids) >= longest), places)]
    if len(texts) < 2:
        raise ValueError(f"no two files of specdemo have {longest} tokens; choose a target with a shorter context")
    return [torch.tensor([ids], device=target.device) for ids in texts]


def _tallies(suite: Decoding, target: Target, lane: Lane, prompts: list[Tensor], cancelled: Stop) -> list[Tally]:
    config = replace(GenerationConfig(suite.new_tokens, stop_token_ids=()), budget=lane.budget)
    drafter = build_drafter(lane.method, target, lane.model, lane.parsed)
    return [Tally.of([*generate(target, drafter, prompt, config, cancelled=cancelled)]) for prompt in prompts]


def _row(name: str, length: int, tallies: list[Tally]) -> dict[str, object]:
    accepted = ratio(sum(one.accepted for one in tallies), sum(one.drafted for one in tallies))
    mean = bootstrap(
        lambda chosen: sum(tallies[i].tokens for i in chosen) / max(1, sum(tallies[i].steps for i in chosen)),
        len(tallies),
    )
    return {"lane": name, "position": length, "accepted": accepted, "tokens/pass": mean}
