"""The engine against transformers' generation and llama.cpp on the same weights, greedy, batch size 1.

Everything is timed end to end, including the prompt, and every repeat runs the peers in another order.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig as HFGenerationConfig
from transformers import PreTrainedModel
from transformers.utils import logging

from benchmarks.floor import Overhead, RecordingTarget, overhead, overhead_columns
from benchmarks.llamacpp import LlamaCpp
from benchmarks.pairs import Pair
from specdemo.bench.base import Report, Tick
from specdemo.bench.measure import run_repeats
from specdemo.bench.result import Result
from specdemo.core.estimate import Estimate, over_repeats
from specdemo.core.protocol import Budget, Drafter, GenerationConfig, Target
from specdemo.core.trace import StepEvent
from specdemo.engine.loop import generate
from specdemo.engine.session import environment
from specdemo.methods import BASELINE, load_drafter
from specdemo.models.devices import device_kind
from specdemo.models.fused import fuse_layers

K = 5
LOOKUP = 10  # tokens of a prompt-lookup draft, the default of transformers
SEED = 5
CONSTANT = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}  # draft length
WARM_UP_TOKENS = 16

OUR_PLAIN, OUR_DRAFT, OUR_LOOKUP = "specdemo plain", f"specdemo draft model, k={K}", "specdemo prompt lookup"
PLAIN, ASSISTED = "transformers generate", f"transformers assisted, k={K}"
ASSISTED_USUAL, TRANSFORMERS_LOOKUP = "transformers assisted, default", "transformers prompt lookup"
LLAMA_CPP = "llama.cpp plain"

Peer = Callable[[Tensor, int], list[int]]  # (prompt [1, T], number of new tokens) -> output tokens


@dataclass(slots=True)
class OwnEngine:
    """The engine as a peer. It stores the steps of its last run."""

    target: Target
    drafter: Drafter
    budget: Budget
    stop_token_ids: tuple[int, ...] = ()
    events: list[StepEvent] = field(default_factory=list)

    def config(self, new_tokens: int) -> GenerationConfig:
        return GenerationConfig(new_tokens, budget=self.budget, stop_token_ids=self.stop_token_ids)

    def steps(self, prompt: Tensor, new_tokens: int) -> Iterator[StepEvent]:
        self.events = []
        for event in generate(self.target, self.drafter, prompt, self.config(new_tokens)):
            self.events.append(event)
            yield event

    def __call__(self, prompt: Tensor, new_tokens: int) -> list[int]:
        return [token for event in self.steps(prompt, new_tokens) for token in event.emitted[0]]


def hf_greedy(model: Any, prompt: Tensor, new_tokens: int, **settings: Any) -> Any:
    """Return prompt and greedy output of transformers' `generate` with these settings."""
    length = {"max_new_tokens": new_tokens, "do_sample": False}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **length, **settings)


def transformers_peer(pair: Pair, settings: Mapping[str, Any], assistant: Mapping[str, Any] | None = None) -> Peer:
    """Return `generate` with these settings, optionally with an assistant model and its settings."""

    def run(prompt: Tensor, new_tokens: int) -> list[int]:
        more: dict[str, Any] = dict(settings)
        if assistant is not None:
            pair.draft.generation_config = HFGenerationConfig(pad_token_id=0, **assistant)
            more["assistant_model"] = pair.draft
        ids: list[int] = hf_greedy(pair.target, prompt, new_tokens, **more)[0, prompt.shape[1] :].tolist()
        return ids

    return run


def cast(pair: Pair, target: RecordingTarget, draft: RecordingTarget) -> dict[str, Peer]:
    """Return all peers by name. target and draft are the engine's own copies."""
    return {
        OUR_PLAIN: OwnEngine(target, load_drafter(BASELINE, target), Budget(0, 0)),
        OUR_DRAFT: OwnEngine(target, load_drafter("draft_model", target, draft), Budget(K, K)),
        OUR_LOOKUP: OwnEngine(target, load_drafter("ngram", target), Budget(LOOKUP, LOOKUP)),
        PLAIN: transformers_peer(pair, {}),
        ASSISTED: transformers_peer(pair, {}, {"num_assistant_tokens": K, **CONSTANT}),
        ASSISTED_USUAL: transformers_peer(pair, {}, {}),
        TRANSFORMERS_LOOKUP: transformers_peer(pair, {"prompt_lookup_num_tokens": LOOKUP}),
    }


@dataclass(frozen=True, slots=True)
class Timed:
    seconds: float
    written: list[list[int]]  # output tokens per prompt
    events: list[list[StepEvent]]  # of the engine, per prompt
    untimed: int = 0  # output tokens before the seconds

    @property
    def tokens_per_s(self) -> float:
        return (sum(map(len, self.written)) - self.untimed) / self.seconds


def contest(
    peers: Mapping[str, Peer],
    prompts: Sequence[Tensor],
    new_tokens: int,
    repeat: int,
    tick: Callable[[float], None],
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Timed]:
    """Run every peer on every prompt once, in random order per repeat."""
    order = list(peers)
    random.Random(SEED + repeat).shuffle(order)
    spent = dict.fromkeys(order, 0.0)
    written: dict[str, list[list[int]]] = {name: [] for name in order}
    events: dict[str, list[list[StepEvent]]] = {name: [] for name in order}
    for number, prompt in enumerate(prompts):
        for place, name in enumerate(order):
            tick((number + place / len(order)) / len(prompts))
            device_kind(prompt.device).synchronize(prompt.device)
            begin = now()
            output = peers[name](prompt, new_tokens)
            device_kind(prompt.device).synchronize(prompt.device)
            spent[name] += now() - begin
            written[name].append(output)
            if isinstance(peer := peers[name], OwnEngine):
                events[name].append(peer.events)
    return {name: Timed(spent[name], written[name], events[name]) for name in order}


