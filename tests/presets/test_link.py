"""Share links: round trips, and hostile input."""

import json
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdemo.__main__ import main
from specdemo.bench.suites import Sweep
from specdemo.core.protocol import Budget
from specdemo.core.rules import DEFAULT_RULE
from specdemo.core.trace import compare, from_json, output_outcomes, to_json
from specdemo.methods import method_options
from specdemo.models.packaged import EMBEDDED
from specdemo.presets.files import DEFAULT, Preset, allowed_models, load_presets, read_presets
from specdemo.presets.limits import LIMITS
from specdemo.presets.link import (
    ANOTHER,
    ELSEWHERE,
    FOREIGN,
    OWN,
    changed_by_query,
    from_query,
    to_command,
    to_query,
)

PRESETS = load_presets()
BASE = PRESETS[DEFAULT]

printable = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=40)
names = st.sampled_from(EMBEDDED)
lanes = st.one_of(
    st.builds(
        lambda **lane: {"method": "draft_model", **lane},
        model=names,
        k=st.integers(1, LIMITS.k),
        acceptance=st.sampled_from(["lossless", "block", "typical", "fly", "speculative_cascade"]),
        name=printable,
    ),
    st.builds(
        lambda low, more, **lane: {"method": "ngram", "options": {"min_n": low, "max_n": min(low + more, 8)}, **lane},
        low=st.integers(1, 8),
        more=st.integers(0, 7),
        k=st.integers(1, LIMITS.k),
    ),
)
changes = st.fixed_dictionaries(
    {},
    optional={
        "target": names,
        "prompt": st.one_of(printable, st.sampled_from(["<b>&amp;${1+1}{{x}}\t😀 日本", "a=b&k=9#+ %00"])).filter(
            str.strip
        ),
        "chat": st.booleans(),
        "system": printable,
        "max_new_tokens": st.integers(1, LIMITS.max_new_tokens),
        "temperature": st.just(0.0) | st.floats(0.001, 5.0),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(0, 1000),
        "min_p": st.floats(0, 1, exclude_max=True),
        "seed": st.integers(0, 2**31 - 1),
        "schedule": st.sampled_from(["race", "sequential"]),
        "lanes": st.lists(lanes, min_size=1, max_size=LIMITS.lanes - 1),
    },
)


@given(st.sampled_from(list(PRESETS)), changes)
def test_a_link_brings_back_what_was_shared(id, changed):
    shared = PRESETS[id].with_changes(**changed)
    query = to_query(shared, PRESETS[id])
    assert from_query(query, PRESETS) == (shared, [])
    assert from_query(dict(parse_qsl(query, keep_blank_values=True)), PRESETS) == (shared, [])


def test_a_link_holds_the_differences_alone():
    assert to_query(BASE, BASE) == "preset=embedded-draft"
    assert to_query(BASE.with_changes(k=7), BASE) == "preset=embedded-draft&k=7"
    ngram = PRESETS["embedded-ngram"]
    query = to_query(ngram.with_changes(options={"max_n": 5}, temperature=0.5), ngram)
    assert query == "preset=embedded-ngram&temperature=0.5&option.max_n=5"
    three = PRESETS["embedded-three-lanes"]
    query = to_query(three.with_changes(lanes=[three.lanes[0], {"method": "ngram", "k": 6}]), three)
    assert query == "preset=embedded-three-lanes&method2=ngram&k2=6"


def test_a_command_states_the_differences_that_its_options_know():
    several = PRESETS["embedded-three-lanes"]
    longer = [lane.model_copy(update={"k": 9}) for lane in several.lanes]
    for changed, base, command in (
        (BASE, BASE, f"python -m specdemo run {DEFAULT}"),
        (BASE.with_changes(k=7, prompt="It's", temperature=0.5), BASE, "--prompt 'It'\"'\"'s' --temperature 0.5 --k 7"),
        (BASE.with_changes(chat=False), BASE, "--no-chat"),
        (several.model_copy(update={"lanes": longer}), several, None),
        (several.model_copy(update={"lanes": several.lanes[:1]}), several, f"python app.py --preset {several.id}"),
    ):
        text = to_command(changed, base)
        assert text.endswith(command or "") and text.startswith("python ")
    own = BASE.model_copy(update={"id": OWN})
    assert to_command(own, own) == f"python app.py --target {BASE.target} --draft {BASE.lanes[0].model}"


