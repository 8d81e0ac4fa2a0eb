"""Device measurements: memory bandwidth, matrix products, launch time, forward passes by width and batch size.

Every figure is the best of several measurements, because other programs can only slow a measurement down.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import count, pairwise
from statistics import fmean

import torch
from transformers import PreTrainedModel

from specdemo.bench.random_models import DRAFT_SHAPES, random_model
from specdemo.bench.report import table
from specdemo.core.protocol import Budget, GenerationConfig, Target
from specdemo.core.suggest import counted
from specdemo.costs.profiles import NAME, Figure, MeasuredStep, Passes, Profile, Provenance
from specdemo.engine.loop import generate
from specdemo.methods import BASELINE, load_drafter
from specdemo.methods.heads.eagle import Eagle
from specdemo.methods.synthetic import SyntheticAcceptance
from specdemo.models.cpu_threads import one_thread
from specdemo.models.devices import DTYPES, device_kind, pick_device, pick_dtype
from specdemo.models.fused import fuse_layers
from specdemo.models.machine import clock, commit, device_name, versions
from specdemo.models.pass_cost import pass_times
from specdemo.models.sources import LoadProgress, no_progress
from specdemo.models.target import HFTarget

REPEATS = 8
LAUNCHES = 500
GPU_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CPU_WIDTHS, CPU_BATCHES = (1, 2, 3, 5, 9, 17), (1, 2, 4, 8, 16)  # of `specdemo profile`
CONTEXT, FAR = 64, 256
LINK_BYTES = 1 << 28
STEP_K, STEP_KS, STEP_TOKENS, STEP_BATCH = 5, (2, 5), 96, 8
ACCEPTANCE = 0.7  # acceptance rate of the measured steps
COMMAND = "python -m specdemo profile"

Milliseconds = dict[int, dict[int, float]]  # of passes, by batch size and width


def best_seconds(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the shortest time of `run` on an otherwise idle device, after one warm-up run."""
    times, read = [], clock(device)
    for _ in range(repeats + 1):
        begin = read()
        run()
        times.append(read() - begin)
    return min(times[1:])


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes read and written per second by a copy within the device's memory."""
    # random, because memory may compress zeros
    source = torch.randint(256, (_bytes(device),), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * len(source) / best_seconds(lambda: target.copy_(source), device)


def read_bandwidth(device: torch.device, dtype: torch.dtype) -> float:
    """Return bytes read per second by a matrix-vector product, as in decoding one token."""
    rows = _bytes(device) // (4096 * dtype.itemsize)
    matrix = torch.empty(rows, 4096, dtype=dtype, device=device).uniform_(-1.0, 1.0)
    vector = torch.ones(1, 4096, dtype=dtype, device=device)
    return rows * 4096 * dtype.itemsize / best_seconds(lambda: vector @ matrix.T, device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return operations per second of a large square matrix product. The entries differ, because equal bits save
    power.
    """
    size = 512 if device_kind(device).host else 8192
    matrix = torch.empty(size, size, device=device).normal_().to(dtype)
    return 2.0 * size**3 / best_seconds(lambda: matrix @ matrix, device)


def launch_seconds(device: torch.device) -> float:
    """Return the time to launch an operation from Python, in a sequence without synchronisation."""
    tensor = torch.zeros(1, device=device)
    return best_seconds(lambda: [tensor.add_(1.0) for _ in range(LAUNCHES)], device) / LAUNCHES


def wait_seconds(device: torch.device) -> float:
    """Return the time to launch an operation and wait for it."""
    tensor = torch.zeros(1, device=device)
    return best_seconds(lambda: tensor.add_(1.0), device, 50)


def link_bandwidth(device: torch.device) -> float | None:
    """Return bytes per second from pinned main memory to the device; None if they share memory."""
    if not device_kind(device).separate_memory:
        return None
    here = torch.zeros(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    return LINK_BYTES / best_seconds(lambda: there.copy_(here, non_blocking=True), device)


def passes(
    target: Target,
    widths: Sequence[int] = GPU_WIDTHS,
    batches: Sequence[int] = BATCHES,
    context: int = CONTEXT,
    starts: Callable[[str], None] | None = None,
) -> Milliseconds:
    """Return batch size -> slots -> milliseconds of a pass, for as many batch sizes as memory holds.

    starts: called with the name of each batch size before it is measured.
    """
    milliseconds: Milliseconds = {}
    for batch in batches:
        if starts:
            starts(f"passes, batch size {batch}")
        try:
            times = pass_times(target, sorted({1, *widths}), 5, batch, context)
            milliseconds[batch] = {width: min(repeats) for width, repeats in times.items()}
        except torch.OutOfMemoryError:
            target.release()
            device_kind(target.device).empty_cache()
            break
    return milliseconds


def fast(model: PreTrainedModel) -> HFTarget:
    """Return the model with fused layers, as in a lane."""
    with one_thread(model.device):
        fuse_layers(model)
    device_kind(model.device).empty_cache()
    return HFTarget(model)


def provenance(command: str) -> Provenance:
    """Return when, from which commit and by which command a profile was measured."""
    return Provenance(date=datetime.now(UTC).date().isoformat(), commit=commit(), versions=versions(), by=command)


def basics(device: torch.device, command: str) -> Profile:
    """Measure everything except passes; takes seconds."""

    def figure(value: float | None, unit: float) -> dict[str, object] | None:
        source = f"measured by {command}"
        return None if value is None else {"value": float(f"{value / unit:.4g}"), "source": source}

    title = device_name(device)
    bandwidth = max(copy_bandwidth(device), read_bandwidth(device, pick_dtype("auto", device)))
    values = {
        "name": slug(title),
        "title": f"{title}, {counted(torch.get_num_threads(), 'thread')}" if device_kind(device).host else title,
        "kind": "cpu" if device_kind(device).host else "gpu",
        "memory_gb": figure(device_kind(device).total(device), 1e9),
        "bandwidth_gb_per_s": figure(bandwidth, 1e9),
        "compute_tflop_per_s": {
            dtype: figure(matmul_rate(device, DTYPES[dtype]), 1e12) for dtype in device_kind(device).dtypes
        },
        "launch_us": figure(launch_seconds(device), 1e-6),
        "wait_us": figure(wait_seconds(device), 1e-6),
        "link_gb_per_s": figure(link_bandwidth(device), 1e9),
        "measured": provenance(command),
    }
    return Profile.model_validate(values)


def slug(title: str) -> str:
    """Convert the name of a device to the name of a profile."""
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split()) or "device"


@torch.no_grad()
def measure_profile(device: str = "auto", name: str | None = None, report: LoadProgress = no_progress) -> Profile:
    """Measure this machine in about a minute. name: of the profile. Raise ValueError with one line."""
    where = pick_device(device)
    if name is not None and not re.fullmatch(NAME, name):
        raise ValueError(f"the name of a profile must have only lower-case letters, digits, - and ., not {name!r}")
    model, widths, batches = (
        ("llama-100m", CPU_WIDTHS, CPU_BATCHES) if device_kind(where).host else ("llama-1b", GPU_WIDTHS, BATCHES)
    )
    with one_thread(where):
        report(0.0, "memory and matrix products")
        profile = basics(where, COMMAND)
        targets, dtype = {}, pick_dtype("auto", where)
        while model:  # models of different sizes separate the launch cost from the cost of reading weights
            targets[model] = fast(random_model(model, where, dtype))
            model = DRAFT_SHAPES.get(model, "")
        starts = _parts(report, len(targets) * (len(batches) + 3 + len(STEP_KS)))  # upper limit
        pass_tables = []
        for slots, rows, context in (widths, batches, CONTEXT), ((5,), (1, 8), FAR):
            for of, target in targets.items():
                pass_tables.append(passes_of(of, target, passes(target, slots, rows, context, starts), context))
        steps = [*step_times(targets, starts)]
    more = {"passes": pass_tables, "steps": steps, "name": name or profile.name}
    return Profile.model_validate(profile.model_dump() | more)


def _parts(report: LoadProgress, total: int) -> Callable[[str], None]:
    """Return a function that reports the start of the next of `total` parts."""
    done = count()
    return lambda what: report(min(1.0, next(done) / total), what)


def step_times(targets: Mapping[str, HFTarget], starts: Callable[[str], None] | None = None) -> Iterator[MeasuredStep]:
    """Yield what an engine's steps take, lap by lap, for one text and for a batch of texts.

    Every model runs plain and with the next one as its draft, and a small one with a head, because small matrices hide
    least of the work around them. Drafts are accepted by chance: otherwise texts of a batch would have equal lengths.
    """
    small, last = list(targets.items())[min(1, len(targets) - 1)]
    for (name, target), (draft, model) in pairwise(targets.items()):
        yield from _lane_steps(name, target, starts)
        for k in STEP_KS:
            yield from _lane_steps(name, target, starts, "draft_model", k, model, draft)
    yield from _lane_steps(small, last, starts, "eagle", STEP_K, Eagle.fresh(last).fuse())


def _lane_steps(
    name: str,
    target: HFTarget,
    starts: Callable[[str], None] | None,
    method: str = BASELINE,
    k: int = 0,
    model: object = None,
    draft: str = "",
) -> Iterator[MeasuredStep]:
    """Yield the means over the steps of a method, for one text and for a batch. model: the drafter, named `draft`."""
    if starts:
        starts(f"steps of {name}, {method}")
    config = GenerationConfig(STEP_TOKENS, budget=Budget(k, k), stop_token_ids=())
    for batch in (1, STEP_BATCH):
        rule = SyntheticAcceptance((ACCEPTANCE,), torch.Generator(target.device).manual_seed(0))
        drafter = load_drafter(method, target, model)
        prompt = torch.randint(1, target.vocab_size, (batch, CONTEXT), generator=torch.Generator().manual_seed(0))
        steps = list(generate(target, drafter, prompt.to(target.device), config, accept=rule if k else None))
        events = [event for event in steps if all(event.emitted)][2:-1]  # while no text has ended
        accepted = fmean(len(path) - 1 for event in events for path in event.path)
        yield MeasuredStep(
            model=name,
            method=method,
            dtype=str(target.dtype).removeprefix("torch."),
            draft=draft,
            batch=batch,
            context=CONTEXT + STEP_TOKENS // 2,
            k=k,
            ms={lap: round(fmean(event.ms[lap] for event in events), 4) for lap in events[0].ms},
            drafted=k,
            kept=round(accepted, 3),
        )


def profile_report(profile: Profile) -> str:
    """Return the numbers of a profile as lines, and v(n) for every batch size as a table."""
    lines = [f"{profile.name}: {profile.title}"]
    for name, value in profile:
        several = value if isinstance(value, dict) else {"": value}
        figures = {of: part for of, part in several.items() if isinstance(part, Figure)}
        lines += [f"{name} {of}".ljust(34) + f"{figure.value:g}" for of, figure in figures.items()]
    for pass_table in profile.passes:
        header = ["batch", "ms", *(f"v({n})" for n in pass_table.ms[1] if n > 1), ""]
        rows = [
            [str(batch), f"{ms[1]:.3f}", *(f"{v:.2f}" for n, v in pass_table.v(batch).items() if n > 1), ""]
            for batch, ms in pass_table.ms.items()
        ]
        lines += [
            "",
            f"{pass_table.model}, {pass_table.dtype}, {pass_table.kernels}: a pass over n tokens per row",
            table(header, rows),
        ]
    return "\n".join(lines)


def passes_of(model: str, target: HFTarget, ms: Milliseconds, context: int = CONTEXT) -> Passes:
    """Convert milliseconds by batch size and width to the form of a profile."""
    rounded = {batch: {slots: round(value, 4) for slots, value in row.items()} for batch, row in ms.items()}
    dtype = str(target.dtype).removeprefix("torch.")
    return Passes(model=model, dtype=dtype, kernels=target.facts.kernels, context=context, ms=rounded)


def _bytes(device: torch.device) -> int:
    """Return a size that exceeds all caches; on a GPU at most a sixteenth of the free memory."""
    size = 1 << 27 if device_kind(device).host else 1 << 32
    return min(size, device_kind(device).free(device) // 16)
