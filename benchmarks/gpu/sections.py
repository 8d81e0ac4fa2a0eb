"""Sections of the GPU benchmark: one small function each, most valuable first."""

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.fairness import race_fairness
from benchmarks.floor import floor
from benchmarks.gpu.lab import Absent, Found, Lab, Steps, measure_steps, name_of
from benchmarks.pairs import SIZES, Pair, Size, make_pair, random_pair
from benchmarks.peers import compete, read_bytes
from specdemo.bench.device import BATCHES, CONTEXT, GPU_WIDTHS, basics, best_seconds, fast, passes, passes_of, slug
from specdemo.bench.random_models import DRAFT_SHAPES, random_model
from specdemo.bench.result import Result
from specdemo.core.estimate import Estimate
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.sampling import Sampling
from specdemo.costs.profiles import MeasuredStep
from specdemo.engine.comparison import Lane
from specdemo.engine.lanes import clear_traceback, reason
from specdemo.engine.loop import never_cancelled
from specdemo.engine.session import Session
from specdemo.methods import BASELINE, load_drafter, method
from specdemo.methods.heads.head import Head
from specdemo.models.cpu_threads import one_thread
from specdemo.models.devices import capture_for, device_kind
from specdemo.models.machine import device_name, versions
from specdemo.models.ref import ModelRef
from specdemo.models.target import HFTarget
from specdemo.presets.files import load_presets

ROOT = Path(__file__).parents[2]
COMMAND = "python -m specdemo bench gpu"
PACKAGES = ("accelerate", "bitsandbytes", "flash-linear-attention", "kernels", "triton", "tokenizers", "safetensors")
TESTS_SECONDS = 300
PLAIN = "plain"
TINY = Size(2, 64, 176, 4, 2, 512, 1)
CONTEXTS = (256, 1024, 4096, 8192, 32_000)  # columns
WIDTHS_OF_STEPS = (1, 6, 33)  # slots: plain decoding, a chain of 5, a tree of 32
HEADS, KV_HEADS, SIZE = 32, 8, 128  # attention of Llama 3 8B and Qwen3 8B


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    seconds: float  # estimate for a large GPU
    run: Callable[[Lab], Found]


@dataclass(frozen=True, slots=True)
class Drafting:
    """A method with the settings it is measured with."""

    method: str
    k: int = 4
    options: Mapping[str, Any] | None = None
    fresh: Mapping[str, Any] | None = None  # arguments for its head; None: no head
    draft: bool = False  # uses a draft model
    temperature: float = 0.0

    @property
    def lane(self) -> Lane:
        model = ModelRef("random weights") if self.draft or self.fresh is not None else None
        return Lane(method=self.method, model=model, k=self.k, options=dict(self.options or {}))


METHODS = {
    PLAIN: Drafting(BASELINE),
    "plain, T = 0.8": Drafting(BASELINE, temperature=0.8),
    "draft model, k = 5": Drafting("draft_model", 5, draft=True),
    "draft model, k = 5, T = 0.8": Drafting("draft_model", 5, draft=True, temperature=0.8),
    "EAGLE-3 tree, 32 nodes": Drafting("eagle", 6, {"nodes": 32}, {"kind": "eagle3", "draft_vocab": 32000}),
    "EAGLE-3 chain, k = 5": Drafting("eagle", 5, {"draft": "chain"}, {"kind": "eagle3", "draft_vocab": 32000}),
    "DFlash, blocks of 16": Drafting("dflash", 15, None, {"layers": 5, "block_size": 16}),
    "MTP, k = 3": Drafting("mtp", 3, None, {}),
    "Medusa tree, 24 nodes": Drafting("medusa", 4, {"nodes": 24}, {}),
    "Medusa chain, k = 4": Drafting("medusa", 4, None, {}),
    "MLP speculator, k = 4": Drafting("mlp_speculator", 4, {"draft": "chain"}, {"inner_dim": 3072}),
    "n-grams, k = 5": Drafting("ngram", 5),
    "suffixes, k = 5": Drafting("suffix", 5),
    "layer skip, k = 4": Drafting("layer_skip", 4),
    "cascade of n-grams, k = 4": Drafting("cascade", 4, draft=True),
    "lookahead, k = 4": Drafting("lookahead", 4),
}


