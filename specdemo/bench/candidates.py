"""Candidates of `tune`: drafters with the draft lengths that may pay, and the settings with which the fastest one runs
here and in other engines.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlencode

from specdemo.bench.result import Result, read_result, to_json
from specdemo.core.rules import DEFAULT_RULE
from specdemo.core.suggest import program
from specdemo.costs.lengths import MAX_K, draft_lengths
from specdemo.costs.passes import pass_ratio
from specdemo.engine.comparison import Lane, lane_names
from specdemo.methods import BASELINE, SYNTHETIC, method, wrappable
from specdemo.methods.facts import FACTS
from specdemo.models.local_models import DrafterFit, local_models
from specdemo.models.packaged import EMBEDDED
from specdemo.models.ref import ModelRef
from specdemo.presets.drafters import lanes_for
from specdemo.presets.files import Preset, load_presets
from specdemo.presets.link import OWN, to_query, without_folders
from specdemo.presets.pair import LOOKUPS, drafter_method
from specdemo.presets.serve import served
from specdemo.servers.engines import ENGINES, REPORTING

ON_SERVERS = (1, 2, 3, 4, 6, 8, 12, 16)  # draft lengths where the costs of passes are unknown
FIRST = 4  # of these are always tried, a longer one only if the one before it is the fastest
SURE = 0.5  # probability below which a draft ends in one candidate of a drafter
LONGEST_CELL = 2000  # characters of a text in a result's file
PAGE = "http://127.0.0.1:7860/"
GENERATE: Mapping[str, Callable[[Lane], str]] = {  # arguments of transformers' `generate`
    "ngram": lambda lane: f"prompt_lookup_num_tokens={lane.k}",
    "draft_model": lambda lane: (
        f"assistant_model=AutoModelForCausalLM.from_pretrained({lane.model!r}), and on its generation_config "
        f"num_assistant_tokens={lane.k}, num_assistant_tokens_schedule='constant', assistant_confidence_threshold=0"
    ),
}


def lanes_to_try(target: ModelRef, named: Sequence[ModelRef], fits: Sequence[DrafterFit]) -> dict[str, Lane]:
    """Return the lanes to try for a target, named, without draft lengths: the `named` drafters, lookups, lanes of
    presets, and `fits`. Raises ValueError, one line, for a named drafter that does not fit."""
    lanes = [Lane(method=drafter_method(target, draft), model=draft) for draft in named]
    lanes += [Lane(method=name) for name in LOOKUPS]
    usable = {fit.drafter for fit in fits}
    for preset, of_preset in lanes_for(target):
        if not preset.temperature and not preset.grammar:
            tried = (lane for lane in of_preset if _comparable(lane) and usable.issuperset(lane.models))
            lanes += [lane if lane.tree_nodes else lane.model_copy(update={"k": 0}) for lane in tried]
    lanes += [Lane(method=fit.method, model=fit.drafter) for fit in fits]
    lanes += [Lane(method=name) for name, facts in FACTS.items() if any(x in target.base_name for x in facts.targets)]
    found: dict[object, Lane] = {}
    for lane in lanes:
        found.setdefault((lane.method, lane.model, *lane.options.items()), lane)
    return dict(zip(lane_names([*found.values()]), found.values(), strict=True))


def _comparable(lane: Lane) -> bool:
    """Return whether a short race on this machine can judge a preset's lane."""
    cls = method(lane.method)
    return cls.exact and not cls.learns and lane.method not in (BASELINE, SYNTHETIC) and lane.acceptance == DEFAULT_RULE


def with_lengths(name: str, lane: Lane, pass_ms: Mapping[int, float], draft: float = 0.0) -> list[Lane]:
    """Return the candidates of a drafter, named, the longest drafts last. None where a step takes longer than plain
    decoding of what it yields, however much is accepted. pass_ms: empty on servers, where other candidates follow.
    draft: time to draft a token, in passes."""
    chooses, wraps = method(lane.method).chooses_length, lane.method in wrappable("adaptive")
    nodes = lane.tree_nodes
    if nodes and not lane.chooses_nodes and pass_ms and lane.budget.depth + 1 < pass_ratio(pass_ms, nodes + 1):
        return []
    if nodes or (chooses and not wraps):
        return [lane.model_copy(update={"name": name})]
    ks = draft_lengths(pass_ms, draft, MAX_K) if pass_ms else ON_SERVERS
    if not ks:
        return []
    lanes = [lane.model_copy(update={"name": f"{name}, k={k}", "k": k}) for k in (ks[-1:] if chooses else ks)]
    if lane.options or not wraps:
        return lanes
    if not pass_ms:
        return [*lanes, *_server_candidates(name, lane)]
    adaptive = Lane(
        method="adaptive", model=lane.model, k=ks[-1], options={"drafter": lane.method}, name=f"{name}, adaptive"
    )
    if not hasattr(lane.parsed, "p_min"):
        return [adaptive, *lanes]
    sure = {"name": f"{lanes[-1].name}, p_min={SURE:g}", "options": {"p_min": SURE}}
    return [adaptive, lanes[-1].changed(**sure), *lanes]


