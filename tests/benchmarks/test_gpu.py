"""`bench gpu`: every section on a CPU with tiny shapes; resumed, failed and interrupted calls."""

import json
from math import log

import pytest
import torch

from benchmarks.gpu import run
from benchmarks.gpu.lab import Absent, Found, Lab, Synthetic, measure_steps
from benchmarks.gpu.sections import METHODS, PLANS, Section, plain, sections
from specdemo.analysis.predict import predict
from specdemo.core.accept import Lossless
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.tree import ABSENT, Draft
from specdemo.costs.profiles import read_profile
from specdemo.methods import load_drafter
from tests import processes

CPU = torch.device("cpu")
WITHOUT_A_PAGE = f"""
{processes.block("gradio", "gradio_client")}
from specdemo.__main__ import main
from tests.processes import measure_briefly
measure_briefly()
code = main(sys.argv[1:])
print("page:", sorted(m for m in sys.modules if m.startswith("specdemo.ui")))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Measure all sections except the GPU tests, whose result is taken from an earlier call."""
    folder = tmp_path_factory.mktemp("gpu")
    lab = Lab(CPU, 1)
    entry = run._entry(sections(lab)["tests"], lab, "done", 1) | {"rows": [], "remarks": ["by an earlier call"]}
    run._write(folder, {"tests": entry}, lab)
    arguments = ["bench", "gpu", "--device", "cpu", "--repeats", "1", "--out", str(folder)]
    done = processes.run("-W", "error::UserWarning", "-c", WITHOUT_A_PAGE, *arguments)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_every_section_runs_without_gradio(measured):
    folder, printed = measured
    kept = json.loads((folder / "results.json").read_text())["sections"]
    assert {*kept} == {*sections(Lab(CPU, 1))}
    assert {name: found.get("error") for name, found in kept.items() if found["state"] != "done"} == {}
    assert all(found["rows"] for name, found in kept.items() if name != "tests")
    assert kept["tests"]["remarks"] == ["by an earlier call"]
    assert "page: ['specdemo.ui', 'specdemo.ui.app']" in printed  # only for the command's options
    assert printed.count("Not a GPU measurement") == 1


def test_every_method_drafts_and_reports_its_laps(measured):
    sections = json.loads((measured[0] / "results.json").read_text())["sections"]
    rows = {
        row["method"]: row for name, found in sections.items() if name.startswith("method-") for row in found["rows"]
    }
    assert list(rows) == list(METHODS)
    for name, row in rows.items():
        assert (row["drafted/step"] > 0) == (not name.startswith("plain")), name
        laps = sum(value for column, value in row.items() if column.endswith(" ms"))
        assert row["ms/step"] == pytest.approx(laps, rel=0.02, abs=1e-3)
    assert rows["EAGLE-3 tree, 32 nodes"]["drafted/step"] == 32.0


def test_page_and_profile(measured):
    folder, _ = measured
    assert len(list(folder.iterdir())) == 3
    page = (folder / "report.md").read_text()
    assert "**Not a GPU measurement" in page
    assert "| shape | precision |" in page and "| method | shape |" in page and "transformers assisted, k=5" in page
    (file,) = folder.glob("*.profile.json")
    profile = read_profile(file)
    assert (profile.kind, profile.measured.by) == ("cpu", "python -m specdemo bench gpu")
    target, draft = profile.passes
    assert (target.model, draft.model) == ("llama-tiny", "qwen3-tiny")
    assert target.v(2)[1] == 1.0 and set(target.ms) == {1, 2} and set(target.ms[1]) == {1, 2, 4}
    steps = {step.method: step for step in profile.steps}
    assert set(steps) == {drafting.method for drafting in METHODS.values()}
    drafts = steps["draft_model"]
    assert (drafts.draft, drafts.k, drafts.drafted) == ("qwen3-tiny", 5, 5.0) and 0.0 < drafts.kept < 5.0
    assert [step.k for step in profile.steps if step.method == "eagle"] == [0, 5]  # first the tree, then the chain


