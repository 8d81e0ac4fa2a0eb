"""Log of llama.cpp: `llama-server` (tools/server/server-context.cpp, print_timings; common/speculative.cpp, statistics)
and the older program `llama-speculative`.
"""

import re

from specdemo.diagnosis.observation import Observation
from specdemo.diagnosis.readers.base import Output, OutputReader, OutputTotals, find_last, find_number, numbers_in

ACCEPTED = re.compile(r"\( {0,12}([0-9]{1,12}) accepted */ *([0-9]{1,12}) generated\)")
POSITIONS = re.compile(r"rate per position = \(([0-9., ]{1,8000})\)")
DURATIONS = re.compile(r"dur\(b,g,a\) = [0-9.]{1,15}, ([0-9.]{1,15}),")
SPEED = re.compile(r", {1,12}([0-9.]{1,12}) tokens per second\)")


class LlamaCppLog(OutputReader):
    """Log of `llama-server` or `llama-cli`, with or without speculation. The draft acceptance is logged per request."""

    title = "llama.cpp log"

    def read(self, output: Output) -> Observation | None:
        text = output.text
        if "eval time =" not in text or "tokens per second)" not in text or "n_predict" in text:
            return None
        totals, k, tokens = OutputTotals(batches=[1.0]), 0, 0.0
        for line in output.lines("draft acceptance"):
            k = max(k, _add(totals, line))
        for line in output.lines(" eval time ="):
            match = SPEED.search(line)
            if match and "prompt eval" not in line:
                totals.speeds.append(float(match[1]))
                tokens += find_number("ms /", line) or 0.0
        if not totals.steps:  # a step outputs its accepted tokens and one more; a request's first is of the prefill
            totals.steps = max(tokens - totals.accepted - len(totals.speeds), 0.0)
        totals.positions = totals.positions or [share * totals.steps for share in _positions(output)]
        return Observation(
            engine="llama-server",
            source=self.title,
            method=find_last(r"statistics {1,20}([a-z0-9-]{1,40}):", text),
            drafter=find_last(r"loading draft model '([^'\n]{1,200})'", text),
            k=int(find_last(r"(?:--spec-draft-n-max[ =]|--draft-max[ =]|\bn_max=)([0-9]{1,3})\b", text) or k) or None,
            draft_token_ms=_draft_token_ms(output),
            moe=_moe(text),
            offloaded=_offloaded(text),
            **totals.values(),
        )


class LlamaSpeculative(OutputReader):
    """Output of `llama-speculative`, which llama.cpp had until 2026."""

    title = "llama-speculative"

    def read(self, output: Output) -> Observation | None:
        text = output.text
        if "n_drafted" not in text or "n_accept" not in text:
            return None
        drafted, accepted = find_number("n_drafted =", text), find_number("n_accept  =", text)
        tokens, k = find_number("n_predict =", text), find_number("n_draft   =", text)
        decoded = re.search(r"decoded {1,9}[0-9]{1,9} tokens.{1,60}speed: {1,9}([0-9.]{1,12}) t/s", text)
        totals = OutputTotals(batches=[1.0], speeds=[float(decoded[1])] if decoded else [])
        if drafted and accepted is not None and tokens and tokens > accepted:
            totals.add(drafted, accepted, tokens - accepted)
        draft = text.partition("draft:")[2].partition("target:")[0]
        speed = [
            float(found) for found in re.findall(r"[^t] eval time =.{1,80}?([0-9.]{1,12}) tokens per second", draft)
        ]
        return Observation(
            engine="llama-server",
            source=self.title,
            method="draft_model",
            k=int(k) or None if k else None,
            draft_token_ms=1000.0 / speed[-1] if speed and speed[-1] else None,
            moe=_moe(text),
            offloaded=_offloaded(text),
            **totals.values(),
        )


def _add(totals: OutputTotals, line: str) -> int:
    """Add the acceptance of one request; return its number of positions."""
    match, positions = ACCEPTED.search(line), POSITIONS.search(line)
    length = find_number("mean acceptance length =", line) or find_number("mean len =", line)
    if not match:
        return 0
    accepted, drafted = float(match[1]), float(match[2])
    shares = numbers_in(positions[1]) if positions else []
    steps = accepted / (length - 1.0) if length and length > 1.0 else drafted / len(shares) if shares else 0.0
    totals.add(drafted, accepted, steps, shares)
    return len(shares)


def _positions(output: Output) -> list[float]:
    """Return the acceptance by position from the statistics over all requests, which logs of a higher level contain."""
    return numbers_in(find_last(r"#acc rate/pos = \(([0-9., ]{1,8000})\)", "".join(output.lines("statistics "))))


def _draft_token_ms(output: Output) -> float | None:
    """Return the drafting time per draft token, from the statistics over all requests."""
    *_, last = ["", *output.lines("statistics ")]
    tokens, durations = find_number("#gen tokens =", last), DURATIONS.search(last)
    return float(durations[1]) / tokens if tokens and durations else None


def _moe(text: str) -> bool | None:
    experts = find_last(r"n_expert {1,20}= {1,4}([0-9]{1,5})\b", text)
    return int(experts) > 0 if experts else None


def _offloaded(text: str) -> bool | None:
    """Return whether a part of the layers stays in main memory although others are on the GPU."""
    layers = re.findall(r"offloaded ([0-9]{1,4})/([0-9]{1,4}) layers to GPU", text)
    return any(0 < int(on_gpu) < int(total) for on_gpu, total in layers) if layers else None
