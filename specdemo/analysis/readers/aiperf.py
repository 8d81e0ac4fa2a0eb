"""Records of AIPerf: profile_export.jsonl, one request per line (docs/reference, "Spec Decode")."""

from collections.abc import Mapping

from specdemo.analysis.observation import Observation
from specdemo.analysis.readers.base import Output, OutputReader, OutputTotals, below, count, number, text_of

MARK = '"metrics"'


class AIPerf(OutputReader):
    """Records of AIPerf 0.13 and later, with --export-level records. Without acceptance it is a baseline."""

    title = "AIPerf profile_export.jsonl"

    def read(self, output: Output) -> Observation | None:
        totals, engine, k, found = OutputTotals(), "", 0, False
        for line in output.text.splitlines():
            record = output.parse(line) if line.startswith("{") and MARK in line else None
            if not isinstance(record, Mapping) or not {"metadata", "metrics"} <= record.keys():
                continue
            found = True
            tokens = _metric(record, "output_sequence_length")
            after_first = max(tokens - 1.0, 0.0) if tokens else None
            speed = _metric(record, "output_token_throughput_per_user")
            totals.add_time(after_first or 1.0, 1000.0 / speed * (after_first or 1.0) if speed else None)
            drafts = record.get("spec_decode_acceptance")
            if isinstance(drafts, Mapping):
                engine = text_of(drafts.get("engine")) or engine
                k = max(k, count(drafts.get("num_spec_tokens")) or 0)
                _add(totals, drafts, after_first)
        if not found:
            return None
        return Observation(engine=engine, source=self.title, k=k or None, **totals.values())


def _metric(record: Mapping[object, object], name: str) -> float | None:
    return number(below(record, "metrics", name, "value"))


def _add(totals: OutputTotals, drafts: Mapping[object, object], tokens: float | None) -> None:
    bars, drafted = drafts.get("acceptance_histogram"), number(drafts.get("num_draft_tokens")) or 0.0
    accepted, steps = number(drafts.get("num_accepted_draft_tokens")), number(drafts.get("num_spec_steps"))
    if isinstance(bars, Mapping):
        totals.add_histogram([number(bars.get(str(n))) or 0.0 for n in range(_longest(bars) + 1)], drafted, tokens)
    elif accepted is not None and steps:
        totals.add(drafted, accepted, steps, tokens=tokens)


def _longest(bars: Mapping[object, object]) -> int:
    return max((int(name) for name in bars if isinstance(name, str) and name.isdecimal() and len(name) < 4), default=0)
