"""Recorders for machines without a GPU."""


class Replayed:
    """A recorder that behaves like a CUDA graph where a CPU can show it: every replay writes to the same memory."""

    def __init__(self):
        self.recorded = 0
        self.replayed = 0

    def __call__(self, run):
        self.recorded += 1
        results = run()

        def replay():
            self.replayed += 1
            for into, result in zip(results, run(), strict=True):
                into.copy_(result)
            return results

        return replay


def failing(run):
    raise RuntimeError("operation not permitted when stream is capturing\nmore about it")


def forgetful(run):
    """Record a pass and replay its first result for any input."""
    result = run()
    result[0].zero_()
    return lambda: result
