"""Real models by kind of work, next to transformers' and llama.cpp's own loops on the same weights. `run` chooses
threads and draft lengths; the lengths of head and layer skip are fixed.

The prompts are those of `tune`. All lanes answer each prompt, in random order; the time of an answer starts with its
first token. Intervals are over the prompts.
"""

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.peers import CONSTANT, LOOKUP, WARM_UP_TOKENS, OwnEngine, Timed, hf_greedy, quiet, ratio, row
from specdemo.bench.base import Report, Stop
from specdemo.bench.result import Result, Row, read_result, write_result
from specdemo.bench.sweeps import comparison
from specdemo.core.protocol import Budget, Target
from specdemo.engine.comparison import Lane
from specdemo.engine.session import Session, environment
from specdemo.methods import BASELINE, build_drafter, load_drafter
from specdemo.models.cpu_threads import step_threads, thread_limit
from specdemo.models.llamacpp import library
from specdemo.models.machine import versions
from specdemo.models.packaged import HUB_ID, SMOLLM2, SMOLLM2_GGUF, cache, fetch_file, local
from specdemo.models.ref import ModelRef
from specdemo.models.text import encode
from specdemo.presets.pair import work_prompts
from tests.real_models import GEMMA, QWEN, QWEN_SMALL, command

if TYPE_CHECKING:
    from benchmarks import Models

RESULTS = "results.json"
PLAIN, NGRAM, SUFFIX, HEAD, TREE, SKIP = "plain", "n-gram", "suffix", "EAGLE-3", "EAGLE-3 tree", "layer skip"
MLP, DRAFT, GATED = "MLPSpeculator", "draft model", "gated"
EAGLE, SPECULATOR = ModelRef("smollm2-eagle-3"), ModelRef("smollm2-mlp-speculator")
SMALL_QWEN = ModelRef(cache() / QWEN_SMALL)
LANES = {
    NGRAM: Lane(method="ngram"),
    SUFFIX: Lane(method="suffix"),
    HEAD: Lane(method="eagle", model=EAGLE, k=2, options={"draft": "chain"}),  # as in smollm2-chat
    TREE: Lane(method="eagle", model=EAGLE, k=3, options={"nodes": 5}),
    MLP: Lane(method="mlp_speculator", model=SPECULATOR, k=3),
    SKIP: Lane(method="layer_skip", k=2),
    DRAFT: Lane(method="draft_model", model=SMALL_QWEN),
    GATED: Lane(method="gated", model=SMALL_QWEN),
}
GENERATE, PROMPT_LOOKUP, EARLY_EXIT = (f"transformers: {how}" for how in ("plain", "prompt lookup", "early exit"))
LLAMA, LLAMA_NGRAM = "llama.cpp: plain", "llama.cpp: n-gram"
SERVER, SERVER_DRAFT = "llama-server: plain", "llama-server: draft model"
SAME = {  # the peers of a lane
    PLAIN: (GENERATE, LLAMA),
    NGRAM: (PROMPT_LOOKUP, LLAMA_NGRAM),
    SKIP: (EARLY_EXIT,),
    DRAFT: (SERVER_DRAFT,),
}
ONCE = {SKIP: "chat", EARLY_EXIT: "chat"}  # this model was not trained for it, so one kind of work says enough
CPU_LOOKUP = 2  # draft length that llama-cpp-python recommends on a CPU
LEAST_TOKENS = LOOKUP + 2  # a shorter answer may come in a single pass
CONTEXT = 2048