def test_a_link_unsets_what_its_preset_sets():
    there = {BASE.id: BASE.changed(chat=True)}
    query = to_query(BASE, there[BASE.id])
    assert query == "preset=embedded-draft&chat=" and from_query(query, there) == (BASE, [])


def test_machine_settings_are_not_shared():
    assert to_query(BASE.with_changes(device="cpu", dtype="float32"), BASE) == "preset=embedded-draft"


def own(tmp_path, name, **lane):
    """Return presets of a page that was started with a model: of a file, or of another name."""
    target = tmp_path / name if name.endswith(".gguf") else name
    pair = BASE.with_changes(target=str(target), **{"method": "ngram"} | lane)
    return PRESETS | {OWN: pair.changed(id=OWN, title=name[-80:])}


@pytest.mark.parametrize("name", ["mine.gguf", "folder/mine.gguf", "code"])
def test_a_link_names_the_models_of_a_page_without_their_folders(tmp_path, name):
    here, there = own(tmp_path / "ann", name), own(tmp_path / "bob", name)
    query = to_query(here[OWN].with_changes(k=5), here[OWN])
    assert query == f"preset=your-models&target={name.rpartition('/')[2]}&k=5"  # no file of this name to hash
    chosen, refused = from_query(query, there)
    assert (chosen.target, chosen.lanes[0].k, refused) == (there[OWN].target, 5, [])


@pytest.mark.parametrize("elsewhere", [None, "other.gguf", "stories"])
def test_a_link_to_a_model_that_the_page_does_not_have_says_so(tmp_path, elsewhere):
    here = own(tmp_path / "ann", "mine.gguf")
    query = to_query(here[OWN], here[OWN])
    there = own(tmp_path, elsewhere) if elsewhere else PRESETS
    chosen, (note,) = from_query(query, there)
    has = ELSEWHERE.format(elsewhere or BASE.target)
    assert note == f"ignored target='mine.gguf' from the link: {has}" and "mine" not in chosen.target


def write_model(path, content):
    """Write a model of one file or, without a suffix, a folder."""
    file = path if path.suffix else path / "model.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["mine.gguf", "mine"])
@pytest.mark.parametrize("allow_any", [False, True])
def test_a_link_names_a_model_in_files_by_name_and_hash(tmp_path, name, allow_any):
    for folder in ("ann", "bob", "eve"):
        middle = b"other" if folder == "eve" else b"equal"  # the header, the size and the end are the same
        write_model(tmp_path / folder / name, b"GGUF" + b"0" * 500_000 + middle + b"0" * 500_000)
    ann, bob, eve = (own(tmp_path, str(tmp_path / folder / name)) for folder in ("ann", "bob", "eve"))
    query = to_query(ann[OWN], ann[OWN])
    assert query == to_query(bob[OWN], bob[OWN]) != to_query(eve[OWN], eve[OWN])
    assert query == urlencode({"preset": OWN, "target": f"{name}@{ann[OWN].target.content_hash}"})
    assert from_query(query, bob, allow_any) == (bob[OWN], [])
    chosen, (note,) = from_query(query, eve, allow_any)
    assert chosen.target == eve[OWN].target and note.endswith(ANOTHER.format(chosen.target.link_name))
    assert note.startswith(f"ignored target='{name}@") and str(tmp_path) not in note
    old = from_query({"preset": OWN, "target": name}, eve, allow_any)
    assert old == (eve[OWN], [])  # a link of an earlier version


def test_another_target_is_one_note_with_its_drafts(tmp_path):
    here = own(tmp_path / "ann", "mine.gguf", method="draft_model", model="small.gguf")
    query = to_query(here[OWN], here[OWN])
    assert "model=small.gguf" in query
    there = own(tmp_path, "other.gguf", method="draft_model", model="tiny.gguf")
    chosen, (note,) = from_query(query, there)
    assert chosen == there[OWN] and note.startswith("ignored target='mine.gguf'") and "other.gguf" in note


