"""A draft model with another vocabulary: identical text on many prompts, same distribution over many samples, and speed
against transformers' universal assisted generation (Timor et al., arXiv 2502.05202) on the same pair.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from transformers import GenerationConfig as HFGenerationConfig

from benchmarks.pairs import Pair
from benchmarks.peers import OUR_PLAIN, PLAIN, OwnEngine, Peer, contest, quiet, row, transformers_peer
from specdemo.bench.base import Report
from specdemo.bench.measure import Tick, repeated
from specdemo.bench.result import Result
from specdemo.bench.suites import Losslessness
from specdemo.core.estimate import over_repeats
from specdemo.core.protocol import Budget
from specdemo.engine.session import environment
from specdemo.methods import BASELINE, load_drafter
from specdemo.models.load import LoadedModel, load_model
from specdemo.models.target import HFTarget
from specdemo.presets.files import preset
from specdemo.training.collect import generated_rows

PRESET = "embedded-other-vocabulary"
PROMPTS, OPENING, GREEDY = 200, 24, 48  # number of prompts, tokens of each that the target generates, new tokens
TIMED = 8  # number of prompts that are timed
DRAWS = 48  # repeats of 256
DRAFTING, ASSISTED, ASSISTED_USUAL = "specdemo, other vocabulary", "universal assisted", "universal assisted, default"


def vocabularies(repeats: int, new_tokens: int, report: Report, cancelled: Callable[[], bool]) -> Result:
    """Measure the first lane of PRESET. repeats: number of timed repeats."""
    chosen = preset(PRESET)
    loaded, draft = (load_model(name, "float32", "cpu", kernels="transformers") for name in chosen.models)
    own_target = load_model(chosen.target, "float32", "cpu")
    target = HFTarget(own_target.model, own_target.tokenizer, own_target.name)
    prompts = [row[None] for row in generated_rows(loaded.model, 0, PROMPTS, OPENING, seed=0)]
    k = chosen.lanes[0].k
    peers = cast(loaded, draft, target, k)
    plain, drafting = peers[OUR_PLAIN], peers[DRAFTING]
    differing = 0
    for number, prompt in enumerate(prompts):
        report(0.3 * number / len(prompts), "comparing tokens")
        pairs = zip(plain(prompt, GREEDY), drafting(prompt, GREEDY), strict=True)
        differing += sum(a != b for a, b in pairs)
    drawn = Losslessness(preset=chosen.with_changes(temperature=0.8), repeats=DRAWS).run(lambda *_: None, cancelled)

    def once(repeat: int, tick: Tick) -> Mapping[str, Any]:
        return contest(peers, prompts[:TIMED], new_tokens, repeat, tick)

    with quiet():
        done, stopped = repeated(repeats, report, cancelled, once)
    ratios = {
        other: over_repeats([timed[DRAFTING].tokens_per_s / timed[other].tokens_per_s for timed in done])
        for other in (OUR_PLAIN, PLAIN, ASSISTED, ASSISTED_USUAL)
    }
    remarks = [f"{differing} differing tokens over {PROMPTS} prompts of {GREEDY} tokens.", *drawn.remarks[:4]]
    remarks += [f"{DRAFTING} / {name}: {r.format()}" for name, r in ratios.items()]
    config = {"preset": PRESET, "k": k, "new_tokens": new_tokens, "prompts": TIMED}
    rows = [row(name, done) for name in peers]
    return Result("other-vocabulary", len(done), config, environment(target), rows, [*remarks, *stopped], "lane")


def cast(loaded: LoadedModel, draft: LoadedModel, target: HFTarget, k: int) -> dict[str, Peer]:
    """Return our lanes, and transformers' generation on the same weights."""
    for model in (loaded.model, draft.model):
        model.generation_config = HFGenerationConfig(pad_token_id=0)
    pair = Pair(PRESET, loaded.model, draft.model, [], 0.0)
    words = {"tokenizer": loaded.tokenizer, "assistant_tokenizer": draft.tokenizer}
    fixed = {
        "num_assistant_tokens": k,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    own = load_drafter("draft_model", target, LoadedModel(deepcopy(draft.model), draft.tokenizer, draft.name))
    # transformers assumes one vocabulary if both sizes are equal, so add a row, which is never the most likely
    table = draft.model.resize_token_embeddings(draft.model.config.vocab_size + 1, mean_resizing=False)
    table.weight.data[-1] = 0.0
    return {
        OUR_PLAIN: OwnEngine(target, load_drafter(BASELINE, target), Budget(0, 0)),
        DRAFTING: OwnEngine(target, own, Budget(k, k)),
        PLAIN: transformers_peer(pair, {}),
        ASSISTED: transformers_peer(pair, words, fixed),
        ASSISTED_USUAL: transformers_peer(pair, words, {}),
    }