Part = tuple[float, list[int]]  # time, and the tokens that came then
Peer = Callable[[Tensor, int], list[Part]]  # (prompt [1, T], number of new tokens) -> answer


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, and its lanes. file_type: made from the file of SMOLLM2_GGUF by llama.cpp, for its speed only."""

    target: str
    lanes: tuple[str, ...]
    dtype: str = "auto"
    file_type: int | None = None

    @property
    def missing(self) -> bool:
        """Return True if a file is not here that no call of this benchmark makes."""
        return self.target == QWEN and not all((cache() / name).is_file() for name in (QWEN, QWEN_SMALL))

    def file(self) -> Path | None:
        """Return the GGUF file; None for a model in PyTorch."""
        if self.dtype != "auto":
            return None
        if self.target in (GEMMA, QWEN):
            return cache() / self.target
        source = fetch_file(lambda share, what: None)
        return source if self.file_type is None else quantise(source, cache() / self.target, self.file_type)


SUBJECTS = {
    "SmolLM2 135M Instruct, bfloat16": Subject(SMOLLM2, (NGRAM, SUFFIX, HEAD, TREE, MLP, SKIP), "bfloat16"),
    "SmolLM2 135M Instruct, Q4_1": Subject(SMOLLM2_GGUF, (NGRAM, SUFFIX, HEAD)),
    "SmolLM2 135M Instruct, Q4_K_M": Subject("smollm2-q4_k_m.gguf", (NGRAM, SUFFIX, HEAD), file_type=15),
    "SmolLM2 135M Instruct, Q8_0": Subject("smollm2-q8_0.gguf", (NGRAM, SUFFIX, HEAD), file_type=7),
    "Gemma 3 270M, Q4_K_M": Subject(GEMMA, (NGRAM, SUFFIX)),
    "Qwen2.5 Coder 1.5B with its 0.5B, Q4_K_M": Subject(QWEN, (DRAFT, NGRAM, SUFFIX, GATED)),
}


def quantise(source: Path, file: Path, file_type: int) -> Path:
    """Make a GGUF file of another type from `source` if it is not here. file_type: number in llama.cpp."""
    if not file.is_file():
        parameters = library().llama_model_quantize_default_params()
        parameters.ftype, parameters.allow_requantize = file_type, True
        part = file.with_suffix(".part")
        if library().llama_model_quantize(str(source).encode(), str(part).encode(), ctypes.byref(parameters)):
            raise ValueError(f"llama.cpp cannot make {file.name} from {source.name}")
        part.replace(file)
    return file


class LlamaLoop:
    """Greedy decoding by the loop of the package llama_cpp, plain or with its own n-gram speculation."""

    def __init__(self, file: Path, target: Target, drafted: int) -> None:
        """drafted: tokens of a draft; 0 for plain decoding. The threads are those of `target`."""
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        settings: dict[str, Any] = {"n_ctx": CONTEXT, "n_gpu_layers": 0, "flash_attn": True, "verbose": False}
        settings |= dict.fromkeys(("n_threads", "n_threads_batch"), target.threads or torch.get_num_threads())
        drafter = LlamaPromptLookupDecoding(num_pred_tokens=drafted) if drafted else None
        self._llama: Any = Llama(str(file), draft_model=drafter, **settings)
        self._stop = target.stop_token_ids

    def __call__(self, prompt: Tensor, new_tokens: int) -> Iterator[list[int]]:
        self._llama.reset()
        for count, token in enumerate(self._llama.generate(prompt[0].tolist(), temp=0.0), start=1):
            yield [token]
            if count == new_tokens or token in self._stop:
                return


class LlamaServer:
    """Greedy decoding by llama-server inside this process (package xllamacpp), plain or with a draft model, with the
    server's own draft length."""

    def __init__(self, file: Path, target: Target, draft: Path | None) -> None:
        """The threads are those of `target`."""
        library = import_module("xllamacpp")
        settings = library.CommonParams()
        settings.model.path, settings.n_ctx, settings.n_parallel = str(file), CONTEXT, 1
        settings.n_gpu_layers, settings.verbosity = 0, -1
        threads = target.threads or torch.get_num_threads()
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
        if draft:
            speculative = settings.speculative
            speculative.types = [library.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            speculative.draft.mparams.path = str(draft)
            speculative.draft.cpuparams.n_threads = speculative.draft.cpuparams_batch.n_threads = threads
        self._server, self._tokenizer = library.Server(settings), target.tokenizer

    def __call__(self, prompt: Tensor, new_tokens: int) -> list[Part]:
        """Return the pieces of the text as they come. They are text, so the ids are those of the tokenizer."""
        times, texts = [], []

        def receive(piece: Mapping[str, Any]) -> bool:
            if text := piece["choices"][0]["text"]:
                times.append(time.perf_counter())
                texts.append(text)
            return False

        body = {"prompt": prompt[0].tolist(), "n_predict": new_tokens, "temperature": 0, "stream": True}
        self._server.handle_completions({**body, "cache_prompt": False}, receive)
        ids = self._tokenizer.encode("".join(texts), add_special_tokens=False)
        return [*zip(times[:-1], ([token] for token in ids), strict=False), (times[-1], ids[len(times) - 1 :])]


class Streamer(list[Part]):
    """Tokens of transformers' `generate` as they come, after the prompt."""

    def put(self, tokens: Tensor) -> None:
        self.append((time.perf_counter(), tokens.flatten().tolist()))

    def end(self) -> None:
        pass


def loop(parts: Callable[[Tensor, int], Iterable[list[int]]]) -> Peer:
    """Return a peer that notes when each part of an answer comes."""
    return lambda prompt, new_tokens: [(time.perf_counter(), part) for part in parts(prompt, new_tokens)]


def own(engine: OwnEngine) -> Peer:
    answer = loop(lambda prompt, new_tokens: (event.emitted[0] for event in engine.steps(prompt, new_tokens)))

    def run(prompt: Tensor, new_tokens: int) -> list[Part]:
        with step_threads(engine.target):  # as a session does, else every step sets them
            return answer(prompt, new_tokens)

    return run


def transformers_peer(model: Any, **settings: Any) -> Peer:
    """Return `generate` with these settings."""

    def run(prompt: Tensor, new_tokens: int) -> list[Part]:
        parts = Streamer()
        with quiet():
            hf_greedy(model, prompt, new_tokens, streamer=parts, **settings)
        return parts[1:]

    return run


def transformers_peers(dtype: str) -> dict[str, Peer]:
    weights = local(SMOLLM2) or HUB_ID
    model: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=getattr(torch, dtype)).eval()
    model.generation_config.update(num_assistant_tokens=LANES[SKIP].k, **CONSTANT)
    exit_layer = round(model.config.num_hidden_layers / 3)  # as in the method's default
    return {
        GENERATE: transformers_peer(model),
        PROMPT_LOOKUP: transformers_peer(model, prompt_lookup_num_tokens=LOOKUP),
        EARLY_EXIT: transformers_peer(model, assistant_early_exit=exit_layer),
    }


