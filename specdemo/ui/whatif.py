"""The tab Other machines: a run's acceptance combined with another machine, load or draft, and the diagnosis of an
engine's output. Needs no torch: every answer takes milliseconds, and a change of a control predicts again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import gradio as gr

from specdemo.analysis.configs import method_in, shape
from specdemo.analysis.diagnose import Diagnosis, diagnose
from specdemo.analysis.observation import Observation
from specdemo.analysis.predict import ASSUMED, BATCHES, Prediction, Row, predict, published
from specdemo.analysis.readers import READERS, read_output, read_output_file
from specdemo.bench.report import changes, numbers
from specdemo.core.atomic_io import json_text
from specdemo.core.estimate import Estimate
from specdemo.core.safe_io import PUBLIC_FILE_BYTES
from specdemo.core.trace import RunTrace, estimates
from specdemo.costs.acceptance import Acceptance, of_lane, of_lengths
from specdemo.costs.lengths import MAX_K
from specdemo.costs.passes import measured_passes
from specdemo.costs.profiles import profile, profiles
from specdemo.costs.shapes import reference_configs
from specdemo.methods import BASELINE
from specdemo.methods.facts import MODELS, PREDICTED
from specdemo.models.ref import ModelRef
from specdemo.presets.files import is_recorded, load_presets, recorded
from specdemo.presets.link import OWN as OWN_MODEL
from specdemo.ui import assets
from specdemo.ui.controls import look, unfolding
from specdemo.ui.job import QUIET, UPLOADED, Parts, Values, named
from specdemo.ui.model_menus import check_names, model_choices, page_preset
from specdemo.ui.views import predictable

ELSEWHERE = "h100-sxm"  # machine for "Estimate on an H100"
CONTEXTS = [("256", 256), ("1k", 1024), ("4k", 4096), ("16k", 16384), ("64k", 65536)]
LOAD = {"batch": 1, "context": 1024}  # of a first visit
PUBLISHED = "published"  # start of a first visit: EAGLE-3 on an 8B model, a published result
USUAL_K = 5  # of a lane whose draft length is measured when it runs
PAIR = "EAGLE-3 for Llama-3.1-8B-Instruct"
SAME, OWN = "run", "own"  # the run's draft and acceptance, or custom ones
ACCEPTANCE = [("as in the run", SAME), ("custom rate", OWN)]
LENGTH = "Draft length k"
SMALL = 4e9  # maximum parameters of an offered draft model


@dataclass(frozen=True, slots=True)
class Start:
    """The lane that predictions start from, with its draft length, its acceptance and its measured speed-up. given:
    further arguments of `predict`.
    """

    words: str
    target: str
    k: int
    acceptance: Acceptance
    given: dict[str, Any]
    speedup: Estimate | None = None
    source: str = "measured"  # of the speed-up


Starts = dict[str, tuple[str, Callable[[], Start]]]  # by id: the label in the menu, and what reads it


def start_of(trace: RunTrace, index: int, words: str, allow_any_model: bool = False) -> Start:
    """Return the starting point of a lane. Raises ValueError, one line, if it cannot be predicted. Names may be foreign
    text.
    """
    lane, config = trace.lanes[index], trace.config
    target, model = str(config.get("target")), lane.options.get("model")
    check_names({str(name) for name in (target, model) if name} - {*reference_configs()}, allow_any_model)
    if lane.method not in PREDICTED:
        raise ValueError(f"{lane.name} chooses drafts at run time and cannot be predicted; choose another run")
    acceptance = of_lane(lane)
    k = None if acceptance.nodes else lane.options.get("k")  # a tree is as deep as its acceptance is known
    given = {
        "method": lane.method,
        "model": model if isinstance(model, str) else None,
        "options": {name: value for name, value in lane.options.items() if isinstance(value, int)},
        "quantization": str(config.get("quantization") or "") or None,
        "passes": measured_passes(trace, target),
    }
    length = k if isinstance(k, int) else len(acceptance.rates)
    return Start(words, target, length, acceptance, given, estimates(trace)[index - 1])


@lru_cache
def recorded_start(preset_id: str) -> Start:
    """Return the first lane of a recorded run."""
    trace = recorded(preset_id)
    assert trace is not None
    return start_of(trace, 1, f"Recorded: {load_presets()[preset_id].title}")


@lru_cache
def published_start() -> Start:
    """Return the published chains of EAGLE-3 on vLLM, with their best draft length."""
    found = [one for one in published() if one.what == "vLLM, EAGLE-3"]
    best = max(found, key=lambda one: one.speedup)
    words = (
        f"Published: {PAIR} with vLLM on an H100, {best.tokens:.2f} tokens per pass at k = {best.k}, {best.source}; "
        "that version took 1.0 ms per draft token, of which reading the head takes 0.3 ms, so it gained less"
    )
    acceptance = of_lengths({one.k: one.tokens for one in found})
    given = {"method": best.method, "model": best.model}
    return Start(words, best.target, best.k, acceptance, given, Estimate(best.speedup), "published")


def own_start() -> Start:
    """Return the models that the page was started with, with an assumed acceptance."""
    chosen = page_preset()
    lane = next((lane for lane in chosen.lanes if lane.method in PREDICTED), chosen.lanes[0])
    words = f"Your model: {chosen.target.short_name}, {lane.title}; acceptance assumed, as nothing ran yet"
    given = {"method": lane.method, "model": lane.model, "quantization": chosen.quantization}
    return Start(words, chosen.target, lane.k or USUAL_K, Acceptance((ASSUMED,)), given)


def starts() -> Starts:
    """Return what predictions can start from besides the visible run. The first one is that of a first visit."""
    chosen = load_presets().get(OWN_MODEL)
    own: Starts = {OWN_MODEL: (f"Your model: {chosen.target.short_name}", own_start)} if chosen else {}
    found = [p for p in load_presets().values() if p.lanes[0].method in PREDICTED and is_recorded(p.id)]
    runs: Starts = {p.id: (p.title, partial(recorded_start, p.id)) for p in found}
    return own | {PUBLISHED: (f"Published: {PAIR}", published_start)} | runs


def predict_for(start: Start, values: Values) -> Prediction:
    """Return the prediction for the values of the controls. Raises ValueError with one line."""
    target, given = values["target"], start.given | {name: int(values[name]) for name in LOAD}
    check_names({str(target)} - {start.target, *reference_configs()}, False)
    if target != start.target:
        given |= {"quantization": None, "passes": None}
    if values["draft"] != SAME:
        name, _, model = str(values["draft"]).partition(":")
        given |= {"method": name, "model": model or None, "options": None}
    given["acceptance"] = start.acceptance if values["kept"] == SAME else [values["rate"]]
    return predict(target, device=values["machine"], dtype=values["dtype"], **given)


def to_view(start: Start, p: Prediction, k: int) -> dict[str, object]:
    """Return the data of the view: the prediction, the chosen draft length, and what is known of the start."""
    row = min(p.rows, key=lambda row: abs(row.k - k))
    where = p.scenario.device.profile
    source = f"measured {where.measured.date}" if where.measured else "from its spec sheet"
    return p.as_dict() | {
        "target": ModelRef(p.scenario.target.name).short_name,
        "at": {"k": row.k, "batch": p.scenario.batch},
        "room_gb": where.memory_gb.value,
        "sentence": sentence(p, row),
        "where": f"{where.title} · {p.scenario.device.dtype} · {source}",
        "known": {"k": start.k, "speedup": start.speedup.value, "source": start.source} if start.speedup else None,
        "from": start.words,
    }


def sentence(p: Prediction, row: Row) -> str:
    """Return what the chosen draft length costs and yields, and the best one."""
    chosen = (
        f"With k = {row.k} and batch size {p.scenario.batch}, a step costs {row.step_ms / p.plain_ms:.2f} plain steps "
        f"and yields {row.tokens.value:.2f} tokens per row; bottleneck: {row.limit}."
    )
    note = p.extrapolation_note(row) if row is not p.best else ""
    best = f"Best: {p.sentence}" if p.best_k else p.sentence
    return " ".join(filter(None, [chosen, note, best]))


class Questions:
    """Events of the tab for all visitors. shown: returns the visible run of a visitor's Race tab, and whether it is the
    visitor's own.
    """

    def __init__(self, shown: Callable[[gr.Request], tuple[RunTrace, bool] | None], allow_any_model: bool) -> None:
        self._shown, self._any = shown, allow_any_model

    def open(self, request: gr.Request, values: Values) -> Values:
        """Update the tab when it is opened, because the visible run may have changed."""
        offered, own = self._offered(request)
        first = next(iter(offered if own else starts()))
        return self._begin(offered, values["start"] if values["state"] else first, values, first)

    def start_from_race(self, request: gr.Request, values: Values) -> Values:
        """Start from the visible run, on another machine, at the load of a first visit."""
        values = values | {"machine": ELSEWHERE, "state": None} | LOAD
        offered, _ = self._offered(request)
        return self._begin(offered, next(iter(offered)), values) | LOAD

    def begin(self, request: gr.Request, values: Values) -> Values:
        """Start from another run."""
        return self._begin(self._offered(request)[0], values["start"], values | {"state": None})

    def _begin(self, offered: Starts, chosen: str, values: Values, first: str = PUBLISHED) -> Values:
        """Return the updates for a new start. chosen: where to start from; first: if there is no such start."""
        chosen = chosen if chosen in offered else first
        choices = [(words, id) for id, (words, _) in offered.items()]
        update = {"start": gr.update(choices=choices, value=chosen), "machine": values["machine"]}
        try:
            start = offered[chosen][1]()
        except ValueError as error:
            return update | _refused(error)
        if start == values["state"]:
            return update | answer(None, values)
        filled = {"draft": SAME, "kept": SAME, "k": start.k, "target": start.target}
        filled["rate"] = round(sum(start.acceptance.rates) / len(start.acceptance.rates), 2)
        predicted = answer(None, values | filled | {"state": start})
        target = gr.update(value=start.target, choices=model_choices(_targets(start.target)))
        return update | filled | predicted | {"state": start, "target": target, "k": _length(start)}

    def _offered(self, request: gr.Request) -> tuple[Starts, bool]:
        """Return the starts, first the lanes of the visible run that can be predicted, and whether it is the visitor's
        own.
        """
        shown = self._shown(request)
        if shown is None:
            return starts(), False
        trace, own = shown
        words = f"{'Your last run' if own else 'Run shown in Race'}: {ModelRef(trace.config.get('target')).short_name}"
        lanes: Starts = {
            f"lane-{i}": (title := f"{words}, {lane.name}", partial(start_of, trace, i, title, self._any))
            for i, lane in enumerate(trace.lanes)
            if i and predictable(trace, lane) and lane.summary.get("drafted")
        }
        return lanes | starts(), own


def answer(_: gr.Request | None, values: Values) -> Values:
    """Predict again after a control has changed."""
    start, known_types = values["state"] or published_start(), [*profile(values["machine"]).compute_tflop_per_s]
    dtype = next(name for name in (values["dtype"], "bfloat16", "float16", "float32") if name in known_types)
    shown = {"dtype": gr.update(choices=known_types, value=dtype)}
    return shown | _show(lambda: to_view(start, predict_for(start, values | {"dtype": dtype}), int(values["k"])))


def _length(start: Start) -> object:
    """Return the update of the draft length. A tree can be cut, but not made deeper than the recorded one."""
    tree = start.acceptance.nodes
    label = f"Depth of the tree ({tree} nodes)" if tree else LENGTH
    return gr.update(value=start.k, maximum=max(len(start.acceptance.rates), 2) if tree else MAX_K, label=label)


def _show(data: Callable[[], Mapping[str, object]]) -> Values:
    """Return the update of a view. A visitor's mistake is shown as one line."""
    try:
        return {"view": json_text(data())}
    except ValueError as error:
        return _refused(error)


