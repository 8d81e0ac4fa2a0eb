"""A hand-made run whose text would do harm if it were interpreted as markup."""

from specdemo.core.tally import summarise
from specdemo.core.trace import LaneTrace, RunTrace, StepEvent, compare

HOSTILE = [
    "<b>bold</b>",
    " &amp; ",
    "${1+1}",
    " {{x}} ",
    "<img src=x onerror=\"document.title='owned'\">",
    "\t\ttabs",
    "\n\n",
    "日本語",
    " 👩‍👩‍👧",
    "`${alert(1)}`",
    "</span>",
    " \u202eidi\u202c",
    "<script>document.title='owned'</script>",
    "  end",
]
PROMPT = "Say <i>this</i> ${again} {{please}} & go"
WRONG = "<u>wrong</u>"
PLAIN_MS = {"draft": 0.0, "verify": 4.0, "accept": 0.5, "commit": 0.5, "observe": 0.0}
SPEC_MS = {"draft": 1.5, "verify": 4.5, "accept": 0.5, "commit": 0.5, "observe": 0.0}


def prefill(ms: float = 8.0) -> StepEvent:
    return StepEvent(0, [[]], [[]], [[0]], [[0]], [[]], [[]], {"prefill": ms})


def plain_lane() -> LaneTrace:
    ids = list(range(len(HOSTILE)))
    events = [StepEvent(i, [[]], [[]], [[0]], [[i]], [[]], [[]], PLAIN_MS) for i in ids[1:]]
    return _closed("Baseline", "none", [prefill(), *events])


def speculative_lane(name: str = "Speculative <em>lane</em>", method: str = "ngram") -> LaneTrace:
    """Return a lane with four kinds of steps in turn: 1 of 3 draft tokens accepted, 2 of 2, 0 of 2, and no draft."""
    wrong, events, at = len(HOSTILE), [prefill()], 1
    while at < len(HOSTILE):
        accepted, refused = [(1, 2), (2, 0), (0, 2), (0, 0)][(len(events) - 1) % 4]
        accepted = min(accepted, len(HOSTILE) - at - 1)
        drafted = [*range(at, at + accepted), *[wrong] * refused]
        probs = [0.9 if t != wrong else 0.2 for t in drafted]
        emitted = list(range(at, at + accepted + 1))
        events.append(
            StepEvent(
                len(events), [drafted], [list(range(len(drafted)))], [list(range(accepted + 1))], [emitted],
                [probs], [[p / 2 for p in probs]], SPEC_MS,
            )
        )  # fmt: skip
        at += accepted + 1
    return _closed(name, method, events)


def hostile_trace(lanes: int = 1) -> RunTrace:
    traces = [plain_lane(), *(speculative_lane() for _ in range(lanes))]
    rows = [{**compare(traces[0], lane, greedy=True), "verdict": "identical"} for lane in traces[1:]]
    return RunTrace(
        preset="embedded-draft",
        config={"temperature": 0.0, "max_new_tokens": len(HOSTILE), "target": "stories", "seed": 0},
        environment={"device": "Abacus <b>9000</b>", "dtype": "float32", "threads": 1, "date": "2026-11-20"},
        schedule="race",
        lanes=traces,
        comparison=rows,
        prompt=PROMPT,
        vocabulary={str(i): text for i, text in enumerate([*HOSTILE, WRONG])},
    )


def _closed(name: str, method: str, events: list[StepEvent]) -> LaneTrace:
    ids = [t for e in events for t in e.emitted[0]]
    pieces = [HOSTILE[t] for t in ids]
    lane = LaneTrace(name, method, {"k": 3}, True, [1, 2], ids, "".join(pieces), "stop", events, pieces=pieces)
    lane.summary = summarise(lane, peak_memory_bytes=12_345_678)
    return lane
