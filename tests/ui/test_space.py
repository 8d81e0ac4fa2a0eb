"""A public page, a ZeroGPU, and the page where no GPU is available."""

import json
import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gradio as gr
import httpx
import pytest
import torch
import yaml

from specdemo.bench.suites import Sweep
from specdemo.presets import limits
from specdemo.presets.files import load_presets, preset, recorded
from specdemo.ui import race, setup, space, sweep
from specdemo.ui.page import build
from specdemo.ui.race import Log, Races, replayed
from specdemo.ui.setup import changed
from tests import processes
from tests.traces import hostile_trace
from tests.ui.stand_ins import lines

ZERO_GPU = """
import json, os, sys
import torch
from specdemo.presets.files import preset
from specdemo.ui import space
from specdemo.ui.page import preload
from specdemo.ui.race import Log
from tests.processes import measure_briefly
from tests.ui.stand_ins import sync

measure_briefly()
space.FORK_S = 30.0  # so that a slow machine reaches the end
chosen = preset("embedded-draft").with_changes(max_new_tokens=12)
preload([chosen])
assert space.zero_gpu() and not torch.cuda.is_initialized()
done, stopped, refused = (Log(spec=one) for one in (chosen, chosen.with_changes(max_new_tokens=400), chosen))
outputs = list(sync(done.follow()))

running = sync(stopped.follow())
while '"step"' not in next(running):
    pass
stopped.stop()
list(running)

os.environ["QUOTA"] = "8"
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
    stages = [line.get("name", line.get("text")) for line in messages if line["type"] in ("stage", "loading")]
    assert stages[:3] == ["loading", "models ready", "measuring passes"]  # loaded before the fork
    assert lines(stopped)[-1] == {"type": "end", "finish": "cancelled", "comparison": []}
    reason = "no GPU for this run: You have exceeded your GPU quota (34s requested vs. 8s left)"
    assert lines(refused)[1:] == [{"type": "error", "text": reason}] and compared == reason


def test_no_quota_without_zero_gpu(monkeypatch):
    monkeypatch.syspath_prepend("tests/ui/zero_gpu")
    monkeypatch.delenv("SPACES_ZERO_GPU", raising=False)
    assert space.on_zero_gpu(lambda: 1)(build) is build
    assert not space.zero_gpu()


@pytest.fixture(params=[("RTX PRO 6000 Blackwell Server Edition", 1.5), ("H200", 1.0)])
def zero_gpu(request, monkeypatch):
    """The client of ZeroGPU next to each of its GPUs, the weights of a Space, and a scheduler with a quota."""
    client = pytest.importorskip("spaces.zero.client")
    model, factor = request.param
    monkeypatch.setenv("SPACES_ZERO_GPU", "1")
    monkeypatch.setattr(client.config, "_read_gpu_information", lambda: f"Model: \t NVIDIA {model}")
    monkeypatch.setattr(client.config, "get_config", client.config.get_config.__wrapped__)
    monkeypatch.setattr(client.utils, "self_cgroup_device_path", lambda: "/")
    weights = [("Qwen/Qwen3-8B", 16_400_000_000), ("Qwen/Qwen3-0.6B", 1_200_000_000), ("in 4 bits", 6_000_000_000)]
    monkeypatch.setattr(space, "session", lambda: SimpleNamespace(loaded=lambda: weights))
    return SimpleNamespace(client=client, factor=factor, scheduler=partial(Scheduler, client, monkeypatch))


class Scheduler:
    """Lends a GPU to a visitor without an account for as long as a day's quota has what a call asks for."""

    def __init__(self, client, monkeypatch):
        self.left, self._client = space.DAY_S, client
        service = client.APIClient(
            httpx.Client(base_url="http://scheduler", transport=httpx.MockTransport(self._answer))
        )
        monkeypatch.setattr(client, "api_client", lambda: service)

    def _answer(self, request):
        asked = int(request.url.params["durationSeconds"])
        if asked > self.left:
            return httpx.Response(429, json={"left": self.left, "wait": 3600})
        self.left -= asked
        return httpx.Response(200, json={"idle": False, "nvidiaIndex": 0, "nvidiaUUID": "gpu", "allowToken": "token"})

    def run(self, spec):
        self._client.schedule(task_id=1, duration=timedelta(seconds=space.seconds(spec)))


def large(**changes):
    return load_presets()["qwen3-8b"].model_copy(update=changes)


@pytest.mark.parametrize("spec", [preset("embedded-draft"), large()], ids=["embedded", "qwen3-8b"])
def test_the_scheduler_is_asked_for_what_a_run_needs(zero_gpu, spec):
    asked = zero_gpu.client.get_duration_seconds(timedelta(seconds=space.seconds(spec)), None)
    assert space.needed_s(spec) <= asked < space.needed_s(spec) + zero_gpu.factor
    assert asked < 50  # two visits of a large race


def test_a_run_and_its_repeat_fit_into_a_day_without_an_account(zero_gpu):
    runs, scheduler = space.pooled_runs(large()), zero_gpu.scheduler()
    assert 1 < runs < space.POOLED == space.pooled_runs(preset("embedded-draft"))
    scheduler.run(large())
    with pytest.raises(gr.Error, match="GPU limit"):
        scheduler.run(large(repeats=runs + 1))
    scheduler.run(large(repeats=runs))