# Sections by prefix, and the shape of the method measurements; a plan takes one or two calls of ten minutes. The first
# one shows that the machine computes correctly, the others measure methods at real sizes.
PLANS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "all": ("", ("",)),
    "first": ("qwen3-8b", ("environment", "device", "tests", "failed-capture", "attention", "contexts", "presets")),
    "qwen": ("qwen3-8b", ("environment", "device", "plain-qwen3-8b", "method", "widths")),
    "llama": ("llama-8b", ("environment", "device", "plain-llama-8b", "method", "peers", "overhead", "memory")),
}


def sections(lab: Lab, plan: str = "all") -> dict[str, Section]:
    """Return the sections of a plan for that device by name."""
    large = ("llama-8b", "qwen3-8b", "llama-1b", "qwen3-1.7b", "qwen3-32b", "llama-34b")
    shapes = ("llama-tiny", "qwen3-tiny") if lab.small else large
    table = {
        "environment": Section("Environment", 5, environment),
        "device": Section("Bandwidth, arithmetic, starting work", 15, device),
        "tests": Section("GPU tests", 120, tests),
        "failed-capture": Section("A failed capture", 20, failed_capture),
        "attention": Section("Attention of one layer", 25, attention),
        f"contexts-{lab.main}": Section(f"Forward passes by context, {lab.main}", 25, contexts),
        f"plain-{shapes[0]}": Section(f"Plain decoding, {shapes[0]}", 60, partial(plain, shapes[0])),
        f"widths-{lab.main}": Section(f"v(n, batch) and c, {lab.main}", 90, widths),
    }
    for label, drafting in METHODS.items():
        table[f"method-{lab.main}-{slug(label)}"] = Section(
            f"Step of {label}, {lab.main}", 8, partial(step, label, drafting)
        )
    table |= {
        "peers": Section("Beside transformers", 70, peers),
        "overhead": Section("Step overhead over replays", 120, overhead),
        "presets": Section("The embedded presets", 60, presets),
        "memory": Section("Memory over 50 runs", 60, memory),
    }
    if not lab.small:  # on a CPU `bench race-fairness` measures it
        table["fairness"] = Section("Race fairness", 30, fairness)
    for name in shapes[1:]:
        table[f"plain-{name}"] = Section(f"Plain decoding, {name}", 90, partial(plain, name))
    return {name: section for name, section in table.items() if name.startswith(PLANS[plan][1])}


def environment(lab: Lab) -> Found:
    facts = {
        "device": device_name(lab.device),
        "memory GB": round(device_kind(lab.device).total(lab.device) / 1e9, 1),
        "kind": device_kind(lab.device).describe(),
        "processor": device_name(torch.device("cpu")),
        "cores": psutil.cpu_count(),
        "main memory GB": round(psutil.virtual_memory().total / 1e9, 1),
        "system": platform.platform(),
        **versions(),
        "commit": lab.commit or "unknown",
        **{package: _version(package) for package in PACKAGES},
        **dict(_nvidia(lab.device)),
    }
    return Found([{"what": name, "is": value} for name, value in facts.items()])


