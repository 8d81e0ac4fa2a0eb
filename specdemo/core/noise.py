"""Reasons why a repeated measurement may give another result, found in the step times of a run."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, median, quantiles

from specdemo.core.estimate import Estimate, Runs, Timed, waited_share

WAITED = 0.10  # share of a lane's wall time in which its thread did not run
SPREAD = 0.50  # of plain steps: 5th to 95th percentile, divided by the median
DRIFT = 0.15  # of plain steps, from the first third of a run to the last
WIDE = 0.10  # half of the interval, relative to the value
CHEAPER = 0.97  # cost of a step in plain tokens; a wider pass cannot be cheaper
BUNCHED = 0.20  # median gap between pieces, divided by the mean gap
AT_ONCE = 0.05  # share of a request's time in which all of its text arrived
OTHERWISE = 1.20  # ratio between the server's and the client's time
PIECE = 16  # average tokens per piece, the longest draft of any lane
ENOUGH = 20  # steps needed for percentiles and thirds


def reasons(plain: Runs, lane: Runs, speed: Estimate) -> tuple[str, ...]:
    """Return why the speed-up of a lane over plain decoding should be measured again; empty if it need not be."""
    return (*_waiting(plain, lane), *_restless(plain), *_impossible(lane, speed), *wide(speed))


def of_server(name: str, runs: Runs, told: Iterable[float]) -> Iterator[str]:
    """Yield why the time of a lane on a server may not be its own. server_times_ms: times of its last request, by the
    server's clock."""
    if any(map(_bunched, runs)):
        yield f"the pieces of {name} arrived in bunches, so that only whole requests can be compared"
    here, there = runs[-1].ms, sum(told)
    if there and not 1.0 / OTHERWISE <= here / there <= OTHERWISE:
        yield f"the server of {name} says {there / 1000.0:.2f} s where {here / 1000.0:.2f} s passed here"


def _waiting(plain: Runs, lane: Runs) -> Iterator[str]:
    for name, runs in (("this lane", lane), ("the baseline", plain)):
        share = waited_share(runs)
        if share is not None and share >= WAITED:
            yield f"{name} waited for the processor in {share:.0%} of its time"


def _restless(plain: Runs) -> Iterator[str]:
    """Check the median over several runs."""
    long = [[ms for _, ms in run.steps] for run in plain if len(run.steps) >= ENOUGH]
    if not long:
        return
    spread = median(_spread(times) for times in long)
    if spread > SPREAD:
        yield f"the time of plain steps varied by {spread:.0%}"
    change = median(_change(times[: len(times) // 3], times[-(len(times) // 3) :]) for times in long)
    if abs(change) > DRIFT:
        yield f"plain steps became {abs(change):.0%} {'slower' if change > 0 else 'faster'} during the run"


def _spread(times: Sequence[float]) -> float:
    fences = quantiles(times, n=20)
    return (fences[-1] - fences[0]) / median(times) if median(times) else 0.0


def _change(first: Sequence[float], last: Sequence[float]) -> float:
    return median(last) / median(first) - 1.0 if median(first) else 0.0


def _impossible(lane: Runs, speed: Estimate) -> Iterator[str]:
    """Check that a step costs at least as much as plain decoding of one token, whose pass it contains."""
    cost = sum(run.tokens for run in lane) / max(sum(len(run.steps) for run in lane), 1) / speed.value
    if cost < CHEAPER:
        yield f"implausible timing: a step cost {cost:.2f}x a plain token"


def wide(speed: Estimate) -> Iterator[str]:
    """Yield a reason if the interval is wide for its value."""
    if speed.width is not None and speed.width > WIDE:
        yield f"its interval is wide, {speed.interval()}"


def _bunched(run: Timed) -> bool:
    """Return True if pieces of text arrived together that were not generated together."""
    gaps = [ms for _, ms in run.steps]
    if run.tokens < ENOUGH or not run.ms:
        return False
    if len(gaps) * PIECE < run.tokens or sum(gaps) < AT_ONCE * run.ms:
        return True
    return median(gaps) < BUNCHED * fmean(gaps)