def _refused(error: ValueError) -> Values:
    return {"view": json_text({"error": str(error)})}


def _targets(first: str) -> list[str]:
    shipped = [p.target for p in load_presets().values() if p.embedded]
    return list(dict.fromkeys([first, page_preset().target, *shipped, *_on_the_hub()]))


def _on_the_hub() -> list[str]:
    return [name for name in reference_configs() if "/" in name]  # the others are sizes used by benchmarks


def _drafts() -> list[tuple[str, str]]:
    titles = {name: facts.title for name, facts in PREDICTED.items() if name != BASELINE}
    small = [name for name in _on_the_hub() if shape(name).parameters < SMALL]
    kinds = {name: method_in(reference_configs()[name], plug_ins=False) for name in small}
    models = [(f"{titles[kind]}: {ModelRef(name).short_name}", f"{kind}:{name}") for name, kind in kinds.items()]
    without_model = [(title, name) for name, title in titles.items() if name not in MODELS]
    return [("as in the run", SAME), *without_model, *models]


def draw(tab: gr.Tab, estimate_button: gr.Button, questions: Questions) -> None:
    """Create the tab, inside the current Blocks. estimate_button: starts from the visible run."""
    _why_card()
    gr.Markdown(assets.text("whatif.md"), elem_id="whatif-about")
    given: dict[str, Any] = {"state": gr.State(), **_where(), **_other()}
    view = assets.view("whatif.html", "helpers.js", "chart.js", "whatif.js", elem_id="whatif", later=True)
    parts = {**given, "view": view}
    named(tab.select, questions.open, given, parts, **QUIET)
    named(given["start"].input, questions.begin, given, parts, **QUIET)
    event = named(estimate_button.click, questions.start_from_race, given, parts, **QUIET)
    event.then(None, None, None, js=assets.to_tab("machines"), **QUIET)
    # not `change`: updates by the server would predict again
    changes = [part.input for name, part in given.items() if name not in ("state", "start")]
    shown = {name: parts[name] for name in ("dtype", "view")}
    named(partial(gr.on, changes, trigger_mode="always_last"), answer, given, shown, **QUIET)


