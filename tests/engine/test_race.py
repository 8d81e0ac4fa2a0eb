"""The schedule and the clocks, on hand-made events and a fake clock."""

import itertools
import sys
import threading

import pytest
import torch

from specdemo.core.trace import StepEvent
from specdemo.engine.clock import CpuStopwatch, clock_name, stopwatch_for
from specdemo.engine.messages import race, sequential
from specdemo.models import machine
from specdemo.models.machine import ThreadTimes, thread_times


def lane(name, durations, log=None):
    """Yield events with the given durations in ms, and append the name to `log` when the generator is closed."""
    try:
        for index, ms in enumerate(durations):
            yield StepEvent(index, [[]], [[]], [[0]], [[name]], [[]], [[]], {"verify": ms})
    finally:
        if log is not None:
            log.append(name)


def order(steps):
    return [index for index, _ in steps]


def test_lane_with_the_earliest_clock_runs_next():
    assert order(race([lane(0, [3.0] * 3), lane(1, [1.0] * 6)])) == [0, 1, 1, 1, 0, 1, 1, 1, 0]


def test_every_lane_gets_the_same_time_whatever_its_steps_cost():
    clocks = [0.0, 0.0, 0.0]
    lanes = [lane(0, [7.0] * 100), lane(1, [1.0] * 1000), lane(2, itertools.cycle([2.0, 5.0]))]
    for index, event in race(lanes):
        clocks[index] += event.ms["verify"]
        if min(clocks) > 100.0:
            assert max(clocks) - min(clocks) <= 7.0
        if max(clocks) > 400.0:
            break


def test_a_stall_in_one_lane_leaves_the_other_lane_clock_alone():
    """The clock of a lane must not change when the other lane is slowed down."""

    def clocked(stall):
        now = {"seconds": 0.0}

        def working(watch, extra):
            for index in range(5):
                watch.start()
                now["seconds"] += 0.010 + extra
                watch.lap("verify")
                yield StepEvent(index, [[]], [[]], [[0]], [[1]], [[]], [[]], watch.read())
                now["seconds"] += 5.0  # time between steps is not counted

        watches = [CpuStopwatch(lambda: now["seconds"]) for _ in range(2)]
        totals = [0.0, 0.0]
        for index, event in race([working(watches[0], 0.0), working(watches[1], stall)]):
            totals[index] += event.ms["verify"]
        return totals

    calm, stalled = clocked(0.0), clocked(0.5)
    assert stalled[0] == pytest.approx(calm[0])
    assert stalled[1] == pytest.approx(calm[1] + 5 * 500.0)


def test_sequential_is_one_after_the_other():
    assert order(sequential([lane(0, [1.0] * 2), lane(1, [1.0] * 2)])) == [0, 0, 1, 1]


@pytest.mark.parametrize("schedule", [race, sequential])
def test_closing_the_schedule_closes_started_lanes(schedule):
    log = []
    steps = schedule([lane(0, [1.0] * 9, log), lane(1, [1.0] * 9, log)])
    next(steps)
    next(steps)
    steps.close()
    assert 0 in log
    assert log == ([0, 1] if schedule is race else [0])


def test_stopwatch_adds_laps_of_one_name():
    times = iter([0.0, 0.001, 0.003, 0.006])
    watch = CpuStopwatch(lambda: next(times))
    watch.start()
    watch.lap("draft")
    watch.lap("verify")
    watch.lap("draft")
    assert watch.read() == {"draft": 4.0, "verify": 2.0}


def test_a_thread_that_waits_takes_no_device_time():
    ran, passed = iter([0.0, 0.002, 0.005]), iter([10.0, 10.025])
    watch = CpuStopwatch(lambda: next(ran), lambda: next(passed))
    watch.start()
    watch.lap("draft")
    watch.lap("verify")
    assert watch.read() == {"draft": 2.0, "verify": 3.0} and watch.wall_ms == 25.0


def test_a_step_that_waited_for_other_programs_is_marked():
    """Thread b computes, with a; thread c has little to do, so its waits do not lengthen the step."""
    starts = {"a": (50.0, 1.0), "b": (40.0, 2.0), "c": (9.0, 7.0)}
    for waited, marked in ((0.5, None), (4.0, 4.0)):
        ends = {"a": (69.0, 1.0), "b": (59.0 - waited, 2.0 + waited), "c": (9.1, 9.0), "new": (0.0, 90.0)}
        times, threads = iter([0.0, 0.0, 0.020]), iter([starts, ends])
        watch = CpuStopwatch(lambda times=times: next(times), threads=lambda threads=threads: next(threads))
        watch.start()
        watch.lap("verify")
        assert watch.read() == {"verify": 20.0} and watch.waited_ms == marked


@pytest.mark.parametrize(("pause", "readings"), [(0.0009, 3), (0.0011, 4)])
def test_a_step_that_follows_at_once_starts_with_the_last_reading_of_the_threads(pause, readings):
    """At once: within 5 % of the last step's time, so that no wait in between can mark a step."""
    now, read = {"seconds": 0.0}, []
    watch = CpuStopwatch(lambda: now["seconds"], threads=lambda: read.append(1) or {"a": (20.0 * len(read), 0.0)})
    for _ in range(2):
        watch.start()
        now["seconds"] += 0.020
        watch.lap("verify")
        assert watch.read() == {"verify": 20.0} and watch.waited_ms is None
        now["seconds"] += pause
    assert len(read) == readings


def test_the_system_counts_how_long_a_thread_waits():
    if sys.platform != "linux":
        assert thread_times() == {}
        return
    ran, waited = thread_times()[str(threading.get_native_id())]
    assert ran > 0.0 and waited >= 0.0


def test_threads_that_do_not_compute_are_read_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "THREADS", str(tmp_path))
    clock = iter([0.0, 0.0, 0.1, 0.3, 0.3, 0.4, 9.0, 9.0, 9.1])  # of every call, and after all threads were read
    files = {name: tmp_path / name / "schedstat" for name in ("page", "engine")}
    for file in files.values():
        file.parent.mkdir()
        file.write_text("1000000 2000000 3\n")
    read = ThreadTimes(lambda: next(clock))
    assert read() == read() == {"page": (1.0, 2.0), "engine": (1.0, 2.0)}  # which ones compute is not known yet
    files["engine"].write_text("90000000 2000000 4\n")
    assert read() == {"page": (1.0, 2.0), "engine": (90.0, 2.0)} and read() == {"engine": (90.0, 2.0)}
    assert len(read()) == len(read()) == 2  # after a pause


def test_lanes_on_a_cpu_are_timed_by_their_own_thread_if_it_is_the_only_one():
    cpu = torch.device("cpu")
    assert clock_name(cpu) == "thread CPU time" and clock_name(torch.device("cuda")) == "CUDA events"
    watch = stopwatch_for(cpu)
    watch.start()
    watch.lap("verify")
    assert watch.read()["verify"] >= 0.0 and watch.wall_ms is not None
    assert clock_name(cpu, wall_time=True) == "wall time" and stopwatch_for(cpu, wall_time=True).wall_ms is None
