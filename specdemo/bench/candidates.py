"""Candidates of `tune`: drafters on this machine that fit a target, with the draft lengths that may pay; and the
settings with which the fastest one runs here and in other engines.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlencode

from specdemo.bench.result import Result, read_result, to_json
from specdemo.core.rules import DEFAULT_RULE
from specdemo.core.speedup import expected_tokens, interpolate
from specdemo.core.suggest import program
from specdemo.engine.comparison import Lane
from specdemo.methods import BASELINE, SYNTHETIC, method, wrappable
from specdemo.methods.facts import FACTS, LONGEST
from specdemo.models.gguf_files import is_gguf, local_header
from specdemo.models.local_models import local_models, matching_drafts
from specdemo.models.sources import cached_folder, resolve
from specdemo.presets.drafters import base_name, published_drafters
from specdemo.presets.files import EMBEDDED, Preset, load_presets
from specdemo.presets.link import OWN, linked_name, short_name, to_query, without_folders
from specdemo.presets.pair import LOOKUPS, drafter_method
from specdemo.presets.serve import served
from specdemo.servers.engines import ENGINES, READERS

RATES = [n / 20 for n in range(1, 20)]  # acceptance rates that a draft length is chosen for
ON_SERVERS = (3, 7)  # draft lengths where the costs of passes are unknown
SURE = 0.5  # probability below which a draft ends in one candidate of a drafter
NEAR = 0.97  # share of the best speed at such a rate that is enough
DRAFT_COST = 0.1  # of a draft token in passes of the target, before it is measured
LONGEST_CELL = 2000  # characters of a text in a result's file
PAGE = "http://127.0.0.1:7860/"
GENERATE: Mapping[str, Callable[[Lane], str]] = {  # arguments of transformers' `generate`
    "ngram": lambda lane: f"prompt_lookup_num_tokens={lane.k}",
    "draft_model": lambda lane: (
        f"assistant_model=AutoModelForCausalLM.from_pretrained({lane.model!r}), and on its generation_config "
        f"num_assistant_tokens={lane.k}, num_assistant_tokens_schedule='constant', assistant_confidence_threshold=0"
    ),
}


def draft_lengths(pass_ms: Mapping[int, float], draft: float = 0.0) -> list[int]:
    """Return the fewest draft lengths of which one is near the best at every acceptance rate, sorted; [1] if no length
    is faster than plain decoding at any rate.

    pass_ms: slots -> time of a pass. draft: time to draft a token, in passes.
    """
    sizes = sorted(pass_ms)
    speeds = {}
    for k in range(1, LONGEST):
        step = interpolate(pass_ms, sizes, k + 1) / pass_ms[1] + draft * k
        speeds[k] = [expected_tokens([rate] * k)[k] / step for rate in RATES]
    best = [max(column) for column in zip(*speeds.values(), strict=True)]
    near = {k: {i for i, speed in enumerate(row) if speed >= NEAR * best[i]} for k, row in speeds.items()}
    rest, chosen = {i for i, speed in enumerate(best) if speed > 1.0}, list[int]()
    while rest:
        chosen.append(max(near, key=lambda k: (len(near[k] & rest), -k)))
        rest -= near[chosen[-1]]
    return sorted(chosen) or [1]


def drafters(target: str, drafts: Sequence[str], download: bool) -> dict[str, Lane]:
    """Return the lanes to try, named, without draft lengths. Raises ValueError, one line, for a named drafter that does
    not fit."""
    named = [Lane(method=drafter_method(target, draft), model=draft) for draft in drafts]
    found: dict[str, Lane] = {}
    for lane in [*named, *_found(target, download)]:
        options = "".join(f", {name}={value}" for name, value in lane.options.items())
        found.setdefault(f"{lane.method}{f' {short_name(lane.model)}' if lane.model else ''}{options}", lane)
    return found


def with_lengths(name: str, lane: Lane, pass_ms: Mapping[int, float]) -> list[Lane]:
    """Return the candidates of a drafter, named, the longest drafts last. None for a tree whose pass takes longer than
    plain decoding of all that it can accept. pass_ms: empty on servers."""
    chooses, wraps = method(lane.method).chooses_length, lane.method in wrappable("adaptive")
    nodes = getattr(lane.parsed, "nodes", 0)
    if nodes and pass_ms and not lane.chooses_nodes and getattr(lane.parsed, "draft", "tree") != "chain":
        plain_passes = interpolate(pass_ms, sorted(pass_ms), nodes + 1) / pass_ms[1]
        if lane.budget.depth + 1 < plain_passes:
            return []
    if nodes or (chooses and not wraps):
        return [lane.model_copy(update={"name": name})]
    ks = draft_lengths(pass_ms, DRAFT_COST if lane.model else 0.0) if pass_ms else ON_SERVERS
    lanes = [lane.model_copy(update={"name": f"{name}, k={k}", "k": k}) for k in (ks[-1:] if chooses else ks)]
    if lane.options or not wraps or not pass_ms:
        return lanes
    adaptive = Lane(
        method="adaptive", model=lane.model, k=ks[-1], options={"drafter": lane.method}, name=f"adaptive {name}"
    )
    if not hasattr(lane.parsed, "p_min"):
        return [adaptive, *lanes]
    sure = {"name": f"{lanes[-1].name}, p_min={SURE:g}", "options": {"p_min": SURE}}
    return [adaptive, lanes[-1].changed(**sure), *lanes]


def _found(target: str, download: bool) -> Iterator[Lane]:
    """Yield lookups, the lanes of presets with this target, drafters of the catalogue, and matching models here."""
    own_name = base_name(target)
    yield from (Lane(method=name) for name in LOOKUPS)
    for preset in load_presets().values():
        if base_name(preset.target) == own_name and not preset.temperature and not preset.grammar:
            for lane in preset.lanes:
                if _comparable(lane) and all(download or _is_here(model) for model in lane.models):
                    yield lane if getattr(lane.parsed, "nodes", 0) else lane.model_copy(update={"k": 0})
    for entry in published_drafters(target):
        if entry.method and (download or _is_here(entry.drafter)):
            yield Lane(method=entry.method, model=entry.drafter)
    for name, facts in FACTS.items():
        if any(word in own_name for word in facts.targets):
            yield Lane(method=name)
    models, path = local_models(target), Path(resolve(target)).expanduser()
    own = next((model for model in models if target == model.name or path == model.path), None)
    yield from (
        Lane(method="draft_model", model=draft.name) for draft, _ in (matching_drafts(own, models) if own else ())
    )


def not_here(target: str) -> list[str]:
    """Return the published drafters of a target that are not on this machine."""
    return [entry.drafter for entry in published_drafters(target) if entry.method and not _is_here(entry.drafter)]


def _comparable(lane: Lane) -> bool:
    """Return whether a short race on this machine can judge a preset's lane."""
    cls = method(lane.method)
    return cls.exact and not cls.learns and lane.method not in (BASELINE, SYNTHETIC) and lane.acceptance == DEFAULT_RULE