def test_no_link_is_the_default_preset():
    assert from_query({}, PRESETS) == from_query("", PRESETS) == (BASE, [])


def test_prompt_too_long_for_a_link_is_reported():
    with pytest.raises(ValueError, match="the prompt of a link can have 2000 characters, this one has 2001"):
        to_query(BASE.with_changes(prompt="a" * 2001), BASE)


@pytest.mark.parametrize(
    ("query", "note"),
    [
        ({"preset": "nope"}, "ignored preset='nope' from the link: unknown preset; choose one in the menu"),
        ({"preset": "embedded-ngrm"}, "ignored preset='embedded-ngrm' from the link: unknown preset; did you mean"),
        ({"k": "9999"}, "ignored k='9999' from the link: k must be 16 or less, not 9999"),
        ({"k": "9" * 5000}, "ignored k='9999"),
        ({"k": 7}, "ignored 'k' from the link: its value is not text"),
        ({"temperature": "nan"}, "ignored temperature='nan' from the link: temperature must be a finite number"),
        ({"method": "rm -rf"}, "ignored method='rm -rf' from the link: unknown method 'rm -rf'; choose one of"),
        ({"model": "evil/model"}, "ignored model='evil/model' from the link: a link may name only embedded models"),
        ({"prompt": "a\x1b[2Jb"}, "ignored prompt='a\\x1b[2Jb' from the link: the prompt must not contain the control"),
        ({"prompt": "\ud800"}, "ignored prompt='\\ud800' from the link: prompt must be valid text"),
        ({"chat": "maybe"}, "ignored chat='maybe' from the link: chat must be true or false, not 'maybe'"),
        ({"lanes": "99"}, "ignored lanes='99' from the link: must be a number from 1 to 3"),
        ({"option.max_n": "3"}, "ignored option.max_n='3' from the link: unknown option 'max_n' of method"),
        ({"k2": "5"}, "ignored unknown setting 'k2' from the link"),
        ({"__class__": "x"}, None),
        ({"__theme": "dark", "view": "api"}, None),
    ],
)
def test_hostile_values_leave_the_default_and_a_note(query, note):
    chosen, notes = from_query(query, PRESETS)
    assert chosen == BASE
    assert len(notes) == (note is not None)
    for text in notes:
        assert text.startswith(note)
        assert len(text) < 400
        assert text.isprintable()


def test_one_bad_value_does_not_spoil_the_others():
    chosen, notes = from_query("preset=embedded-ngram&k=99&seed=5&option.max_n=99&option.min_n=2", PRESETS)
    assert chosen == PRESETS["embedded-ngram"].with_changes(seed=5, options={"min_n": 2})
    assert len(notes) == 2


def test_options_that_are_valid_only_together_are_set_together():
    start = PRESETS["embedded-ngram"].with_changes(options={"min_n": 3})
    shared = start.with_changes(options={"max_n": 2})
    assert from_query("option.max_n=2&option.min_n=1", PRESETS, start=start) == (shared, [])
    chosen, notes = from_query("option.max_n=2&seed=5", PRESETS, start=start)
    assert chosen == start.with_changes(seed=5)
    assert notes == ["ignored option.max_n='2' from the link: option 'min_n' (3) must not exceed 'max_n' (2)"]


def test_invalid_lane_stays_unchanged():
    chosen, notes = from_query({"method": "ngram", "model": "stories", "k": "9"}, PRESETS)
    assert chosen == BASE
    assert notes == [
        "ignored method='ngram' from the link: method 'ngram' takes no model; leave it out",
    ]
    chosen, notes = from_query("preset=embedded-ngram&method=draft_model", PRESETS)
    assert chosen == PRESETS["embedded-ngram"]
    assert "needs a model" in notes[0]


def test_the_first_of_several_values_counts():
    assert from_query("k=7&k=9", PRESETS) == (BASE.with_changes(k=7), ["ignored a second 'k' from the link"])

    class Several(dict):
        def multi_items(self):
            return [("k", "7"), ("k", "9")]

    assert from_query(Several(), PRESETS)[0] == BASE.with_changes(k=7)


