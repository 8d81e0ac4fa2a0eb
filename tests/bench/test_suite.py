"""Short runs of the suites on the shipped and on random models, with a fake clock where time matters."""

import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdemo.__main__ import main
from specdemo.analysis.configs import shape
from specdemo.bench import device, sweeps
from specdemo.bench import suites as registry
from specdemo.bench.base import LaneSuite
from specdemo.bench.device import basics, passes, passes_of, step_times
from specdemo.bench.measure import (
    AxisPoint,
    Decoder,
    Totals,
    compare_lanes,
    measure_points,
    run_repeats,
    tally_row,
    windows,
)
from specdemo.bench.plot import chart
from specdemo.bench.prompts import read_questions
from specdemo.bench.random_models import random_model
from specdemo.bench.report import bench_report, markdown
from specdemo.bench.result import Result, read_result, recorded_suite, to_json
from specdemo.bench.suites import Sweep, axes, lanes, suite, suites
from specdemo.core.accept import Lossless
from specdemo.core.estimate import Estimate, RunTiming, rate
from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.core.settings import settings
from specdemo.core.trace import StepEvent
from specdemo.costs.profiles import profile
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.loop import never_cancelled
from specdemo.engine.session import Session
from specdemo.methods import load_drafter
from specdemo.models.prefix_reuse import PrefixCachedTarget
from specdemo.models.ref import ModelRef
from specdemo.models.target import HFTarget
from specdemo.models.toy import ToyTarget
from specdemo.presets.files import load_presets, preset
from specdemo.presets.link import OWN, changed_by_query

SHORT = {"new_tokens": 12, "prompts": ["Once upon a time"]}


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeps, "PROBES", 1)
        patch.setattr(sweeps, "PROBE_WIDTHS", (1,))
        yield


def silent(share, what, so_far=None):
    assert 0.0 <= share <= 1.0
    assert what


def run_suite(name, **options):
    return suite(name, **options).run(silent, never_cancelled)


def cancelled_after(calls):
    left = iter(range(calls))
    return lambda: next(left, None) is None


@pytest.fixture(scope="module")
def result():
    return run_suite("k", repeats=2, ks=(3,), preset="embedded-draft-wide", **SHORT)


@pytest.fixture(scope="module")
def swept():
    return run_suite("k", repeats=1, ks=(1, 2, 4), preset="embedded-ngram", **SHORT)


def test_a_row_per_lane_with_medians_and_quartiles(result):
    assert [row["lane"] for row in result.rows] == ["Baseline", "embedded-draft-wide"]
    for row in result.rows:
        spread = row["tokens/s"]
        assert spread.value > 0 and spread.low is spread.high is None  # two repeats give no interval
    assert result.rows[0]["speed-up"] == Estimate(1.0)
    assert result.rows[0]["tokens/pass"] == 1.0
    assert 0.0 < result.rows[1]["accepted"] <= 1.0
    assert [row["output"] for row in result.rows] == [None, "identical"]
    assert (result.repeats, result.axis) == (2, "lane")


def test_sweep_shows_predictions_next_to_measurements(swept):
    assert [(row["lane"], row["k"]) for row in swept.rows] == [
        ("Baseline", 0),
        *(("embedded-ngram", k) for k in (1, 2, 4)),
    ]
    assert swept.axis == "k"
    assert [row["predicted"] is not None for row in swept.rows] == [False, True, True, True]
    remark = swept.remarks[0]
    assert remark.startswith("embedded-ngram: cost model calibrated at k = 2; largest error ")
    assert "predicted best: " in remark


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", "contains no prompts"),
        ("{", "line 1: not a question; it has the form "),
        ('{"category": "a", "turns": []}', "line 1: not a question"),
        ('{"category": "a", "turns": ["half of a pair: \\ud800"]}', "line 1: not a question"),
        ('{"category": 1, "turns": ["x"]}', "line 1: not a question"),
        ('{"category": "a", "turns": ["x"]}\n7', "line 2: not a question"),
        ('{"category": "x", "turns": ' + "[" * 100_000, "line 1: not a question"),
        ('{"category": "x", "turns": ["' + "a" * 1_000_000 + '"]}', "line 1: a question of 1,000,000 characters"),
    ],
)
def test_a_file_of_something_else_is_one_line(tmp_path, content, line):
    path = tmp_path / "q.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError) as refused:
        read_questions(path)
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_batches_grow_and_every_row_is_decoded(monkeypatch):
    monkeypatch.setattr(axes, "BATCHES", (1, 3))
    result = run_suite("batch", repeats=1, preset="embedded-ngram", new_tokens=8)
    assert [(row["lane"], row["batch"]) for row in result.rows] == [
        ("Baseline", 1),
        ("embedded-ngram", 1),
        ("Baseline", 3),
        ("embedded-ngram", 3),
    ]
    assert [row["tokens/pass"] for row in result.rows[::2]] == [1.0, 1.0]
    assert result.rows[2]["speed-up"].value == 1.0
    assert result.remarks[0].startswith("Drafting is not clearly faster or slower at batch size 3: ")


