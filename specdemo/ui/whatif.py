"""The What if tab: a run's acceptance combined with another machine, load or draft, and the diagnosis of an engine's
output. Needs no torch: every answer takes milliseconds, and predictions are computed at each change of a control.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import gradio as gr

from specdemo.analysis.acceptance import Acceptance, of_lane, of_lengths
from specdemo.analysis.diagnose import Diagnosis, diagnose
from specdemo.analysis.observation import Observation
from specdemo.analysis.predict import ASSUMED, BATCHES, Prediction, Row, predict, published
from specdemo.analysis.profiles import profile, profiles
from specdemo.analysis.readers import READERS, read_output, read_output_file
from specdemo.analysis.work import known, method_in, shape
from specdemo.bench.report import changes, numbers
from specdemo.core.atomic_io import json_text
from specdemo.core.estimate import Estimate
from specdemo.core.passes import measured_passes
from specdemo.core.safe_io import PUBLIC_FILE_BYTES
from specdemo.core.trace import RunTrace, estimates
from specdemo.engine.comparison import MAX_K
from specdemo.methods import BASELINE
from specdemo.methods.facts import PREDICTED
from specdemo.presets.files import DEFAULT, load_presets
from specdemo.presets.link import OWN as OWN_MODEL
from specdemo.presets.link import shown_name
from specdemo.presets.recorded import is_recorded, recorded
from specdemo.ui import assets
from specdemo.ui.controls import unfolding
from specdemo.ui.job import QUIET, Values, named
from specdemo.ui.model_menus import check_names, model_choices, page_preset
from specdemo.ui.views import predictable

ELSEWHERE = "h100-sxm"  # machine for "Estimate on an H100"
CONTEXTS = {256: "256", 1024: "1k", 4096: "4k", 16384: "16k", 65536: "64k"}
LOAD = {"batch": 1, "context": 1024}  # of a first visit
PUBLISHED = "published"  # start of a first visit: EAGLE-3 on an 8B model, a published result
USUAL_K = 5  # of a lane whose draft length is measured when it runs
PAIR = "EAGLE-3 for Llama-3.1-8B-Instruct"
SAME, OWN = "run", "own"  # the run's draft and acceptance, or custom ones
Choices = Sequence[tuple[str, str | float]]  # labels and values
ACCEPTANCE = [("as in the run", SAME), ("custom rate", OWN)]
LENGTH = "Draft length k"
LONGEST = PUBLIC_FILE_BYTES  # characters of a pasted output
SMALL = 4e9  # maximum parameters of an offered draft model


@dataclass(frozen=True, slots=True)
class Start:
    """The lane that predictions start from: models, acceptance, and the measured speed-up."""

    words: str
    target: str
    method: str
    model: str | None
    options: Mapping[str, int]
    quantization: str | None
    acceptance: Acceptance
    k: int
    speedup: Estimate | None
    source: str = "measured"  # of the speed-up
    slower: str = ""  # reason why a measured speed-up may lie below the predicted ones
    passes: Mapping[int, float] = field(default_factory=dict)  # slots -> time of a pass on the run's CPU, if known


def start_of(trace: RunTrace, index: int, words: str, allow_any_model: bool = False) -> Start:
    """Return the starting point of a lane. Raises ValueError, one line, if it cannot be predicted. Names may be foreign
    text.
    """
    lane, config = trace.lanes[index], trace.config
    target, model = str(config.get("target")), lane.options.get("model")
    check_names({str(name) for name in (target, model) if name} - {*known()}, allow_any_model)
    if lane.method not in PREDICTED:
        raise ValueError(f"{lane.name} chooses drafts at run time and cannot be predicted; choose another run")
    acceptance = of_lane(lane)
    k = None if acceptance.nodes else lane.options.get("k")  # a tree is as deep as its acceptance is known
    return Start(
        words=words,
        target=target,
        method=lane.method,
        model=model if isinstance(model, str) else None,
        options={name: value for name, value in lane.options.items() if isinstance(value, int)},
        quantization=str(config["quantization"]) if config.get("quantization") else None,
        acceptance=acceptance,
        k=k if isinstance(k, int) else len(acceptance.rates),
        speedup=estimates(trace)[index - 1],
        passes=measured_passes(trace, target),
    )


@lru_cache
def recorded_starts() -> dict[str, str]:
    """Return the presets with a recorded run that predictions can start from, id -> title, the default first."""
    found = {id: p for id, p in load_presets().items() if p.lanes[0].method in PREDICTED and is_recorded(id)}
    order = sorted(found, key=lambda id: id != DEFAULT)
    return {id: found[id].title for id in order}


@lru_cache
def recorded_start(preset_id: str) -> Start:
    """Return the first lane of a recorded run."""
    trace = recorded(preset_id)
    if trace is None or preset_id not in recorded_starts():
        raise ValueError(f"no recorded run of {preset_id[:60]!r}; choose one of {', '.join(recorded_starts())}")
    return start_of(trace, 1, f"Recorded: {recorded_starts()[preset_id]}")


@lru_cache
def published_start() -> Start:
    """Return the published chains of EAGLE-3 on vLLM, with their best draft length."""
    found = [one for one in published() if one.what == "vLLM, EAGLE-3"]
    best = max(found, key=lambda one: one.speedup)
    measured = f"{best.tokens:.2f} tokens per pass at k = {best.k}"
    return Start(
        words=f"Published: {PAIR} with vLLM on an H100, {measured}, {best.source}",
        target=best.target,
        method=best.method,
        model=best.model,
        options={},
        quantization=None,
        acceptance=of_lengths({one.k: one.tokens for one in found}),
        k=best.k,
        speedup=Estimate(best.speedup),
        source="published",
        slower="that version of vLLM took 1.0 ms per draft token, and reading the head takes 0.3 ms",
    )


def own_start() -> Start:
    """Return the models that the page was started with, with an assumed acceptance."""
    chosen = page_preset()
    lane = next((lane for lane in chosen.lanes if lane.method in PREDICTED), chosen.lanes[0])
    words = f"Your model: {shown_name(chosen.target)}, {lane.method}; acceptance assumed, as nothing ran yet"
    quantization = str(chosen.quantization) if chosen.quantization else None
    rates = Acceptance((ASSUMED,))
    return Start(words, chosen.target, lane.method, lane.model, {}, quantization, rates, lane.k or USUAL_K, None)


def _first() -> str:
    return OWN_MODEL if OWN_MODEL in load_presets() else PUBLISHED


def _starts() -> list[tuple[str, str]]:
    own = [(f"Your model: {shown_name(page_preset().target)}", OWN_MODEL)] if _first() == OWN_MODEL else []
    return [*own, (f"Published: {PAIR}", PUBLISHED), *((title, id) for id, title in recorded_starts().items())]


def _start(id: str) -> Start:
    return published_start() if id == PUBLISHED else own_start() if id == OWN_MODEL else recorded_start(id)


def predict_for(start: Start, values: Values) -> Prediction:
    """Return the prediction for the values of the controls. Raises ValueError with one line."""
    check_names({str(values["target"])} - {start.target, *known()}, False)
    same = values["draft"] == SAME
    name, _, model = str(values["draft"]).partition(":")
    return predict(
        values["target"],
        device=values["machine"],
        method=start.method if same else name,
        model=start.model if same else model or None,
        dtype=values["dtype"],
        quantization=start.quantization if values["target"] == start.target else None,
        batch=int(values["batch"]),
        context=int(values["context"]),
        acceptance=start.acceptance if values["kept"] == SAME else [values["rate"]],
        options=start.options if same else {},
        passes=start.passes if values["target"] == start.target else {},
    )


def to_view(start: Start, p: Prediction, k: int) -> dict[str, object]:
    """Return the data of the view: the prediction, the chosen draft length, and what is known of the start."""
    row = min(p.rows, key=lambda row: abs(row.k - k))
    where = p.scenario.device.profile
    source = f"measured {where.measured.date}" if where.measured else "from its spec sheet"
    verify = row.verify_ms / row.v
    return p.as_dict() | {
        "target": shown_name(p.scenario.target.name),
        "at": {"k": row.k, "batch": p.scenario.batch},
        "plain_parts": {"draft_ms": 0.0, "verify_ms": verify, "other_ms": p.plain_ms - verify},
        "room_gb": where.memory_gb.value,
        "word": row.speedup.label,
        "interval": row.speedup.interval(),
        "sentence": " ".join(filter(None, [sentence(p, row), _outside(start, p)])),
        "where": f"{where.title} · {p.scenario.device.dtype} · {source}",
        "known": {"k": start.k, "speedup": start.speedup.value, "source": start.source} if start.speedup else None,
        "from": start.words,
    }


def _outside(start: Start, p: Prediction) -> str:
    """Return why the speed-up of the start lies below its prediction; empty if it does not."""
    row = next((row for row in p.rows if row.k == start.k), None)
    low = row.speedup.low if row else None
    if not start.slower or start.speedup is None or low is None or start.speedup.value >= low:
        return ""
    return f"The {start.source} {start.speedup.value:.2f}× is less than predicted, because {start.slower}."


def sentence(p: Prediction, row: Row) -> str:
    """Return the bottleneck at the chosen draft length and a better one."""
    words = [
        f"With k = {row.k} and batch size {p.scenario.batch}, a step costs {row.step_ms / p.plain_ms:.2f} plain steps "
        f"and yields {row.tokens.value:.2f} tokens per row; bottleneck: {row.limit}."
    ]
    if not p.best_k:
        words.append("No draft length is faster than plain decoding here.")
    elif p.best_k != row.k:
        words.append(f"Best: k = {p.best_k} ({p.best.speedup.format('×')}).")
    advised = [row, p.best] if p.best_k else [row]
    words += dict.fromkeys(filter(None, map(p.extrapolation_note, advised)))
    if p.break_even_batch is not None and p.best_k:
        words.append(f"No draft length is faster from batch size {p.break_even_batch} on.")
    if p.too_large:
        words.append(p.too_large)
    return " ".join(words)


class Questions:
    """Events of the tab for all visitors. shown: returns the visible run of a visitor's Race tab, and whether it is the
    visitor's own.
    """

    def __init__(self, shown: Callable[[gr.Request], tuple[RunTrace, bool] | None], allow_any_model: bool) -> None:
        self._shown, self._any = shown, allow_any_model

    def open(self, request: gr.Request, values: Values) -> Values:
        """Update the tab when it is opened, because the visible run may have changed."""
        lanes, own = self._lanes(request)
        first = next(iter(lanes), _first()) if own else _first()
        known = values["start"] in {PUBLISHED, _first(), *lanes, *recorded_starts()}
        return self._begin(request, lanes, values["start"] if known and values["state"] else first, values)

    def start_from_race(self, request: gr.Request, values: Values) -> Values:
        """Start from the visible run, on another machine, at the load of a first visit."""
        values = values | {"machine": ELSEWHERE, "state": None} | LOAD
        lanes, _ = self._lanes(request)
        return self._begin(request, lanes, next(iter(lanes), PUBLISHED), values) | LOAD

    def begin(self, request: gr.Request, values: Values) -> Values:
        """Start from another run."""
        return self._begin(request, self._lanes(request)[0], values["start"], values | {"state": None})

    def answer(self, _: gr.Request, values: Values) -> Values:
        """Predict again after a control has changed."""
        start = values["state"] or published_start()
        dtypes = [*profile(values["machine"]).compute_tflop_per_s]
        if values["dtype"] not in dtypes:
            usual = (name for name in ("bfloat16", "float16") if name in dtypes)
            values = values | {"dtype": next(usual, "float32")}
        shown = {"dtype": gr.update(choices=dtypes, value=values["dtype"])}
        try:
            return shown | {"view": json_text(to_view(start, predict_for(start, values), int(values["k"])))}
        except ValueError as error:
            return shown | {"view": _refused(str(error))}

    def _begin(
        self, request: gr.Request, lanes: Mapping[str, tuple[RunTrace, int, str]], chosen: str, values: Values
    ) -> Values:
        """Return the updates for a new start. chosen: where to start from."""
        choices = [*((words, key) for key, (_, _, words) in lanes.items()), *_starts()]
        update = {"start": gr.update(choices=choices, value=chosen), "machine": values["machine"]}
        try:
            start = start_of(*lanes[chosen], self._any) if chosen in lanes else _start(chosen)
        except ValueError as error:
            return update | {"view": _refused(str(error))}
        if start == values["state"]:
            return update | self.answer(request, values)
        filled = {"draft": SAME, "kept": SAME, "k": start.k, "target": start.target}
        filled["rate"] = round(sum(start.acceptance.rates) / len(start.acceptance.rates), 2)
        answer = self.answer(request, values | filled | {"state": start})
        target = gr.update(value=start.target, choices=model_choices(_targets(start.target)))
        return update | filled | answer | {"state": start, "target": target, "k": _length(start)}

    def _lanes(self, request: gr.Request) -> tuple[dict[str, tuple[RunTrace, int, str]], bool]:
        """Return the lanes of the visible run that can be predicted, and whether it is the visitor's own."""
        shown = self._shown(request)
        if shown is None:
            return {}, False
        trace, own = shown
        words = "Your last run" if own else "Run shown in Race"
        lanes = {
            f"lane-{i}": (trace, i, f"{words}: {shown_name(str(trace.config.get('target')))}, {lane.name}")
            for i, lane in enumerate(trace.lanes)
            if i and predictable(trace, lane) and lane.summary.get("drafted")
        }
        return lanes, own


