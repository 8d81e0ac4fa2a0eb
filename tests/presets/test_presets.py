"""The shipped presets, presets that are rejected or cannot run here, and the comparison of two models."""

import json
from pathlib import Path

import pytest
import torch

import specdemo
from specdemo.__main__ import main
from specdemo.analysis.predict import predict
from specdemo.bench.suites import suite
from specdemo.core.rules import RULES
from specdemo.engine.comparison import Comparison, Lane
from specdemo.models.devices import pick_dtype
from specdemo.models.gguf_header import Header
from specdemo.models.packaged import EMBEDDED
from specdemo.models.ref import ModelRef
from specdemo.presets import files as module
from specdemo.presets.files import DEFAULT, FOLDER, allowed_models, load_presets, preset, read_presets, recorded
from specdemo.presets.link import LONGEST_TEXT, OWN
from specdemo.presets.pair import QUESTION, TASKS, add_pair, comparison, kind_of_work, pair, task, work_prompts
from specdemo.presets.runnable import Machine, nearest_runnable, why_not
from specdemo.ui.setup import about, row_data, to_values
from specdemo.ui.views import finish

PRESETS = dict(load_presets())  # without models that a test of this process names later
BASE = PRESETS[DEFAULT]
PROMISED = {f"embedded-{name}" for name in "draft draft-wide draft-deep ngram sampling three-lanes".split()}


def test_the_default_comes_first_then_what_needs_no_download():
    assert next(iter(PRESETS)) == DEFAULT == "embedded-draft"
    flags = [p.embedded for p in PRESETS.values()]
    assert flags == sorted(flags, reverse=True)
    assert {id for id, p in PRESETS.items() if p.embedded} >= PROMISED
    assert not PRESETS["qwen3-8b"].embedded


@pytest.mark.parametrize("id", PRESETS)
def test_every_preset_is_what_the_engine_takes(id):
    chosen = PRESETS[id]
    assert chosen.with_changes() == chosen  # all options exist and differ from their defaults
    spec = chosen.changed()
    assert (spec.id, spec.target, spec.prompt) == (id, chosen.target, chosen.prompt)
    assert [lane.k for lane in spec.lanes] == [lane.k for lane in chosen.lanes]
    assert len(chosen.prompt) <= LONGEST_TEXT


def test_changes_reach_the_lanes_they_are_for():
    three = preset("embedded-three-lanes")
    assert [lane.k for lane in three.with_changes(k=7).lanes] == [7, 7]
    assert [lane.acceptance for lane in three.with_changes(acceptance="typical").lanes] == ["typical"] * 2
    assert three.with_changes(method="draft_model").lanes == three.lanes[:1]
    assert BASE.with_changes(method="ngram", k=3).lanes == [Lane(method="ngram", k=3)]
    assert BASE.with_changes(method="ngram", options={"max_n": "5", "min_n": 1}).lanes[0].options == {"max_n": 5}
    assert BASE.with_changes(temperature=1).temperature == 1.0
    assert BASE.with_changes(lanes=[{"method": "ngram"}]).methods == ["ngram"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"k": -1}, "k must be 0 or more, not -1"),
        ({"k": 9999}, "k must be 16 or less, not 9999"),
        ({"k": "7"}, "k must be a whole number, not '7'"),
        ({"temperature": -1.0}, "temperature must be 0.0 or more, not -1.0"),
        ({"temperature": 1e-9}, "temperature must be 0 (greedy) or between 0.001 and 100, not 1e-09"),
        ({"temperature": float("nan")}, "temperature must be a finite number, not nan"),
        ({"top_p": 0.0}, "top_p must be above 0.0, not 0.0"),
        ({"max_new_tokens": 5000}, "max_new_tokens must be 1024 or less, not 5000"),
        ({"schedule": "rase"}, "schedule must be 'race' or 'sequential', not 'rase'"),
        ({"device": "tpu"}, "the device must be auto, cpu, mps, cuda, cuda:N, xpu or xpu:N"),
        ({"target": 3}, "target must be text, not 3"),
        ({"prompt": " \n"}, "the prompt is empty; write at least one word"),
        ({"prompt": "a\x00b"}, "the prompt must not contain the control character U+0000; remove it"),
        ({"prompt": "a" * 100_001}, "prompt must have 100000 characters at most"),
        ({"promt": "x"}, "unknown setting 'promt'; did you mean 'prompt'?"),
        ({"method": "ngrm"}, "unknown method 'ngrm'; did you mean 'ngram'?"),
        ({"method": "ngram", "options": {"max": 3}}, "unknown option 'max' of method 'ngram'; did you mean 'max_n'?"),
        ({"method": "ngram", "options": {"max_n": 99}}, "option 'max_n' must be between 1 and 8, not 99"),
        (
            {"method": "ngram", "options": {"max_n": 1, "min_n": 2}},
            "option 'min_n' (2) must not exceed 'max_n' (1)",
        ),
        ({"options": {"max_n": 3}}, "unknown option 'max_n' of method 'draft_model'; choose one of p_min"),
        *(
            (
                {"method": name, "model": None},
                f"method {name!r} needs a model; `python -m specdemo drafters TARGET` lists those of your target",
            )
            for name in ("draft_model", "eagle", "cascade")
        ),
        ({"method": "ngram", "model": "x"}, "method 'ngram' takes no model; leave it out"),
        ({"lanes": BASE.lanes * 4}, "lanes must have 1 to 3 entries"),
        (
            {"lanes": [{"method": "ngram", "depth": 3}]},
            "unknown setting 'depth'; choose one of method, model, k, options, acceptance, acceptance_options, name, "
            "server, served_model",
        ),
        ({"lanes": 5}, "lanes must be a list, not 5"),
        ({"server": "ftp://x"}, "the server must have the form http://host:port, not 'ftp://x'"),
    ],
)
def test_bad_settings_are_refused_in_one_line_with_the_fix(changes, line):
    with pytest.raises(ValueError) as refusal:
        BASE.with_changes(**changes)
    assert str(refusal.value) == line


