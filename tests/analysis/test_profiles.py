"""Device profiles: the contents of a file, and the shipped ones."""

import json
import subprocess
import sys

import pytest

from specdemo.__main__ import main
from specdemo.analysis.profiles import Profile, profile, profiles, read_profile, write_profile

ONE = {"value": 1.5, "source": "a test"}
LEAST = {
    "name": "a-card",
    "title": "A card",
    "kind": "gpu",
    "memory_gb": ONE,
    "bandwidth_gb_per_s": ONE,
    "compute_tflop_per_s": {"bfloat16": ONE},
}
PASSES = {"model": "llama-1b", "dtype": "bfloat16", "kernels": "fused", "context": 64, "ms": {1: {1: 2.0, 4: 3.0}}}


def test_a_profile_is_read_as_it_was_written(tmp_path):
    made = Profile.model_validate(LEAST | {"passes": [PASSES], "steps": [], "launch_us": ONE})
    write_profile(made, tmp_path / "a.json")
    assert read_profile(tmp_path / "a.json") == made == profile(str(tmp_path / "a.json"))
    assert made.passes[0].v(1) == {1: 1.0, 4: 1.5}


@pytest.mark.parametrize(
    "change, line",
    [
        ({"bandwidth_gb_per_s": {"value": 1.0}}, "bandwidth_gb_per_s.source: Field required"),
        ({"bandwidth_gb_per_s": {"value": 0.0, "source": "x"}}, "bandwidth_gb_per_s.value: Input should be greater"),
        ({"bandwith": ONE}, "bandwith: Extra inputs are not permitted"),
        ({"name": "A card"}, "name: String should match pattern"),
        ({"passes": [PASSES | {"ms": {"0": {"1": 1.0}}}]}, "passes.0.ms.0"),
    ],
)
def test_invalid_profiles(tmp_path, change, line):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(LEAST | change))
    with pytest.raises(ValueError) as refused:
        read_profile(path)
    assert str(refused.value).startswith(f"{path} is not a profile: {line}")
    assert "\n" not in str(refused.value)


def test_an_unknown_device_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="unknown device 'h100-sx'; did you mean 'h100-sxm'"):
        profile("h100-sx")


def test_every_number_that_ships_has_a_source_and_no_torch_is_needed():
    script = "from specdemo.analysis.profiles import profiles as p; import sys; print(len(p()), 'torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert int(printed[0]) >= 12 and printed[1] == "False"
    for name, one in profiles().items():
        assert one.name == name
        assert one.measured or "datasheet" in one.bandwidth_gb_per_s.source


@pytest.mark.parametrize("value", [1e-308, 1e-7, 1e10, 1e308, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["memory_gb", "bandwidth_gb_per_s", "launch_us"])
def test_figures_that_no_device_has_are_refused(tmp_path, capsys, name, value):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(LEAST | {name: {"value": value, "source": "a test"}}))
    assert main(["predict", "stories", "--device", str(path), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and f"{path} is not a profile: {name}.value: Input should be" in err


def test_a_profile_is_bounded_before_it_is_parsed(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(LEAST | {"title": "x" * 300_000}))
    monkeypatch.setattr(Profile, "model_validate_json", None)
    with pytest.raises(ValueError, match="bytes; the limit is 200,000"):
        read_profile(path)
