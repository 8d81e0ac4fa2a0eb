"""The lengthened race and the numbers of the suite `page`; the suite itself needs a browser and minutes."""

import pytest

from benchmarks.page import Simulation, lengthened, spread
from specdemo.core.trace import step_ms
from specdemo.engine.messages import Finished, StepRow
from specdemo.presets.files import DEFAULT, recorded


def test_a_race_is_lengthened_to_a_speed_a_number_of_lanes_and_of_tokens():
    race = lengthened(recorded(DEFAULT), 100.0, 4, 300)
    assert [len(lane.token_ids) >= 300 for lane in race.lanes] == [True] * 4
    assert all("".join(lane.pieces) == lane.text for lane in race.lanes)
    plain = race.lanes[0].events[1:]
    assert sum(map(step_ms, plain)) / len(plain) == pytest.approx(100.0, rel=0.05)
    assert race.lanes[1].summary["tokens_per_s"] > race.lanes[0].summary["tokens_per_s"] > 0


def test_a_simulated_run_ends_when_it_is_stopped():
    engine = Simulation()
    engine.trace, engine.live = lengthened(recorded(DEFAULT), 0.0, 2, 50), False
    messages = [*engine.stream(None, lambda: False, None)]
    assert isinstance(messages[-1], Finished) and sum(isinstance(m, StepRow) for m in messages) > 50
    assert [*engine.stream(None, lambda: True, None)] == []


def test_a_spread_is_the_median_between_the_ends():
    assert spread([3.0, 1.0, 2.25]) == "2.2 (1.0 to 3.0)"
