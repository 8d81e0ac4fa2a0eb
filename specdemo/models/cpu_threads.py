"""CPU threads of the passes of a run: how many there may be, and how many are used.

Threads wait for each other at every product. One that another program delays delays all, so that two threads can be
slower than one; the number is measured (models/pass_cost.py) and falls during a run that others disturb.
"""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import psutil
import torch

from specdemo.core.protocol import Target
from specdemo.costs.passes import interpolate
from specdemo.models.devices import device_kind

BUSY_CORES = 4  # from this number on, one core is left to the page, the browser and other programs
MANY_CORES = 1 << 10
UNCHANGED = nullcontext()  # the number of threads
TRIAL_PASSES = 3  # passes in a row that must be slow, and that are tried with fewer threads
SLOW_RATIO = 1.6  # time of a slow pass in usual ones; the trial tells a disturbance from a long text
STALL_RATIO, STALL_MS = 6.0, 100.0  # one pass is enough if it takes so many measured ones, and so many ms more


def threads(count: int) -> AbstractContextManager[None]:
    """Set the number of torch's threads inside the block, if it is another one: that takes as long as a small step."""
    return UNCHANGED if torch.get_num_threads() == count else _set_threads(count)


@contextmanager
def _set_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread(device: torch.device) -> AbstractContextManager[None]:
    """Set one thread on a CPU, unless OMP_NUM_THREADS is set."""
    if torch.get_num_threads() == 1 or "OMP_NUM_THREADS" in os.environ or not device_kind(device).host:
        return UNCHANGED
    return threads(1)


def step_threads(target: Target) -> AbstractContextManager[None]:
    """Set torch's threads for a step of a target: its own number if torch computes it, else one."""
    own = target.threads if target.model is not None else 0
    return threads(own) if own and device_kind(target.device).host else one_thread(target.device)


def thread_counts() -> tuple[int, ...]:
    """Return the numbers of threads to choose from: powers of two up to the usable cores, or OMP_NUM_THREADS alone."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given):
        return (int(given),)
    cores = usable_cores()
    powers = [1 << n for n in range(cores.bit_length())]
    return tuple(sorted({*powers, cores}))


def usable_cores() -> int:
    """Return the number of physical cores that this process may use. From four on, one is left to other programs.

    Respects the affinity, the CPU quota of a container, and on hybrid processors only counts the fast cores.
    """
    cores = min(len(_fast_cores()), _quota())
    return cores if cores < BUSY_CORES else cores - 1


def _fast_cores() -> set[str]:
    """Return one key per physical core on which this process may run."""
    if not hasattr(os, "sched_getaffinity"):
        return {str(core) for core in range(_fast_cores_of_mac() or psutil.cpu_count(logical=False) or 1)}
    allowed = os.sched_getaffinity(0)
    fast = allowed & _cpus(_read("/sys/devices/cpu_core/cpus"))  # of Intel's hybrid processors
    siblings = "/sys/devices/system/cpu/cpu{}/topology/core_cpus_list"
    return {_read(siblings.format(cpu)) or str(cpu) for cpu in fast or allowed}


def _fast_cores_of_mac() -> int:
    if sys.platform != "darwin":
        return 0
    name = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]
    result = subprocess.run(name, capture_output=True, text=True)
    return int(result.stdout) if result.stdout.strip().isdecimal() else 0


def _quota() -> int:
    """Return the number of cores that the control group of this process may fill, at least 1."""
    limit, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if not limit.isdecimal():
        folder = "/sys/fs/cgroup/cpu/cpu.cfs_{}_us"
        limit, period = _read(folder.format("quota")), _read(folder.format("period"))
    if not (limit.isdecimal() and period.isdecimal()):
        return MANY_CORES
    return max(1, int(limit) // max(int(period), 1))


def _cpus(text: str) -> set[int]:
    """Return the numbers in a list such as 0-3,8."""
    bounds = [part.partition("-") for part in text.split(",") if part]
    return {cpu for first, _, last in bounds for cpu in range(int(first), int(last or first) + 1)}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


class ThreadLimit:
    """Most threads of all lanes of a run. When passes become slow, the next ones use fewer threads, on trial.

    Passes are slow when other programs take a core: a thread that waits for it delays all others. They are also slow
    after a long text, and on a slow host; then fewer threads do not help, and the limit rises again.
    """

    def __init__(self) -> None:
        self.start_run()

    def start_run(self) -> None:
        """Forget earlier runs."""
        self.threads, self.on_trial = MANY_CORES, False
        self._before = 0, 0.0  # threads and cost before a trial
        self._usual = 1.0  # cost that is not slow
        self._costs: deque[float] = deque(maxlen=TRIAL_PASSES)

    def record(self, ms: float, slots: int, used: int, pass_ms: Mapping[int, float]) -> None:
        """Record a pass with `used` threads.

        pass_ms: slots -> time of a pass of this target (a GGUF file may pay several passes for a wide one). Empty: not
        measured, as outside races. Passes over other numbers of slots, or of another target, would look slow then, so
        none counts.
        """
        if not pass_ms or (used < 2 and not self.on_trial):
            return
        expected = interpolate(pass_ms, slots)
        self._costs.append(ms / expected)
        stalls = ms > max(STALL_RATIO * expected, expected + STALL_MS) and not self.on_trial
        if len(self._costs) < TRIAL_PASSES and not stalls:
            return
        cost = min(self._costs)
        if self.on_trial:
            threads, slow = self._before
            self.on_trial, self._usual = False, min(cost, slow)
            self.threads = self.threads if cost < slow else threads
        elif stalls or cost > SLOW_RATIO * self._usual:
            self.on_trial, self._before = True, (used, cost)
            self.threads = max(n for n in (*thread_counts(), 1) if n < used)
        else:
            return
        self._costs.clear()


thread_limit = ThreadLimit()  # all lanes of a process share its cores
