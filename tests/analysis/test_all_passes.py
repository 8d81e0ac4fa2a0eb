"""Simulated decoding with a known number of target passes, written in every engine's format and read back.

Engines count only passes with a draft. In these runs a part of the passes has none.
"""

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from specdemo.analysis.readers import read_output
from specdemo.analysis.watch import Watch

SAMPLES = Path(__file__).parent / "samples"
K, TOKENS = 4, 400


@dataclass
class Request:
    """One request: drafted and accepted tokens of its passes with a draft, and the passes without one."""

    drafts: list[tuple[int, int]] = field(default_factory=list)
    plain: int = 0
    ms: float = 0.0

    @property
    def passes(self):
        return len(self.drafts) + self.plain

    @property
    def drafted(self):
        return sum(drafted for drafted, _ in self.drafts)

    @property
    def accepted(self):
        return sum(accepted for _, accepted in self.drafts)

    @property
    def tokens(self):
        """Return the output tokens; the first is of the prefill."""
        return 1 + self.accepted + self.passes

    @property
    def histogram(self):
        return [sum(accepted == n for _, accepted in self.drafts) for n in range(K + 1)]

    @property
    def shares(self):
        return [sum(self.histogram[n:]) / len(self.drafts) for n in range(1, K + 1)]


@dataclass
class Run:
    requests: list[Request]

    def total(self, name):
        return sum(getattr(request, name) for request in self.requests)

    @property
    def drafts(self):
        return [draft for request in self.requests for draft in request.drafts]

    @property
    def merged(self):
        return Request(self.drafts, self.total("plain"), self.total("ms"))


def simulate(seed, share, requests=3):
    """Decode; a pass has a draft of K tokens with probability `share`, each accepted with 70 %."""
    rng = random.Random(seed)
    run = Run([])
    for place in range(requests):
        request = Request()
        while request.tokens < TOKENS:
            if rng.random() >= share:
                request.plain += 1
                continue
            accepted = 0
            while accepted < K and rng.random() < 0.7:
                accepted += 1
            request.drafts.append((K, accepted))
        request.ms = request.passes * (10.0 + 5.0 * place)  # requests of different speed
        run.requests.append(request)
    return run


def llamacpp_log(run):
    lines, text = ["spec common_specu: - n_max=4, n_min=0, p_min=0.000000"], "slot print_timing: id 0 | task {} |"
    for task, one in enumerate(run.requests):
        slot, length = text.format(task), 1 + one.accepted / len(one.drafts)
        ms = f"{one.ms:.2f} ms / {one.tokens} tokens"
        lines.append(f"{slot} eval time = {ms} ({one.ms / one.tokens:.2f} ms per token, 1.00 tokens per second)")
        rate = ", ".join(f"{share:.3f}" for share in one.shares)
        lines.append(
            f"{slot} draft acceptance = 0.5 ({one.accepted} accepted / {one.drafted} generated), "
            f"mean acceptance length = {length:.2f}, acceptance rate per position = ({rate})"
        )
    return "\n".join(lines)


def counters(run, prefix, **others):
    one = run.merged
    values = {"num_drafts": len(one.drafts), "num_draft_tokens": one.drafted, "num_accepted_tokens": one.accepted}
    lines = [f"{prefix}_{name}_total {value}" for name, value in values.items()]
    at = enumerate(one.shares)
    lines += [f'{prefix}_num_accepted_tokens_per_pos_total{{position="{n}"}} {s * len(one.drafts):.0f}' for n, s in at]
    return "\n".join([*lines, *(f"{name} {value}" for name, value in others.values())])


def vllm_metrics(run):
    return counters(
        run,
        "vllm:spec_decode",
        tokens=("vllm:generation_tokens_total", run.total("tokens")),
        first=("vllm:time_to_first_token_seconds_count", len(run.requests)),
        s=("vllm:request_decode_time_seconds_sum", run.total("ms") / 1000),
        output=("vllm:request_generation_tokens_sum", run.total("tokens")),
        finished=("vllm:request_generation_tokens_count", len(run.requests)),
    )


def llamacpp_metrics(run):
    speed = 1000 * run.total("tokens") / run.total("ms")
    return counters(
        run,
        "llamacpp:spec_decode",
        tokens=("llamacpp:tokens_predicted_total", run.total("tokens")),
        speed=("llamacpp:predicted_tokens_seconds", speed),
    )


def vllm_log(run):
    """Write the lines of 10 seconds per request."""
    lines = []
    for one in run.requests:
        rates, length = ", ".join(f"{share:.3f}" for share in one.shares), 1 + one.accepted / len(one.drafts)
        lines += [
            f"INFO [loggers.py:271] Engine 000: Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: "
            f"{one.tokens / 10:.1f} tokens/s, Running: 1 reqs, Waiting: 0 reqs",
            f"INFO [metrics.py:101] SpecDecoding metrics: Mean acceptance length: {length:.2f}, Accepted throughput: "
            f"{one.accepted / 10:.2f} tokens/s, Drafted throughput: {one.drafted / 10:.2f} tokens/s, Accepted: "
            f"{one.accepted} tokens, Drafted: {one.drafted} tokens, Per-position acceptance rate: {rates}",
        ]
    return "\n".join(lines)


def speculative(one):
    return {
        "num_spec_steps": len(one.drafts),
        "num_draft_tokens": one.drafted,
        "num_accepted_draft_tokens": one.accepted,
        "acceptance_histogram": one.histogram,
        "num_spec_tokens": K,
    }


def vllm_answer(run):
    usage = {"completion_tokens": run.requests[0].tokens}
    return json.dumps({"usage": usage, "metrics": {"speculative_decoding": speculative(run.requests[0])}})


