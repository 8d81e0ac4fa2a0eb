"""The page with a stand-in engine whose runs stop after their first tokens until a test opens the gate, and with
stand-ins for training and benchmarks.
"""

import sys
import threading
from multiprocessing.managers import AcquirerProxy, BaseManager, EventProxy
from types import SimpleNamespace

from specdemo.bench import suites
from specdemo.bench.tune import Tune
from specdemo.engine.messages import Finished, replay
from specdemo.ui import job, lab, page, race
from tests.traces import hostile_trace
from tests.ui.stand_ins import Bench, Trainer, tuned

# `started` and `stopped` count runs. While `warm` is cleared, links are not read yet, as on a busy machine.
GATES = {name: threading.Event() for name in ("open", "up", "warm")}
GATES |= {name: threading.Semaphore(0) for name in ("started", "stopped")}


class Manager(BaseManager):
    """Shares the gates of the test's process with the page's."""


for name, gate in GATES.items():
    proxy = EventProxy if isinstance(gate, threading.Event) else AcquirerProxy
    Manager.register(name, lambda gate=gate: gate, proxy)


class Gated:
    def __init__(self, gates):
        self.gates = gates
        self.lock = threading.Lock()

    def stream(self, spec, cancelled, progress):
        progress(0.5, "loading stories")
        messages = list(replay(hostile_trace()))
        yield from messages[:5]
        self.gates.started.release()
        while not self.gates.open.wait(0.01):
            if cancelled():
                trace = hostile_trace()
                for lane in trace.lanes:
                    lane.finish = "cancelled"
                self.gates.stopped.release()
                yield Finished(trace)
                return
        yield from messages[5:]

    def place(self, spec):
        pass

    def with_chosen_lengths(self, spec):
        return spec


class GatedBench(Bench):
    """A benchmark stand-in whose last repeat ends when the gate is open."""

    def __init__(self, gates):
        self.gates = gates

    @property
    def endless(self):
        return not self.gates.open.is_set()

    def run(self, repeats, report, cancelled):
        try:
            return super().run(repeats, report, cancelled)
        finally:
            if cancelled():
                self.gates.stopped.release()


def gated_tune(gates):
    """Return a stand-in for `Tune.run` that knows one kind of work until the gate is open or it is stopped."""

    def run(self, report, cancelled):
        report(0.5, "chat, 4 candidates, 60 s left", lambda: tuned(["chat"]))
        while not gates.open.wait(0.01):
            if cancelled():
                gates.stopped.release()
                return tuned(["chat"])
        return tuned()

    return run


def serve_gated(port, gates):
    engine, trainer, open_link = Gated(gates), Trainer(), race.Races.open_link

    def open_when_warm(self, request, values):
        gates.warm.wait(60)
        return open_link(self, request, values)

    job.session = race.session = lambda: engine
    lab.recipes = trainer
    suites.suite = lab.suite = GatedBench(gates)
    Tune.run = gated_tune(gates)
    race.Races.open_link = open_when_warm
    server = page.serve(port=port, block=False)
    gates.up.set()
    server.block_thread()


if __name__ == "__main__":
    port, of_test = map(int, sys.argv[1:])
    manager = Manager(("127.0.0.1", of_test), b"gates")
    manager.connect()
    serve_gated(port, SimpleNamespace(**{name: getattr(manager, name)() for name in GATES}))