def cast_of(suite: "Models", of: Subject, prompt: str) -> tuple[Session, dict[str, OwnEngine], dict[str, Peer]]:
    """Return the session that loaded the target, the engine's lanes and the other peers."""
    lanes = tuple(LANES[name].model_copy(update={"name": name}) for name in of.lanes)
    spec = comparison(suite.model_copy(update={"dtype": of.dtype}), str(of.file() or of.target), lanes)
    spec = spec.model_copy(update={"prompt": prompt, "context": CONTEXT})
    session = Session()
    session.run(spec)  # chooses the threads and the draft lengths, and runs everything once
    thread_limit.start_run()  # llama.cpp gets the threads that were chosen, not those of a disturbed moment
    target = session.target()
    stop = target.stop_token_ids
    engines = {PLAIN: OwnEngine(target, load_drafter(BASELINE, target), Budget(0, 0), stop)}
    for lane in session.with_chosen_lengths(spec).lanes:
        drafter = build_drafter(lane.method, target, session.drafter(lane, spec), lane.parsed)
        engines[lane.name] = OwnEngine(target, drafter, lane.budget, stop)
    if file := of.file():
        peers = {name: loop(LlamaLoop(file, target, k)) for name, k in ((LLAMA, 0), (LLAMA_NGRAM, CPU_LOOKUP))}
        if DRAFT in of.lanes and find_spec("xllamacpp"):
            drafts = {SERVER: None, SERVER_DRAFT: cache() / QWEN_SMALL}
            peers |= {name: LlamaServer(file, target, draft) for name, draft in drafts.items()}
    else:
        peers = transformers_peers(of.dtype)
    return session, engines, peers