def test_prompts_grow_as_far_as_the_context_reaches(monkeypatch):
    monkeypatch.setattr(axes, "PROMPT_LENGTHS", (16, 32, 1024))
    result = run_suite("prompt", repeats=1, preset="embedded-ngram", new_tokens=4)
    assert [row["prompt tokens"] for row in result.rows[::2]] == [16, 32]
    assert all(row["TTFT ms"].value > 0 for row in result.rows)


def test_contexts_grow_along_one_text_that_is_read_once(monkeypatch):
    monkeypatch.setattr(axes, "CONTEXTS", (32, 64, 128))
    read = []
    start = PrefixCachedTarget.start

    def counted_start(self, tokens, *rest, **more):
        forward = start(self, tokens, *rest, **more)
        read.append((tokens.shape[1], tokens.shape[1] - self.cached_tokens))
        return forward

    monkeypatch.setattr(PrefixCachedTarget, "start", counted_start)
    result = run_suite("context", repeats=1, preset="embedded-draft", new_tokens=8, longest=100)
    assert [(row["lane"], row["context"]) for row in result.rows] == [
        (lane, length) for length in (32, 64, 100) for lane in ("Baseline", "embedded-draft")
    ]
    assert "TTFT ms" not in result.rows[0] and all(row["accepted"] is not None for row in result.rows[1::2])
    assert {length for length, _ in read} == {int(n * share) for n in (100, 64, 32) for share in (1.0, 0.9, 0.8)}
    again = [new for length, new in read if length == 32]
    assert max(again) <= 8 and sum(new for _, new in read) < 3 * 100  # the target's and the drafter's texts
    assert "context of 100" in result.remarks[0] or "lain decoding is faster" in result.remarks[0]


def test_a_target_and_a_drafter_may_be_named_for_the_context(capsys, monkeypatch):
    monkeypatch.setitem(load_presets(), OWN, None)  # the preset of the named models goes with the test
    named = ["bench", "context", "--target", "stories", "--repeats", "1", "--new-tokens", "8", "--longest", "64"]
    assert main([*named, "--model", "stories-draft-wide", "--json"]) == 0
    result = read_result(capsys.readouterr().out)
    assert {row["lane"] for row in result.rows} == {"Baseline", "Draft 1.3M"} and result.config["target"] == "stories"
    assert main(["bench", "k", "--target", "stories"]) == 2
    assert main(["bench", "context", "--model", "stories-draft-wide"]) == 2
    assert capsys.readouterr().err.endswith("the drafter of a preset is part of it; name its target too (--target)\n")


@pytest.mark.parametrize(
    ("gains", "sentence"),
    [
        ([1.6, 1.2, 0.9, 0.8], "From about 1,600 tokens on, plain decoding is faster: 1.20x at 1,024, 0.90x at 2,048."),
        ([1.6, 0.9, 1.1, 0.8], "From about 2,500 tokens on, plain decoding is faster: 1.10x at 2,048, 0.80x at 4,096."),
        ([0.9, 0.8, 0.7, 0.6], "Plain decoding is faster at every length."),
        ([1.6, 1.2, 1.1, 0.99], "Drafting is not clearly faster or slower at a context of 4096: 0.99x."),
        ([1.6, 1.2, 1.1, 1.2], "Drafting is not clearly faster or slower at a context of 4096: 1.20x."),
    ],
)
def test_the_length_from_which_plain_decoding_is_faster(gains, sentence):
    rows = [
        {"lane": lane, "context": 512 * 2**place, "speed-up": Estimate(gain if lane == "x" else 1.0)}
        for place, gain in enumerate(gains)
        for lane in ("Baseline", "x")
    ]
    assert axes._crossing(rows) == sentence