def test_many_bad_settings_give_few_notes():
    assert len(from_query({f"x{i}": "1" for i in range(10_000)}, PRESETS)[1]) == 7
    chosen, notes = from_query("k=3&" * 10_000, PRESETS)
    assert chosen == BASE
    assert notes == ["ignored the link: it has 40000 characters; the limit is 20000"]


def test_any_model_requires_the_owners_permission():
    query = {"target": "somebody/else", "model": "somebody/small"}
    assert from_query(query, PRESETS)[0] == BASE
    chosen, notes = from_query(query, PRESETS, allow_any_model=True)
    assert (chosen.models, notes) == (("somebody/else", "somebody/small"), [])


keys = st.sampled_from(
    ["preset", "target", "prompt", "lanes", "temperature", "seed", "schedule", "top_p", "sweep", "option2.x"]
    + [f"{name}{n}" for name in ("method", "model", "k", "name", "acceptance", "server") for n in ("", "2", "3")]
    + [f"option{n}.{knob.name}" for knob in method_options("ngram") for n in ("", "2")]
)
values = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["ngram", "draft_model", "none", "stories", "3", "-1", "1e9", "inf", "\ud800", "\x00", *PRESETS]),
    st.sampled_from(["9" * 100_000, "x" * 100_000, "nan", "1e999", "1_0"]),
    st.none(),
    st.floats(),
    st.lists(st.integers(), max_size=2),
)


@settings(max_examples=max(100, settings.get_profile("hardening").max_examples))
@given(st.dictionaries(st.one_of(keys, st.text(max_size=8)), values, max_size=12))
def test_nothing_in_a_link_raises_or_passes_the_limits(query):
    chosen, notes = from_query(query, PRESETS)
    assert Preset.model_validate(chosen.model_dump()) == chosen
    assert set(chosen.models) <= set(allowed_models(PRESETS))
    assert chosen.with_changes() == chosen
    texts = {name: value for name, value in query.items() if isinstance(value, str)}
    sweep, more = changed_by_query(Sweep(), texts)
    assert sweep and all(note.isprintable() and len(note) < 1000 for note in (*notes, *more))


@given(st.text(max_size=200))
def test_no_query_string_raises(query):
    from_query(query, PRESETS)
    from_query("?" + query, PRESETS)


def test_model_in_an_option_must_be_allowed_too():
    query = {"preset": "embedded-draft", "method": "cascade", "model": "stories-draft-wide"}
    chosen, notes = from_query(query | {"option.inner_model": "someone/else"}, PRESETS)
    assert chosen.lanes[0].options == {}
    assert notes == [f"ignored option.inner_model='someone/else' from the link: {FOREIGN}"]
    chosen, notes = from_query(query | {"option.inner_model": "stories-draft-deep"}, PRESETS)
    assert chosen.models == ("stories", "stories-draft-wide", "stories-draft-deep") and not notes
    assert "someone/else" in from_query(query | {"option.inner_model": "someone/else"}, PRESETS, True)[0].models


def test_a_link_may_name_the_servers_that_the_operator_listed(monkeypatch):
    base = PRESETS["embedded-draft"]
    query = to_query(base.on_servers(["http://127.0.0.1:8001"]), base)
    assert query == "preset=embedded-draft&server=http%3A%2F%2F127.0.0.1%3A8001"
    monkeypatch.setenv("SPECDEMO_SERVERS", "")
    chosen, notes = from_query(query, PRESETS)
    assert chosen == base and "server http://127.0.0.1:8001 is not allowed" in notes[0]
    monkeypatch.setenv("SPECDEMO_SERVERS", "127.0.0.1:8001")
    assert from_query(query, PRESETS)[0].lanes[0].server == "http://127.0.0.1:8001"
    assert from_query("preset=two-servers&server=", PRESETS)[0].lanes[0].server is None