def test_the_page_says_before_a_run_what_it_asks_for(zero_gpu):
    def line(spec):
        return setup.show_setup(None, setup.to_values(spec))["about"].partition("A run asks ")[2]

    assert line(large()) == "for 46 s of GPU time; a day has 120 s without an account, so a repeat makes 2 runs."
    documented = " ".join(Path("docs/deploy.md").read_text(encoding="utf-8").split())
    assert "A race of Qwen3 8B with two drafters and 256 tokens asks for 46 s, " in documented
    slow = large(lanes=[lane.model_copy(update={"k": 10}) for lane in 2 * large().lanes[:1]])
    assert line(slow).endswith("so a repeat does not fit.")
    with pytest.raises(ValueError, match="a repeat does not fit into 120 s of GPU time"):
        space.pooled_runs(slow)
    with pytest.raises(ValueError, match="needs up to [0-9]+ s of GPU time, and this page lends 120 s; choose fewer"):
        space.seconds(slow.model_copy(update={"repeats": 3}))


def test_a_draft_length_and_a_method_that_are_chosen_during_a_run_are_predicted_as_long_ones(zero_gpu):
    def needed(**changes):
        return space.needed_s(large(lanes=[large().lanes[0].model_copy(update=changes)]))

    assert needed(k=4) < needed(k=0) == needed(k=limits.PUBLIC.k)
    assert needed(method="ngram", model=None) < needed(method="router") == needed()


def test_a_run_ends_before_the_gpu_is_taken_away_whatever_the_weights_took(zero_gpu, monkeypatch):
    monkeypatch.setattr(space, "_waits", True)
    monkeypatch.setattr(space.psutil, "Process", lambda: SimpleNamespace(create_time=lambda: space.time.time() - 9.0))
    first, later = space.left_s(large()), space.left_s(large())
    assert later == pytest.approx(first + 9.0, abs=1.0) and later == space.needed_s(large()) - space.BACK_S


@pytest.fixture
def public(monkeypatch):
    monkeypatch.setenv("SPECDEMO_PUBLIC", "1")
    return Races(limits.fit(preset("embedded-draft")), False)


def raced(changes):
    return changed("embedded-draft", changes, not limits.public())


def swept(changes):
    return sweep.admit(Sweep().changed(**changes))


@pytest.mark.parametrize(
    "ask, changes, line",
    [
        (raced, {"target": "meta-llama/Llama-3.1-8B-Instruct"}, "is not available on this public page"),
        (raced, {"target": "someone/else"}, "is not on this page's list"),
        (raced, {"max_new_tokens": 257}, "256 new tokens at most, not 257; for more, duplicate this Space"),
        (raced, {"lanes": [{"method": "ngram"}] * 3}, "3 lanes at most, not 4"),
        (raced, {"k": 11}, "10 draft tokens at most"),
        (raced, {"lanes": [{"method": "lookahead", "options": {"nodes": 65}}]}, "64 draft tree nodes at most, not 65"),
        (raced, {"prompt": "word " * 1000}, "4000 prompt characters at most"),
        (swept, {"preset": "llama-3.1-8b"}, "is not available on this public page"),
        (swept, {"new_tokens": 512}, "256 new tokens at most, not 512"),
        (swept, {"repeats": 4}, "3 repeats at most, not 4"),
    ],
)
def test_a_public_page_runs_and_sweeps_listed_models_within_limits(public, monkeypatch, ask, changes, line):
    assert ask({})
    with pytest.raises(ValueError, match=line):
        ask(changes)
    monkeypatch.delenv("SPECDEMO_PUBLIC")
    assert ask(changes)


def test_a_public_page_offers_every_preset_within_its_limits(public):
    for chosen in load_presets().values():
        if chosen in limits.at_hand():
            assert limits.admit(limits.fit(chosen))
    with pytest.raises(ValueError, match="remove --allow-any-model"):
        build(allow_any_model=True)


def test_a_link_never_runs_anything_and_is_cut_to_what_is_public(public, monkeypatch):
    monkeypatch.setattr(race, "session", None)
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
    monkeypatch.setattr(space, "best_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(race, "session", None)
    text = Log().add(race.run(load_presets()["qwen3-8b"], lambda: False, print))
    assert lines(text)[1:] == [{"type": "error", "text": "Qwen/Qwen3-8B needs a GPU and this machine has none"}]


class Engine:
    def stream(self, spec, cancelled, loading):
        raise ValueError("Qwen/Qwen3-8B needs 18.0 GB in float32, 2.0 GB are free on cpu; choose a smaller model")
        yield


def test_no_recorded_run_stands_in_for_one_that_fails(monkeypatch):
    monkeypatch.setattr(space, "best_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(race, "session", Engine)
    chosen = load_presets()["smollm2-chat"]
    assert recorded(chosen.id)
    log = Log(before=replayed(hostile_trace()))
    first, error = lines(log.add(race.run(chosen, lambda: False, print)))
    assert not first["recorded"] and error["type"] == "error" and "needs 18.0 GB" in error["text"]
    assert log.trace == hostile_trace()  # the chat can continue


def test_the_settings_make_a_space():
    front = yaml.safe_load(Path("docs/space.yaml").read_text(encoding="utf-8"))
    assert front["sdk"] == "gradio" and Path(front["app_file"]).is_file()
    assert f"gradio=={front['sdk_version']}" in Path("requirements.txt").read_text(encoding="utf-8").split()
    assert tuple(front["preload_from_hub"]) == limits.preloaded() == tuple(front["models"])
    assert any(not p.embedded for p in limits.at_hand())  # the downloaded models complete a preset
    assert len(front["short_description"]) <= 60
