"""What a device can do, measured: memory bandwidth, matrix products, starting work, passes by width and batch.

Every figure is the best of a few, as whatever else runs only takes away.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from statistics import fmean

import torch
from transformers import PreTrainedModel

from specdemo.bench.random_models import SHAPES, random_model
from specdemo.bench.table import table
from specdemo.core.protocol import Budget, GenerationConfig, Target
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.methods.heads.eagle import Eagle
from specdemo.models.devices import kind, now
from specdemo.models.fused import hasten
from specdemo.models.machine import commit, device_name, one_thread, versions
from specdemo.models.pass_cost import verify_costs
from specdemo.models.place import DTYPES, pick_device, pick_dtype
from specdemo.models.target import HFTarget
from specdemo.prediction.profiles import NAME, Figure, Measured, Passes, Profile, Step

REPEATS = 8
LAUNCHES = 500
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CPU_WIDTHS, CPU_BATCHES = (1, 2, 3, 5, 9, 17), (1, 2, 4, 8, 16)  # of `specdemo profile`
CONTEXT = 64
LINK_BYTES = 1 << 28
STEP_K, STEP_TOKENS, STEP_BATCH = 5, 64, 8
COMMAND = "python -m specdemo profile"


def best_seconds(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Of `run`, on a device that has nothing else to do; after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        begin = now(device)
        run()
        times.append(now(device) - begin)
    return min(times[1:])


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy inside the device's memory reads and writes."""
    source = torch.zeros(_bytes(device), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * len(source) / best_seconds(lambda: target.copy_(source), device)


def read_bandwidth(device: torch.device, dtype: torch.dtype) -> float:
    """Bytes a second that a matrix times a vector reads: what decoding one token does."""
    rows = _bytes(device) // (4096 * dtype.itemsize)
    matrix = torch.zeros(rows, 4096, dtype=dtype, device=device)
    vector = torch.zeros(1, 4096, dtype=dtype, device=device)
    return rows * 4096 * dtype.itemsize / best_seconds(lambda: vector @ matrix.T, device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large product of two square matrices; numbers that are not all alike, since equal bits
    save power and so time."""
    size = 512 if device.type == "cpu" else 8192
    matrix = torch.empty(size, size, device=device).normal_().to(dtype)
    return 2.0 * size**3 / best_seconds(lambda: matrix @ matrix, device)


def launch_seconds(device: torch.device) -> float:
    """Starting an operation from Python, in a row of them that nobody waits for."""
    tensor = torch.zeros(1, device=device)
    return best_seconds(lambda: [tensor.add_(1.0) for _ in range(LAUNCHES)], device) / LAUNCHES


def wait_seconds(device: torch.device) -> float:
    """Starting an operation and waiting until it is done."""
    tensor = torch.zeros(1, device=device)
    return best_seconds(lambda: tensor.add_(1.0), device, 50)


def node_seconds(device: torch.device) -> float | None:
    """An operation of a recorded pass; None where passes are not recorded."""
    if not kind(device).records:
        return None
    tensor = torch.zeros(1, device=device)
    with torch.cuda.device(device):
        tensor.add_(1.0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                tensor.add_(1.0)
        return best_seconds(graph.replay, device) / LAUNCHES


def link_bandwidth(device: torch.device) -> float | None:
    """Bytes a second from main memory, from pinned pages; None where that is the device's own memory."""
    if not kind(device).apart:
        return None
    here = torch.zeros(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    return LINK_BYTES / best_seconds(lambda: there.copy_(here, non_blocking=True), device)


def passes(
    target: Target, widths: Sequence[int] = WIDTHS, batches: Sequence[int] = BATCHES, context: int = CONTEXT
) -> dict[int, dict[int, float]]:
    """Batch -> slots -> milliseconds of a pass; as many batches as memory holds."""
    found: dict[int, dict[int, float]] = {}
    for batch in batches:
        try:
            found[batch] = verify_costs(target, sorted({1, *widths}), 5, batch, context, min)
        except torch.OutOfMemoryError:
            target.release()
            kind(target.device).empty()
            break
    return found


def fast(model: PreTrainedModel) -> HFTarget:
    """The model as a lane runs it."""
    with one_thread(model.device):
        hasten(model)
    kind(model.device).empty()
    return HFTarget(model)


def measured(command: str) -> Measured:
    """When, from which code and by which command a profile is measured here."""
    return Measured(date=datetime.now(UTC).date().isoformat(), commit=commit(), versions=versions(), by=command)


def basics(device: torch.device, command: str) -> Profile:
    """All but passes: in seconds."""

    def figure(value: float | None, unit: float) -> dict[str, object] | None:
        source = f"measured by {command}"
        return None if value is None else {"value": float(f"{value / unit:.4g}"), "source": source}

    title = device_name(device)
    bandwidth = max(copy_bandwidth(device), read_bandwidth(device, pick_dtype("auto", device)))
    found = {
        "name": slug(title),
        "title": title if device.type != "cpu" else f"{title}, {torch.get_num_threads()} thread(s)",
        "kind": "cpu" if device.type == "cpu" else "gpu",
        "memory_gb": figure(kind(device).total(device), 1e9),
        "bandwidth_gb_per_s": figure(bandwidth, 1e9),
        "compute_tflop_per_s": {
            dtype: figure(matmul_rate(device, DTYPES[dtype]), 1e12) for dtype in kind(device).dtypes
        },
        "launch_us": figure(launch_seconds(device), 1e-6),
        "node_us": figure(node_seconds(device), 1e-6),
        "wait_us": figure(wait_seconds(device), 1e-6),
        "link_gb_per_s": figure(link_bandwidth(device), 1e9),
        "measured": measured(command),
    }
    return Profile.model_validate(found)


def slug(title: str) -> str:
    """A device's name as a profile's."""
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split()) or "device"


@torch.no_grad()
def measure_profile(device: str = "auto", name: str | None = None) -> Profile:
    """This machine in about a minute. name: of the profile. Raises ValueError with one line."""
    where = pick_device(device)
    if name is not None and not re.fullmatch(NAME, name):
        raise ValueError(f"a profile's name has small letters, digits, - and ., not {name!r}")
    model, widths, batches = (
        ("llama-100m", CPU_WIDTHS, CPU_BATCHES) if where.type == "cpu" else ("llama-1b", WIDTHS, BATCHES)
    )
    with one_thread(where):
        found = basics(where, COMMAND)
        target = fast(random_model(SHAPES[model], where, pick_dtype("auto", where)))
        known = [passes_of(model, target, passes(target, widths, batches))]
        steps: list[Step] = []
        if where.type == "cpu":  # a small model beside tells starting operations from reading weights
            other = SHAPES[model].draft
            draft = fast(random_model(SHAPES[other], where, target.dtype))
            known.append(passes_of(other, draft, passes(draft, widths, batches)))
            steps = [*step_times(model, target, other, draft)]
    more = {"passes": known, "steps": steps, "name": name or found.name}
    return Profile.model_validate(found.model_dump() | more)


def step_times(name: str, target: HFTarget, other: str, draft: HFTarget) -> Iterator[Step]:
    """What an engine's steps take, lap by lap: plain and with a draft model, of one text and of a batch, and with a
    head on the small model, whose matrices hide least of what is done beside them."""
    dtype = str(target.dtype).removeprefix("torch.")
    head = Eagle.fresh(draft).hasten()
    lanes = [(name, target, "none", None, 0), (name, target, "draft_model", draft, STEP_K)]
    places = [(*lane, batch) for lane in lanes for batch in (1, STEP_BATCH)]
    for of, runs, chosen, model, k, batch in (*places, (other, draft, "eagle", head, STEP_K, 1)):
        drafter = load_drafter(chosen, runs, model)
        prompt = torch.randint(1, runs.vocab_size, (batch, CONTEXT), generator=torch.Generator().manual_seed(0))
        config = GenerationConfig(STEP_TOKENS, budget=Budget(k, k), stop_token_ids=())
        events = [event for event in generate(runs, drafter, prompt, config) if all(event.emitted)][2:-1]
        ms = {lap: round(fmean(event.ms.get(lap, 0.0) for event in events), 4) for lap in events[0].ms}
        named = other if chosen == "draft_model" else ""
        yield Step(model=of, method=chosen, dtype=dtype, draft=named, batch=batch, k=k, ms=ms, drafted=k)


def profile_report(profile: Profile) -> str:
    """Its numbers in lines, and v(n) of every batch in a table."""
    lines = [f"{profile.name}: {profile.title}"]
    for name, value in profile:
        several = value if isinstance(value, dict) else {"": value}
        lines += [f"{name} {of}".ljust(34) + f"{one.value:g}" for of, one in several.items() if isinstance(one, Figure)]
    for known in profile.passes:
        header = ["batch", "ms", *(f"v({n})" for n in known.ms[1] if n > 1), ""]
        rows = [
            [str(batch), f"{ms[1]:.3f}", *(f"{v:.2f}" for n, v in known.v(batch).items() if n > 1), ""]
            for batch, ms in known.ms.items()
        ]
        lines += [
            "",
            f"{known.model}, {known.dtype}, {known.kernels}: a pass over n tokens of every text",
            table(header, rows),
        ]
    return "\n".join(lines)


def passes_of(model: str, target: HFTarget, ms: dict[int, dict[int, float]]) -> Passes:
    """Milliseconds by batch and width as a profile holds them."""
    rounded = {batch: {slots: round(value, 4) for slots, value in row.items()} for batch, row in ms.items()}
    dtype = str(target.dtype).removeprefix("torch.")
    return Passes(model=model, dtype=dtype, kernels=target.kernels, context=CONTEXT, ms=rounded)


def _bytes(device: torch.device) -> int:
    """Large enough to be in no cache: of a GPU up to a sixteenth of what is free."""
    size = 1 << 27 if device.type == "cpu" else 1 << 32
    return min(size, kind(device).free(device) // 16)