def _length(start: Start) -> object:
    """Return the update of the draft length. A tree can be cut, but not made deeper than the recorded one."""
    tree = start.acceptance.nodes
    label = f"Depth of the tree ({tree} nodes)" if tree else LENGTH
    return gr.update(value=start.k, maximum=max(len(start.acceptance.rates), 2) if tree else MAX_K, label=label)


def _refused(reason: str) -> str:
    return json_text({"error": reason})


def _targets(first: str) -> list[str]:
    shipped = [p.target for p in load_presets().values() if p.embedded]
    return list(dict.fromkeys([first, page_preset().target, *shipped, *_on_the_hub()]))


def _on_the_hub() -> list[str]:
    return [name for name in known() if "/" in name]  # the others are sizes used by benchmarks


def _drafts() -> list[tuple[str, str]]:
    configs = {name: known()[name] for name in _on_the_hub() if shape(name).parameters < SMALL}
    titles = {name: facts.title for name, facts in PREDICTED.items() if name != BASELINE}
    kinds = {name: method_in(config, plug_ins=False) for name, config in configs.items()}
    models = [(f"{titles[kind]}: {name}", f"{kind}:{name}") for name, kind in kinds.items()]
    without_model = [(title, name) for name, title in titles.items() if name != "draft_model"]
    return [("as in the run", SAME), *without_model, *models]