def test_temperatures_grow_and_drafts_are_drawn_or_the_likeliest(monkeypatch):
    monkeypatch.setattr(axes, "TEMPERATURES", (0.0, 1.0))
    result = run_suite(
        "temperature", repeats=2, preset="embedded-draft-wide", new_tokens=24, prompts=["Once upon a time"]
    )
    name = "embedded-draft-wide"
    lanes = ["Baseline", f"{name}, drawn", f"{name}, drawn, block", f"{name}, likeliest"]
    assert [(row["lane"], row["temperature"]) for row in result.rows] == [(n, t) for t in (0.0, 1.0) for n in lanes]
    greedy, warm = ([row["tokens/pass"] for row in result.rows[at : at + 4]] for at in (0, 4))
    assert greedy[0] == warm[0] == 1.0 and greedy[1] == greedy[2] == greedy[3] > 1.0
    assert len(set(warm[1:])) > 1
    assert [line["name"] for line in chart(result)["lines"]] == lanes[1:]


def test_a_stopped_suite_keeps_its_finished_repeats():
    done, remarks = run_repeats(3, silent, cancelled_after(3), lambda repeat, tick: tick(0.5) or repeat)
    assert (done, remarks) == ([0], ["stopped after 1 of 3 repeats"])
    with pytest.raises(ValueError, match="stopped before the first repeat was complete, so nothing was measured"):
        run_repeats(3, silent, cancelled_after(1), lambda repeat, tick: tick(0.5))


def test_stopping_reaches_a_text_that_is_being_written():
    target, passes = ToyTarget(64), []
    forward = target.forward
    target.forward = lambda *given: passes.append(1) or forward(*given)
    lanes = {"plain": Decoder(load_drafter("none", target), Lossless(), GenerationConfig(60, stop_token_ids=()))}
    place = AxisPoint(1, [torch.tensor([[1, 2, 3]])])
    with pytest.raises(ValueError, match="stopped before the first repeat"):
        measure_points(target, lanes, [place], "batch", 1, silent, lambda: len(passes) >= 30, list)
    assert len(passes) == 30


STEPS = st.lists(st.tuples(st.integers(0, 6), st.floats(1.0, 40.0)), min_size=1, max_size=30)
REPEAT = st.builds(lambda steps, tokens: Totals(runs=[RunTiming(steps, tokens)]), STEPS, st.integers(1, 99))


@given(st.lists(st.tuples(REPEAT, REPEAT), min_size=1, max_size=5))
def test_the_numbers_of_a_row_lie_strictly_inside_their_intervals(repeats):
    """Interval ends are rounded like the value, so they may meet it only where the interval is narrower than the
    rounding.
    """
    plain, own = zip(*repeats, strict=True)
    row = tally_row("lane", {}, own, plain)
    for seen in (row["tokens/s"], row["speed-up"]):
        assert (seen.low is None) >= (len(repeats) < 3)
        assert seen.low is None or seen.low < seen.value < seen.high or seen.high - seen.low <= 3e-4


@pytest.mark.parametrize("name", [name for name in registry.swept() if recorded_suite(name)])
def test_recorded_numbers_lie_strictly_inside_their_intervals(name):
    for row in recorded_suite(name).rows:
        for seen in row.values():
            if isinstance(seen, Estimate) and seen.low is not None:
                assert seen.low < seen.value < seen.high or seen.low == seen.value == seen.high, row


class Throttled:
    """A throttle monitor of a GPU that is too hot in every run."""

    def __init__(self, device):
        pass

    def reasons(self):
        return ["the GPU is throttled by heat"]


def test_a_noisy_run_marks_its_result_also_once_it_is_stored(monkeypatch):
    monkeypatch.setattr("specdemo.engine.session.GpuClock", Throttled)
    result = run_suite("k", repeats=1, ks=(2,), preset="embedded-ngram", **SHORT)
    stored = read_result(to_json(result))
    assert "the GPU is throttled by heat" in stored.rows[1]["speed-up"].reasons
    for text in (bench_report(stored), markdown(stored)):
        assert (
            "Noisy machine, run again: a second run may not confirm 1 of 2 rows" in text
            and "the GPU is throttled by heat" in text
        )


