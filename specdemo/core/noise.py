"""Why a second run may not confirm a measured time: found in the steps themselves, named in words."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, median, quantiles

from specdemo.core.estimate import Estimate, Runs, Timed, waited_share

WAITED = 0.10  # share of a lane's wall time in which its thread did not run
SPREAD = 0.50  # of plain steps, all of one shape: from the 5th to the 95th percentile, by the median
DRIFT = 0.15  # of plain steps, from the first third of a lane to its last
WIDE = 0.10  # half of the interval
CHEAPER = 0.97  # a step's cost in plain tokens; one token more cannot make a pass cheaper
BUNCHED = 0.20  # median gap between pieces by the mean one
AT_ONCE = 0.05  # the part of a request in which all of its text came
OTHERWISE = 1.20  # a server's own time by that which passed here, or the other way round
PIECE = 16  # tokens in the average piece, as many as any lane drafts
ENOUGH = 20  # steps, to speak of percentiles and thirds


def reasons(plain: Runs, lane: Runs, speed: Estimate) -> tuple[str, ...]:
    """Why the speed-up of a lane over the plain one should be measured again; none where it need not."""
    return (*_waiting(plain, lane), *_restless(plain), *_impossible(lane, speed), *wide(speed))


def of_server(name: str, runs: Runs, told: Iterable[float]) -> Iterator[str]:
    """Why the time of a lane on a server may not be its own. told: its last request's times by the server's clock."""
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
    """In the middle one of several runs."""
    long = [[ms for _, ms in run.steps] for run in plain if len(run.steps) >= ENOUGH]
    if not long:
        return
    spread = median(_spread(times) for times in long)
    if spread > SPREAD:
        yield f"plain steps, all alike, differed by {spread:.0%} of their time"
    change = median(_change(times[: len(times) // 3], times[-(len(times) // 3) :]) for times in long)
    if abs(change) > DRIFT:
        yield f"plain steps took {abs(change):.0%} {'more' if change > 0 else 'less'} time at the end"


def _spread(times: Sequence[float]) -> float:
    fences = quantiles(times, n=20)
    return (fences[-1] - fences[0]) / median(times) if median(times) else 0.0


def _change(first: Sequence[float], last: Sequence[float]) -> float:
    return median(last) / median(first) - 1.0 if median(first) else 0.0


def _impossible(lane: Runs, speed: Estimate) -> Iterator[str]:
    """A step of the lane makes at least the pass that plain decoding makes for a token."""
    cost = sum(run.tokens for run in lane) / max(sum(len(run.steps) for run in lane), 1) / speed.value
    if cost < CHEAPER:
        yield f"a step that costs {cost:.2f}x a plain token cannot be"


def wide(speed: Estimate) -> Iterator[str]:
    """Says so of an interval that is wide for its value."""
    if speed.width is not None and speed.width > WIDE:
        yield f"its interval is wide, {speed.interval()}"


def _bunched(run: Timed) -> bool:
    """Whether pieces of text came together that were not written together."""
    gaps = [ms for _, ms in run.steps]
    if run.tokens < ENOUGH or not run.ms:
        return False
    if len(gaps) * PIECE < run.tokens or sum(gaps) < AT_ONCE * run.ms:
        return True
    return median(gaps) < BUNCHED * fmean(gaps)
