"""Search of `tune` with simulated costs and a simulated clock, its candidates, and one run on an embedded model."""

import json
import re
from itertools import count
from random import Random
from types import SimpleNamespace

import pytest

from specdemo.__main__ import main
from specdemo.bench.candidates import SURE, race_link, settings_to_copy, shareable, with_lengths
from specdemo.bench.prompts import OWN
from specdemo.bench.racer import EXCLUDED, STAGES
from specdemo.bench.report import bench_report
from specdemo.bench.result import Result, read_result, to_json
from specdemo.bench.search import Sample, Search
from specdemo.bench.tune import RACE_LINK, YOURS, Tune, _bars, _confirmed, _recommendation
from specdemo.core.estimate import Estimate, over_runs
from specdemo.core.protocol import Budget, TargetFacts
from specdemo.costs.lengths import draft_lengths
from specdemo.costs.step import CostModel
from specdemo.engine.comparison import Lane
from specdemo.models import packed
from specdemo.models.errors import Cancelled
from specdemo.models.local_models import DrafterFit
from specdemo.models.packaged import embedded_folder
from specdemo.models.ref import ModelRef
from specdemo.presets.drafters import drafters_of, published_drafters
from specdemo.presets.files import load_presets
from specdemo.presets.link import from_query
from specdemo.presets.pair import LOOKUPS, pair, work_prompts
from specdemo.servers import address
from tests.completion_server import completion_server, piece
from tests.servers.stand_in import gone, make, started

FLAT = {1: 10.0, 2: 10.2, 4: 10.4, 8: 11.0, 12: 11.8}
FOURS = {1: 10.0, 2: 9.6, 3: 10.9, 4: 12.0, 5: 16.7, 6: 18.3, 7: 19.9, 8: 19.3, 12: 25.0}  # SmolLM2 in Q4_K_M
STEEP = {1: 10.0, 2: 19.0, 3: 28.0, 4: 37.0, 8: 73.0}
KINDS = ("chat", "summary", "edit", "code", "json", "translate")
PROMPTS = [f"prompt {n}" for n in range(8)]
NUMBERS = {"tokens_per_s": 9.0, "tokens": 96, "steps": 48, "drafted": 96, "accepted": 48}
NUMBERS |= {"ms_draft": 1.0, "ms_verify": 9.0, "ms_other": 0.0}


@pytest.fixture(autouse=True)
def weights_of_one_size(monkeypatch):
    """Leave out float16, which is chosen by measured speed: the size of weights decides which drafters are raced."""
    monkeypatch.setattr(packed, "has_float16_products", lambda: False)


class SimulatedMachine:
    """Candidates with a true acceptance rate per kind of work, on a machine with noise and a clock."""

    def __init__(self, curve, seed, hit=1.0):
        self.rng, self.curve, self.now, self.races = Random(seed), curve, 0.0, 0
        self.families = {f: [f"{f}, k={k}" for k in draft_lengths(curve, 0.0, 16)] for f in ("ngram", "suffix", "head")}
        self.lengths = {n: int(n.partition("=")[2]) for names in self.families.values() for n in names}
        self.rates = {(kind, f): hit * self.rng.uniform(0.1, 0.95) for kind in KINDS for f in self.families}

    def costs(self, kind, name, shift=0.0):
        family, k = name.partition(",")[0], self.lengths[name]
        rate = min(max(self.rates[kind, family] + shift, 0.0), 0.97)
        verify = {n: ms / 10.0 for n, ms in self.curve.items()}
        draft = 1.0 if family == "head" else 0.0
        return CostModel(10.0, 10.0, verify, draft, 0.0, 0.1, [rate], k)

    def speed(self, kind, name):
        return self.costs(kind, name).speedup(self.lengths[name])

    def measure(self, prompt, names):
        """Run candidates, and predict lookups, and heads by a head that ran. Predictions are a tenth too low."""
        self.races += 1
        self.now += 1.0 + len(names)
        kind = prompt.partition(" ")[0]
        shift = Random(prompt).gauss(0.0, 0.03)
        head = any(name.startswith("head") for name in names)
        found = {}
        for name in self.lengths:
            costs = self.costs(kind, name, shift)
            speed = costs.speedup(self.lengths[name])
            predicted = 0.9 * speed if head or not name.startswith("head") else 0.0
            numbers = {"tokens_per_s": 100.0 * speed, "tokens": 96, "steps": 48, "drafted": 96, "accepted": 48}
            if name in names:
                found[name] = Sample(speed * self.rng.gauss(1.0, 0.02), numbers, costs, predicted)
            elif predicted:
                found[name] = Sample(0.0, predicted=predicted)
        return found

    def search(self, seconds, measure=None, serve=None):
        works = {kind: [f"{kind} {text}" for text in PROMPTS] for kind in KINDS}
        search = Search(works, self.families, measure or self.measure, seconds, now=lambda: self.now, serve=serve)
        search.run()
        return search


