"""Log of vLLM: v1/spec_decode/metrics.py (lines with "SpecDecoding metrics"), v1/metrics/loggers.py (throughput)."""

import re
from collections.abc import Sequence

from specdemo.analysis.observation import Observation
from specdemo.analysis.readers.base import Output, OutputReader, OutputTotals, find_last, find_number, numbers_in
from specdemo.servers.counters import FIRST_TOKENS, all_passes

MARK = "SpecDecoding metrics:"
LOAD = "Avg generation throughput:"
ROUNDING = 0.006  # of a length that is printed with two digits
RATES = re.compile(r"Per-position acceptance rate: ([0-9., ]{1,8000})")


class VLLMLog(OutputReader):
    """Log of a vLLM server with speculative decoding, of versions since 0.9."""

    title = "vLLM log"

    def read(self, output: Output) -> Observation | None:
        if MARK not in output.text and not ("Engine 0" in output.text and LOAD in output.text):
            return None
        totals, preemptions = OutputTotals(), 0
        drafting = [*output.lines(MARK)]
        for line in drafting:
            _add(totals, line)
        for line in output.lines(LOAD):
            totals.speeds.append(find_number(LOAD, line) or 0.0)
            totals.batches.append(find_number("Running:", line) or 0.0)
            preemptions += "Preemptions:" in line
        _count_all_passes(totals, drafting)
        given = "".join(output.lines("speculative_config="))
        return Observation(
            engine="vllm",
            source=self.title,
            method=find_last(r"speculative_config=SpeculativeConfig\(method='([\w-]{1,60})'", given),
            drafter=find_last(r"SpeculativeConfig\([^()]{0,200}?model='([^']{1,200})'", given),
            target=find_last(r"with config: model='([^']{1,200})'", given),
            offloaded=True if preemptions > len(totals.speeds) / 2 else None,
            **totals.values(),
        )


def _count_all_passes(totals: OutputTotals, drafting: Sequence[str]) -> None:
    """Count the passes without a draft from the throughput. A line about drafts covers the time since the last one, so
    the shortest of these times is that of a line about throughput.

    They stay unknown if the log begins or ends within a reading, and in old versions, whose lines about drafts have no
    throughput: it is not known whether those count every draft (vllm-0.9.log has 16 tokens per counted draft).
    """
    rates = [(find_number("Drafted:", line), find_number("Drafted throughput:", line)) for line in drafting]
    seconds = [drafted / rate for drafted, rate in rates if drafted and rate]
    if seconds and len(totals.speeds) >= len(drafting):
        tokens = sum(totals.speeds) * min(seconds)
        if tokens > (1.0 + FIRST_TOKENS) * (totals.drafting_steps + totals.accepted):
            totals.steps = all_passes(tokens, totals.accepted, totals.drafting_steps)


def _add(totals: OutputTotals, line: str) -> None:
    accepted, drafted = find_number(", Accepted:", line), find_number("Drafted:", line)
    length = find_number("Mean acceptance length:", line)
    match = RATES.search(line)
    rates = numbers_in(match[1]) if match else []
    if accepted is None or not drafted or length is None:
        return
    steps = drafted / len(rates) if rates else 0.0
    if accepted and length > 1.0 and (not steps or abs(1.0 + accepted / steps - length) > ROUNDING):
        steps = accepted / (length - 1.0)  # drafts that end early
    if steps:
        totals.add(drafted, accepted, steps, rates)