def slowed(profile, times):
    """Return the profile of a machine that is `times` as slow."""

    def longer(of):
        return {name: longer(value) if isinstance(value, dict) else times * value for name, value in of.items()}

    passes = [p.model_copy(update={"ms": longer(p.ms), "uneven": longer(p.uneven)}) for p in profile.passes]
    steps = [s.model_copy(update={"ms": longer(s.ms)}) for s in profile.steps]
    return profile.model_copy(update={"passes": tuple(passes), "steps": tuple(steps)})


def test_a_prediction_reads_the_profile(measured):
    """The profile is ten times as slow, so that measured and estimated times differ clearly, also on a busy machine."""
    (file,) = measured[0].glob("*.profile.json")
    profile = slowed(read_profile(file), 10.0)
    dtype = profile.passes[0].dtype
    found, guess = (
        predict("llama-tiny", model="qwen3-tiny", device=p, dtype=dtype, acceptance=[0.7], ks=(5,)).rows[0]
        for p in (profile, profile.model_copy(update={"passes": (), "steps": ()}))
    )
    step = next(s for s in profile.steps if s.method == "draft_model")
    drafting = step.ms["draft"] + step.ms["observe"]
    assert abs(log(found.draft_ms / drafting)) < abs(log(guess.draft_ms / drafting))
    assert profile.bandwidth_gb_per_s.source == "measured by python -m specdemo bench gpu"


@pytest.fixture
def table(monkeypatch):
    """Return a list of the sections that ran, and replace the sections by ones that append to it or raise an
    exception.
    """
    ran = []

    def make(**found):
        def section(name, what):
            def once(lab):
                ran.append(name)
                if isinstance(what, BaseException):
                    raise what
                return Found([{"what": name, "is": 1.0}])

            return Section(name, 60.0, once)

        made = {name: section(name, what) for name, what in found.items()}
        monkeypatch.setattr(run, "sections", lambda lab, plan: made)
        return ran

    return make


def call(folder, minutes=100.0, now=lambda: 0.0):
    found = run.measure(folder, "cpu", minutes, 1, lambda *_: None, lambda: False, now)
    return {row["section"]: row["state"] for row in found.rows}, found.remarks


def test_call_resumes_the_last_one(tmp_path, table):
    ran = table(a=None, b=None, c=None)
    clock = iter(range(0, 1000, 2))  # two seconds pass per reading; a CPU section has five
    states, remarks = call(tmp_path, 12 / 60, lambda: next(clock))
    assert states == {"a": "done", "b": "to come", "c": "to come"}
    assert remarks[0].startswith("2 of 3 sections remain, about 2 minutes")
    states, _ = call(tmp_path)
    assert states == dict.fromkeys("abc", "done")
    assert ran == ["a", "b", "c"]
    assert {file.name for file in tmp_path.iterdir()} == {"results.json", "report.md"}


def test_plans_are_parts_of_all_sections_at_their_own_shape():
    names = {
        plan: [*sections(Lab(torch.device("meta"), 1, shape), plan)] for plan, (shape, _) in PLANS.items() if shape
    }
    assert names["first"][-1] == "presets" and "contexts-qwen3-8b" in names["first"]
    assert {"plain-qwen3-8b", "widths-qwen3-8b", "method-qwen3-8b-plain"} <= {*names["qwen"]}
    assert {"plain-llama-8b", "peers", "method-llama-8b-plain"} <= {*names["llama"]}
    assert not {name for name in names["qwen"] if name.startswith("method")} & {*names["llama"]}


def test_commit_is_an_argument(tmp_path, table):
    table(a=None)
    run.measure(tmp_path, "cpu", 1.0, 1, lambda *_: None, lambda: False, commit="abc1234")
    assert json.loads((tmp_path / "results.json").read_text())["environment"]["commit"] == "abc1234"
    assert "commit `abc1234`" in (tmp_path / "report.md").read_text()


def test_failed_section_reports_why_and_is_retried_once(tmp_path, table):
    ran = table(a=RuntimeError("CUDA error: too bad\nlong story"), b=Absent("llama-8b needs 19 GB"), c=None)
    states, _ = call(tmp_path)
    assert states == {"a": "failed", "b": "done", "c": "done"}
    page = (tmp_path / "report.md").read_text()
    assert "- failed: CUDA error: too bad\n" in page and "- Skipped: llama-8b needs 19 GB." in page
    for _ in range(2):
        assert call(tmp_path)[0] == states
    assert ran == ["a", "b", "c", "a"]


