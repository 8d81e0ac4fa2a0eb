"""The weekly check of the presets against a hub on the loopback interface."""

import check_presets
import pytest
from check_presets import answers

from specdemo.presets.files import Preset
from tests.models.fake_hub import SHA, serve

MODEL = {"config.json": b"{}", "model.safetensors": b"x" * 3000}
RIGHT = {"cardData": {"license": "apache-2.0"}, "gated": False}


def preset(**settings):
    lane = {"method": "draft_model", "model": "org/draft@v1"}
    usual = {"target": "org/target", "lanes": [lane], "prompt": "x", "title": "x", "licence": "Apache 2.0"}
    return Preset.build({"id": "mine", **usual, "memory_gb": 1, **settings})


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serve({"org/target": dict(MODEL), "org/draft": dict(MODEL)}, monkeypatch, tmp_path) as served:
        served.cards = {name: dict(RIGHT) for name in served.repositories}
        yield served


def wrong(*presets):
    return {answer.name: list(answer.wrong) for answer in answers(presets) if answer.wrong}


def test_valid_presets_are_one_line_and_nothing_is_fetched(hub):
    hub.repositories["org/draft"] = {"config.json": b"{}", "medusa_lm_head.pt": b"x" * 60_000_000}
    lines = [str(answer) for answer in answers([preset(memory_gb=0.1), preset(id="same", memory_gb=0.1)])]
    assert lines == [
        f"ok     org/target: 0.0 GB, licence apache-2.0, open, at {SHA[:8]}",
        f"ok     org/draft@v1: 0.1 GB, licence apache-2.0, open, at {SHA[:8]}",
    ]
    assert not hub.requests


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda hub: hub.repositories.pop("org/target"), "unknown model 'org/target'"),
        (
            lambda hub: hub.gated.add("org/target"),
            "org/target is gated; accept its licence on huggingface.co/org/target",
        ),
        (lambda hub: hub.repositories["org/target"].pop("config.json"), "has no config.json"),
        (lambda hub: hub.repositories["org/target"].pop("model.safetensors"), "has no weights"),
        (lambda hub: hub.repositories["org/target"].update({"model.safetensors": b""}), "model.safetensors is empty"),
        (lambda hub: hub.cards["org/target"].update(gated="auto"), "is gated, which mine does not state"),
        (
            lambda hub: hub.cards["org/target"].update(cardData={"license": "mit"}),
            "has licence 'mit', but mine states 'Apache 2.0'",
        ),
    ],
)
def test_each_thing_that_is_wrong_is_named(hub, change, message):
    change(hub)
    found = wrong(preset())
    assert list(found) == ["org/target"] and found["org/target"][0].startswith(message)


def test_a_pin_that_is_gone_is_named(hub):
    gone = preset(lanes=[{"method": "draft_model", "model": "org/draft@v9"}])
    assert "org/draft has no revision 'v9'" in wrong(gone)["org/draft@v9"][0]


def test_licence_and_gate_of_a_preset_are_the_targets(hub):
    hub.cards["org/draft"] = {"cardData": {"license": "gemma"}, "gated": False}
    assert not wrong(preset())
    assert wrong(preset(gated=True)) == {"org/target": ["is open, but mine states that it is gated"]}
    hub.cards["org/target"] = {"cardData": {"license": "llama3.1"}, "gated": "manual"}
    assert not wrong(preset(gated=True, licence="Llama 3.1 Community License"))
    hub.cards["org/target"] = {"cardData": {"license": "other"}, "gated": "manual"}
    assert not wrong(preset(gated=True, licence="words of its own"))


def test_weights_that_do_not_fit_the_stated_memory_are_named(hub):
    small = preset(memory_gb=5e-6)
    assert wrong(small) == {"preset mine": ["weights of 0.0 GB"]}
    assert not wrong(small.changed(quantization="4bit"))
    hub.numbers = {"org/target": 750}  # stored in fp32 and loaded at half the size
    assert not wrong(small)


def test_the_script_ends_with_1_where_something_is_wrong(hub, monkeypatch, capsys):
    monkeypatch.setattr(check_presets, "load_presets", lambda: {"mine": preset()})
    assert check_presets.main() == 0
    assert capsys.readouterr().out.endswith("all 2 are as the presets state\n")
    hub.repositories.pop("org/draft")
    assert check_presets.main() == 1
    out = capsys.readouterr().out
    assert "WRONG  org/draft@v1: unknown model" in out and out.endswith("1 of 2 are wrong\n")


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "HF_HUB_OFFLINE",
            True,
            "HF_HUB_OFFLINE is set, but the check needs the hub",
        ),
        ("ENDPOINT", "http://127.0.0.1:1", "http://127.0.0.1:1 cannot be reached; try again later"),
    ],
)
def test_unreachable_hub_is_one_line(hub, monkeypatch, capsys, name, value, line):
    monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    assert check_presets.main() == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1 and printed[0].startswith(line)


def test_quantisations_are_checked(hub):
    hub.repositories["org/m-GGUF"] = {"m-Q4_K_M.gguf": b"x" * 60_000_000, "m-Q8_0.gguf": b"x"}
    hub.cards["org/m-GGUF"] = dict(RIGHT)
    small = {"lanes": [{"method": "ngram"}], "memory_gb": 0.05}
    four, five = (preset(target=f"org/m-GGUF:{q}", **small) for q in ("Q4_K_M", "Q5_K_M"))
    assert wrong(four) == {"preset mine": ["weights of 0.1 GB"]} and not wrong(four.changed(memory_gb=0.1))
    (reason,) = wrong(five)["org/m-GGUF:Q5_K_M"]
    assert reason.startswith("org/m-GGUF has no Q5_K_M; choose one of m-Q4_K_M.gguf")
