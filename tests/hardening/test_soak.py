"""Memory after hundreds of runs and rejected calls, which must not grow."""

import gc
import os
from pathlib import Path

import pytest

from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.session import Session

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's count of memory")

RUNS, REFUSED, SETTLED = 200, 1_000, 20
LANES = (
    Lane(method="draft_model", model="stories-draft-wide", k=3),
    Lane(method="ngram", k=2),
    Lane(method="medusa", model="stories-medusa", k=3),
    Lane(method="online", model="stories-draft-deep", k=2, options={"every": 2}),
)


def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def spec(number):
    """Return a comparison with other lanes, another prompt and another length for each number."""
    prompt = "Once upon a time, " + "a dog saw a cat and " * (number % 13)
    lanes = [*LANES[number % 4 :][:2]]
    return Comparison(id="test", target="stories", prompt=prompt, lanes=lanes, max_new_tokens=4 + number % 9)


@pytest.mark.release
def test_runs_and_refused_calls_leave_memory_where_it_was():
    session = Session()
    wrong = (
        {"prompt": " "},
        {"prompt": "word " * 600},
        {"target": "storeys"},
        {"lanes": (Lane(method="ngram", options={"max_m": 2}),)},
        {"lanes": (Lane(method="online", model="stories-draft-deep", options={"lr": 99.0}),)},
    )
    seen = []
    for number in range(RUNS):
        session.run(spec(number))
        for call in range(REFUSED // RUNS):
            with pytest.raises(ValueError):
                session.run(spec(number).model_copy(update=wrong[call % len(wrong)]))
        seen.append(resident())
    settled, last = seen[SETTLED - 1], seen[-1]
    assert last < 1.05 * settled, f"{settled:.0f} MB after {SETTLED} runs, {last:.0f} MB after {RUNS}"