def test_a_lane_whose_options_name_another_drafter_leaves_the_model_out():
    usual = BASE.with_changes(method="adaptive").lanes[0]
    assert usual.model and BASE.with_changes(method="adaptive", options={"drafter": "draft_model"}).lanes[0] == usual
    lane = BASE.with_changes(method="adaptive", options={"drafter": "suffix", "corpus": "x"}).lanes[0]
    assert lane.model is None and lane.title == "Adaptive suffix"
    lookup = BASE.changed(lanes=[lane])
    assert lookup.with_changes(method="adaptive").lanes == [lane]
    assert lookup.with_changes(method="adaptive", model="stories-draft-wide").lanes[0].title == "Adaptive draft 1.3M"
    with pytest.raises(ValueError, match="must be a whole number"):
        BASE.with_changes(method="adaptive", options={"drafter": ["suffix"]})


def test_servers_go_to_the_lanes_and_one_more_to_the_baseline():
    three = preset("embedded-three-lanes")
    one = three.on_servers(["a:1"], "m")
    assert (one.server, one.lanes[0].server, one.lanes[1].server) == (None, "http://a:1", None)
    every = three.on_servers(["a:1", "https://b/v1/", "c:3"], "m")
    assert [lane.server for lane in every.all_lanes] == ["http://a:1", "https://b", "http://c:3"]
    assert {lane.served_model for lane in every.all_lanes} == {"m"} and every.all_remote
    assert three.on_servers([]) == three
    with pytest.raises(ValueError, match="4 servers for 2 lanes and the baseline; give fewer"):
        three.on_servers(["a:1"] * 4)


def test_a_setting_of_one_lane_needs_one_lane():
    with pytest.raises(ValueError, match="model applies to one lane and this preset has 2; set the method as well"):
        preset("embedded-three-lanes").with_changes(model="stories-draft-deep")


def test_visitors_may_name_the_models_of_the_presets():
    assert set(allowed_models(PRESETS)) >= {*EMBEDDED, "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"}
    assert allowed_models({}) == EMBEDDED


