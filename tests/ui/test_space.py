"""A public page, a ZeroGPU, and the page where no GPU is available."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from specdemo.bench.suites import Sweep
from specdemo.presets import limits
from specdemo.presets.files import load_presets, preset
from specdemo.presets.recorded import recorded
from specdemo.ui import live, space, sweep
from specdemo.ui.page import build
from specdemo.ui.race import Log, Visits, replayed
from specdemo.ui.setup import changed
from tests import processes
from tests.traces import hostile_trace
from tests.ui.stand_ins import lines

ZERO_GPU = """
import json, os, sys
import torch
from specdemo.presets.files import preset
from specdemo.ui import live
from specdemo.ui.race import Log
from tests.ui.stand_ins import sync

chosen = preset("embedded-draft").with_changes(max_new_tokens=12)
live.preload([chosen])
assert live.ELSEWHERE and not torch.cuda.is_initialized()
done, stopped, refused = (Log(spec=one) for one in (chosen, chosen.with_changes(max_new_tokens=400), chosen))
outputs = list(sync(done.follow()))

running = sync(stopped.follow())
while '"step"' not in next(running):
    pass
stopped.stop()
list(running)

os.environ["REFUSED"] = "You have exceeded your GPU quota (13s requested vs. 0s left)"
list(sync(refused.follow()))
try:
    refused.result()
except ValueError as error:
    compared = str(error)
json.dump([outputs[-1], done.trace.comparison[0], stopped.text, refused.text, compared], sys.stdout)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="GPUs are lent on Linux, to forked processes")
def test_zero_gpu_runs_in_a_forked_process():
    paths = os.pathsep.join(["tests/ui/zero_gpu", "."])
    settings = os.environ | {"SPACES_ZERO_GPU": "1", "SPACE_ID": "someone/specdemo", "PYTHONPATH": paths}
    ran = processes.run("-c", ZERO_GPU, env=settings, timeout=120)
    assert ran.returncode == 0, ran.stderr
    text, comparison, stopped, refused, compared = json.loads(ran.stdout)
    messages = lines(text)
    assert messages[-1]["type"] == "end" and comparison["verdict"] == "identical"
    assert [line["text"] for line in messages if line["type"] == "loading"] == [
        "models ready"
    ]  # loaded before the fork
    assert lines(stopped)[-1] == {"type": "end", "finish": "cancelled", "comparison": []}
    reason = "no GPU for this run: You have exceeded your GPU quota (13s requested vs. 0s left)"
    assert lines(refused)[1:] == [{"type": "error", "text": reason}] and compared == reason


def test_no_quota_without_zero_gpu(monkeypatch):
    monkeypatch.syspath_prepend("tests/ui/zero_gpu")
    monkeypatch.delenv("SPACES_ZERO_GPU", raising=False)
    assert space.on_zero_gpu(lambda: 1)(build) is build
    assert not space.zero_gpu() and not live.ELSEWHERE


def test_duration_estimate_grows_and_stays_below_the_quota():
    short, long = (preset("embedded-draft").with_changes(max_new_tokens=n) for n in (32, 1024))
    assert space.seconds(short) < space.seconds(long) < space.LEND_S
    large = load_presets()["qwen3-8b"]
    assert space.seconds(long) < space.seconds(large) <= space.LEND_S


@pytest.fixture
def public(monkeypatch):
    monkeypatch.setenv("SPECDEMO_PUBLIC", "1")
    return Visits(limits.fit(preset("embedded-draft")), False)


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"target": "meta-llama/Llama-3.1-8B-Instruct"}, "is not available on this public page"),
        ({"target": "someone/else"}, "is not on this page's list"),
        ({"max_new_tokens": 257}, "256 new tokens at most, not 257; for more, duplicate this Space"),
        ({"lanes": [{"method": "ngram"}] * 3}, "3 lanes at most, not 4"),
        ({"k": 11}, "10 draft tokens at most"),
        ({"lanes": [{"method": "lookahead", "options": {"nodes": 65}}]}, "64 draft tree nodes at most, not 65"),
        ({"prompt": "word " * 1000}, "4000 prompt characters at most"),
    ],
)
def test_a_public_page_runs_listed_models_and_short_runs(public, monkeypatch, changes, line):
    with pytest.raises(ValueError, match=line):
        changed("embedded-draft", changes, False)
    monkeypatch.delenv("SPECDEMO_PUBLIC")
    assert changed("embedded-draft", changes, True)


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"preset": "llama-3.1-8b"}, "is not available on this public page"),
        ({"new_tokens": 512}, "256 new tokens at most, not 512"),
        ({"repeats": 4}, "3 repeats at most, not 4"),
    ],
)
def test_a_public_page_sweeps_listed_models_and_few_repeats(public, monkeypatch, changes, line):
    assert sweep.admit(Sweep())
    with pytest.raises(ValueError, match=line):
        sweep.admit(Sweep().changed(**changes))
    monkeypatch.delenv("SPECDEMO_PUBLIC")
    assert sweep.admit(Sweep().changed(**changes))


def test_a_public_page_offers_every_preset_within_its_limits(public):
    for chosen in load_presets().values():
        if chosen in limits.at_hand():
            assert limits.admit(limits.fit(chosen))
    with pytest.raises(ValueError, match="remove --allow-any-model"):
        build(allow_any_model=True)


def test_a_link_never_runs_anything_and_is_cut_to_what_is_public(public, monkeypatch):
    monkeypatch.setattr(live, "session", None)
    query = {"preset": "embedded-draft", "max_new_tokens": "1024", "run": "1", "go": "1"}
    request = SimpleNamespace(session_hash="a", query_params=query)
    chosen, refused = public.read_query(request.query_params)
    assert chosen.max_new_tokens == limits.PUBLIC.max_new_tokens
    assert [note.partition(";")[0] for note in refused] == [
        "ignored unknown setting 'run' from the link",
        "ignored unknown setting 'go' from the link",
        "the link exceeds the limits of this public page",
    ]


def test_a_public_page_without_a_gpu_says_why_there_is_no_run(public, monkeypatch):
    monkeypatch.setattr(live, "best_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(live, "session", None)
    text = Log().add(live.run(load_presets()["qwen3-8b"], lambda: False, print))
    assert lines(text)[1:] == [{"type": "error", "text": "Qwen/Qwen3-8B needs a GPU and this machine has none"}]


class Engine:
    def stream(self, spec, cancelled, loading):
        raise ValueError("Qwen/Qwen3-8B needs 18.0 GB in float32, 2.0 GB are free on cpu; choose a smaller model")
        yield


def test_no_recorded_run_stands_in_for_one_that_fails(monkeypatch):
    monkeypatch.setattr(live, "best_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(live, "session", Engine)
    chosen = load_presets()["smollm2-chat"]
    assert recorded(chosen.id)
    log = Log(before=replayed(hostile_trace()))
    first, error = lines(log.add(live.run(chosen, lambda: False, print)))
    assert not first["recorded"] and error["type"] == "error" and "needs 18.0 GB" in error["text"]
    assert log.trace == hostile_trace()  # the chat can continue


def test_the_settings_make_a_space():
    front = yaml.safe_load(Path("docs/space.yaml").read_text(encoding="utf-8"))
    assert front["sdk"] == "gradio" and Path(front["app_file"]).is_file()
    assert f"gradio=={front['sdk_version']}" in Path("requirements.txt").read_text(encoding="utf-8").split()
    assert tuple(front["preload_from_hub"]) == limits.preloaded() == tuple(front["models"])
    assert any(not p.embedded for p in limits.at_hand())  # the downloaded models complete a preset
    assert len(front["short_description"]) <= 60
