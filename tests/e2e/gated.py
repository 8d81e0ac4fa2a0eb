"""The page on a stand-in engine whose runs stay at their first tokens until a test opens the gate."""

import multiprocessing.synchronize
from dataclasses import dataclass

from specdemo.engine.session import Finished, replay
from specdemo.ui import live, page
from tests.traces import hostile_trace


@dataclass
class Gates:
    """Shared with the test's process. begun and stopped count runs."""

    open: multiprocessing.synchronize.Event
    begun: multiprocessing.synchronize.Semaphore
    stopped: multiprocessing.synchronize.Semaphore
    up: multiprocessing.synchronize.Event


class Gated:
    def __init__(self, gates):
        self.gates = gates

    def stream(self, spec, cancelled, progress):
        progress(0.5, "loading stories")
        messages = list(replay(hostile_trace()))
        yield from messages[:5]
        self.gates.begun.release()
        while not self.gates.open.wait(0.01):
            if cancelled():
                trace = hostile_trace()
                for lane in trace.lanes:
                    lane.finish = "cancelled"
                self.gates.stopped.release()
                yield Finished(trace)
                return
        yield from messages[5:]

    def load(self, spec):
        pass


def serve_gated(port, gates):
    live.session = lambda: Gated(gates)
    server = page.serve(port=port, block=False)
    gates.up.set()
    server.block_thread()