@pytest.mark.parametrize("curve", [FLAT, FOURS])
@pytest.mark.parametrize("seed", range(3))
def test_finds_settings_within_5_percent_of_the_best_in_less_time_than_a_sweep(curve, seed):
    world = SimulatedMachine(curve, seed)
    search = world.search(300.0)
    names = [name for family in world.families.values() for name in family]
    near = [
        world.speed(work.name, work.ranked()[0]) >= 0.95 * max(world.speed(work.name, name) for name in names)
        for work in search.works
    ]
    assert sum(near) >= 5
    assert world.now <= 300.0 < len(KINDS) * len(PROMPTS) * len(names)

    def mean(name):
        return sum(world.speed(kind, name) for kind in KINDS)

    assert mean(search.leader()) >= 0.95 * max(map(mean, names))
    assert search.mixed(search.leader()).low > 1.0


@pytest.mark.parametrize(("seconds", "complete"), [(200.0, True), (30.0, False)])
def test_confirmation_uses_other_prompts_in_turn_and_ends_in_time(seconds, complete):
    world = SimulatedMachine(FLAT, 0)
    search = world.search(300.0)
    start = world.now
    again = search.confirm({kind: [f"{kind} other {n}" for n in range(3)] for kind in KINDS}, seconds - search.rest)
    again.run()
    counts = [work.rounds for work in again.works]
    assert world.now <= start + seconds and (counts == [3] * 6) is complete
    assert max(counts) - min(counts) <= 1 <= max(counts)
    for work, found in zip(again.works, search.works, strict=True):
        assert {*work.ranked()} == ({*found.ranked()[:2]} if work.rounds else set())


@pytest.mark.parametrize(
    ("ratio", "spread", "words"),
    [
        (1.2, 0.02, "the order held"),
        (0.8, 0.02, "the order did not hold"),
        (1.01, 0.05, "both are about equally fast"),
        (1.2, 0.5, "the order is open"),
    ],
)
def test_confirmation_tells_from_all_kinds_together_whether_the_order_held(ratio, spread, words):
    def measure(prompt, names):
        speeds = {"a": 2.0, "b": 1.5}
        if prompt in held["chat"]:
            speeds["a"] = 1.5 * ratio * (1.0 + spread * (held["chat"].index(prompt) - 1))
        return {name: Sample(speeds[name]) for name in names}

    held = {kind: ["other 0", "other 1", "other 2"] for kind in KINDS[:2]}
    search = Search(dict.fromkeys(held, PROMPTS), {"x": ["a"], "y": ["b"]}, measure, 9.0)
    search.run()
    again = search.confirm(held, 9.0)
    again.run()
    *kinds, last = _confirmed(search, again)
    assert [line.partition(":")[0] for line in kinds] == [*held]
    assert last.endswith(f"as fast as the second ones; {words}.")


class SimulatedServers(SimulatedMachine):
    """Candidates that take a minute to start, one at a time."""

    def __init__(self, *how, **more):
        super().__init__(*how, **more)
        self.starts, self.broken = [], ""

    def serve(self, name):
        self.starts.append(name)
        self.now += 60.0
        return name != self.broken

    def measure(self, prompt, names):
        assert [*names] == self.starts[-1:]
        return {name: one for name, one in super().measure(prompt, names).items() if one.speed}

    @property
    def names(self):
        return [name for family in self.families.values() for name in family]


@pytest.mark.parametrize("curve", [FLAT, FOURS])
def test_on_servers_every_candidate_starts_once_and_the_best_is_found(curve):
    world = SimulatedServers(curve, 1)
    search = world.search(600.0, serve=world.serve)
    assert world.starts == world.names
    assert world.now <= 600.0 + 60.0 * len(world.names) + 2.0  # starting does not count
    best = [max(world.speed(work.name, name) for name in world.names) for work in search.works]
    found = [world.speed(work.name, work.ranked()[0]) for work in search.works]
    assert sum(mine >= 0.95 * most for mine, most in zip(found, best, strict=True)) >= 5
    again = search.confirm({kind: [f"{kind} other {n}" for n in range(3)] for kind in KINDS}, 500.0)
    again.run()
    for work, found in zip(again.works, search.works, strict=True):
        assert {*work.ranked()} == {*found.ranked()[:2]}
    assert len({*world.starts[len(world.names) :]}) == len(world.starts) - len(world.names)


@pytest.mark.parametrize(
    ("speeds", "started"), [([1.1, 1.2, 1.3, 1.4], 4), ([1.1, 1.2, 1.15, 1.4], 3), ([0.9, 1.3, 1.2, 1.4], 3)]
)
def test_on_servers_longer_drafts_start_only_while_the_speed_rises(speeds, started):
    names, starts = [f"k={k}" for k in (1, 2, 3, 4)], []
    after = {name: names[:place] for place, name in enumerate(names) if place >= 2}

    def measure(prompt, asked):
        return {name: Sample(2.0 if name == "sure" else speeds[names.index(name)]) for name in asked}

    search = Search({"own": PROMPTS}, {"a": ["sure", *names]}, measure, 9.0, serve=lambda name: not starts.append(name))
    search.after = after
    search.run()
    assert starts == ["sure", *names[:started]]


def test_on_servers_longer_drafts_have_time_too_and_nothing_starts_without_time():
    world, names = SimulatedServers(FLAT, 0), [f"k={k}" for k in (1, 2, 3, 4, 6)]
    ran, works = dict.fromkeys(names, 0), {"own": [f"own {n}" for n in range(20)]}

    def measure(prompt, asked):
        world.now += 3.0
        ran[asked[0]] += 1
        return {asked[0]: Sample(1.0 + 0.1 * names.index(asked[0]))}

    def search(seconds):
        found = Search(
            works, {"a": names}, measure, seconds, now=lambda: world.now, serve=lambda n: not starts.append(n)
        )
        found.after = {"k=6": names[:4]}
        found.run()
        return found

    starts = []
    assert search(60.0).leader() == "k=6" and 0 < ran["k=6"] >= ran["k=4"]
    starts.clear()
    search(3.0)
    assert starts == ["k=1", "k=2"][: len(starts)]