def test_rows_are_reported_as_they_are_measured():
    seen = []

    def report(share, what, so_far=None):
        if so_far is not None:
            seen.append((share, so_far()))

    options = SHORT | {"prompts": ["Once upon a time", "One day"]}
    result = suite("k", repeats=2, ks=(1, 2), preset="embedded-ngram", **options).run(report, never_cancelled)
    assert [share for share, _ in seen] == [0.25, 0.5, 0.75, 1.0]
    for _, part in seen:
        assert (part.suite, part.axis, part.config) == (result.suite, result.axis, result.config)
        assert [(row["lane"], row["k"]) for row in part.rows] == [(row["lane"], row["k"]) for row in result.rows]
        assert [line["name"] for line in chart(part)["lines"]] == ["embedded-ngram"]
    assert [row["speed-up"] for row in seen[-1][1].rows] == [row["speed-up"] for row in result.rows]


def test_places_of_an_axis_are_reported_one_by_one():
    target, seen = ToyTarget(64), []
    lanes = {"plain": Decoder(load_drafter("none", target), Lossless(), GenerationConfig(4, stop_token_ids=()))}
    places = [AxisPoint(n, [torch.tensor([[1, 2, 3]] * n)]) for n in (1, 2)]

    def report(share, what, so_far=None):
        seen.extend([so_far()] if so_far else [])

    rows, _, _ = measure_points(target, lanes, places, "batch", 2, report, never_cancelled, list)
    assert [[row["batch"] for row in part] for part in seen] == [[1], [1, 2], [1, 2], [1, 2]]
    assert seen[-1] == rows


def test_a_noisy_machine_marks_every_place_on_an_axis(monkeypatch):
    monkeypatch.setattr("specdemo.bench.measure.GpuClock", Throttled)
    target = ToyTarget(64)
    plain = GenerationConfig(8, stop_token_ids=())
    lanes = {
        "plain": Decoder(load_drafter("none", target), Lossless(), plain),
        "lookup": Decoder(load_drafter("ngram", target), Lossless(), replace(plain, budget=Budget(2, 2))),
    }
    rows, _, _ = measure_points(
        target, lanes, [AxisPoint(1, [torch.tensor([[1, 2, 3]])])], "batch", 1, silent, never_cancelled, list
    )
    assert [row["speed-up"].reasons[-1:] for row in rows] == [(), ("the GPU is throttled by heat",)]


def test_stopping_reaches_the_run_itself():
    stop = []
    spec = Comparison(
        id="bench",
        target="stories",
        prompt="-",
        lanes=[Lane(method="ngram", k=2)],
        max_new_tokens=400,
        schedule="sequential",
    )
    runner = Session()

    def report(share, what, so_far):
        stop.append(share)

    with pytest.raises(ValueError, match="stopped before the first repeat"):
        compare_lanes(runner, spec, ["Once upon a time"], 1, report, lambda: len(stop) > 1, list)


def test_the_notes_of_a_run_are_remarks_of_the_suite():
    class Noting(Session):
        def run(self, *args):
            trace = super().run(*args)
            trace.notes = ["verifying 5 tokens takes 1.50 times as long as one token"]
            return trace

    spec = Comparison(id="bench", target="stories", prompt="-", lanes=[Lane(method="ngram", k=2)], max_new_tokens=4)
    seen = compare_lanes(Noting(), spec, ["Once upon a time"], 1, silent, lambda: False, list)
    assert seen.remarks[-1] == "Verifying 5 tokens takes 1.50 times as long as one token."


def test_windows_lie_evenly_on_an_endless_text():
    assert [w.tolist() for w in windows([1, 2, 3, 4], 6, 2, "cpu")] == [[[1, 2, 3, 4, 1, 2]], [[3, 4, 1, 2, 3, 4]]]