def measure(suite: "Models", report: Report, cancelled: Stop) -> Result:
    """Measure what is missing in the results of earlier calls. Raises ValueError, one line, if those are of another
    commit or of other settings.
    """
    suite.folder.mkdir(parents=True, exist_ok=True)
    begin, file = time.monotonic(), suite.folder / RESULTS
    kinds = {kind: texts[: suite.prompts] for kind, texts in work_prompts().items() if kind.startswith(suite.work)}
    settings = {"new_tokens": suite.new_tokens, "prompts": suite.prompts}
    done = read_result(file) if file.is_file() else Result("models", suite.prompts, settings, environment(None), [])
    if done.config != settings or done.environment["commit"] != environment(None)["commit"]:
        raise ValueError(f"{file} has results of another commit or of other settings; choose another --out")
    known = {(row["model"], row["category"]) for row in done.rows}
    subjects = [name for name, subject in SUBJECTS.items() if suite.models in name and not subject.missing]
    missing = [(n, k) for n in subjects for k in kinds if (n, k) not in known]
    name = ""
    for count, (model, kind) in enumerate(missing):
        if cancelled() or time.monotonic() - begin > 60.0 * suite.minutes:
            left = f"{len(missing) - count} of {len(missing)} kinds of work remain; run the same command again"
            return replace(done, remarks=[left])
        report(count / len(missing), f"{model}, {kind}")
        if name != model:
            (session, engines, peers), name = cast_of(suite, SUBJECTS[model], kinds[kind][0]), model
        target, tokenizer = engines[PLAIN].target, session.tokenizer
        prompts = [_prompt(tokenizer, text) for text in kinds[kind]]
        left_out = {each for each, only in ONCE.items() if only != kind}
        thread_limit.start_run()  # the number of threads with which every text starts
        where = {"model": model, "category": kind, "threads": target.threads or torch.get_num_threads()}
        every = [*done.rows, *rows(where, contests(engines, peers, left_out, prompts, suite.new_tokens))]
        about = environment(target) | {"dtype": "several types", "threads": None, "clock": "wall time"}
        about["versions"] = versions() | {"llama-cpp-python": version("llama_cpp_python")}
        done = replace(done, environment=about, rows=every)
        write_result(done, file)
    absent = [name for name, subject in SUBJECTS.items() if suite.models in name and subject.missing]
    return replace(done, remarks=[f"{name} is left out; {command(QWEN)} makes it" for name in absent])


def _prompt(tokenizer: Any, text: str) -> Tensor:
    words: Any = [{"role": "user", "content": text}] if tokenizer.chat_template else text
    return torch.tensor([encode(tokenizer, words, CONTEXT)])


def contests(
    engines: Mapping[str, OwnEngine],
    peers: Mapping[str, Peer],
    left_out: Set[str],
    prompts: Sequence[Tensor],
    new_tokens: int,
) -> list[dict[str, Timed]]:
    """Let all peers answer every prompt; return the time and the tokens per prompt with answers of some length."""
    every = {name: own(engine) for name, engine in engines.items()} | {**peers}
    every = {name: peer for name, peer in every.items() if name not in left_out}
    contests = []
    for number, prompt in enumerate((prompts[0], *prompts)):  # the first time for warm-up
        found = {}
        thread_limit.start_run()  # every text is a run: a disturbed one leaves the next its threads
        for name in Random(number).sample(list(every), len(every)):
            parts = every[name](prompt, new_tokens if number else WARM_UP_TOKENS)
            written = [token for _, part in parts for token in part]
            events = [engines[name].events] if name in engines else []
            found[name] = Timed(parts[-1][0] - parts[0][0], [written], events, untimed=len(parts[0][1]))
        if number and min(len(timed.written[0]) for timed in found.values()) >= LEAST_TOKENS:
            contests.append({name: found[name] for name in every})
    return contests


def rows(where: Row, contests: Sequence[Mapping[str, Timed]]) -> list[Row]:
    """Return a row per peer. where: its first columns. over its peer: the ratio to the same method elsewhere."""
    made = [{**where, **row(name, contests, PLAIN), "prompts": len(contests)} for name in contests[0]]
    for each in made:
        peer = next((other for other in SAME.get(each["lane"], ()) if other in contests[0]), None)
        each["over its peer"] = ratio(contests, each["lane"], peer) if peer else None
    return made