def test_a_candidate_whose_server_fails_is_left_out_and_a_slow_one_ends_early():
    world = SimulatedServers(STEEP, 0, hit=0.2)
    world.broken = world.names[0]
    search = world.search(10_000.0, serve=world.serve)
    assert all(world.broken not in work.samples for work in search.works)
    assert world.races < len(PROMPTS) * len(KINDS) * (len(world.names) - 1)


def test_on_servers_a_first_prompt_that_fails_does_not_end_a_candidate():
    world = SimulatedServers(FLAT, 0)
    search = world.search(600.0, lambda text, names: {} if text[-1] == "0" else world.measure(text, names), world.serve)
    assert all({*work.samples} == {*world.names} for work in search.works)


def test_an_interrupt_while_a_server_starts_keeps_what_is_known():
    world = SimulatedServers(FLAT, 0)

    def interrupted(name):
        if world.starts:
            raise KeyboardInterrupt
        return world.serve(name)

    search = world.search(300.0, serve=interrupted)
    assert search.stopped and search.leader() == world.names[0]


def test_ends_early_where_nothing_pays():
    world = SimulatedMachine(STEEP, 0, hit=0.2)
    search = world.search(10_000.0)
    assert all(work.speed(work.ranked()[0]).high < 1.0 for work in search.works)
    assert world.races <= 5 * len(KINDS)
    assert _recommendation(search, search.leader())[0].startswith("For mixed work decode plainly: no candidate")
    search = SimulatedMachine(STEEP, 0, hit=0.2).search(10.0)
    assert _recommendation(search, search.leader())[0].startswith("Undecided for mixed work: the best so far is")


@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_an_interrupt_keeps_what_is_known(after):
    world = SimulatedMachine(FLAT, 0)

    def interrupted(prompt, names):
        if world.races == after:
            raise KeyboardInterrupt
        return world.measure(prompt, names)

    search = world.search(300.0, interrupted)
    assert search.stopped
    assert sum(bool(work.samples) for work in search.works) == min(after, len(KINDS))
    assert bool(search.leader()) is (after > 0)


def scripted(*races):
    """Return a measurement that gives these races, and then an interrupt."""
    rest = [*races]

    def measure(prompt, names):
        if not rest:
            raise KeyboardInterrupt
        return rest.pop(0)

    return measure


def test_predictions_are_scaled_by_runs_and_cover_the_prompts_that_a_candidate_did_not_run_on():
    """Candidate b ran on an easy text only, and its predictions are a fifth too low."""
    easy = {"a": Sample(3.0), "b": Sample(4.0, predicted=3.2)}
    races = [easy, *[{"a": Sample(1.1), "b": Sample(0.0, predicted=0.8)}] * 2]
    search = Search({"code": PROMPTS}, {"x": ["a", "b"]}, scripted(*races), 9.0)
    search.run()
    (work,) = search.works
    assert work.value("b") == pytest.approx(4.0 ** (1 / 3)) and work.speed("b").value == 4.0
    assert work.ranked() == ["b", "a"] and work.ratios("b", "a") == [4.0 / 3.0]


def test_prompts_that_fail_do_not_end_a_kind_before_its_answer_is_known():
    now, speeds = [0.0], Random(0)

    def measure(prompt, names):
        now[0] += 1.0
        return {} if prompt == "long" else {"a": Sample(speeds.uniform(1.0, 3.0))}

    search = Search({"own": ["long", "long", "fits", "long"]}, {"x": ["a"]}, measure, 1000.0, now=lambda: now[0])
    search.run()
    assert len(search.works[0].runs("a")) == 4 and now[0] < 20.0
    search = Search({"own": ["long"] * 3}, {"x": ["a"]}, measure, 1000.0, now=lambda: now[0])
    search.run()
    assert not search.leader() and now[0] < 40.0


def test_prompts_that_fail_do_not_put_a_slow_candidate_first_that_is_predicted_on_all_others():
    fast, slow = {"fast": Sample(2.0)}, {"slow": Sample(0.0, predicted=1.1)}
    races = [{"fast": Sample(2.0), "slow": Sample(1.1, predicted=1.1)}, {}, {}, {}, slow, fast | slow]
    search = Search({"own": PROMPTS}, {"x": ["fast"], "y": ["slow"]}, scripted(*races), 9.0)
    search.run()
    assert search.works[0].ranked()[0] == search.leader() == "fast"


@pytest.mark.parametrize(("speeds", "mean"), [([1.0, 4.0], 2.0), ([1.0, 1.2, 1.44], 1.2)])
def test_the_speed_up_of_one_kind_of_work_is_that_of_all_work(speeds, mean):
    search = Search({"own": PROMPTS}, {"x": ["a"]}, scripted(*({"a": Sample(speed)} for speed in speeds)), 9.0)
    search.run()
    assert search.works[0].speed("a") == search.mixed("a") and search.mixed("a").value == pytest.approx(mean)