def _nvidia(device: torch.device) -> Iterator[tuple[str, str]]:
    if device.type != "cuda":
        return
    yield "capability", ".".join(map(str, torch.cuda.get_device_capability(device)))
    yield "CUDA", str(torch.version.cuda)
    fields = ("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit", "persistence_mode")
    if shutil.which("nvidia-smi"):
        query = f"--query-gpu={','.join(fields)}", "--format=csv,noheader", f"--id={device.index or 0}"
        command = ["nvidia-smi", *query]
        output = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
        yield from zip(fields, output.split(", "), strict=False)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def device(lab: Lab) -> Found:
    """Measure the numbers of a device profile."""
    found = basics(lab.device, COMMAND)
    rows = []
    for name, figure in found.model_dump(exclude={"passes", "steps", "measured"}).items():
        several = {name: figure} if name != "compute_tflop_per_s" else {f"{name} {d}": f for d, f in figure.items()}
        rows += [{"what": what, "is": one["value"]} for what, one in several.items() if isinstance(one, dict)]
    return Found(rows, profile=found.model_dump(exclude_none=True))


def tests(lab: Lab) -> Found:
    """Run the GPU tests in a separate process, so that damage to the device context ends with it."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rfE", "--tb=line", "-m", "gpu"]
    if not (ROOT / "tests" / "gpu").is_dir():
        raise Absent("the tests need a checkout")
    done = subprocess.run(
        [*command, "tests/gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TESTS_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode not in (0, 1) or not lines:
        raise RuntimeError(" / ".join([*lines[-5:], *done.stderr.splitlines()[-2:]]))
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return Found(
        [{"what": line.partition(" - ")[0][7:], "is": line.partition(" - ")[2]} for line in failed], lines[-1:]
    )


FAILED_CAPTURE = """
import torch
from specdemo.kv.graphs import CudaGraphs, GraphCache

