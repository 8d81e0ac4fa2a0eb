"""Hundreds of runs, and calls that are refused, leave memory where it was."""

import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest

from specdemo.engine.session import Session
from specdemo.engine.spec import LaneSpec, RunSpec

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's count of memory")

RUNS, REFUSED, SETTLED = 200, 1_000, 20
LANES = (
    LaneSpec("draft_model", "stories-draft-wide", 3),
    LaneSpec("ngram", k=2),
    LaneSpec("medusa", "stories-medusa", 3),
    LaneSpec("online", "stories-draft-deep", 2, {"every": 2}),
)


def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def spec(number):
    """Other lanes, another prompt and another length every time."""
    prompt = "Once upon a time, " + "a dog saw a cat and " * (number % 13)
    return RunSpec("test", "stories", prompt, LANES[number % 4 :][:2], max_new_tokens=4 + number % 9)


@pytest.mark.soak
def test_runs_and_refused_calls_leave_memory_where_it_was():
    session = Session()
    wrong = (
        {"prompt": " "},
        {"prompt": "word " * 600},
        {"target": "storeys"},
        {"lanes": (LaneSpec("ngram", options={"max_m": 2}),)},
        {"lanes": (LaneSpec("online", "stories-draft-deep", options={"lr": 99.0}),)},
    )
    seen = []
    for number in range(RUNS):
        session.run(spec(number))
        for call in range(REFUSED // RUNS):
            with pytest.raises(ValueError):
                session.run(replace(spec(number), **wrong[call % len(wrong)]))
        seen.append(resident())
    settled, last = seen[SETTLED - 1], seen[-1]
    assert last < 1.05 * settled, f"{settled:.0f} MB after {SETTLED} runs, {last:.0f} MB after {RUNS}"