def test_a_candidate_that_fails_leaves():
    world = SimulatedMachine(FLAT, 0)
    broken = max(world.lengths, key=lambda name: (name.startswith("ngram"), world.lengths[name]))
    search = world.search(
        300.0, lambda text, names: {n: one for n, one in world.measure(text, names).items() if n != broken}
    )
    assert all(broken not in work.ranked() for work in search.works)
    assert all(work.ranked() for work in search.works)


@pytest.mark.parametrize(
    ("curve", "draft", "expected"), [(FOURS, 0.0, {3}), (FOURS, 0.1, {3}), (FLAT, 0.0, {14}), (STEEP, 0.0, {1})]
)
def test_draft_lengths_follow_the_curve_of_costs(curve, draft, expected):
    found = draft_lengths(curve, draft, 16)
    assert expected <= {*found}
    assert len(found) <= 5
    if curve is FOURS:
        assert not {4, 5, 6} & {*found}


@pytest.mark.parametrize(("curve", "tried"), [(FLAT, True), ({}, True), (FOURS, True), (STEEP, False)])
def test_a_tree_is_tried_unless_its_passes_cannot_pay(curve, tried):
    lane = Lane(method="eagle", model="code-eagle-1", k=5, options={"nodes": 12})
    assert [one.name for one in with_lengths("eagle", lane, curve)] == ["eagle"] * tried


@pytest.mark.parametrize("options", [{"draft": "chain"}, {"draft": "chain", "nodes": 12}])
def test_a_chain_of_a_method_that_also_drafts_trees_is_tried_with_several_lengths(options):
    lane = Lane(method="eagle", model="code-eagle-1", k=5, options=options)
    assert lane.budget == Budget(5, 5) and not lane.chooses_nodes
    chains = with_lengths("eagle", lane, FLAT)
    assert len(chains) > 1 and all(one.name == f"eagle, k={one.k}" and one.options == options for one in chains)
    assert [one.k for one in with_lengths("eagle", lane, STEEP)] == [1]


def offered(target, named=(), download=False):
    return Tune.build({"target": target, "drafts": named, "download": download}).lanes(drafters_of(ModelRef(target)))


def test_candidates_are_the_drafters_of_this_machine():
    lanes = offered("code", [ModelRef("code-draft")])
    found = {name: with_lengths(name, lane, FLAT) for name, lane in lanes.items()}
    assert {"Prompt lookup", "Suffix decoding", "Draft 2.6M", "EAGLE"} <= {*found}
    names = [lane.name for lanes in found.values() for lane in lanes]
    assert len({*names}) == len(names)
    assert [lanes[0].method for lanes in (found["Prompt lookup"], found["Suffix decoding"])] == ["adaptive"] * 2
    assert [lane.k for lane in found["Suffix decoding"]] == [14, 14]  # it chooses shorter drafts itself
    drafts = with_lengths("Draft 2.6M", lanes["Draft 2.6M"], FLAT, 0.1)
    (sure,) = [lane for lane in drafts if lane.options == {"p_min": SURE}]
    assert sure.name == f"Draft 2.6M, k={sure.k}, p_min={SURE}" and sure.k == 10


def test_published_drafters_are_candidates_where_they_are_here_or_may_be_downloaded():
    here, all_of_them = (offered("Qwen/Qwen3-1.7B", download=download) for download in (False, True))
    assert {lane.method for lane in here.values()} == {*LOOKUPS}
    published = {entry.drafter for entry in published_drafters(ModelRef("Qwen/Qwen3-1.7B")) if entry.method}
    assert {fit.drafter for fit in drafters_of(ModelRef("Qwen/Qwen3-1.7B")) if fit.place == "not here"} >= published
    assert published and published <= {lane.model for lane in all_of_them.values()}


@pytest.mark.parametrize(
    "target", ["smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct", "x/smollm2-135m-instruct-q4_1.gguf"]
)
def test_the_shipped_head_of_a_downloaded_model_is_found_by_every_name_of_the_model(target):
    assert "smollm2-eagle-3" in {lane.model for lane in offered(target).values()}


@pytest.mark.parametrize(
    ("target", "tried"), [("facebook/layerskip-llama2-7B", True), ("x/layerskip-8b.gguf", True), ("x/llama", False)]
)
def test_layer_skip_is_tried_where_a_model_was_trained_for_it(target, tried):
    assert ("Layer skip" in offered(target)) is tried


def test_the_built_in_prompts_cover_six_kinds_of_work():
    kinds = Tune.build({"target": "model"}).kinds()
    assert tuple(kinds) == KINDS
    assert all(len({*texts}) >= 8 for texts in kinds.values())
    assert {*Tune.build({"target": "code"}).kinds()} == {*OWN["code"]}
    assert {*Tune.build({"target": "model", "work": "json,chat"}).kinds()} == {"json", "chat"}