def compete(pair: Pair, repeats: int, new_tokens: int, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Compare the engine with transformers and with its own forward passes alone."""
    target, draft = _with_fused_layers(pair.target), _with_fused_layers(pair.draft)
    everybody = cast(pair, target, draft)
    absent = []
    try:
        everybody[LLAMA_CPP] = LlamaCpp(pair.target)
    except ValueError as error:
        absent.append(f"{error}.")
    own_lanes = {name: peer for name, peer in everybody.items() if isinstance(peer, OwnEngine)}

    def once(repeat: int, tick: Tick) -> tuple[dict[str, Timed], dict[str, list[Overhead]]]:
        if not repeat:
            longest = max(pair.prompts, key=lambda prompt: prompt.shape[1])
            for peer in everybody.values():  # a complete text, because CUDA graphs depend on the cache's capacity
                tick(0.0)
                peer(longest, new_tokens if isinstance(peer, OwnEngine) else min(WARM_UP_TOKENS, new_tokens))
        timed = contest(everybody, pair.prompts, new_tokens, repeat, lambda share: tick(0.8 * share))
        floors: dict[str, list[Overhead]] = {}
        for name in (OUR_PLAIN, OUR_DRAFT):
            tick(0.8)
            peer = own_lanes[name]
            found = [overhead(target, peer.drafter, draft, prompt, peer.config(new_tokens)) for prompt in pair.prompts]
            floors[name] = [run for run in found if run is not None]
        return timed, floors

    with quiet():
        done, stopped = run_repeats(repeats, report, cancelled, once)
    contests = [timed for timed, _ in done]
    rows = [row(name, contests) for name in everybody]
    for line in rows:
        floors = [found[line["lane"]] for _, found in done if found.get(line["lane"])]
        if len(floors) == len(done):
            line |= overhead_columns(floors)
    config = {"pair": pair.name, "agreement": round(pair.agreement, 3), "k": K, "new_tokens": new_tokens}
    config |= {"prompts": len(pair.prompts), "parameters": pair.target.num_parameters()}
    remarks = [_agreement(pair), *_ratios(contests), *absent, *stopped]
    if target.dtype != torch.float32 and any(line["output"] != "identical" for line in rows):
        remarks.append("In half precision, outputs diverge where two tokens are equal within rounding.")
    return Result("peers", len(done), config, environment(target), rows, remarks, "lane")


def _with_fused_layers(model: PreTrainedModel) -> RecordingTarget:
    """Return a copy with fused layers; the peers use the weights as transformers made them."""
    own = deepcopy(model)
    fuse_layers(own)
    return RecordingTarget(own)


def row(name: str, contests: Sequence[Mapping[str, Timed]], baseline: str = PLAIN) -> dict[str, Any]:
    events = [event for timed in contests for run in timed[name].events for event in run[1:]]
    drafted = sum(t >= 0 for e in events for t in e.drafted[0])
    own, plain = ([text for timed in contests for text in timed[each].written] for each in (name, baseline))
    same, total = sum(map(list.__eq__, own, plain)), len(plain)
    return {
        "lane": name,
        "tokens/s": over_repeats([timed[name].tokens_per_s for timed in contests]),
        "speed-up": ratio(contests, name, baseline),
        "accepted": round(sum(len(e.path[0]) - 1 for e in events) / drafted, 4) if drafted else None,
        "tokens/pass": round(sum(len(e.emitted[0]) for e in events) / len(events), 4) if events else None,
        "output": "identical" if same == total else f"{same} of {total} identical",
    }


def ratio(contests: Sequence[Mapping[str, Timed]], one: str, other: str) -> Estimate:
    return over_repeats([timed[one].tokens_per_s / timed[other].tokens_per_s for timed in contests])


def _agreement(pair: Pair) -> str:
    kind = "trained" if pair.name == "embedded" else "random"
    return (
        f"Models: {kind}, {pair.target.num_parameters() / 1e6:.1f} M and {pair.draft.num_parameters() / 1e6:.1f} M "
        f"parameters; the draft's first choice is the target's for {pair.agreement:.0%} of the tokens."
    )


def _ratios(contests: Sequence[Mapping[str, Timed]]) -> list[str]:
    versus = [
        (OUR_PLAIN, PLAIN),
        (OUR_PLAIN, LLAMA_CPP),
        (OUR_DRAFT, ASSISTED),
        (OUR_DRAFT, ASSISTED_USUAL),
        (OUR_LOOKUP, TRANSFORMERS_LOOKUP),
    ]
    ratios = [(one, other, ratio(contests, one, other)) for one, other in versus if other in contests[0]]
    return [f"{one} / {other}: {r.format()}" for one, other, r in ratios]


def read_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights read per token: all but the embedding table, unless it is also the output head."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total if table is head else total - table.numel() * table.element_size()  # type: ignore[operator]


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' log messages."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
