"""Simulated runs with known costs and acceptance."""

from specdemo.core.trace import LaneTrace, RunTrace, StepEvent


def chain(index, drafted, accepted, draft_ms, verify_ms, other_ms=0.0):
    nodes = [100 + i for i in range(drafted)]
    probs = [[None] * drafted]
    ms = {"draft": draft_ms, "verify": verify_ms, "accept": other_ms}
    parents = [list(range(drafted))]
    return StepEvent(index, [nodes], parents, [list(range(accepted + 1))], [[*nodes[:accepted], 7]], probs, probs, ms)


def prefill():
    return StepEvent(0, [[]], [[]], [[0]], [[7]], [[]], [[]], {"prefill": 20.0})


def plain_run(steps=40, ms=10.0):
    return [prefill(), *(chain(i, 0, 0, 0.0, ms) for i in range(1, steps + 1))]


def simulated(rng, alphas, k, steps=2500, v=None, c=1.0, fixed=0.5, other=0.25):
    """Return events of a lane with known costs and acceptance."""
    v = v or (lambda n: 10.0 + n)
    events = [prefill()]
    for index in range(1, steps + 1):
        accepted = next((i for i in range(k) if rng.random() >= alphas[i]), k)
        events.append(chain(index, k, accepted, fixed + c * k, v(k + 1), other))
    return events


def speed(events):
    return sum(len(e.emitted[0]) for e in events[1:]) / sum(sum(e.ms.values()) for e in events[1:])


def trace(*lanes, options=None):
    traces = []
    for name, events in (("Baseline", plain_run()), *lanes):
        ids = [t for e in events for t in e.emitted[0]]
        pieces = ["x"] * len(ids)
        traces.append(
            LaneTrace(name, "any", options or {}, True, [1], ids, "".join(pieces), "length", events, {}, pieces)
        )
    return RunTrace("p", {"temperature": 0.0}, {}, "race", traces)
