"""Mean accepted lengths from files: golden curves and results of `vllm bench serve`."""

import json

import pytest

from specdemo.__main__ import main
from specdemo.prediction.golden import read_curve, read_curves, write_golden
from specdemo.prediction.predict import predict

GOLDEN = """\
# Source: a run
_metadata:
  draft-model: some/head
some-model:
  thinking_on: {1: 1.84, 2: 2.51, 3: 3.01, 6: 3.77, 7: 3.73}
  thinking_off:
    1: 1.94
    2: 2.81
"""
SERVE = {
    "model_id": "some/target", "spec_decode_acceptance_length": 2.4, "spec_decode_num_drafts": 10,
    "spec_decode_draft_tokens": 30, "spec_decode_accepted_tokens": 14,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.4, 0.2], "ttfts": [0.1],
}  # fmt: skip


@pytest.fixture
def golden(tmp_path):
    path = tmp_path / "golden.yaml"
    path.write_text(GOLDEN, encoding="utf-8")
    return path


@pytest.fixture
def serve(tmp_path):
    path = tmp_path / "serve.json"
    path.write_text(json.dumps(SERVE), encoding="utf-8")
    return path


def test_a_golden_file_has_a_curve_per_model_and_mode(golden):
    on, off = read_curves(golden)
    assert (on.model, on.thinking, off.thinking) == ("some-model", "on", "off")
    assert on.lengths == {1: 1.84, 2: 2.51, 3: 3.01, 6: 3.77, 7: 3.73} and off.lengths == {1: 1.94, 2: 2.81}
    assert read_curve(f"{golden}:off") == off and off.title == "some-model, thinking off"
    with pytest.raises(ValueError, match="several curves .*; add :on or :off to the file"):
        read_curve(str(golden))
    with pytest.raises(ValueError, match="some-model, thinking off has no length for k = 3; choose one of 1, 2"):
        off.length(3)


def test_predictions_use_the_measured_lengths(golden):
    acceptance = read_curve(f"{golden}:on").acceptance()
    assert [acceptance.tokens(k).value for k in (1, 2, 3, 6, 7)] == [1.84, 2.51, 3.01, 3.77, 3.73]
    assert 3.01 < acceptance.tokens(4).value < acceptance.tokens(5).value < 3.77
    assert acceptance.longest == 7 and acceptance.rate(7) == pytest.approx(0.0)  # a longer draft was accepted less
    assert acceptance.rates[:2] == pytest.approx((0.84, 0.67 / 0.84))


def test_a_result_of_vllm_bench_serve_has_rates(serve):
    curve = read_curve(str(serve))
    assert curve.model == "some/target" and curve.lengths == {3: 2.4} and curve.thinking == ""
    assert curve.rates == pytest.approx((0.8, 0.5, 0.5)) and curve.acceptance().expected(3) == pytest.approx(2.4)
    serve.write_text(json.dumps({**SERVE, "spec_decode_per_position_acceptance_rates": None}), encoding="utf-8")
    assert read_curve(str(serve)).acceptance().expected(3) == pytest.approx(2.4)


@pytest.mark.parametrize(("text", "line"), [
    ("a: 1", "expected 1 to 32 curves: a model with thinking_on or thinking_off"),
    ("- 1", "expected a model with thinking_on or thinking_off"),
    ("m: {thinking_maybe: {1: 1.5}}", "unknown mode 'thinking_maybe'; expected thinking_on or thinking_off"),
    ("m: {thinking_on: {0: 1.0}}", "draft lengths must be whole numbers from 1 to 64, not '0'"),
    ("m: {thinking_on: {true: 1.0}}", "draft lengths must be whole numbers"),
    ("m: {thinking_on: {2: 3.5}}", "the length at k = 2 must be from 1 to 3, not '3.5'"),
    ("m: {thinking_on: {2: .nan}}", "the length at k = 2 must be from 1 to 3, not 'nan'"),
    ("m: {thinking_on: {}}", "expected a mean accepted length per draft length k"),
    ('{"spec_decode_acceptance_length": null}', "no spec_decode_acceptance_length: run `vllm bench serve"),
])  # fmt: skip
def test_a_bad_file_is_one_line(tmp_path, text, line):
    path = tmp_path / "odd.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as rejection:
        read_curves(path)
    assert str(rejection.value).startswith(f"odd.yaml: {line}") and "\n" not in str(rejection.value)


def test_a_written_file_is_read_again(tmp_path):
    path = tmp_path / "out.yaml"
    write_golden(path, "org/model: odd", "off", {2: 2.504, 1: 1.7}, ["two\nlines"])
    assert path.read_text(encoding="utf-8").startswith("# two lines\n")
    assert read_curve(str(path)).lengths == {1: 1.7, 2: 2.5} and read_curve(str(path)).model == "org/model: odd"


def test_predict_takes_the_file(golden, capsys):
    line = ["predict", "stories", "--method", "ngram", "--lengths"]
    assert main([*line, f"{golden}:on", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)[0]["rows"]
    assert rows[2]["k"] == 3 and rows[2]["tokens"]["value"] == pytest.approx(3.01)
    assert main([*line, f"{golden}:on", "--acceptance", "0.5"]) == 2
    assert "--lengths, --acceptance and --trace exclude each other" in capsys.readouterr().err
    assert main([*line, "missing.yaml"]) == 2 and "cannot read missing.yaml" in capsys.readouterr().err


def test_predict_without_lengths_is_unchanged():
    assert predict("stories", method="ngram", acceptance=[0.5]).rows[1].tokens.value == pytest.approx(1.75)