def test_totals_count_rows_and_leave_the_prefill_out():
    probs = [[None, None], [None, None]]
    prefill = StepEvent(0, [[], []], [[], []], [[0], [0]], [[1], [1]], [[], []], [[], []], {"prefill": 50.0})
    step = StepEvent(
        1, [[5, 6], [7, -1]], [[0, 1], [0, 1]], [[0, 1, 2], [0]], [[5, 6, 9], [8]], probs, probs, {"verify": 10.0}
    )
    totals = Totals()
    totals.add([prefill, step])
    counts = [(row.tokens, row.steps, row.drafted, row.accepted) for row in totals.rows]
    assert counts == [(3, 1, 2, 2), (1, 1, 1, 0)]
    assert (rate(totals.runs).value, totals.tokens_per_pass, totals.acceptance_rate) == (400.0, 2.0, round(2 / 3, 4))
    assert totals.prefills == [50.0]


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("metods", {}, "unknown suite 'metods'; did you mean 'methods'?"),
        ("k", {"repeats": 0}, "repeats must be 1 or more, not 0"),
        ("k", {"ks": (0,)}, "draft lengths must be from 1 to 16, not [0]"),
        ("k", {"ks": ()}, "draft lengths must be from 1 to 16, not []"),
        ("k", {"preset": "nothing"}, "unknown preset 'nothing'; "),
        ("k", {"prompts": [" "]}, "a prompt is empty; write at least one word"),
        ("k", {"new_tokens": 1}, "new_tokens must be 2 or more, not 1"),
        ("race-fairness", {"device": "cpu"}, "unknown setting 'device'; choose one of repeats"),
        ("methods", {"preset": "qwen3-8b"}, "no embedded preset of one greedy lane runs on "),
    ],
)
def test_invalid_request_is_one_line(name, options, line):
    with pytest.raises(ValueError) as refused:
        run_suite(name, **options)
    assert str(refused.value).startswith(line)


def test_every_option_of_a_suite_is_one_of_the_command_line():
    for each in suites().values():
        fixed = {"repeats"} if each.name == "load" else set()  # a suite that reads results has one repeat
        assert set(each.model_fields) == set(settings(each)) | fixed


class Coin(LaneSuite):
    """A suite with a fixed result."""

    name, title, question = "coin", "Coin", "Which side is faster?"

    def run(self, report, cancelled):
        environment = {"device": "a thumb", "threads": 1, "dtype": "copper"}
        return Result(self.name, self.repeats, self.config("none"), environment, [{"lane": "heads"}])


@pytest.fixture
def with_coin(monkeypatch):
    monkeypatch.setattr(lanes, "Coin", Coin, raising=False)
    monkeypatch.setattr(Coin, "__module__", lanes.__name__)
    suites.cache_clear()
    yield
    suites.cache_clear()


def test_a_suite_in_the_list_is_in_the_command_line_the_page_and_its_links(with_coin, capsys):
    assert main(["bench", "coin", "--repeats", "2", "--dtype", "bf16"]) == 0
    assert capsys.readouterr().out.startswith("coin | a thumb, 1 thread, copper | 2 repeats")
    assert main(["bench", "coin", "--gpus", "2"]) == 2
    assert "No such option: --gpus" in capsys.readouterr().err
    assert registry.swept()["coin"].title == "Coin"
    linked, refused = changed_by_query(Sweep(), "sweep=coin&repeats=4")
    assert (linked.suite(), refused) == (Coin(repeats=4, new_tokens=96), [])


def test_outside_a_checkout_the_projects_own_suites_are_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("specdemo.presets.files.FOLDER", tmp_path / "presets")
    suites.cache_clear()
    with pytest.raises(ValueError, match="suite 'peers' measures specdemo itself and needs a checkout of specdemo"):
        suite("peers", pair="8m")
    assert "peers" not in suites()
    suites.cache_clear()


def test_lane_uses_the_tree_of_its_method_with_or_without_a_size():
    assert Lane(method="eagle", model="stories-eagle-3", k=4).budget == Budget(4, 24)
    assert Lane(method="eagle", model="stories-eagle-3", k=4, options={"nodes": 8}).budget == Budget(4, 8)
    assert Lane(method="ngram", k=5).budget == Budget(5, 5)


THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '' if enable_thinking | default(true) else 'No' }}"