def test_prompts_of_a_file_replace_the_built_in_ones(tmp_path):
    lines = tmp_path / "own.txt"
    lines.write_text("first\n\nsecond\n")
    assert Tune.build({"target": "model", "prompt_file": lines}).kinds() == {"own": ["first", "second"]}
    questions = tmp_path / "question.jsonl"
    rows = [{"question_id": n, "category": f"c{n % 2}", "turns": [f"question {n}"]} for n in range(4)]
    questions.write_text("\n".join(map(json.dumps, rows)))
    expected = {"c0": ["question 0", "question 2"], "c1": ["question 1", "question 3"]}
    assert Tune.build({"target": "model", "prompt_file": questions}).kinds() == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["code", "--draft", "stories-medusa"], "does not fit"),
        (["code", "--work", "poetry"], "unknown kind of work 'poetry'"),
        (["code", "--engine", "vllm", "--command", "/nowhere/vllm"], "there is no program /nowhere/vllm"),
        (["code", "--server", "http://127.0.0.1:1"], "--server is needed twice"),
        (["code", "--engine", "vllm", *["--server", "127.0.0.1:1"] * 2], "exclude each other"),
    ],
)
def test_bad_input_gets_one_line(options, reason, capsys):
    assert main(["tune", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert reason in error


@pytest.fixture(scope="module")
def tuned():
    """Tune an embedded model once, and return the progress, with the results so far, and the result."""
    tune, seen = Tune.build({"target": "code", "work": "code edit", "minutes": 0.3, "new_tokens": 16}), []
    return seen, tune.run(lambda share, what, so_far: seen.append((share, what, so_far())), lambda: False)


def test_the_command_prints_a_result_and_stores_it(tuned, tmp_path, monkeypatch, capsys):
    def run(self, *how):
        assert (self.target, self.work, self.new_tokens, self.minutes) == ("code", "code edit", 16, 0.2)
        return tuned[1]

    monkeypatch.setattr(Tune, "run", run)
    out = tmp_path / "tuned.json"
    options = ["--work", "code edit", "--new-tokens", "16", "--minutes", "0.2", "--out", str(out)]
    assert main(["tune", "code", *options]) == 0
    printed = capsys.readouterr().out
    assert re.search(
        "(For|Undecided for) code edit", printed
    )  # one kind of work is not mixed; it may be undecided on a busy machine
    assert ("Here: " in printed) == ("--target code --method" in printed)
    assert "repeat" not in printed.splitlines()[0]  # the rows count prompts
    result = read_result(out)
    assert {row["category"] for row in result.rows} == {"code edit", "mixed"}
    assert main(["replay", str(out)]) == 0
    # what is stored names models without the folders of this machine
    assert capsys.readouterr().out == printed.replace(f"{embedded_folder()}/", "")


def ready_racer(pass_ms=None, cancelled=lambda: False, **options):
    """Return a racer of the embedded model of code that knows the costs of its passes: these, or measured ones."""
    racer = Tune.build({"target": "code", **options}).racer(cancelled)
    racer.load(lambda *_: None)
    if pass_ms is None:
        racer.measure_costs()
    else:
        racer.pass_ms = pass_ms
    return racer


def idle_racer(lanes, **facts):
    """Return what `tune` reads of a racer when it writes a result."""
    return SimpleNamespace(lanes=lanes, notes={}, left_out={}, rates={}, so_far={}.get, **facts)


def test_why_texts_part_is_examined_once_for_each_candidate_where_rounding_may_differ(monkeypatch):
    racer = ready_racer(new_tokens=8)
    racer.usable({"ngram": Lane(method="ngram")}, [])
    seen = []
    monkeypatch.setattr("specdemo.engine.session.compare_outputs", lambda trace, *how: seen.append(how[-1]))
    monkeypatch.setattr(racer, "_sample", lambda trace, place: None)
    first, *_, last = racer.lanes
    for exact, expected in ((False, [True, False, True]), (True, [True] * 3)):
        racer._target = SimpleNamespace(facts=TargetFacts("float32", same_bits=exact))
        seen.clear()
        for names in ([last], [last], [last, first]):
            found = racer.measure("def find(text):", names)
            assert all(one.predicted and not one.speed for one in found.values()) and not {*names} & {*found}
        assert seen == expected
    assert racer.measure("a " * 2000, [last]) == {} and "the limit is" in racer.failure


@pytest.mark.parametrize("ends", ["time", "stop"])
def test_an_answer_ends_in_time_and_at_a_stop_and_counts_as_far_as_it_came(ends):
    checks = count()
    racer = ready_racer(cancelled=lambda: ends == "stop" and next(checks) > 40, new_tokens=400)
    (name, *_) = racer.usable({"ngram": Lane(method="ngram")}, [])["ngram"]
    checks = count()  # of the race alone
    if ends == "time":
        racer.rest = lambda: 40 - next(checks)
    found = racer.measure("def find(text):", [name])
    assert found[name].speed and 8 <= found[name].numbers["tokens"] < 400
    assert not racer._session.explains  # which reads the texts again
    if ends == "stop":
        with pytest.raises(Cancelled):
            racer.measure("def find(text):", [name])


@pytest.mark.parametrize("last", ["loading", "racing"])
def test_a_stop_before_the_first_answer_keeps_the_costs_of_passes_and_no_run_in_progress_has_a_verdict(last):
    seen, partial = [""], []

    def report(share, what, so_far):
        seen.append(what)
        partial.append(so_far())

    tune = Tune.build({"target": "stories"})
    result = tune.run(report, lambda: seen[-1].startswith(last) and "Passes" in str(partial[-1]))
    assert {row["state"] for row in result.rows} <= {"not raced: stopped"}
    assert result.remarks[0].startswith("Stopped before an answer was measured")
    assert "Passes: 1 token " in result.remarks[1] and "no time" not in str(result.remarks)
    for running in partial:
        assert running.remarks[0] == "No answer is measured yet." and "Not measured" not in str(running.remarks)


def test_a_file_of_prompts_that_do_not_fit_gets_one_line(tmp_path, capsys):
    path = tmp_path / "long.txt"
    path.write_text("a " * 2000)
    assert main(["tune", "code", "--prompts", str(path)]) == 2
    assert re.fullmatch("specdemo: the prompt has .* tokens, the limit is .*\n", capsys.readouterr().err)


def test_what_was_not_measured_or_confirmed_is_named_with_the_reason(monkeypatch):
    """The kind `bad` has unusable prompts only; so are those of `own` that --confirm uses; time ends before `late`."""

    def measure(prompt, names):
        clock[0] += 1.0
        return {} if prompt.startswith("bad") else {name: Sample(1.0, NUMBERS) for name in names}

    clock, lanes = [0.0], {name: Lane(method="ngram", name=name) for name in "ab"}
    works = {"own": ["good"], "bad": ["bad 0"], "late": ["good"]}
    search = Search(works, {"x": ["a"], "y": ["b"]}, measure, 2.0, now=lambda: clock[0])
    search.run()
    again = search.confirm({"own": ["bad 1"]}, 9.0)
    again.run()
    confirmed = [*_confirmed(search, again)]
    assert confirmed == ["own: not confirmed: no other prompt worked."]
    idle = idle_racer(lanes, link=lambda *_: "", environment=dict, remarks=list, fits=[])
    idle.left_out = {"C": "the model is damaged"}
    remarks = Tune.build({"target": "code"})._result(search, idle, confirmed).remarks
    assert remarks[-2:] == ["Not measured: bad, no usable answer.", "Not measured: late, no time."]
    idle.fits = [DrafterFit(ModelRef("code.gguf"), "draft_model", False, "damaged", "LM Studio")]
    remarks = Tune.build({"target": "code"})._result(search, idle, confirmed).remarks
    assert remarks[-1] == "On this machine: no draft model; damaged: code.gguf."
    (late,) = _confirmed(search, search.confirm({"own": ["good"]}, 0.0))
    assert late == "own: not confirmed: there was no time."


def test_a_prompt_is_measured_first_and_alone_where_time_is_short():
    own = Tune.build({"target": "model", "prompt": "Write a poem."})
    assert own.kinds() == {YOURS: ["Write a poem."]}
    known = work_prompts()["json"][3]
    (kind, texts), *rest = Tune.build({"target": "model", "prompt": known, "work": f"chat,{YOURS}"}).kinds().items()
    assert (kind, texts[0], len(texts)) == ("json", known, len({*work_prompts()["json"]}))
    assert [name for name, _ in rest] == ["chat"] and "prompt" not in own.config("x")
    late = ["chat"]
    for lane_s, alone, left in ((10.0, True, ([1], late)), (10.0, False, ([8], late)), (6.0, True, ([8, 8], []))):
        search = Search({}, {}, None, 120.0, now=lambda: 0.0)
        search.plan({"json": PROMPTS, "chat": PROMPTS}, lambda _, seconds=lane_s: seconds, alone)
        assert ([len(work.prompts) for work in search.works], search.late) == left


def test_one_prompt_has_the_interval_of_its_runs_and_several_need_three():
    sample = Sample(1.5, interval=(1.4, 1.6))
    for prompts, known in ((["only"], True), (PROMPTS, False)):
        search = Search({"own": prompts}, {"x": ["a"]}, scripted({"a": sample}, {"a": sample}), 9.0)
        search.run()
        speed = search.mixed("a")
        assert speed == search.works[0].speed("a") and (speed.low is not None) is known
    assert over_runs([Estimate(1.5, 1.4, 1.6)] * 4).low == pytest.approx(1.45, abs=0.01)
    assert over_runs([Estimate(1.0), Estimate(4.0, 3.0, 5.0)]) == Estimate(2.0)


def test_a_race_begins_even_if_there_is_no_time_for_all_of_it():
    search = Search({}, {"x": ["a"], "y": ["b"]}, scripted({"a": Sample(1.5)}), 9.0, now=lambda: 0.0)
    search.plan({"own": PROMPTS}, lambda _: 60.0)
    search.run()
    assert search.works[0].racing == ["a"] and search.leader() == "a"


def test_what_the_costs_of_passes_exclude_is_not_loaded_and_one_lookup_is_raced_all_the_same(monkeypatch):
    racer = ready_racer({1: 10.0, 2: 21.0, 8: 90.0})
    loaded = []
    monkeypatch.setattr(racer._session, "load", lambda spec, _: loaded.append(spec.lanes[0].method))
    lanes = {
        "draft": Lane(method="draft_model", model="code-draft"),
        "s": Lane(method="suffix"),
        "n": Lane(method="ngram"),
    }
    assert racer.usable(lanes, ["code-draft"]) == {"n": ["n, k=1"]} and loaded == ["ngram"]
    assert racer.left_out == {"draft": EXCLUDED, "s": EXCLUDED}


def test_a_drafter_that_drafts_slowly_is_excluded_after_it_was_loaded():
    racer = ready_racer({1: 10.0, 2: 11.0, 4: 13.0, 8: 17.0})
    big = {"draft": Lane(method="draft_model", model="code")}
    assert racer.usable(big, []) == {} and racer.left_out == {"draft": EXCLUDED}


def test_drafters_load_in_a_third_of_the_time_and_the_others_are_named(monkeypatch):
    racer = ready_racer()
    rest = iter([90.0, 61.0, 59.0])

    def load(spec, progress):
        if spec.lanes[0].model:
            progress(0.5, "reading")

    monkeypatch.setattr(racer._session, "load", load)
    racer.rest = lambda: next(rest)
    families = racer.usable({"draft": Lane(method="draft_model", model="code-draft"), "n": Lane(method="ngram")}, [])
    assert {*families} == {"n"} and racer.left_out == {"draft": "no time"}


def test_stages_and_the_race_so_far_are_seen_while_it_runs(tuned):
    seen, result = tuned
    assert [share for share, *_ in seen] == sorted(share for share, *_ in seen)
    stages = [dict(running.environment["stages"]) for *_, running in seen]
    assert all([*each] == [*STAGES] for each in stages)
    begun = [max((n for n, seconds in enumerate(each.values()) if seconds), default=0) for each in stages]
    assert begun == sorted(begun) and begun[-1] == STAGES.index("racing")
    assert sum(list(result.environment["stages"].values())[1:]) < 23.0  # the deadline, without the target
    racing = [row for *_, running in seen for row in running.rows if row["state"] == "racing"]
    assert racing and all(row["speed-up"].value and not row.get(RACE_LINK) for row in racing)
    rows = [row for row in result.rows if row["category"] == "mixed"]
    assert [row["place"] for row in rows if row["place"]] == sorted(row["place"] for row in rows if row["place"])
    assert rows[-1]["lane"] == "plain decoding" and re.fullmatch(r"[\d.]+ tokens/s", rows[-1]["state"])
    assert "racing" not in {row["state"] for row in rows} and all(row[RACE_LINK] for row in rows if row["place"])
    assert re.search(
        r"Loading the model \d+ s, measuring passes \d+ s, loading drafters \d+ s, racing", bench_report(result)
    )


def test_a_candidate_that_fell_behind_is_left_out_after_its_races():
    speeds = {
        "a": Sample(2.0, NUMBERS),
        "b": Sample(1.9, NUMBERS),
        "c": Sample(1.8, NUMBERS),
        "d": Sample(0.3, NUMBERS),
    }
    families = {name: [name] for name in speeds}
    search = Search({"own": PROMPTS}, families, scripted(*[speeds] * 2), 9.0)
    search.run()
    lanes = {name: Lane(method="ngram", name=name) for name in speeds}
    bars, out = _bars(search, idle_racer(lanes), "a", False), "left out after 2 races"
    states = {row["lane"]: row["state"] for row in bars}
    assert states == {"a": "", "b": "", "c": out, "d": out, "plain decoding": "11.1 tokens/s"}


def test_bars_have_the_order_of_the_search_also_where_one_ran_on_an_easy_prompt_only():
    easy = {"a": Sample(2.0, NUMBERS, predicted=2.0), "b": Sample(2.5, NUMBERS, predicted=2.5)}
    hard = {"a": Sample(1.5, NUMBERS, predicted=1.5), "b": Sample(0.0, predicted=0.8)}
    search = Search({"own": PROMPTS}, {"A": ["a"], "B": ["b"]}, scripted(easy, *[hard] * 3), 9.0)
    search.run()
    lanes = {name: Lane(method="ngram", name=name) for name in "ab"}
    first, second, _ = _bars(search, idle_racer(lanes), search.leader(), False)
    assert (first["lane"], second["lane"], first["place"], second["place"]) == ("a", "b", 1, 2)
    assert second["speed-up"].value == 2.5 > first["speed-up"].value
    # of a single prompt, runs alone count
    search = Search({"own": ["only"]}, {"A": ["a"], "B": ["b"]}, scripted(easy, *[hard] * 3), 9.0)
    search.run()
    assert search.leader() == "b"


def prompts_of(folder, count):
    path = folder / "own.txt"
    path.write_text("".join(f"prompt {n}\n" for n in range(count)))
    return ["--prompts", str(path), "--minutes", "5"]


def test_an_engine_runs_its_candidates_one_after_the_other_on_the_same_prompts(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TIMES", "4")
    monkeypatch.setattr("specdemo.bench.search.NEAR", 0.31)  # the times of a stand-in mean nothing
    engine, out = make(tmp_path), tmp_path / "tuned.json"
    options = ["--engine", "vllm", "--command", str(engine), *prompts_of(tmp_path, 5), "--confirm", "--out", str(out)]
    assert main(["tune", "code", *options]) == 0
    printed = capsys.readouterr().out
    plain, *candidates = [entry["args"] for entry in started(engine)]
    assert "--speculative-config" not in plain
    drafts = [json.loads(args[args.index("--speculative-config") + 1]) for args in candidates]
    lengths = [one["num_speculative_tokens"] for one in drafts[:-2]]
    assert lengths[:4] == [1, 2, 3, 4] and lengths == sorted(lengths)
    assert {one["method"] for one in drafts} == {"draft_model"}
    asked = [json.loads(line) for line in (tmp_path / "started.asked").read_text().splitlines()]
    asked = [prompt for prompt in asked if prompt.startswith("prompt")]
    turns = [*[(0, 1)] * len(lengths), (2, 3, 4), (2, 3, 4)]
    assert asked == [f"prompt {n}" for turn in turns for n in turn for _ in range(2)]
    assert gone(engine)
    assert printed.startswith("tune | vLLM 9.9, ") and "own: on 3 other prompts Draft 2.6M" in printed
    assert "Left out: Prompt lookup, vLLM 9.9 has no method 'ngram'." in printed and "adaptive" not in printed
    result = read_result(out)
    raced = {row["lane"] for row in result.rows if row["place"]}
    assert raced == {f"Draft 2.6M, k={k}" for k in lengths}
    assert {row["state"] for row in result.rows if row["lane"] == "Prompt lookup"} == {
        "not raced: vLLM 9.9 has no method 'ngram'"
    }
    assert result.config["engine"] == "vllm" and "command" not in result.config


def test_two_servers_are_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(address.LISTED, "")
    pieces = [piece(f"word{n} ", total=n + 1, finish="length" if n == 9 else None) for n in range(10)]
    with completion_server(pieces) as plain, completion_server(pieces) as other:
        servers = ["--server", plain.address, "--server", other.address]
        assert main(["tune", "some/model", *servers, *prompts_of(tmp_path, 3), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    rows = [row for row in shown["rows"] if row["place"]]
    why = [line for line in shown["remarks"] if line.startswith("own: ")]  # none if noise made the second one faster
    assert all(line.endswith("; the server does not report its drafts.") for line in why)
    assert [(row["category"], row["lane"]) for row in rows] == [
        (category, f"server {address.host(other.address)}") for category in ("own", "mixed")
    ]
    assert rows[0]["prompts"] == 3 and not rows[0]["race"]
    asked = [body["messages"][0]["content"] for _, body, _ in other.requests]
    assert [prompt for prompt in asked if prompt.startswith("prompt")] == PROMPTS[:3]


@pytest.mark.parametrize("folder", ["/home/someone/models", "C:\\Users\\someone"])
def test_a_shared_result_names_files_without_folders(folder):
    model, draft = ModelRef(f"{folder}/target.gguf"), ModelRef(f"{folder}/draft.gguf")
    chosen = pair(ModelRef("code"), ModelRef("code-draft")).with_changes(k=3)
    lane = chosen.lanes[0].model_copy(update={"model": draft})
    remarks = settings_to_copy(chosen.model_copy(update={"target": model, "lanes": [lane]}))
    rows = [{"lane": "a", "race": race_link(ModelRef(model), lane, "p")}]
    config = Tune.build({"target": model, "drafts": [draft]}).config("x")
    shared = to_json(shareable(Result("tune", 1, config, {}, rows, [*remarks, f"Left out: {draft}."]), [model, draft]))
    assert "someone" not in shared and shared.count("target.gguf") > 3
    assert folder in remarks[0]  # where it was measured, the command works


def test_settings_to_copy_name_the_engines_that_have_the_method():
    found = "\n".join(settings_to_copy(pair(ModelRef("code"), ModelRef("code-draft")).with_changes(k=3)))
    assert "run --target code --method draft_model --model code-draft --k 3" in found
    assert "preset=your-models&target=code&method=draft_model&k=3&model=code-draft" in found
    assert "vllm serve" in found
    assert "num_assistant_tokens=3" in found
    assert "'draft_model': 'code-draft'" in found
    lookup = "\n".join(settings_to_copy(pair(ModelRef("code")).with_changes(method="ngram", k=7)))
    assert "prompt_lookup_num_tokens=7" in lookup
    heads = "\n".join(settings_to_copy(pair(ModelRef("code")).with_changes(method="mtp", model="some/mtp", k=2)))
    assert "Ollama: DRAFT with the drafter in the Modelfile, and draft_num_predict 2" in heads
    assert "LM Studio" not in heads
    on_engine = settings_to_copy(pair(ModelRef("code")).with_changes(method="ngram", k=7, dtype="float32"), "vllm")
    assert [line.partition(":")[0] for line in on_engine] == ["Here", "vLLM"]
    assert on_engine[0].endswith("--target code --method ngram --dtype float32 --k 7 --engine vllm")
    only_here = settings_to_copy(pair(ModelRef("code")).with_changes(method="lookahead", k=4))
    assert [line.partition(":")[0] for line in only_here] == ["Here", "Page"]


@pytest.mark.parametrize("target", ["code", "some/model"])
@pytest.mark.parametrize("prompt", ["Write <b>.", "long " * 1000])
def test_a_link_opens_the_race_of_a_candidate(target, prompt):
    for name, lane in offered("code", [ModelRef("code-draft")]).items():
        for one in with_lengths(name, lane, FLAT):
            query = race_link(ModelRef(target), one, prompt)
            opened, notes = from_query(query, load_presets(), allow_any_model=True)
            assert (opened.target, notes) == (target, [])
            assert len(opened.lanes) == 1 and opened.lanes[0].parsed == one.parsed
            assert (opened.lanes[0].method, opened.lanes[0].model, opened.lanes[0].k) == (one.method, one.model, one.k)
            assert (opened.prompt == prompt) is (len(prompt) < 100) and len(query) <= 2000