def _is_here(model: str) -> bool:
    with suppress(ValueError):
        if Path(resolve(model)).expanduser().exists():
            return True
        return local_header(model) is not None if is_gguf(model) else cached_folder(model).is_dir()
    return False


def race_link(target: str, lane: Lane, prompt: str) -> str:
    """Return the query of a link to the race of a lane, from a preset of the target or else the page's own models. It
    leaves out a prompt that is too long."""
    base = next((one for one in load_presets().values() if one.target == target), None)
    if base is None:
        queries = [_of_own(target, lane) | more for more in ({"lanes": 1, "prompt": prompt}, {"lanes": 1})]
        return next(query for query in map(urlencode, queries) if len(query) <= LONGEST_CELL)
    chosen = base.model_copy(update={"lanes": [lane.model_copy(update={"name": ""})], "temperature": 0.0})
    with suppress(ValueError):
        if len(query := to_query(chosen.model_copy(update={"prompt": prompt}), base)) <= LONGEST_CELL:
            return query
    return to_query(chosen, base)


def _of_own(target: str, lane: Lane) -> dict[str, object]:
    """Return the parts of a link to a lane of a page that was started with the target."""
    of_link: dict[str, object] = {"preset": OWN, "target": linked_name(target), "method": lane.method, "k": lane.k}
    of_link |= {"model": linked_name(lane.model)} if lane.model else {}
    return of_link | {f"option.{name}": value for name, value in lane.options.items()}


def settings_to_copy(chosen: Preset, engine: str = "") -> list[str]:
    """Return how to run the only lane of a comparison: here, and in every engine that has its method. engine: only on
    this one."""
    lane, target = chosen.lanes[0], chosen.target
    dtype = "" if chosen.dtype == "auto" else chosen.dtype
    flags: list[tuple[str, object]] = [
        ("target", target),
        ("method", lane.method),
        ("dtype", dtype),
        ("model", lane.model),
        ("k", lane.k),
    ]
    flags += [*(("option", f"{name}={value}") for name, value in lane.options.items()), ("engine", engine)]
    words = ["run", *(word for flag, value in flags if value for word in (f"--{flag}", str(value)))]
    start = shlex.join(["ui", "--target", target, *(["--draft", lane.model] if lane.model else [])])
    lines = [f"Here: {program()} {shlex.join(words)}"]
    if not engine:
        lines.append(f"Page: {PAGE}?{urlencode(_of_own(target, lane))} after `{program()} {start}`")
    for one in ENGINES.values() if not engine else [ENGINES[engine]]:
        server = [*served(chosen, one.name)][1]
        if server.command:
            lines.append(f"{one.title}: {shlex.join(server.command)}")
    if engine:
        return lines
    for reader in READERS.values():
        if lane.k and lane.method in reader.drafts_with:
            fields = reader.draft_request(short_name(lane.model or ""), lane.k)
            how = f"{fields} in the request; " if fields else ""
            lines.append(f"{reader.title}: {how}{reader.draft_length_setting(lane.k)}")
    if lane.method in GENERATE and not is_gguf(target):
        lines.append(f"transformers: model.generate(**inputs, {GENERATE[lane.method](lane)})")
    return lines


def shareable(result: Result, models: Iterable[str]) -> Result:
    """Return a result that names models in files without their folders. models: of the result, besides those in stores
    of this machine."""
    names = {*models, *EMBEDDED, *(model.name for model in local_models())}
    paths = {str(Path(resolve(name)).expanduser()) for name in names}
    return read_result(without_folders(to_json(result), names | paths))
