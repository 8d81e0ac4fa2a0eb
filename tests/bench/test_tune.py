"""Search of `tune` with simulated costs and a simulated clock, its candidates, and one run on an embedded model."""

import json
from random import Random

import pytest

from specdemo.__main__ import main
from specdemo.bench.candidates import draft_lengths, drafters, race_link, settings_to_copy, with_lengths
from specdemo.bench.result import read_result
from specdemo.bench.search import KindOfWork, Sample, Search
from specdemo.bench.tune import OWN, Tune
from specdemo.engine.cost import CostModel
from specdemo.presets.files import load_presets
from specdemo.presets.link import from_query
from specdemo.presets.pair import add_pair

FLAT = {1: 10.0, 2: 10.2, 4: 10.4, 8: 11.0, 12: 11.8}
FOURS = {1: 10.0, 2: 9.6, 3: 10.9, 4: 12.0, 5: 16.7, 6: 18.3, 7: 19.9, 8: 19.3, 12: 25.0}  # SmolLM2 in Q4_K_M
STEEP = {1: 10.0, 2: 19.0, 3: 28.0, 4: 37.0, 8: 73.0}
KINDS = ("chat", "summary", "edit", "code", "json", "translate")
PROMPTS = [f"prompt {n}" for n in range(8)]


class SimulatedMachine:
    """Candidates with a true acceptance rate per kind of work, on a machine with noise and a clock."""

    def __init__(self, curve, seed, hit=1.0):
        self.rng, self.curve, self.now, self.races = Random(seed), curve, 0.0, 0
        self.families = {f: [f"{f}, k={k}" for k in draft_lengths(curve)] for f in ("ngram", "suffix", "head")}
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
        self.races += 1
        self.now += 1.0 + len(names)
        kind = prompt.partition(" ")[0]
        shift = Random(prompt).gauss(0.0, 0.03)
        found = {}
        for name in names:
            costs = self.costs(kind, name, shift)
            speed = costs.speedup(self.lengths[name]) * self.rng.gauss(1.0, 0.02)
            numbers = {"tokens_per_s": 100.0 * speed, "tokens": 96, "steps": 48, "drafted": 96, "accepted": 48}
            found[name] = Sample(speed, numbers, costs)
        return found

    def search(self, seconds, measure=None):
        works = {kind: [f"{kind} {text}" for text in PROMPTS] for kind in KINDS}
        search = Search(works, self.families, measure or self.measure, seconds, now=lambda: self.now)
        search.run(self.lengths, self.curve)
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
    runs = search.confirm({kind: [f"{kind} other {n}" for n in range(3)] for kind in KINDS}, start + seconds - 300.0)
    counts = [len(runs[kind]) for kind in KINDS]
    assert world.now <= start + seconds and (counts == [3] * 6) is complete
    assert max(counts) - min(counts) <= 1 <= max(counts)
    assert all({*run} == {*work.ranked()[:2]} for work in search.works for run in runs[work.name])


def test_ends_early_where_nothing_pays():
    world = SimulatedMachine(STEEP, 0, hit=0.2)
    search = world.search(10_000.0)
    assert all(work.speed(work.ranked()[0]).high < 1.0 for work in search.works)
    assert world.races <= 5 * len(KINDS)


@pytest.mark.parametrize("after", [1, 4, 9])
def test_an_interrupt_keeps_what_is_known(after):
    world = SimulatedMachine(FLAT, 0)

    def interrupted(prompt, names):
        if world.races == after:
            raise KeyboardInterrupt
        return world.measure(prompt, names)

    search = world.search(300.0, interrupted)
    assert search.stopped
    assert sum(bool(work.samples) for work in search.works) == min(after, len(KINDS))
    assert search.leader()


def test_an_interrupt_of_the_first_run_and_short_answers_leave_nothing():
    def interrupted(prompt, names):
        raise KeyboardInterrupt

    with pytest.raises(ValueError, match="nothing was measured"):
        SimulatedMachine(FLAT, 0).search(300.0, interrupted)
    assert not SimulatedMachine(FLAT, 0).search(300.0, lambda prompt, names: {}).leader()


SEEN = [(1.8, (0,)), (1.5, (1,)), (1.6, (0, 1, 2))]  # speed-ups and rounds


def test_a_single_run_does_not_rank_above_a_faster_first_look():
    looked, ran, twice = ({number: Sample(speed, {}) for number in rounds} for speed, rounds in SEEN)
    work = KindOfWork("code", [], {"ran": ran, "looked": looked}, left=["ran", "looked"])
    assert work.ranked() == ["looked", "ran"]
    assert KindOfWork("code", [], work.samples | {"twice": twice}, left=["twice"]).ranked()[0] == "twice"