def _where() -> Parts:
    machines = [(where.title, name) for name, where in profiles().items()]
    first = [(words, id) for id, (words, _) in starts().items()]
    parts: Parts = {}
    with gr.Row(elem_id="whatif-where"):
        parts["start"] = gr.Dropdown(first, value=PUBLISHED, **look("Start from", "whatif-start", 5, 260))
        parts["machine"] = gr.Dropdown(machines, value=ELSEWHERE, **look("Machine", "machine", 3, 180))
        parts["dtype"] = gr.Dropdown(["bfloat16"], value="bfloat16", **look("Precision", "precision", 2, 120))
    with gr.Row(elem_id="whatif-load"):
        parts["batch"] = _chips([(str(n), n) for n in BATCHES], LOAD["batch"], look("Batch size", "batch", 5, 300))
        parts["context"] = _chips(CONTEXTS, LOAD["context"], look("Context (tokens)", "context", 3, 300))
        parts["k"] = gr.Slider(1, MAX_K, published_start().k, step=1, **look(LENGTH, "whatif-k", 3, 220))
    return parts


def _other() -> Parts:
    first = published_start().target
    rate = look("Acceptance rate", "rate", min_width=220) | {"info": "per position, after accepted ones"}
    unfolding("Other target or drafter", "whatif-draft")
    with gr.Column(elem_id="whatif-draft", elem_classes="unfolded"), gr.Row():
        targets, place = model_choices(_targets(first)), look("Target", "whatif-target", min_width=220)
        return {
            "target": gr.Dropdown(targets, value=first, **place),
            "draft": gr.Dropdown(_drafts(), value=SAME, **look("Drafter", "draft", min_width=220)),
            "kept": _chips(ACCEPTANCE, SAME, look("Acceptance", "acceptance-source", min_width=260)),
            # the style sheet shows it with "custom rate"
            "rate": gr.Slider(0.05, 0.98, ASSUMED, step=0.01, **rate),
        }


