"""A stand-in for Hugging Face's `spaces` on ZeroGPU, as seen by a generator.

It multiplies the declared duration, compares it with the visitor's quota ($QUOTA, 120 seconds by default), forks, and
pickles what crosses.
"""

import functools
import multiprocessing
import os
import pickle
import sys
from types import SimpleNamespace

FACTOR = 1.5
sys.modules["spaces.zero.config"] = SimpleNamespace(get_config=lambda: {"duration_factor": FACTOR})


class Refused(Exception):
    def __init__(self, message):
        super().__init__(repr(message))
        self.message = message


def GPU(*, duration):
    return functools.partial(_lend, duration)


def _lend(duration, task):
    fork = multiprocessing.get_context("fork")

    def run_forked(*arguments):
        asked, left = round(FACTOR * duration(*arguments)), int(os.environ.get("QUOTA", "120"))
        if asked > left:
            raise Refused(f"You have exceeded your GPU quota ({asked}s requested vs. {left}s left)")
        results, stop, sent = fork.SimpleQueue(), fork.Event(), pickle.dumps(arguments)
        worker = fork.Process(target=_work, args=(task, sent, results, stop))
        worker.start()
        try:
            while (item := results.get()) is not None:
                yield pickle.loads(item)
        finally:
            stop.set()
            while item is not None:
                item = results.get()
            worker.join()

    return run_forked


def _work(task, sent, results, stop):
    try:
        generator = task(*pickle.loads(sent))
        for item in generator:
            results.put(pickle.dumps(item))
            if stop.is_set():
                generator.close()
    finally:
        results.put(None)