def test_thinking_on_and_off_are_two_points(tmp_path):
    with pytest.raises(ValueError, match="stories has no thinking mode; choose the preset of a model that can think"):
        run_suite("thinking", repeats=1, preset="embedded-ngram", **SHORT)
    shutil.copytree(ModelRef("stories").path, tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(THINKING, encoding="utf-8")
    chosen = preset("embedded-ngram").with_changes(target=str(tmp_path / "chat"))
    result = run_suite("thinking", repeats=1, preset=chosen, **SHORT)
    assert [(row["thinking"], row["lane"]) for row in result.rows] == [
        (mode, lane) for mode in ("on", "off") for lane in ("Baseline", "embedded-ngram")
    ]
    assert [bar["name"] for bar in chart(result)["groups"][0]["bars"]] == ["on", "off"]


CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny"])
def test_a_random_model_is_the_same_every_time_and_of_its_shape(name):
    one, other = (random_model(name, CPU, torch.float32) for _ in range(2))
    matrices = {n: p for n, p in one.named_parameters() if p.ndim > 1}
    assert sum(p.numel() for p in matrices.values()) == shape(name).parameters
    assert all(torch.equal(p, dict(other.named_parameters())[n]) for n, p in one.named_parameters())
    assert len({p.flatten()[0].item() for p in matrices.values()}) == len(matrices)
    ids = torch.arange(1, 30)[None]
    assert torch.isfinite(one(ids).logits).all()
    transformers_own = type(one)(one.config)  # with correct rotary angles
    transformers_own.load_state_dict(one.state_dict())
    torch.testing.assert_close(transformers_own.eval()(ids).logits, one(ids).logits)


@pytest.mark.filterwarnings("ignore")  # bitsandbytes warns on a CPU
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_take_what_they_are_counted_for(bits):
    target = HFTarget(random_model("llama-tiny", CPU, torch.bfloat16, bits))
    assert target.weight_bytes == pytest.approx(shape("llama-tiny", f"{bits}bit").weight_bytes(2), rel=0.1)
    assert torch.isfinite(target.start(torch.arange(1, 9)[None]).logits).all()


def test_passes_by_batch_and_width():
    target = HFTarget(random_model("llama-tiny", CPU, torch.float32))
    ms = passes(target, (3,), (1, 4))
    assert {batch: list(row) for batch, row in ms.items()} == {1: [1, 3], 4: [1, 3]}
    known = passes_of("llama-tiny", target, ms)
    assert known.v(4)[1] == 1.0 and set(known.ms[4]) == {1, 3}


def test_steps_accept_part_of_each_chain():
    """The rows of a batch reach different lengths, as in a real run."""
    targets = {name: HFTarget(random_model(name, CPU, torch.float32)) for name in ("llama-tiny", "qwen3-tiny")}
    found = {(step.model, step.method, step.k, step.batch): step for step in step_times(targets)}
    small = [("qwen3-tiny", "eagle", 5)]
    lanes = [("llama-tiny", "none", 0), *(("llama-tiny", "draft_model", k) for k in (2, 5)), *small]
    assert set(found) == {(*lane, batch) for lane in lanes for batch in (1, 8)}
    for (_, method, k, _), step in found.items():
        assert step.drafted == k and (0.0 < step.kept < k or not k)
        assert step.draft == ("qwen3-tiny" if method == "draft_model" else "")


def test_a_profile_reports_its_progress(monkeypatch):
    monkeypatch.setattr(device, "basics", lambda where, command: profile("laptop-cpu"))
    monkeypatch.setattr(device, "random_model", lambda name, where, dtype: random_model("llama-tiny", where, dtype))
    monkeypatch.setattr(device, "CPU_WIDTHS", (3,))
    monkeypatch.setattr(device, "CPU_BATCHES", (1, 2))
    monkeypatch.setattr(device, "STEP_TOKENS", 32)
    seen = []
    device.measure_profile("cpu", report=lambda share, what: seen.append((share, what)))
    shares = [share for share, _ in seen]
    assert shares[0] == 0.0 and shares == sorted(shares) and 0.8 < shares[-1] <= 1.0
    assert {"memory and matrix products", "passes, batch size 2", "steps of llama-100m, none"} <= {w for _, w in seen}


def test_the_basics_of_this_machine():
    profile = basics(CPU, "a test")
    assert profile.kind == "cpu" and profile.link_gb_per_s is None
    assert 0.1 < profile.bandwidth_gb_per_s.value < 10_000.0
    assert set(profile.compute_tflop_per_s) == {"float32", "bfloat16", "float16"}
    assert profile.launch_us.source == "measured by a test"