def _server_candidates(name: str, lane: Lane) -> Iterator[Lane]:
    """Yield the candidates of a drafter that only some servers have: drafts that end where it is unsure, and a lookup
    first."""
    k = ON_SERVERS[FIRST - 1]
    if hasattr(lane.parsed, "p_min"):
        yield lane.changed(name=f"{name}, k={k}, p_min={SURE:g}", k=k, options={"p_min": SURE})
    if not method(lane.method).looks_up:
        both = f"{name} and lookup, k={k}"
        yield Lane(method="gated", model=lane.model, k=k, options={"drafter": lane.method}, name=both)


def race_link(target: ModelRef, lane: Lane, prompt: str) -> str:
    """Return the query of a link to the race of a lane, from a preset of the target or else the page's own models. It
    leaves out a prompt that is too long."""
    base = next((preset for preset in load_presets().values() if preset.target == target), None)
    if base is None:
        queries = [_of_own(target, lane) | more for more in ({"lanes": 1, "prompt": prompt}, {"lanes": 1})]
        return next(query for query in map(urlencode, queries) if len(query) <= LONGEST_CELL)
    preset = base.model_copy(update={"lanes": [lane.model_copy(update={"name": ""})], "temperature": 0.0})
    with suppress(ValueError):
        if len(query := to_query(preset.model_copy(update={"prompt": prompt}), base)) <= LONGEST_CELL:
            return query
    return to_query(preset, base)


def _of_own(target: ModelRef, lane: Lane) -> dict[str, object]:
    """Return the parts of a link to a lane of a page that was started with the target."""
    of_link: dict[str, object] = {"preset": OWN, "target": target.link_name, "method": lane.method, "k": lane.k}
    of_link |= {"model": lane.model.link_name} if lane.model else {}
    return of_link | {f"option.{name}": value for name, value in lane.options.items()}


def settings_to_copy(preset: Preset, engine: str = "") -> list[str]:
    """Return how to run the only lane of a comparison: here, and in every engine that has its method. engine: only on
    this one."""
    lane, target = preset.lanes[0], preset.target
    dtype = "" if preset.dtype == "auto" else preset.dtype
    named = {"target": target, "method": lane.method, "dtype": dtype, "model": lane.model, "k": lane.k or ""}
    options = [("option", f"{name}={value}") for name, value in lane.options.items()]
    flags = [*named.items(), *options, ("engine", engine)]
    words = ["run", *(word for flag, value in flags if value for word in (f"--{flag}", str(value)))]
    start = shlex.join(["ui", "--target", target, *(["--draft", lane.model] if lane.model else [])])
    lines = [f"Here: {program()} {shlex.join(words)}"]
    if not engine:
        lines.append(f"Page: {PAGE}?{urlencode(_of_own(target, lane))} after `{program()} {start}`")
    for server_engine in ENGINES.values() if not engine else [ENGINES[engine]]:
        server = [*served(preset, server_engine.name)][1]
        if server.command:
            lines.append(f"{server_engine.title}: {shlex.join(server.command)}")
    if engine:
        return lines
    for reader in REPORTING.values():
        if lane.k and lane.method in reader.drafts_with:
            model = lane.model.label.partition("@")[0].rpartition("/")[2] if lane.model else ""
            fields = reader.draft_request(model, lane.k)
            how = f"{fields} in the request; " if fields else ""
            lines.append(f"{reader.title}: {how}{reader.draft_length_setting(lane.k)}")
    if lane.method in GENERATE and not target.gguf:
        lines.append(f"transformers: model.generate(**inputs, {GENERATE[lane.method](lane)})")
    return lines


def commands(lines: Iterable[str]) -> dict[str, str]:
    """Return the command of every engine in the lines of `settings_to_copy`, by its title."""
    titles = {engine.title for engine in ENGINES.values()}
    return {title: words for title, _, words in (line.partition(": ") for line in lines) if title in titles}


def shareable(result: Result, models: Iterable[ModelRef]) -> Result:
    """Return a result that names models in files without their folders. models: of the result, besides those in stores
    of this machine."""
    names = {*models, *map(ModelRef, EMBEDDED)}
    names |= {model.name for name in (None, *names) for model in local_models(name)}
    paths = {ModelRef(name.path) for name in names if name.path}
    return read_result(without_folders(to_json(result), names | paths))