@pytest.mark.parametrize("short, name", [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_a_dtype_has_a_short_name(short, name):
    assert BASE.with_changes(dtype=short).dtype == name
    assert pick_dtype(short, torch.device("cpu")) == getattr(torch, name)
    assert predict("stories", dtype=short).as_dict() == predict("stories", dtype=name).as_dict()
    assert suite("k", dtype=short).dtype == name


@pytest.mark.parametrize("dtype", ["fp8", "bf61", ["bf16"], 16, None])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="^dtype must be 'auto', 'float32', 'bfloat16' or 'float16', not "):
        BASE.with_changes(dtype=dtype)


def test_variants_are_presets(tmp_path):
    text = "title: A {variant}\ntarget: org/a:{variant}\nlanes: [{method: ngram}]\nprompt: x\n"
    (tmp_path / "a.yaml").write_text(text + "variants: {Q4_K_M: {memory_gb: 1.0}, Q8_0: {memory_gb: 2.5}}")
    four, eight = read_presets(tmp_path / "a.yaml")
    assert (four.id, four.title, four.target, four.memory_gb) == ("a-q4-k-m", "A Q4_K_M", "org/a:Q4_K_M", 1)
    assert (eight.id, eight.target, eight.memory_gb) == ("a-q8-0", "org/a:Q8_0", 2.5)
    (tmp_path / "b.yaml").write_text(text + "variants: [1]")
    with pytest.raises(ValueError, match=r"b.yaml: variants must be settings by name"):
        read_presets(tmp_path / "b.yaml")


SHIPPED = sorted((FOLDER / "recorded").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_recorded_run_is_a_run_of_its_preset(path):
    assert path.stat().st_size < 300_000
    trace, spec = recorded(path.stem), preset(path.stem)
    assert isinstance(spec, Comparison) and trace.preset == path.stem
    assert trace.prompt == spec.prompt and trace.schedule == spec.schedule
    assert {name: trace.config[name] for name in ("target", "max_new_tokens", "seed", "temperature")} == {
        "target": spec.target,
        "max_new_tokens": spec.max_new_tokens,
        "seed": spec.seed,
        "temperature": spec.sampling.temperature,
    }
    assert [lane.method for lane in trace.lanes[1:]] == [lane.method for lane in spec.lanes]
    for recorded_lane, lane in zip(trace.lanes[1:], spec.lanes, strict=True):
        assert {"k": lane.k, **lane.options}.items() <= recorded_lane.options.items()
    verdicts = ["identical" if RULES[lane.acceptance].lossless else "lossy" for lane in spec.lanes]
    assert finish(trace) == "done" and [row["verdict"] for row in trace.comparison] == verdicts
    assert trace.environment["device"] and trace.environment["date"] and trace.environment["commit"]


def test_a_damaged_recording_names_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    Path(tmp_path / "recorded").mkdir()
    Path(tmp_path / "recorded" / "odd.json").write_text("{}", encoding="utf-8")
    recorded.cache_clear()
    with pytest.raises(ValueError, match="odd.json: not a specdemo trace"):
        recorded("odd")
    assert recorded("absent") is None
    recorded.cache_clear()


DOWNLOADED = [p for p in PRESETS.values() if not p.embedded and p.server is None]
NONE, SMALL, LARGE = Machine(0, False), Machine(16, False), Machine(85, True, 128, True)


def test_there_are_pairs_for_every_card():
    groups = ["8 GB RAM", "16 GB RAM", "32 GB RAM", "16 GB", "24 GB", "80 GB"]
    assert list(dict.fromkeys(p.group for p in DOWNLOADED)) == groups
    assert all(len([p for p in DOWNLOADED if p.group == g]) >= 5 for g in groups)
    families = {"Qwen/Qwen3", "meta-llama/", "openai/gpt-oss", "google/gemma", "lmsys/vicuna"}
    assert all(any(p.target.startswith(family) for p in DOWNLOADED) for family in families)
    assert {"medusa", "eagle", "draft_model"} <= {m for p in DOWNLOADED if "vicuna" in p.id for m in p.methods}


@pytest.mark.parametrize("chosen", DOWNLOADED, ids=lambda p: p.id)
def test_download_size_is_reported(chosen):
    assert chosen.group and chosen.licence and chosen.memory_gb
    assert chosen.memory_gb < int(chosen.group.split()[0])
    assert chosen.gated == chosen.target.startswith(("meta-llama/", "facebook/", "google/gemma-3"))


def test_unrunnable_preset_reports_the_reason():
    assert why_not(PRESETS["embedded-draft"], NONE) == ""
    assert why_not(PRESETS["qwen3-8b"], NONE) == "it needs a GPU with about 20 GB, and this machine has none"
    assert why_not(PRESETS["qwen3-8b"], SMALL) == "it needs about 20 GB of GPU memory, and this machine has 16"
    assert "meta-llama/Llama-3.1-8B-Instruct is gated: accept its licence" in why_not(
        PRESETS["llama-3.1-8b"], Machine(85, False)
    )
    assert [p.id for p in PRESETS.values() if why_not(p, LARGE)] == []


def test_presets_without_a_gpu():
    for ram, groups in ((16, ("8 GB RAM", "16 GB RAM")), (32, ("8 GB RAM", "16 GB RAM", "32 GB RAM"))):
        able = [p.id for p in DOWNLOADED if not why_not(p, Machine(0, False, ram, True))]
        assert able == [p.id for p in DOWNLOADED if p.group in groups]
    eight = PRESETS["gguf-qwen3-8b-q8-0"]
    assert eight.models == ("Qwen/Qwen3-8B-GGUF:Q8_0", "unsloth/Qwen3-0.6B-GGUF:Q8_0")
    assert why_not(eight, Machine(0, False, 8, True)) == "it needs about 11 GB of memory, and this machine has 8"
    assert why_not(eight, Machine(0, False, 16)) == "it needs llama.cpp: pip install llama-cpp-python gguf"
    assert not why_not(PRESETS["smollm2-1.7b"], Machine(0, False, 8))


def test_nearest_preset_uses_available_models():
    assert nearest_runnable(PRESETS["gpt-oss-20b"], NONE).id == "embedded-code"  # EAGLE and a lookup
    assert nearest_runnable(PRESETS["qwen3-8b"], SMALL).id == "qwen3-8b-4bit"
    assert nearest_runnable(PRESETS["layerskip-1b"], NONE).id == "embedded-layer-skip"
    assert all(nearest_runnable(p, LARGE) == p for p in DOWNLOADED)


def test_a_preset_that_could_not_be_loaded_is_replaced_by_another_form_of_its_model_that_is_here(monkeypatch):
    made, machine = {"smollm2", "smollm2.gguf"}, Machine(0, False, 8, True)
    monkeypatch.setattr("specdemo.presets.files.packaged.local", made.__contains__)
    assert nearest_runnable(PRESETS["smollm2-chat"], machine, failed=True).id == "smollm2-gguf"
    made.clear()
    assert nearest_runnable(PRESETS["smollm2-chat"], machine, failed=True).embedded


def test_page_reports_it(monkeypatch):
    monkeypatch.setattr("specdemo.presets.runnable.this_machine", lambda: NONE)
    data = json.loads(row_data(to_values(PRESETS["embedded-draft"]), ""))
    assert (data["obstacle"], data["instead"]) == ("", None)
    data = json.loads(row_data(to_values(PRESETS["llama-3.1-8b"]), ""))
    assert data["obstacle"] == "This machine cannot run it: it needs a GPU with about 20 GB, and this machine has none."
    assert data["instead"] == ["embedded-draft", "Draft model"]
    assert "about 20 GB of memory, gated: needs a login, Llama 3.1 Community License" in about(PRESETS["llama-3.1-8b"])


@pytest.fixture(autouse=True)
def without_pair(monkeypatch):
    monkeypatch.setitem(load_presets(), OWN, None)
    load_presets().pop(OWN)


@pytest.fixture
def served(monkeypatch):
    """Return the arguments of the pages that were started."""
    starts = []
    monkeypatch.setattr("specdemo.ui.page.serve", lambda *given, **more: starts.append(given))
    return starts


@pytest.mark.parametrize(
    ("draft", "method"),
    [("stories-draft-wide", "draft_model"), ("stories-eagle-1", "eagle"), (None, "suffix")],
)
def test_page_starts_with_the_named_models(served, draft, method):
    assert main(["ui", "--target", "stories", *(["--draft", draft] if draft else []), "--threads", "2"]) == 0
    ((start, *_),) = served
    chosen = load_presets()[start]
    assert (chosen.target, chosen.lanes[0].method, chosen.lanes[0].model) == ("stories", method, draft)
    assert (chosen.chat, chosen.chip, chosen.threads) == (False, "Your models", 2)
    assert [lane.method for lane in chosen.lanes[1:]] == ["adaptive" if draft else "ngram"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "/absent/model.gguf"], "the file /absent/model.gguf does not exist"),
        (["--target", "stories", "--draft", "code-eagle-1"], "code-eagle-1 does not fit stories: "),
        (["--draft", "stories-draft-wide"], "--draft needs a target; add --target MODEL"),
        (["--threads", "2"], "--threads needs a target; add --target MODEL"),
        (["--target", "stories", "--preset", "embedded-ngram"], "--preset and --target exclude each other"),
        (["--target", "stories", "--cache-type", "q4"], "cache_type must be 'auto', 'f32', 'f16' or 'q8_0'"),
    ],
)
def test_bad_names_are_one_line_before_the_server_starts(served, capsys, options, message):
    assert main(["ui", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"specdemo: {message}") and not served


def test_too_little_memory_is_one_line_before_the_server_starts(served, capsys, monkeypatch):
    monkeypatch.setattr("specdemo.models.memory.free_bytes", lambda device: [1_000_000])
    monkeypatch.setattr("specdemo.engine.session.free_bytes", lambda device: [1_000_000])
    assert main(["ui", "--target", "stories", "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "stories needs about" in line and "free on cpu; choose" in line and not served


def test_public_page_names_no_models(served, capsys, monkeypatch):
    monkeypatch.setenv("SPECDEMO_PUBLIC", "1")
    assert main(["ui", "--target", "stories"]) == 2
    assert "a public page offers only the models of its presets; remove --target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "tags", "kind"),
    [
        ("qwen2.5-coder-1.5b-q4_k_m.gguf", [], "code"),
        ("codellama-7b.gguf", [], "code"),
        ("mine.gguf", ["chat", "code"], "code"),
        ("mine.gguf", ["chat"], "edit"),
        ("encoder-decoder-1b.gguf", [], "edit"),
    ],
)
def test_a_model_that_writes_code_gets_code_to_rewrite(name, tags, kind, tmp_path, monkeypatch):
    header = Header({"general.tags": tags}, "", 0, 0, 0, 0, {})
    monkeypatch.setattr("specdemo.presets.pair.local_header", lambda name: header)
    monkeypatch.setattr("specdemo.presets.pair.has_chat_template", lambda target: True)
    monkeypatch.setattr("specdemo.presets.pair._check_gguf", lambda name: None)
    monkeypatch.setattr("specdemo.engine.session.Session.check_room", lambda *_: None)
    assert pair(ModelRef(name)).prompt == work_prompts()[kind][0]


def test_a_prompt_to_continue_is_not_sent_as_a_message(monkeypatch):
    monkeypatch.setattr("specdemo.presets.pair.has_chat_template", lambda target: target == "code")
    written = load_presets()["embedded-draft"].prompt
    assert comparison("embedded-draft", {"target": "code"}).prompt == QUESTION
    kept = (
        {"target": "stories"},
        {"target": "code", "chat": False},
        {"target": "code", "prompt": written},
        {"seed": 2},
    )
    assert [comparison("embedded-draft", changes).prompt for changes in kept] == [written] * 4


def test_a_target_needs_no_preset(capsys):
    assert main(["run", "--target", "stories", "--max-new-tokens", "4"]) == 0
    assert {"Prompt lookup", "Suffix decoding"} <= {line[:15].strip() for line in capsys.readouterr().out.splitlines()}
    trace = specdemo.run(target="stories", model="stories-draft-wide", k=2, max_new_tokens=4)
    assert [lane.method for lane in trace.lanes] == ["none", "draft_model"] and trace.lanes[1].options["k"] == 2
    assert [lane.k for lane in add_pair(ModelRef("stories")).lanes] == [0, 0]  # chosen from the measured passes
    for changes, k in (({"target": "code"}, 0), ({"target": "code", "k": 6}, 6), ({"target": "stories"}, 4)):
        assert load_presets()["embedded-draft"].with_changes(**changes).lanes[0].k == k
    assert main(["run"]) == 2
    assert "or name a model: --target MODEL" in capsys.readouterr().err


def test_the_kind_of_work_is_that_of_a_task_or_of_the_presets_own_prompt():
    add_pair(ModelRef("code"))
    tasks = {task(name, chat): kind for name, (kind, _) in TASKS.items() for chat in (True, False)}
    assert {prompt: kind_of_work(OWN, prompt) for prompt in tasks} == tasks
    assert kind_of_work("embedded-code", load_presets()["embedded-code"].prompt) == "code"
    assert kind_of_work("embedded-code", "def mine():") == kind_of_work("unknown", "def mine():") == ""
