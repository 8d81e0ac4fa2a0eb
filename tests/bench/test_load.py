"""`bench load`: the draft length that pays at each load, from recorded results (tests/analysis/samples)."""

import json
from pathlib import Path

import pytest

from specdemo.__main__ import main
from specdemo.bench.plot import chart
from specdemo.bench.suites import suite
from specdemo.bench.suites.load import load_points
from specdemo.engine.loop import never_cancelled

CLOSE = "no clear gain, serve without speculation or measure more requests"
SAMPLES = Path(__file__).parents[1] / "analysis" / "samples"


def report(share, what, so_far=None, /):
    """Take the progress of a suite."""


def loads(plain, speculative):
    result = suite("load", plain=plain, speculative=speculative).run(report, never_cancelled)
    return result, [remark for remark in result.remarks if ": " in remark and remark[0].isdigit()]


def vllm(*names):
    return [SAMPLES / f"vllm-cpu-{name}.json" for name in names]


@pytest.fixture
def guidellm(tmp_path):
    """Return a function that writes a GuideLLM report with one benchmark per number of concurrent requests."""

    def write(name, seconds, k=0, spread=None, strategy=None):
        data = json.loads((SAMPLES / "guidellm.json").read_text(encoding="utf-8"))
        (one,) = data["benchmarks"]
        found = []
        for streams, latency in seconds.items():
            made = json.loads(json.dumps(one))
            made["config"]["strategy"] = strategy or {"type_": "concurrent", "streams": streams}
            made["metrics"]["request_latency"]["successful"] = {"mean": latency} | (
                {"std_dev": spread * latency} if spread else {}
            )
            made["metrics"]["request_totals"]["successful"] = 64
            drafts = made["requests"]["successful"][0]["response_metrics"]
            drafts["speculative_decoding"]["num_spec_tokens"] = k
            made["requests"] = made["requests"] if k else {}
            found.append(made)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(data | {"benchmarks": found}), encoding="utf-8")
        return path

    return write


def test_results_of_vllm_bench_serve_name_the_draft_length_of_each_load():
    result, lines = loads(vllm("good-plain", "batch16-plain"), vllm("good", "long", "batch16"))
    assert lines == [
        "1 concurrent: k = 4 pays, 2.09x, 1.66 to 2.64.",
        "16 concurrent: none pays, turn speculation off; k = 4 is 0.77x, 0.71 to 0.84.",
    ]
    lane = next(row for row in result.rows if row["lane"] == "k = 4" and row["load"] == 16)
    assert lane["speed-up"].value == pytest.approx(169.96 / 230.98, rel=0.06)
    assert lane["tokens/pass"] == pytest.approx(3.0714, rel=1e-4)
    assert len(chart(result)["lines"]) == 3


@pytest.mark.parametrize(
    ("seconds", "spread", "verdict"),
    [
        ({3: 10.0, 5: 12.0}, 0.1, "k = 3 pays, 2.00x, 1.93 to 2.07"),
        ({3: 25.0, 5: 30.0}, 0.1, "none pays, turn speculation off; k = 3 is 0.80x, 0.77 to 0.83"),
        ({3: 19.8, 5: 30.0}, 0.1, f"{CLOSE}; k = 3 is 1.01x, 0.98 to 1.05"),
        ({3: 10.0, 5: 12.0}, None, "unknown, the results have no spread over requests; k = 3 is 2.00x"),
    ],
)  # fmt: skip
def test_reports_of_guidellm_with_and_without_a_spread(guidellm, seconds, spread, verdict):
    plain = guidellm("plain", {4: 20.0}, spread=spread)
    drafting = [guidellm(f"k{k}", {4: latency}, k, spread) for k, latency in seconds.items()]
    _, lines = loads([plain], drafting)
    assert lines == [f"4 concurrent: {verdict}."]


def test_loads_are_compared_only_with_the_same_load(guidellm):
    plain = guidellm("plain", {1: 10.0, 4: 20.0}, spread=0.1)
    rates = {"type_": "constant", "rate": 4.0}
    _, lines = loads([plain], [guidellm("k3", {1: 5.0}, 3, 0.1), guidellm("rate", {4: 5.0}, 3, 0.1, rates)])
    assert [line.partition(",")[0] for line in lines] == [
        "1 concurrent: k = 3 pays",
        "4 concurrent: unknown",
        "4 requests/s: unknown",
    ]


def test_an_unknown_draft_length_is_named_by_its_file(tmp_path):
    data = json.loads((SAMPLES / "vllm-cpu-good.json").read_text(encoding="utf-8"))
    data = {name: value for name, value in data.items() if "per_position" not in name}
    path = tmp_path / "eagle.json"
    path.write_text(json.dumps(data | {"dataset_name": "random", "model_id": "other"}), encoding="utf-8")
    result, lines = loads(vllm("good-plain"), [path])
    assert lines[0].startswith("1 concurrent: eagle.json pays, 2.09x")
    assert "The results are of different models: target, other." in result.remarks
    assert any(remark.startswith("Random prompts") for remark in result.remarks)


def test_wrong_files_are_one_line(tmp_path, capsys):
    good, plain = map(str, vllm("good", "good-plain"))
    assert main(["bench", "load", "--plain", plain]) == 2
    assert "give --plain FILE and --speculative FILE" in capsys.readouterr().err
    assert main(["bench", "load", "--plain", good, "--speculative", good]) == 2
    assert "vllm-cpu-good.json was measured with speculation; give one without it as --plain" in capsys.readouterr().err
    for name, text in (("log.json", "{}"), ("text", "no JSON"), ("deep.json", "[" * 100)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert main(["bench", "load", "--plain", str(tmp_path / name), "--speculative", good]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert name in line
    with pytest.raises(ValueError, match="is no result of `vllm bench serve --save-result` or GuideLLM"):
        load_points(SAMPLES / "vllm-answer.json")


def test_the_command_writes_a_result(tmp_path, capsys):
    plain, good = map(str, vllm("good-plain", "good"))
    out = tmp_path / "load.json"
    html = str(tmp_path / "load.html")
    assert main(["bench", "load", "--plain", plain, "--speculative", good, "--out", str(out), "--html", html]) == 0
    printed = capsys.readouterr().out
    assert "k = 4 pays, 2.09x" in printed and "repeats are needed" not in printed
    assert json.loads(out.read_text(encoding="utf-8"))["config"]["plain"] == ["vllm-cpu-good-plain.json"]