x = torch.ones(4, 4, device="cuda")
failing = GraphCache(CudaGraphs(x.device), x.device, torch.float32)
failing("k", 1, lambda y: (y * y.sum().item(),), (x,), [(4, 4)])
print("reason:", failing.disabled_reason)
print("stream restored:", torch.cuda.current_stream() == torch.cuda.default_stream())
torch.cuda.empty_cache()
print("cache emptied: True")
working = GraphCache(CudaGraphs(x.device), x.device, torch.float32)
print("next capture:", working("k", 1, lambda y: (y @ y,), (x,), [(4, 4)])[0][0, 0].item(), working.disabled_reason)
"""


def failed_capture(lab: Lab) -> Found:
    """Check in a separate process that a capture that fails leaves a process that can capture again."""
    if lab.small:
        return Found([{"what": "reason", "is": "needs a GPU"}])
    command = [sys.executable, "-c", FAILED_CAPTURE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    return Found([{"what": what, "is": value} for what, _, value in lines], done.stderr.splitlines()[-1:])


def attention(lab: Lab) -> Found:
    """Measure attention of one layer with 32 heads and 8 key/value heads of size 128, by kernel."""
    device_kind(lab.device).prepare()
    found, dtype = Found(), lab.dtype()
    for columns in (256,) if lab.small else CONTEXTS:
        for slots in WIDTHS_OF_STEPS:
            shapes = (HEADS // KV_HEADS * slots, columns, columns)
            query, key, value = (torch.randn(1, KV_HEADS, n, SIZE, device=lab.device, dtype=dtype) for n in shapes)
            mask = torch.zeros(1, 1, len(query[0, 0]), columns, device=lab.device, dtype=dtype)
            kernels: dict[str, Callable[[], Tensor]] = {
                "masked": partial(F.scaled_dot_product_attention, query, key, value, mask),
                "unmasked": partial(F.scaled_dot_product_attention, query, key, value),
                "products": partial(_attention_by_products, query, key, value, mask),
            }
            if lab.device.type == "cuda":
                kernels["tree"] = _tree_kernel(query, key, value, slots)
            times = {f"{name} us": _microseconds(run, lab.device) for name, run in kernels.items()}
            found.rows.append({"columns": columns, "slots": slots, **times})
    return found


def _attention_by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = (query @ key.mT) * SIZE**-0.5 + mask
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value


def _tree_kernel(query: Tensor, key: Tensor, value: Tensor, slots: int) -> Callable[[], Tensor]:
    """Return our kernel, which reads as many columns as a tensor says."""
    heads = query.view(1, HEADS, slots, SIZE)
    ends = torch.tensor([key.shape[2] - slots], device=query.device)
    chain = torch.ones(1, slots, slots, dtype=torch.bool, device=query.device).tril()
    return partial(torch.ops.specdemo.tree_attention, heads, key, value, ends, chain, SIZE**-0.5)


def _microseconds(run: Callable[[], Tensor], device: torch.device, calls: int = 20) -> float | str:
    """Return the time of a call within a CUDA graph; on a CPU of a plain call."""

    def several() -> tuple[Tensor, ...]:
        return tuple(run() for _ in range(calls))

    try:
        capture = capture_for(device)
        replay = capture(several) if capture else several
        return round(1e6 * best_seconds(replay, device) / calls, 2)
    except RuntimeError as error:
        return reason(error)


def contexts(lab: Lab) -> Found:
    """Measure forward passes after short and long texts."""
    found = Found()
    for name in dict.fromkeys((lab.main, shape_of_draft(lab))):
        target = lab.target(name, lab.dtype())
        for context in (64,) if lab.small else CONTEXTS:
            ms = passes(target, WIDTHS_OF_STEPS, (1,), context=context).get(1)
            if ms is None:
                found.remarks.append(f"{name}: {context} tokens do not fit into memory.")
                break
            row = {"shape": name, "context": context, "layers": target.facts.kernels, "note": target.note}
            found.rows += [row | {"slots": slots, "ms": round(value, 4)} for slots, value in ms.items()]
            target.release_graphs()
    return found


def plain(name: str, lab: Lab) -> Found:
    """Measure plain decoding in every precision of the device, against its bandwidth."""
    found = Found()
    usual = lab.dtype()
    precisions: list[tuple[torch.dtype, int | None]] = [
        (lab.dtype(known), None) for known in device_kind(lab.device).dtypes if lab.small or known != "float32"
    ]
    if device_kind(lab.device).quantised and not lab.small:
        precisions += [(usual, 4), (usual, 8)]
    for dtype, bits in precisions:
        try:
            found.rows.append(_plain(name, lab, dtype, bits))
        except Exception as error:  # the other precisions may work
            found.remarks.append(f"{f'{bits}bit' if bits else name_of(dtype)}: {reason(error)}.")
            clear_traceback(error)
            lab.forget()
    return found


def _plain(name: str, lab: Lab, dtype: torch.dtype, bits: int | None) -> dict[str, Any]:
    target = lab.target(name, dtype, bits)
    new_tokens = 8 if lab.small else 128
    steps = measure_steps(lab, target, load_drafter(BASELINE, target), GenerationConfig(new_tokens, stop_token_ids=()))
    read = read_bytes(target.model)
    rate = 1000.0 * read / steps.step_ms
    return {
        "shape": name,
        "precision": f"{bits}bit" if bits else name_of(dtype),
        "layers": target.facts.kernels,
        "tokens/s": round(steps.tokens_per_s, 1),
        "ms/token": round(steps.step_ms, 4),
        "by the wall": round(steps.wall_ms, 4),
        "weights read GB": round(read / 1e9, 3),
        "GB/s": round(rate / 1e9, 1),
        "of the bandwidth": round(rate / lab.bandwidth, 3),
        "note": target.note,
    }


def widths(lab: Lab) -> Found:
    """Measure forward passes of the target and its draft model for all widths and batch sizes."""
    found = Found()
    slots, batches = ((1, 2, 4), (1, 2)) if lab.small else (GPU_WIDTHS, BATCHES)
    for name in dict.fromkeys((lab.main, shape_of_draft(lab))):
        target = lab.target(name, lab.dtype())
        ms = passes(target, slots if name == lab.main else (1, 2), batches)
        known = passes_of(name, target, ms)
        found.rows += [
            {
                "shape": name,
                "layers": target.facts.kernels,
                "batch": batch,
                "slots": n,
                "ms": value,
                "v": round(known.v(batch)[n], 4),
            }
            for batch, row in known.ms.items()
            for n, value in row.items()
        ]
        found.profile.setdefault("passes", []).append(known.model_dump())
        found.remarks += [f"{name}: {target.note}."] * bool(target.note)
        if len(ms) < len(batches):
            found.remarks.append(f"{name}: the largest batch size that fits into memory is {max(ms)}.")
    own, with_draft = (
        {row["batch"]: row["ms"] for row in found.rows if row["shape"] == name and row["slots"] == 1}
        for name in (lab.main, shape_of_draft(lab))
    )
    ratios = ", ".join(f"{with_draft[b] / own[b]:.3f} at batch {b}" for b in own if b in with_draft)
    found.remarks.append(f"c, the time of a pass of {shape_of_draft(lab)} / {lab.main}: {ratios}.")
    return found


def shape_of_draft(lab: Lab) -> str:
    return DRAFT_SHAPES.get(lab.main, lab.main)


def step(label: str, drafting: Drafting, lab: Lab) -> Found:
    """Measure the parts of a method's step with synthetic acceptance."""
    target = lab.target(lab.main, lab.dtype())
    drafter = load_drafter(drafting.method, target, _model(drafting, lab, target), **(drafting.options or {}))
    budget = Budget(0, 0) if drafting.method == BASELINE else drafting.lane.budget
    sampling = Sampling(temperature=drafting.temperature)
    config = GenerationConfig(24 if lab.small else 128, sampling, budget, stop_token_ids=())
    steps = measure_steps(lab, target, drafter, config)
    row = {
        "method": label,
        "shape": lab.main,
        "precision": name_of(target.dtype),
        "ms/step": round(steps.step_ms, 4),
        "by the wall": round(steps.wall_ms, 4),
        **{f"{lap} ms": round(ms, 4) for lap, ms in steps.ms.items()},
        "drafted/step": round(steps.drafted, 2),
        "kept/step": round(steps.accepted, 2),
        "tokens/step": round(steps.emitted, 2),
        "tokens/s": round(steps.tokens_per_s, 1),
    }
    notes = [note for note in (target.note, drafter.note) if note]
    return Found([row], notes, {} if drafting.temperature else {"steps": [_measured_step(drafting, lab, steps, row)]})