def llamacpp_answer(run):
    one = run.requests[0]
    timings = {"predicted_n": one.tokens, "predicted_ms": one.ms, "draft_n": one.drafted}
    return json.dumps({"timings": timings | {"draft_n_accepted": one.accepted}})


def lmstudio_answer(run):
    one = run.requests[0]
    counts = {"total_draft_tokens_count": one.drafted, "accepted_draft_tokens_count": one.accepted}
    return json.dumps({"usage": {"completion_tokens": one.tokens, **counts}})


def bench_serve(run):
    one = run.merged
    return json.dumps(
        {
            "completed": len(run.requests),
            "total_output_tokens": run.total("tokens"),
            "output_throughput": 1.0,
            "mean_tpot_ms": 7.0,
            "output_lens": [request.tokens for request in run.requests],
            "itls": [[request.ms / 1000 / 8] * 8 for request in run.requests],
            "spec_decode_num_drafts": len(one.drafts),
            "spec_decode_draft_tokens": one.drafted,
            "spec_decode_accepted_tokens": one.accepted,
            "spec_decode_per_position_acceptance_rates": one.shares,
            "spec_decode_acceptance_length": 1 + one.accepted / len(one.drafts),
        }
    )


def bench_table(run):
    one = run.merged
    rows = {"Successful requests": len(run.requests), "Total generated tokens": run.total("tokens")}
    rows |= {"Drafts": len(one.drafts), "Draft tokens": one.drafted, "Accepted tokens": one.accepted}
    rows |= {"Acceptance length": 1 + one.accepted / len(one.drafts)}
    lines = [f"{name}:   {value}" for name, value in rows.items()]
    return "\n".join(["num_speculative_tokens: 4", "=== Serving Benchmark Result ===", *lines])


def aiperf(run):
    records = []
    for one in run.requests:
        speed = 1000 * (one.tokens - 1) / one.ms
        metrics = {"output_sequence_length": one.tokens, "output_token_throughput_per_user": speed}
        drafts = speculative(one) | {"acceptance_histogram": {str(n): bar for n, bar in enumerate(one.histogram)}}
        named = {name: {"value": value} for name, value in metrics.items()}
        records.append({"metadata": {}, "metrics": named, "spec_decode_acceptance": drafts})
    return "\n".join(map(json.dumps, records))


def guidellm(run):
    requests = [
        {"output_tokens": one.tokens, "response_metrics": {"speculative_decoding": speculative(one)}}
        for one in run.requests
    ]
    return json.dumps({"benchmarks": [{"metrics": {}, "requests": {"successful": requests}}]})


# format -> what its output contains besides acceptance and passes: draft length, drafts, speed of all requests
FORMATS = {
    llamacpp_log: "k drafts speed",
    vllm_metrics: "k drafts speed",
    llamacpp_metrics: "k drafts speed",
    vllm_log: "k drafts",
    bench_serve: "k drafts speed",
    bench_table: "k drafts",
    aiperf: "k drafts speed",
    guidellm: "k drafts",
    vllm_answer: "k drafts",
    llamacpp_answer: "",
    lmstudio_answer: "",
}


@pytest.mark.parametrize("share", [1.0, 0.6, 0.1])
@pytest.mark.parametrize("form", FORMATS)
def test_passes_and_acceptance_are_read_back(form, share):
    run = simulate(f"{form.__name__} {share}", share)
    found, contents = read_output(form(run)), FORMATS[form].split()
    one = run.requests[0] if form.__name__.endswith("answer") else run.merged
    passes = pytest.approx(one.passes, rel=0.01)
    assert found.steps == passes
    assert found.accepted_length == pytest.approx(1 + one.accepted / one.passes, rel=0.01)
    assert found.acceptance_rate == pytest.approx(one.accepted / one.drafted, rel=0.005)
    assert found.drafted_per_step == pytest.approx(one.drafted / one.passes, rel=0.01)
    if "drafts" in contents:
        assert found.drafting_share == pytest.approx(len(one.drafts) / one.passes, rel=0.02)
    if "drafts" in contents and found.by_position:
        assert sum(found.by_position) == pytest.approx(one.accepted / one.passes, rel=0.02)
    if "k" in contents:
        assert (found.k or len(found.by_position)) == K
    if "speed" in contents:
        assert found.tokens_per_s == pytest.approx(1000 * one.tokens / one.ms, rel=0.01)


@pytest.mark.parametrize("share", [1.0, 0.1])
@pytest.mark.parametrize("form", [vllm_metrics, llamacpp_metrics])
def test_watch_counts_all_passes(form, share):
    first, later = simulate(1, share), simulate(1, share)
    later.requests += simulate(2, share).requests
    watch = Watch("http://a:1")
    for at, run in ((0.0, first), (5.0, later)):
        watch.add(at, form(run))
    one = Run(later.requests[3:]).merged
    length = pytest.approx(1 + one.accepted / one.passes, rel=0.01)
    assert watch.rows[0]["tokens/pass"] == length and watch.observation().accepted_length == length
    assert watch.observation().drafting_share == pytest.approx(share, rel=0.1)
    assert ("bottleneck: steps without a draft" in watch.sentence()) == (share < 0.5)


def test_drafts_of_several_kinds_are_added():
    """The same statistics in the other order give the same."""
    text = (SAMPLES / "llamacpp-combined.log").read_text(encoding="utf-8")
    *lines, mtp, ngram = text.splitlines()
    found, other = (read_output("\n".join([*lines, *last])) for last in ((mtp, ngram), (ngram, mtp)))
    assert found.method == "draft-mtp and ngram-mod" and replace(other, method=found.method) == found
    assert found.draft_token_ms == pytest.approx(1123.0 / 860.0) and found.by_position == ()
