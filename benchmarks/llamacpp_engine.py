"""specdemo's loop with llama.cpp's forward passes against llama.cpp's own loop: the same files, threads and KV cache
type, greedy, plain and with the same draft model.

The forward passes are those of the package `llama_cpp`, llama.cpp's own loop is that of the package `xllamacpp`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.llamacpp import LlamaCpp, export
from benchmarks.pairs import Pair
from benchmarks.peers import K, OwnEngine, Timed, contest, ratio, row
from specdemo.bench.base import Report
from specdemo.bench.measure import Tick, repeated
from specdemo.bench.result import Result
from specdemo.core.protocol import Budget, Target
from specdemo.engine.loop import generate
from specdemo.engine.session import environment
from specdemo.methods import BASELINE, load_drafter
from specdemo.models.llamacpp import LlamaCppSettings, library
from specdemo.models.load import load_model

OUR_PLAIN, OUR_DRAFT = "specdemo plain", f"specdemo draft model, k={K}"
PLAIN, DRAFT = "llama.cpp plain", f"llama.cpp draft model, k={K}"
WARM_UP_TOKENS = 16


def compete_on_llamacpp(
    pair: Pair, repeats: int, new_tokens: int, report: Report, cancelled: Callable[[], bool]
) -> Result:
    """Compare both loops. Raises ValueError, one line, if a package is missing or the pair is not in float32."""
    with TemporaryDirectory() as folder:  # the run describes its target from the header of its file
        target, everybody = _peers(pair, Path(folder))

        def once(repeat: int, tick: Tick) -> tuple[dict[str, Timed], dict[str, float]]:
            if not repeat:
                for peer in everybody.values():
                    peer(pair.prompts[0], WARM_UP_TOKENS)
            timed = contest(everybody, pair.prompts, new_tokens, repeat, tick)
            return timed, {name: _overhead(everybody[name], pair, new_tokens) for name in (OUR_PLAIN, OUR_DRAFT)}

        done, stopped = repeated(repeats, report, cancelled, once)
        about = environment(target)
    contests = [timed for timed, _ in done]
    rows = [row(name, contests, PLAIN) for name in everybody]
    for line in rows[:2]:
        line["overhead, ms/step"] = round(median(found[line["lane"]] for _, found in done), 4)
    config = {"pair": pair.name, "agreement": round(pair.agreement, 3), "k": K, "new_tokens": new_tokens}
    config |= {"prompts": len(pair.prompts), "parameters": pair.target.num_parameters()}
    pairs = [(OUR_PLAIN, PLAIN), (OUR_DRAFT, DRAFT), (OUR_DRAFT, PLAIN)]
    remarks = [f"{one} / {other}: {ratio(contests, one, other).format()}" for one, other in pairs]
    return Result("peers", len(done), config, about, rows, [*remarks, *stopped], "lane")


def _peers(pair: Pair, folder: Path) -> tuple[Target, dict[str, Any]]:
    """Return the target on llama.cpp and all peers by name. folder: of the models' files."""
    settings = LlamaCppSettings(gpu_layers=0, threads=torch.get_num_threads(), cache_type="f32")
    files = [export(model, folder / f"{number}.gguf") for number, model in enumerate((pair.target, pair.draft))]
    loaded, draft = (load_model(file, llamacpp=settings) for file in files)
    target = loaded.target()
    return target, {
        OUR_PLAIN: OwnEngine(target, load_drafter(BASELINE, target), Budget(0, 0)),
        OUR_DRAFT: OwnEngine(target, load_drafter("draft_model", target, draft), Budget(K, K)),
        PLAIN: LlamaCpp(pair.target),
        DRAFT: LlamaCpp(pair.target, pair.draft, K),
    }


def _overhead(peer: OwnEngine, pair: Pair, new_tokens: int) -> float:
    """Return the mean time in ms that a step spends outside llama.cpp's `llama_decode`: the median over the prompts.

    Reading the prompt is not a step.
    """
    found = []
    for prompt in pair.prompts:
        outside = []
        with _decode_times() as spent:
            for event in generate(peer.target, peer.drafter, prompt, peer.config(new_tokens)):
                outside.append(sum(event.ms.values()) - 1000.0 * sum(spent))
                spent.clear()
        found.append(mean(outside[1:]))
    return median(found)


@contextmanager
def _decode_times() -> Iterator[list[float]]:
    """Record the seconds of each call of `llama_decode`, on the clock of the steps."""
    llama, spent = library(), list[float]()
    decode = llama.llama_decode
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def timed(*arguments: object) -> object:
        begin = now()
        status = decode(*arguments)
        spent.append(now() - begin)
        return status

    llama.llama_decode = timed
    try:
        yield spent
    finally:
        llama.llama_decode = decode