def test_a_candidate_that_fails_leaves():
    world = SimulatedMachine(FLAT, 0)
    broken = max(world.lengths, key=lambda name: (name.startswith("ngram"), world.lengths[name]))
    search = world.search(300.0, lambda text, names: world.measure(text, [n for n in names if n != broken]))
    assert all(broken not in work.samples for work in search.works)
    assert all(work.ranked() for work in search.works)


@pytest.mark.parametrize(
    ("curve", "draft", "expected"), [(FOURS, 0.0, {3}), (FOURS, 0.1, {3}), (FLAT, 0.0, {14}), (STEEP, 0.0, {1})]
)
def test_draft_lengths_follow_the_curve_of_costs(curve, draft, expected):
    found = draft_lengths(curve, draft)
    assert expected <= {*found}
    assert len(found) <= 5
    if curve is FOURS:
        assert not {4, 5, 6} & {*found}


def test_candidates_are_the_drafters_of_this_machine():
    lanes = drafters("code", ["code-draft"], download=False)
    found = {name: with_lengths(name, lane, FLAT) for name, lane in lanes.items()}
    assert {"ngram", "suffix", "draft_model code-draft", "eagle code-eagle-1"} <= {*found}
    names = [lane.name for lanes in found.values() for lane in lanes]
    assert len({*names}) == len(names)
    assert [lanes[0].method for lanes in (found["ngram"], found["suffix"])] == ["adaptive"] * 2
    assert [lane.k for lane in found["suffix"]] == [0, 7]  # it chooses shorter drafts itself


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
        ([], "Missing argument"),
        (["no-such-model"], "no-such-model"),
        (["code", "--draft", "stories-medusa"], "does not fit"),
        (["code", "--work", "poetry"], "unknown kind of work 'poetry'"),
        (["code", "--minutes", "0"], "minutes must be above 0"),
        (["code", "--minutes", "0.001"], "no time"),
    ],
)
def test_bad_input_gets_one_line(options, reason, capsys):
    assert main(["tune", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert reason in error


def test_tunes_an_embedded_model_and_shows_the_stored_result(tmp_path, capsys):
    out = tmp_path / "tuned.json"
    options = ["--work", "code edit", "--new-tokens", "24", "--minutes", "0.1", "--out", str(out)]
    assert main(["tune", "code", *options]) == 0
    printed = capsys.readouterr().out
    assert "mixed work" in printed  # on a busy machine it may be undecided
    assert ("Here: " in printed) == ("--target code --method" in printed)
    result = read_result(out)
    assert {row["category"] for row in result.rows} == {"code edit", "mixed"}
    assert main(["replay", str(out)]) == 0
    assert capsys.readouterr().out == printed


def test_settings_to_copy_name_the_engines_that_have_the_method():
    found = "\n".join(settings_to_copy(add_pair("code", "code-draft").with_changes(k=3)))
    assert "run --target code --method draft_model --model code-draft --k 3" in found
    assert "preset=your-models&target=code&method=draft_model&k=3&model=code-draft" in found
    assert "vllm serve" in found
    assert "num_assistant_tokens=3" in found
    assert "'draft_model': 'code-draft'" in found
    lookup = "\n".join(settings_to_copy(add_pair("code").with_changes(method="ngram", k=7)))
    assert "prompt_lookup_num_tokens=7" in lookup
    only_here = settings_to_copy(add_pair("code").with_changes(method="lookahead", k=4))
    assert [line.partition(":")[0] for line in only_here] == ["Here", "Page"]


@pytest.mark.parametrize("target", ["code", "some/model"])
@pytest.mark.parametrize("prompt", ["Write <b>.", "long " * 1000])
def test_a_link_opens_the_race_of_a_candidate(target, prompt):
    for name, lane in drafters("code", ["code-draft"], download=False).items():
        for one in with_lengths(name, lane, FLAT):
            query = race_link(target, one, prompt)
            opened, notes = from_query(query, load_presets(), allow_any_model=True)
            assert (opened.target, notes) == (target, [])
            assert len(opened.lanes) == 1 and opened.lanes[0].parsed == one.parsed
            assert (opened.lanes[0].method, opened.lanes[0].model, opened.lanes[0].k) == (one.method, one.model, one.k)
            assert (opened.prompt == prompt) is (len(prompt) < 100) and len(query) <= 2000
