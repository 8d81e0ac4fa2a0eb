"""Reasons why a repeated measurement may give another result, found in the step times of a run."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, median, quantiles

from specdemo.core.estimate import Estimate, Runs, RunTiming, waited_share

MAX_DISTURBED = 0.50  # share of a lane's steps during which other programs took the cores
MAX_WAITED = 0.10  # share of a lane's wall time in which its thread did not run
MAX_SPREAD = 0.50  # of plain steps: 5th to 95th percentile, divided by the median
MAX_DRIFT = 0.15  # of plain steps, from the first third of a run to the last
MAX_WIDTH = 0.10  # half of the interval, relative to the value
MIN_STEP_COST = 0.97  # cost of a step in plain tokens; a wider pass cannot be cheaper
MIN_GAP_RATIO = 0.20  # median gap between pieces, divided by the mean gap
MIN_STREAMED_SHARE = 0.05  # share of a request's time in which all of its text arrived
MAX_CLOCK_RATIO = 1.20  # ratio between the server's and the client's time
MAX_TOKENS_PER_PIECE = 16  # average tokens per piece, the longest draft of any lane
MIN_STEPS = 20  # steps needed for percentiles and thirds


def reasons(plain: Runs, lane: Runs, speed: Estimate) -> tuple[str, ...]:
    """Return why the speed-up of a lane over plain decoding should be measured again; empty if it need not be."""
    return (
        *_processor_waits(plain, lane),
        *_unstable_baseline(plain),
        *_implausible_step(lane, speed),
        *wide_interval(speed),
    )


def server_warnings(name: str, runs: Runs, server_times_ms: Iterable[float]) -> Iterator[str]:
    """Yield why the time of a lane on a server may not be its own. server_times_ms: times of its last request, by the
    server's clock."""
    if any(map(_is_bunched, runs)):
        yield f"the output of {name} arrived in bunches, so only whole requests can be compared"
    local_ms, server_ms = runs[-1].ms, sum(server_times_ms)
    if server_ms and not 1.0 / MAX_CLOCK_RATIO <= local_ms / server_ms <= MAX_CLOCK_RATIO:
        yield f"the server of {name} reports {server_ms / 1000.0:.2f} s, the client measured {local_ms / 1000.0:.2f} s"


def _processor_waits(plain: Runs, lane: Runs) -> Iterator[str]:
    for name, runs in (("this lane", lane), ("the baseline", plain)):
        share = waited_share(runs)
        if share is not None and share >= MAX_WAITED:
            yield f"CPU contention: {name} waited for {100.0 * share:.0f} % of its time"
        disturbed = sum(len(run.disturbed) for run in runs) / max(sum(len(run.steps) for run in runs), 1)
        if disturbed >= MAX_DISTURBED:
            yield f"CPU contention: other programs took the cores in {100.0 * disturbed:.0f} % of the steps of {name}"


def _unstable_baseline(plain: Runs) -> Iterator[str]:
    """Check the median over several runs."""
    step_times = [[ms for _, ms in run.undisturbed_steps] for run in plain]
    step_times = [times for times in step_times if len(times) >= MIN_STEPS]
    if not step_times:
        return
    spread = median(_spread(times) for times in step_times)
    if spread > MAX_SPREAD:
        fewer = "" if waited_share(plain) is not None else ", or set fewer threads than cores"  # known of one thread
        yield f"baseline step time varied by {100.0 * spread:.0f} %, as when other programs run; close those{fewer}"
    change = median(_change(times[: len(times) // 3], times[-(len(times) // 3) :]) for times in step_times)
    if abs(change) > MAX_DRIFT:
        yield f"the baseline became {100.0 * abs(change):.0f} % {'slower' if change > 0 else 'faster'} during the run"


def _spread(times: Sequence[float]) -> float:
    fences = quantiles(times, n=20)
    return (fences[-1] - fences[0]) / median(times) if median(times) else 0.0


def _change(first: Sequence[float], last: Sequence[float]) -> float:
    return median(last) / median(first) - 1.0 if median(first) else 0.0


def _implausible_step(lane: Runs, speed: Estimate) -> Iterator[str]:
    """Check that a step costs at least as much as plain decoding of one token, whose pass it contains."""
    cost = sum(run.tokens for run in lane) / max(sum(len(run.steps) for run in lane), 1) / speed.value
    if cost < MIN_STEP_COST:
        yield f"implausible timing: a speculative step cost only {cost:.2f} plain tokens"


def wide_interval(speed: Estimate) -> Iterator[str]:
    """Yield a reason if the interval is wide for its value."""
    if speed.width is not None and speed.width > MAX_WIDTH:
        yield f"wide interval, {speed.interval()}"


def _is_bunched(run: RunTiming) -> bool:
    """Return True if pieces of text arrived together that were not generated together."""
    gaps = [ms for _, ms in run.steps]
    if run.tokens < MIN_STEPS or not run.ms:
        return False
    if len(gaps) * MAX_TOKENS_PER_PIECE < run.tokens or sum(gaps) < MIN_STREAMED_SHARE * run.ms:
        return True
    return median(gaps) < MIN_GAP_RATIO * fmean(gaps)