def draw(tab: gr.Tab, estimate_button: gr.Button, questions: Questions) -> None:
    """Create the tab, inside the current Blocks. ask: the button that starts from the visible run."""
    gr.Markdown(assets.text("whatif.md"), elem_id="whatif-about")
    given: dict[str, Any] = {"state": gr.State(), **_where(), **_other()}
    view = assets.view("whatif.html", "helpers.js", "chart.js", "whatif.js", elem_id="whatif", later=True)
    _why_card()
    parts = {**given, "view": view}
    named(tab.select, questions.open, given, parts, **QUIET)
    named(given["start"].input, questions.begin, given, parts, **QUIET)
    event = named(estimate_button.click, questions.start_from_race, given, parts, **QUIET)
    event.then(None, None, None, js=assets.to_tab("what-if"), **QUIET)
    stored = ("state", "start")
    # not `change`: updates by the server would predict again
    changes = [part.input for name, part in given.items() if name not in stored]
    shown = {name: parts[name] for name in ("dtype", "view")}
    named(partial(gr.on, changes, trigger_mode="always_last"), questions.answer, given, shown, **QUIET)


def _where() -> dict[str, object]:
    machines = [(where.title, name) for name, where in profiles().items()]
    contexts = [(words, tokens) for tokens, words in CONTEXTS.items()]
    k = published_start().k
    with gr.Row(elem_id="whatif-where"):
        place: Values = {"elem_id": "whatif-start", "scale": 5, "min_width": 260}
        start = gr.Dropdown(_starts(), value=PUBLISHED, label="Start from", **place)
        machine = gr.Dropdown(machines, value=ELSEWHERE, label="Machine", elem_id="machine", scale=3, min_width=180)
        dtype = gr.Dropdown(
            ["bfloat16"], value="bfloat16", label="Precision", elem_id="precision", scale=2, min_width=120
        )
    with gr.Row(elem_id="whatif-load"):
        batches = [(str(n), n) for n in BATCHES]
        batch = _chips(batches, LOAD["batch"], "Batch size", "batch", 5, 300)
        context = _chips(contexts, LOAD["context"], "Context (tokens)", "context", 3, 300)
        length = gr.Slider(1, MAX_K, k, step=1, label=LENGTH, elem_id="whatif-k", scale=3, min_width=220)
    return {"start": start, "machine": machine, "dtype": dtype, "batch": batch, "context": context, "k": length}