def _measured_step(drafting: Drafting, lab: Lab, steps: Steps, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the step of a profile. Only greedy steps belong there, because predictions cover no others."""
    full_draft = "nodes" not in (drafting.options or {}) and row["drafted/step"] == drafting.k
    return MeasuredStep(
        model=lab.main,
        method=drafting.method,
        dtype=row["precision"],
        draft=shape_of_draft(lab) if drafting.draft else "",
        context=CONTEXT + (4 if lab.small else 64),
        k=drafting.k if full_draft else 0,
        ms={lap: round(ms, 4) for lap, ms in steps.ms.items()},
        drafted=row["drafted/step"],
        kept=row["kept/step"],
    ).model_dump()


def _model(drafting: Drafting, lab: Lab, target: HFTarget) -> Any:
    """Return a draft model or head with random weights of real shapes; None if there is none."""
    if drafting.draft:
        return fast(random_model(shape_of_draft(lab), lab.device, target.dtype))
    if drafting.fresh is None:
        return None
    head = method(drafting.method)
    assert issubclass(head, Head)
    sizes = {
        name: min(size, target.vocab_size) if name == "draft_vocab" else size for name, size in drafting.fresh.items()
    }
    # initialising billions of weights takes seconds on the device and minutes on a CPU
    with lab.device, torch.no_grad():
        made = head.fresh(target, **sizes)
        _randomised(made)
    return made.fuse()


def _randomised(head: nn.Module) -> None:
    """Randomise heads whose weights start at zero, which a device could compute faster."""
    for parameter in head.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.02)


def peers(lab: Lab) -> Found:
    """Measure transformers' generate and assisted generation on the same weights, including the prompt."""
    with one_thread(lab.device):
        result = compete(_pair(lab), 1 if lab.small else 2, 8 if lab.small else 64, lambda *_: None, never_cancelled)
    return _found(result)


def overhead(lab: Lab) -> Found:
    """Compare engine steps with the same forward passes alone."""
    with one_thread(lab.device):
        result = floor(_pair(lab), 1 if lab.small else 3, 8 if lab.small else 64, lambda *_: None, never_cancelled)
    return _found(result)


def fairness(lab: Lab) -> Found:
    """Measure whether a slow lane changes the other lane's clock."""
    lab.forget()
    return _found(race_fairness(1 if lab.small else 3, lambda *_: None, never_cancelled))


def _pair(lab: Lab) -> Pair:
    lab.forget()
    if lab.small:
        return random_pair("tiny", TINY, lab.device, lab.dtype(), texts=1)
    free = device_kind(lab.device).free(lab.device)
    name = next(n for n in reversed(SIZES) if 3.0 * SIZES[n].parameters * lab.dtype().itemsize <= free)
    return make_pair(name, str(lab.device), "auto", texts=2)


def _found(result: Result) -> Found:
    rows = [{n: asdict(v) if isinstance(v, Estimate) else v for n, v in row.items()} for row in result.rows]
    pair = [f"Pair {result.config['pair']}."] if "pair" in result.config else []
    return Found(rows, [*pair, *result.remarks])


def presets(lab: Lab) -> Found:
    """Run every preset of shipped models as a lane does."""
    lab.forget()
    found, session = Found(), Session()
    embedded = [known for known in load_presets().values() if known.embedded]
    for chosen in embedded[:2] if lab.small else embedded:
        changed = chosen.with_changes(device=str(lab.device), max_new_tokens=8 if lab.small else 128)
        try:
            trace = session.run(changed)
        except ValueError as error:  # a copy without all shipped models
            found.remarks.append(f"{chosen.id}: {reason(error)}.")
            continue
        for lane, compared in zip(trace.lanes, [{}, *trace.comparison], strict=True):
            failed = lane.note if lane.finish == "error" else ""
            found.rows.append(
                {
                    "preset": chosen.id,
                    "lane": lane.name,
                    "tokens/s": lane.summary.get("tokens_per_s"),
                    "speed-up": compared.get("speedup"),
                    "kept": lane.summary.get("acceptance_rate"),
                    "output": compared.get("verdict", failed or None),
                    "layers": trace.environment["kernels"],
                }
            )
    session.unload()
    return found


def memory(lab: Lab) -> Found:
    """Measure the memory in use after each of many runs of one comparison. It must not grow."""
    lab.forget()
    session, chosen = Session(), load_presets()["embedded-eagle-3"]
    spec = chosen.with_changes(device=str(lab.device), max_new_tokens=8 if lab.small else 64)
    in_use, counted = [], False
    for _ in range(6 if lab.small else 50):
        session.run(spec)
        tensors = device_kind(lab.device).allocated(lab.device)
        counted = tensors > 0
        in_use.append(tensors or psutil.Process().memory_info().rss)
    session.unload()
    after = in_use[len(in_use) // 5 :]  # skip the first runs, which fill caches
    growth = (fmean(after[len(after) // 2 :]) - fmean(after[: len(after) // 2])) / (len(after) / 2.0)
    rows = [{"run": run, "held MB": round(value / 1e6, 2)} for run, value in enumerate(in_use, start=1)]
    what = "by tensors on the device" if counted else "by the process"
    return Found(rows, [f"Memory {what} grows by {growth / 1e6:.3f} MB per run."])