def test_options_of_the_acceptance_rule_travel_in_a_link():
    base = PRESETS["embedded-draft"]
    chosen = base.with_changes(acceptance="fly", acceptance_options={"window": "2"})
    query = to_query(chosen, base)
    assert query == "preset=embedded-draft&acceptance=fly&rule.window=2"
    assert from_query(query, PRESETS) == (chosen, [])
    assert chosen.with_changes(acceptance="typical").lanes[0].acceptance_options == {}
    found, notes = from_query(query.replace("window=2", "window=99"), PRESETS)
    assert found == base.with_changes(acceptance="fly")
    assert notes == ["ignored rule.window='99' from the link: option 'window' must be between 0 and 15, not 99"]


def test_a_rule_for_chains_does_not_combine_with_a_tree():
    with pytest.raises(ValueError, match="'fly' verifies chains only and this lane drafts a tree; set its"):
        PRESETS["embedded-eagle-3"].with_changes(acceptance="fly", options={"draft": "tree"})
    chain = PRESETS["embedded-eagle-3"].with_changes(acceptance="fly", options={"draft": "chain"}).lanes[0]
    assert chain.budget == Budget(chain.k, chain.k)
    with pytest.raises(ValueError, match="drafts a tree"):  # of k nodes
        PRESETS["embedded-mlp-speculator"].with_changes(acceptance="fly", options={"draft": "tree"})


FOLDER = Path(__file__).parent / "previous_release"
LINKS = json.loads((FOLDER / "links.json").read_text(encoding="utf-8"))


def test_a_trace_opens_and_keeps_its_keys():
    text = (FOLDER / "trace.json").read_text(encoding="utf-8")
    trace = from_json(text)
    baseline, lane = trace.lanes
    assert lane.token_ids == baseline.token_ids and lane.method == "medusa" and lane.summary["accepted"] > 0
    assert {"accepted", "corrected"} & {kind for event in lane.events for kind in output_outcomes(event)}
    assert compare(baseline, lane, greedy=True, schedule=trace.schedule)["identical"] is True
    before, after = json.loads(text), json.loads(to_json(trace))
    assert before.keys() <= after.keys()
    for old, new in zip(before["lanes"], after["lanes"], strict=True):
        assert old.keys() <= new.keys() and old["summary"].keys() <= new["summary"].keys()
        assert old["token_ids"] == new["token_ids"] and len(old["events"]) == len(new["events"])
    assert before["comparison"][0].keys() <= after["comparison"][0].keys()


@pytest.mark.parametrize("method", ["orthrus", "uno"])
def test_a_method_that_was_removed_is_one_line_and_its_traces_open(method, tmp_path, capsys):
    text = (FOLDER / "trace.json").read_text(encoding="utf-8").replace('"method":"medusa"', f'"method":"{method}"')
    assert from_json(text).lanes[1].method == method
    (tmp_path / "trace.json").write_text(text, encoding="utf-8")
    assert main(["replay", str(tmp_path / "trace.json")]) == 0
    assert "Medusa (stories-medusa)" in capsys.readouterr().out
    changed, (note,) = from_query({"method": method}, PRESETS)
    assert note.startswith(f"ignored method={method!r} from the link: unknown method {method!r}; choose one of")
    assert changed == BASE


@pytest.mark.parametrize("base", LINKS)
def test_a_link_opens_with_every_setting(base):
    preset, notes = from_query(LINKS[base], load_presets())
    assert not notes
    assert (preset.prompt, preset.temperature, preset.top_p) == ("Once & again", 0.7, 0.9)
    assert (preset.max_new_tokens, preset.seed) == (48, 5)
    assert to_query(preset, load_presets()[base]) == LINKS[base]


def test_a_preset_opens_with_every_key():
    preset = json.loads(read_presets(FOLDER / "preset.yaml")[0].model_dump_json())
    expected = json.loads((FOLDER / "preset.json").read_text(encoding="utf-8")) | {"id": preset["id"]}
    for lane, old in zip(preset["lanes"], expected["lanes"], strict=True):
        assert not any(lane.pop(name) for name in lane.keys() - old.keys())  # later settings are at their defaults
        if old["acceptance"] == "lossless":  # the default of that release
            old["acceptance"] = DEFAULT_RULE
    assert {name: preset[name] for name in expected} == expected