def _chips(choices: Sequence[tuple[str, str | int]], value: str | int, place: Values) -> gr.Radio:
    return gr.Radio(choices, value=value, elem_classes="chips short", **place)


def diagnosis_view(found: Diagnosis) -> dict[str, object]:
    """Return the data of the view."""
    tone = "bad" if found.cause else "gain" if found.healthy and not found.implausible else ""
    return {
        "sentence": found.sentence,
        "tone": tone,
        "numbers": [[*row] for row in numbers(found)],
        "causes": [[cause.title, f"{cause.gain:.2f}×", cause.evidence] for cause in found.causes],
        "changes": changes(found),
        "notes": list(found.notes),
        "missing": list(found.missing),
    }


def diagnose_output(_: gr.Request, values: Values) -> Values:
    """Return the diagnosis of the visitor's output."""
    return _show(lambda: diagnosis_view(diagnose(_observation(values))))


def _observation(values: Values) -> Observation:
    """Read the pasted text, else the file, and add the numbers given. Raises ValueError with one line."""
    text, file = str(values["output"] or ""), str(values["file"] or "")
    if not text.strip() and not file:
        raise ValueError("no output given; paste one, or drop a file")
    try:
        read = read_output(text, PUBLIC_FILE_BYTES) if text.strip() else read_output_file(file, PUBLIC_FILE_BYTES)
    except ValueError as error:
        raise ValueError(str(error).replace(file, Path(file).name) if file else str(error)) from None
    if values["k"] and not isinstance(values["k"], int):
        raise ValueError(f"the draft length must be a whole number, not {values['k']}")
    return read.changed(k=values["k"] or None, plain_tokens_per_s=values["plain"] or None)


def _why_card() -> None:
    """Draw the card "Why is mine slow?": the output of an engine, pasted or dropped, and its diagnosis."""
    kinds = ", ".join(dict.fromkeys(title.partition(",")[0] for title in READERS))
    unfolding("Why is mine slow? Paste the output of your engine", "why-card")
    with gr.Column(elem_id="why-card", elem_classes="unfolded"):
        gr.Markdown(f"Reads: {kinds}.", elem_id="why-about")
        with gr.Row():
            size: Values = {"lines": 6, "max_lines": 12, "max_length": PUBLIC_FILE_BYTES}
            sample = "SpecDecoding metrics: Mean acceptance length: 2.16, ..."
            output = gr.Textbox(placeholder=sample, **size, **look("Output", "why-output", 3, 260))
            file = gr.File(type="filepath", height=150, **look("or drop a file", "why-file", 1, 200))
        with gr.Row():
            plain = gr.Number(None, minimum=0, **look("Tokens/s without speculation", "why-plain"))
            length = gr.Number(None, minimum=0, **look("Draft length k, if the output lacks it", "why-k"))
            run = gr.Button("Diagnose", variant="primary", elem_id="why-run")
        view = assets.view("why.html", "helpers.js", "why.js", elem_id="why", later=True)
        given = {"output": output, "file": file, "plain": plain, "k": length}
        named(run.click, diagnose_output, given, {"view": view}, **UPLOADED)
