"""Log of vLLM: v1/spec_decode/metrics.py (lines with "SpecDecoding metrics"), v1/metrics/loggers.py (throughput)."""

import re

from specdemo.diagnosis.observation import Observation
from specdemo.diagnosis.readers.base import Output, OutputReader, OutputTotals, find_last, find_number, numbers_in

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
        for line in output.lines(MARK):
            _add(totals, line)
        for line in output.lines(LOAD):
            totals.speeds.append(find_number(LOAD, line) or 0.0)
            totals.batches.append(find_number("Running:", line) or 0.0)
            preemptions += "Preemptions:" in line
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