def _other() -> dict[str, object]:
    first = published_start().target
    unfolding("Other target or drafter", "whatif-draft")
    with gr.Column(elem_id="whatif-draft", elem_classes="unfolded"), gr.Row():
        targets = model_choices(_targets(first))
        target = gr.Dropdown(targets, value=first, label="Target", elem_id="whatif-target", min_width=220)
        draft = gr.Dropdown(_drafts(), value=SAME, label="Drafter", elem_id="draft", min_width=220)
        acceptance_choice = _chips(ACCEPTANCE, SAME, "Acceptance", "acceptance-source")
        rate = gr.Slider(  # the style sheet shows it with "custom rate"
            0.05, 0.98, ASSUMED, step=0.01, label="Acceptance rate", info="per position, after accepted ones",
            elem_id="rate", min_width=220,
        )  # fmt: skip
    return {"target": target, "draft": draft, "kept": acceptance_choice, "rate": rate}


def _chips(
    choices: Choices, value: str | float, label: str, elem_id: str, scale: int | None = None, min_width: int = 260
) -> gr.Radio:
    looks: Values = {"elem_id": elem_id, "elem_classes": "chips short"}
    return gr.Radio(choices, value=value, label=label, scale=scale, min_width=min_width, **looks)


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
    """Return the diagnosis of the visitor's output. A visitor's mistake is shown as one line."""
    try:
        observation = _observation(values)
        if values["k"] and not isinstance(values["k"], int):
            raise ValueError(f"the draft length must be a whole number, not {values['k']}")
        given = {"k": values["k"] or None, "plain_tokens_per_s": values["plain"] or None}
        return {"view": json_text(diagnosis_view(diagnose(observation.changed(**given))))}
    except ValueError as error:
        return {"view": json_text({"error": str(error)})}