def test_a_section_that_ends_the_process_is_tried_twice(tmp_path, table):
    ran = table(a=KeyboardInterrupt(), b=None)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            call(tmp_path)
    assert call(tmp_path)[0] == {"a": "cut off", "b": "done"}
    assert ran == ["a", "a", "b"]


def test_lost_device_ends_the_measurement(tmp_path, table, monkeypatch):
    ran = table(a=RuntimeError("an illegal memory access was encountered"), b=None)
    monkeypatch.setattr(Lab, "alive", lambda lab: False)
    states, remarks = call(tmp_path)
    assert states == {"a": "failed", "b": "to come"} and ran == ["a"]
    assert remarks[0] == "The device was lost during 'a'."


def test_a_folder_is_for_one_device(tmp_path, table, monkeypatch):
    table(a=None)
    call(tmp_path)
    monkeypatch.setattr(run, "device_name", lambda device: "NVIDIA H200")
    with pytest.raises(
        ValueError, match="contains measurements of .*, this device is NVIDIA H200; choose another --out"
    ):
        call(tmp_path)


def test_synthetic_acceptance_keeps_by_the_rates():
    usual = torch.tensor([7])
    chain, logits = Draft.chain(torch.tensor([[1, 2, 3, ABSENT]])), torch.randn(1, 5, 16)
    assert Synthetic(usual, (1.0, 1.0, 0.0))(chain, logits, None).path == [[0, 1, 2]]
    verdict = Synthetic(usual, (1.0, 0.0))(chain, logits, None)
    assert (verdict.path, verdict.next_token.tolist()) == ([[0, 1]], [2])  # as if the target had predicted it
    verdict = Synthetic(usual, (1.0,))(chain, logits, None)
    assert (verdict.path, verdict.next_token.tolist()) == ([[0, 1, 2, 3]], [7])  # no further than the draft
    tree = Draft(torch.tensor([[4, 5, 6, 8]]), torch.tensor([[0, 0, 2, 1]]))
    assert Synthetic(usual, (1.0,))(tree, logits, None).path == [[0, 1, 4]]
    assert Synthetic(usual)(Draft.empty(1, CPU), logits[:, :1], None).next_token.tolist() == [7]
    rule = Synthetic(usual, (0.7, 0.5))
    sections = [len(rule(chain, logits, None).path[0]) - 1 for _ in range(4000)]
    assert sum(n >= 1 for n in sections) / 4000 == pytest.approx(0.7, abs=0.03)
    assert sum(n >= 2 for n in sections) / sum(n >= 1 for n in sections) == pytest.approx(0.5, abs=0.03)


def test_exact_rule_time_is_included(monkeypatch):
    calls = []
    rule = Lossless.__call__
    monkeypatch.setattr(Lossless, "__call__", lambda *all: (calls.append(1), rule(*all))[1])
    lab = Lab(CPU, 1)
    target = lab.target("llama-tiny", torch.float32)
    steps = measure_steps(lab, target, load_drafter("ngram", target), GenerationConfig(20, budget=Budget(3, 3)))
    assert len(calls) > 4 and steps.drafted > 0.0


def test_one_precision_that_fails_leaves_the_others(monkeypatch):
    made = Lab.model

    def model(lab, name, dtype, bits=None):
        if dtype == torch.float16:
            raise RuntimeError("no kernel image is available\nat all")
        return made(lab, name, dtype, bits)

    monkeypatch.setattr(Lab, "model", model)
    found = plain("llama-tiny", Lab(CPU, 1))
    assert [row["precision"] for row in found.rows] == ["float32", "bfloat16"]
    assert found.remarks == ["float16: no kernel image is available."]


def test_a_model_that_does_not_fit_is_left_out():
    with pytest.raises(Absent, match="llama-34b needs .* GB and .* GB are free"):
        Lab(CPU, 1).model("llama-34b", torch.float32)