def _observation(values: Values) -> Observation:
    """Read the pasted text, else the file. Raises ValueError with one line."""
    text, file = str(values["output"] or ""), values["file"]
    if text.strip():
        return read_output(text, PUBLIC_FILE_BYTES)
    if not file:
        raise ValueError("no output given; paste one, or drop a file")
    try:
        return read_output_file(str(file), PUBLIC_FILE_BYTES)
    except ValueError as error:
        raise ValueError(str(error).replace(str(file), Path(str(file)).name)) from None


def _why_card() -> None:
    """Draw the card "Why is mine slow?": the output of an engine, pasted or dropped, and its diagnosis."""
    kinds = ", ".join(dict.fromkeys(reader.title.partition(",")[0] for reader in READERS))
    unfolding("Why is mine slow? Paste the output of your engine", "why-card")
    with gr.Column(elem_id="why-card", elem_classes="unfolded"):
        gr.Markdown(f"Reads: {kinds}.", elem_id="why-about")
        with gr.Row():
            output = gr.Textbox(
                label="Output", lines=6, max_lines=12, max_length=LONGEST, elem_id="why-output", scale=3, min_width=260,
                placeholder="SpecDecoding metrics: Mean acceptance length: 2.16, ...",
            )  # fmt: skip
            file = gr.File(
                label="or drop a file", type="filepath", height=150, elem_id="why-file", scale=1, min_width=200
            )
        with gr.Row():
            plain = gr.Number(label="Tokens/s without speculation", minimum=0, elem_id="why-plain", value=None)
            length = gr.Number(label="Draft length k, if the output lacks it", minimum=0, elem_id="why-k", value=None)
            run = gr.Button("Diagnose", variant="primary", elem_id="why-run")
        view = assets.view("why.html", "helpers.js", "why.js", elem_id="why", later=True)
        given = {"output": output, "file": file, "plain": plain, "k": length}
        named(run.click, diagnose_output, given, {"view": view}, **QUIET)
