"""Runs of the shipped models and of servers, and stored runs, as a visitor sees them."""

import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image, ImageSequence
from playwright.sync_api import expect

from specdemo.analysis.lanes import break_even, results
from specdemo.core.tally import summarise
from specdemo.core.trace import compare, estimates, from_json, to_json
from specdemo.costs.passes import SAME_BITS
from specdemo.presets.pair import TASKS
from specdemo.ui.assets import TITLE
from tests.e2e.conftest import (
    NEXT_FRAME,
    SHIFTS,
    choose_example,
    edit,
    expect_example,
    lane_text,
    show_in_real_time,
    visitors,
    wait_for_text,
)
from tests.processes import served
from tests.traces import HOSTILE, PROMPT, hostile_trace
from tests.ui.stand_ins import chat_trace


def run(page, status="^Finished"):
    """Start the first run of a page and wait for its end. The run may be too short to observe in progress."""
    page.locator("#run").click()
    wait_for_text(page, status)
    expect(page.locator("#run")).to_be_enabled()


def value(page, metric, lane):
    return page.locator(f'[data-metric="{metric}"][data-of-lane="{lane}"]').get_attribute("data-value")


def visible(text):
    """Return the text as the step inspector writes it."""
    return re.sub("^ | $", "·", text.translate({9: "⇥", 10: "⏎", 13: "␍"}))


def save(page):
    if not page.locator("#save-json").is_visible():
        page.locator("#share").click()
    with page.expect_download() as download:
        page.locator("#save-json").click()
    return download.value


def open_file(page, path):
    with page.expect_file_chooser() as chooser:
        page.locator("#open-trace").click()
    chooser.value.set_files(path)


@pytest.fixture(scope="module")
def shared_page(chromium, address):
    with visitors(chromium, address) as visit:
        page = visit()
        wait_for_text(page, "^Recorded")
        yield page


@pytest.fixture
def replayed(shared_page):
    """Return a function that opens a file on one page of many tests, and returns the page when it shows the file."""

    def opened(path, width=1280, height=900):
        shared_page.set_viewport_size({"width": width, "height": height})
        shared_page.keyboard.press("Escape")  # closes the inspector of the test before
        shared_page.locator(".sd-rejected").uncheck()
        show_in_real_time(shared_page)
        shared_page.evaluate(NEXT_FRAME)
        shared_page.evaluate("document.querySelector('#view .sd-status').textContent = ''")
        open_file(shared_page, path)
        wait_for_text(shared_page, "^Replayed")
        return shared_page

    return opened


def test_every_number_of_a_finished_page_follows_from_its_trace(visit, replayed, tmp_path):
    """The numbers are recomputed from the events while the page is open. Then the run is repeated and pooled."""
    page = visit("?preset=embedded-draft&max_new_tokens=24&k=3")
    expect(page.locator("#k-1 input")).to_have_value("3")
    run(page)
    file = save(page)
    assert file.suggested_filename == "specdemo-embedded-draft.json"
    path = tmp_path / file.suggested_filename
    file.save_as(path)
    trace = from_json(path.read_bytes())
    assert [lane.finish for lane in trace.lanes] == ["length", "length"]
    assert [lane_text(page, index) for index in (0, 1)] == [lane.text for lane in trace.lanes]
    names = ("tokens_per_s",)
    tiles = {
        "ttft": "ttft_ms",
        "itl": "itl_ms_p50",
        "acceptance": "acceptance_rate",
        "per-pass": "tokens_per_step",
        "memory": "peak_memory_bytes",
    }
    of_all = {"memory", "ttft", "itl"}
    expected = {}
    for index, lane in enumerate(trace.lanes):
        numbers = summarise(lane, lane.summary["peak_memory_bytes"])
        assert numbers == lane.summary
        expected |= {(name, index): numbers[name] for name in names}
        expected |= {(tile, index): numbers[key] for tile, key in tiles.items() if index or tile in of_all}
        split = ", ".join(f"{part} {numbers[f'ms_{part}']}" for part in ("draft", "verify", "other"))
        shown = page.locator(".sd-split .sd-track").nth(index).get_attribute("aria-label")
        assert [round(float(n), 0) for n in re.findall(r"[\d.]+", shown)] == pytest.approx(
            [float(n) for n in re.findall(r"[\d.]+", split)], abs=1.0
        )
        waited = f"CPU contention {round(100 * numbers['waited_share'])} %"
        assert page.locator(".sd-split").nth(index).inner_text().endswith(waited)
    plain, lane = trace.lanes
    exact = trace.environment["exactness"] == SAME_BITS
    row = compare(plain, lane, greedy=True, schedule=trace.schedule) | {"verdict": "identical", "bit_for_bit": exact}
    assert row == trace.comparison[0]
    expected |= {("speedup", 1): row["speedup"]}
    shown = page.locator("[data-metric]").evaluate_all(
        "nodes => nodes.map(n => [n.dataset.metric, Number(n.dataset.ofLane), n.dataset.value])"
    )
    known = {(metric, of): value for metric, of, value in shown if value}  # the target has no experts
    assert known.pop(("output", 1)) == "identical"
    assert {key: float(value) for key, value in known.items()} == expected  # 15 and 15.0 are the same
    totals, (speed,) = summarise(lane), estimates(trace)
    needed = f"break-even {int(100 * round(break_even(totals, speed), 4) + 0.5)} %"  # the page reads four digits
    shares = f"{totals['accepted']} of {totals['drafted']}, {needed}"
    expect(page.locator('[data-tile="acceptance"] small')).to_have_text(shares)
    expect(page.locator('[data-tile="per-pass"] small')).to_have_text(f"{totals['steps']} passes")
    expect(page.locator('[data-tile="speedup"] small')).to_contain_text(f"{speed.interval()}, ")
    expect(page.locator('[data-tile="speedup"] small')).to_contain_text(speed.label)
    expect(page.locator('[data-tile="speedup"] b')).to_have_text(f"{row['speedup']:.2f}×")
    expect(page.locator('[data-tile="output"] b')).to_have_text("✓ bit for bit" if exact else "✓ identical")
    expect(page.locator(".sd-noise .sd-noisy")).to_have_count(int(row["noisy"]))
    expect(page.locator(".sd-explanations")).to_contain_text(results(trace, "×")[0].why)
    rates = [f"position {i}: {100 * rate:.0f} %" for i, rate in enumerate(totals["accept_by_position"], start=1)]
    chart = page.locator(".sd-rates div")
    assert chart.get_attribute("aria-label") == f"Acceptance rate, {', '.join(rates)}"
    expect(chart.locator("rect")).to_have_count(len(rates))

    # The opened file shows the same numbers without a model.
    other = replayed(path)
    expect(other.locator(".sd-badge")).to_have_text(re.compile("^Recorded on .+, [0-9]+ Nov$"))
    assert [lane_text(other, i) for i in (0, 1)] == [lane.text for lane in trace.lanes]
    assert float(value(other, "speedup", 1)) == row["speedup"]

    if row["noisy"]:
        page.locator(".sd-noisy").click()
    else:  # on a quiet machine there is no badge, but its effect is testable
        page.evaluate("document.getElementById('repeat').click()")
    expect(page.locator("#stop")).to_be_enabled()
    expect(page.locator("#run")).to_be_enabled()
    wait_for_text(page, "^Finished")
    pooled = from_json(save(page).path().read_bytes())
    assert [len(lane.repeats) for lane in pooled.lanes] == [2, 2]
    assert float(value(page, "tokens_per_s", 1)) == summarise(pooled.lanes[1])["tokens_per_s"]
    assert float(value(page, "speedup", 1)) == pooled.comparison[0]["speedup"]


def test_hostile_text_stays_text(replayed, trace_file):
    page = replayed(trace_file)
    assert lane_text(page, 0) == lane_text(page, 1) == "".join(HOSTILE)
    for lane in (0, 1):
        expect(page.locator(f'[data-lane="{lane}"] .sd-prompt')).to_have_text(PROMPT)
    assert page.locator("#view img, #view script, #view u, #view i").count() == 0
    assert page.title().endswith(f" - {TITLE}") and "owned" not in page.title()  # the result precedes it
    tokens = "span[data-outcome], del[data-outcome]"
    outcomes = page.locator("[data-lane]").locator(tokens).evaluate_all("all => all.map(s => s.dataset.outcome)")
    assert set(outcomes) == {"target", "accepted", "rejected", "corrected", "bonus"}
    # External tests rely on these hooks.
    assert [page.locator(f'[data-lane="{lane}"]').count() for lane in (0, 1)] == [1, 1]
    assert page.locator(tokens).count() == len(outcomes)
    expect(page.locator(".sd-badge")).to_have_text("Recorded on Abacus <b>9000</b>, 20 Nov")
    name = "Throughput of Baseline, Speculative <em>lane</em> over device time"
    expect(page.get_by_role("img", name=name)).to_be_visible()


def test_rejected_drafts_stay_or_leave_a_mark_steps_are_inspected_and_the_run_replayed(replayed, trace_file):
    page = replayed(trace_file)
    rejected = page.locator('[data-lane="1"] del[data-outcome="rejected"]').first
    assert rejected.get_attribute("data-more") == "+1"
    shown = "node => getComputedStyle(node).opacity"
    filled = "node => getComputedStyle(node.nextSibling).backgroundColor"
    assert rejected.evaluate(shown) == "1" and rejected.evaluate(filled) != "rgba(0, 0, 0, 0)"
    text = page.locator('[data-lane="1"].sd-text')
    height = text.bounding_box()["height"]
    text.hover()
    assert text.bounding_box()["height"] == height  # nothing moves under the pointer
    page.locator(".sd-rejected").check()
    expect(rejected).to_have_css("opacity", "0")  # faded; what stays is a mark at the token after it
    assert "gradient" in rejected.evaluate("node => getComputedStyle(node.nextSibling).backgroundImage")
    page.locator(".sd-rejected").uncheck()
    assert rejected.evaluate(shown) == "1"
    copied = page.evaluate(
        "getSelection().selectAllChildren(document.querySelector('[data-lane=\"1\"].sd-text')), `${getSelection()}`"
    )
    assert HOSTILE[0] in copied and "wrong" not in copied  # a copy is the model's text
    page.locator('[data-lane="1"].sd-text').focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".sd-step")).to_contain_text("Step 1/")
    expect(page.locator(".sd-outcome")).to_have_text(
        ["✓ accepted", "✗ rejected", "· not reached", "↺ correction token"]
    )
    page.locator('[data-lane="1"] span[data-outcome="bonus"]').first.dispatch_event("click")  # it spans two lines
    expect(page.locator(".sd-outcome").last).to_have_text("★ bonus token")
    page.get_by_role("radio", name="1/16").check(force=True)
    page.locator(".sd-replay").click()
    wait_for_text(page, "at 1/16 speed")
    wait_for_text(page, "^Replayed")
    assert lane_text(page, 1) == "".join(HOSTILE)


def test_bad_input_keeps_a_hostile_prompt_which_is_shown_as_it_is_and_a_lossy_lane_has_its_badge_everywhere(visit):
    page = visit("?preset=embedded-sampling&max_new_tokens=12&acceptance=fly&rule.window=2&seed=7")
    expect(page.locator("#acceptance-1 input")).to_have_value(re.compile("lossy"))
    expect(page.locator("#rule-window-1 input[type=number]")).to_have_value("2")
    edit(page)
    expect(page.locator("#seed input")).to_have_value("7")
    page.locator("#prompt textarea").fill(PROMPT)
    page.locator("#seed input").fill("-5")
    page.locator("#run").click()
    expect(page.locator(".sd-alert")).to_have_text("Seed must be 0 or more, not -5")
    expect(page.locator("#run")).to_be_enabled()
    expect(page.locator("#prompt textarea")).to_have_value(PROMPT)
    page.locator("#seed input").fill("5")
    expect(page.locator(".sd-alert")).to_be_hidden()
    run(page, "lossy")
    expect(page.locator('[data-lane="0"] .sd-prompt')).to_have_text(PROMPT)
    for place in (".sd-lane h3", '[data-tile="speedup"]', ".sd-name"):
        expect(page.locator(f"{place} .sd-lossy")).to_have_text("lossy")
    expect(page.locator('[data-tile="output"] b')).to_have_text("⚠ lossy")
    trace = from_json(save(page).path().read_bytes())
    assert [lane.exact for lane in trace.lanes] == [True, False] and trace.config["temperature"] > 0
    assert trace.lanes[1].options["acceptance"] == "fly" and trace.comparison[0]["verdict"] == "lossy"
    assert '"exact":false' in "".join(save(page).path().read_text(encoding="utf-8").split())


def test_unreported_server_values_are_unknown(replayed, remote_file):
    page = replayed(remote_file)
    assert lane_text(page, 1) == "".join(HOSTILE)
    expect(page.locator(".sd-remote")).to_have_text("remote: m at <b>host</b>:8000, draft tokens unknown")
    token = page.locator('[data-lane="1"] span[data-outcome="unknown"]').last
    assert token.evaluate("e => getComputedStyle(e).backgroundColor") == "rgba(0, 0, 0, 0)"
    expect(page.locator('[data-tile="acceptance"]')).to_contain_text("9 of 20")
    expect(page.locator('[data-tile="output"] b')).to_have_text("✓ same text")
    expect(page.locator(".sd-undrafted")).to_have_text("The accepted tokens per step are unknown.")
    token.click()
    expect(page.locator(".sd-step")).to_contain_text("draft tokens unknown")


def test_the_result_is_saved_as_an_image_and_as_a_loop_of_six_seconds(replayed, trace_file):
    page = replayed(trace_file)
    page.locator("#share").click()
    with page.expect_download() as image:
        page.locator(".sd-save-image").click()
    assert image.value.suggested_filename == "specdemo-embedded-draft.png"
    data = image.value.path().read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) == (2560, 1440)
    with page.expect_download() as loop:
        page.locator(".sd-save-loop").click()
    assert loop.value.suggested_filename == "specdemo-embedded-draft.webp"
    with Image.open(loop.value.path()) as pictures:
        lengths = []
        for frame in ImageSequence.Iterator(pictures):
            frame.load()
            lengths.append(frame.info["duration"])
        assert (pictures.size, pictures.info["loop"], sum(lengths), lengths[-1]) == ((960, 540), 0, 6000, 2000)
    expect(page.locator(".sd-save-loop")).to_have_text("Save loop")


def test_on_a_phone_the_selected_token_is_visible_above_the_inspector(replayed, trace_file):
    page = replayed(trace_file, 390, 844)
    token = page.locator('[data-lane="1"] span[data-outcome="corrected"]').last
    token.click()
    expect(page.locator(".sd-inspector")).to_be_visible()
    box, sheet, bar = (
        page.locator(s).last.bounding_box() for s in (".sd-selected-token", ".sd-inspector", ".sd-headline")
    )
    assert bar["y"] + bar["height"] <= box["y"] and box["y"] + box["height"] <= sheet["y"]
    page.locator(".sd-edit").click()  # it would cover the controls
    expect(page.locator(".sd-inspector")).to_be_hidden()
    page.locator(".sd-edit").click()


def test_a_tree_is_drawn_and_walked_by_keyboard_and_drafter_notes_are_plotted(replayed, tree_file, trace_file):
    page = replayed(tree_file, 390, 800)
    page.locator('[data-lane="1"].sd-text').focus()
    page.keyboard.press("End")
    expect(page.locator(".sd-table table")).to_be_visible()  # the draft is a chain
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    nodes = page.get_by_role("treeitem")
    expect(nodes).to_have_count(1 + 64 + 1)
    output_nodes = page.locator(
        '.sd-node:is([data-outcome="accepted"], [data-outcome="bonus"], [data-outcome="corrected"]) code'
    )
    assert output_nodes.all_text_contents() == [visible(text) for text in HOSTILE[1:5]]
    assert page.locator(".sd-tree img, .sd-tree b, .sd-tree script").count() == 0
    struck = page.locator('[data-outcome="rejected"] code').first
    assert "line-through" in struck.evaluate("e => getComputedStyle(e).textDecorationLine")
    box = page.locator(".sd-tree")
    assert box.evaluate("e => e.scrollWidth > e.clientWidth && e.scrollHeight > e.clientHeight")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.locator('.sd-node[tabindex="0"]').focus()
    expect(page.locator(".sd-node-label")).to_contain_text("depth 4 · ")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".sd-node-label")).to_have_text(
        re.compile(r"depth 3 · draft q 0\.50 · target p 0\.25 · ✓ accepted$")
    )
    expect(page.locator(".sd-node:focus")).to_have_attribute("aria-level", "4")
    page.keyboard.press("Home")
    expect(page.locator(".sd-node-label")).to_contain_text("root")

    figures = page.locator(".sd-drafter-notes figure")
    expect(figures).to_have_count(2)
    expect(figures.first).to_contain_text("Draft length know 2 · estimated acceptance 75 % · predicted 1.50×")
    expect(figures.last).to_contain_text("now 60 % · 4 updates · 16.0 ms of training · training loss 1.250")
    expect(figures.first.locator("[role=img]").last).to_have_attribute("aria-label", re.compile("over 4 steps, now 2$"))
    expect(page.locator(".sd-times small").filter(has_text="training")).to_contain_text("including 16.0 ms of training")
    replayed(trace_file)
    expect(page.locator(".sd-drafter-notes")).to_be_hidden()


def test_a_trace_opened_from_the_lower_end_of_the_page_is_in_sight(replayed, trace_file, tmp_path):
    path = tmp_path / "code.json"
    path.write_text(to_json(replace(hostile_trace(), prompt="def add(a, b):\n    return")), encoding="utf-8")
    replayed(trace_file, 390, 844).locator("#open-trace").scroll_into_view_if_needed()
    page = replayed(path, 390, 844)
    expect(page.locator(".sd-lanes")).to_be_in_viewport()
    lane = page.locator('[data-lane="1"].sd-code')
    inner, outer = lane.locator(".sd-baseline-mark").last.bounding_box(), lane.bounding_box()
    assert outer["x"] <= inner["x"] and inner["x"] + inner["width"] <= outer["x"] + outer["width"]


def test_a_first_visit_shows_the_recorded_race_of_the_preset_and_a_late_link_replaces_no_run(visit, trace_file):
    page = visit()
    wait_for_text(page, "^Recorded run. Press Run")
    expect(page.locator(".sd-badge")).to_have_text(re.compile("^Recorded on a server CPU, [0-9]+ Nov$"))
    first = lane_text(page, 1)
    assert first and first == lane_text(page, 0)
    choose_example(page, "DFlash: a block of drafts in one pass")  # it has no recording
    wait_for_text(page, "^Ready")
    expect(page.locator(".sd-badge")).to_be_hidden()
    expect(page.locator(".sd-lane h3")).to_have_text(["Baseline", "DFlash"])
    choose_example(page, "Prompt lookup")
    wait_for_text(page, "^Recorded")
    assert lane_text(page, 1) not in ("", first)
    charted = "[...document.querySelectorAll('#chart .sd-curve')].map(line => line.dataset.points).join()"
    points = page.wait_for_function(f"() => {{ const n = {charted}; return /^[1-9]/.test(n) && n; }}").json_value()
    page.get_by_text("1/16×", exact=True).click()  # at full speed the replay takes a third of a second
    page.locator(".sd-replay").click()
    wait_for_text(page, "^Replaying")
    page.locator(".sd-replay").click()
    wait_for_text(page, "^Replayed")
    page.wait_for_function(f"points => {charted} === points", arg=points)
    assert "after first token" in page.locator("#chart .sd-unit").text_content()
    choose_example(page, "Code vs. story")  # three lanes, whose names have room
    expect(page.locator(".sd-lane h3")).to_have_count(3)
    assert page.locator(".sd-lane h3").evaluate_all("heads => heads.every(e => e.scrollWidth <= e.clientWidth)")
    overtake_link(page, trace_file)


def overtake_link(page, trace_file):
    """Open a link, and a file before the link is answered."""
    overtaken = []

    def overtake(route):
        answer = route.fetch()
        # the prompt of the link's preset, first sent with the controls
        if "Tell it again with Max" in answer.text() and not overtaken:
            overtaken.append(True)
            open_file(page, trace_file)
            wait_for_text(page, "^Replayed")
        route.fulfill(response=answer)

    page.route("**/gradio_api/run/predict*", overtake)
    page.goto(page.url.partition("?")[0] + "?preset=embedded-ngram")
    expect_example(page, "Prompt lookup")
    wait_for_text(page, "^Replayed")
    page.unroute_all(behavior="wait")


def test_a_chat_shows_its_turns_and_folds_what_is_thought(replayed, chat_file):
    page = replayed(chat_file)
    assert [lane_text(page, i) for i in (0, 1)] == [lane.text for lane in chat_trace().lanes]
    for lane, heads in ((0, ["Thought · 6 tokens"]), (1, ["Thought · 7 tokens"])):
        box = page.locator(f'[data-lane="{lane}"].sd-text')
        expect(box.locator("summary")).to_have_text(["3 earlier messages", *heads])
        expect(box.locator(".sd-turn").last).to_have_text("userA piano!")
        expect(box.locator(".sd-prompt").first).to_have_text("Be <b>brief</b>.")
        expect(box.locator(".sd-prompt").first).to_be_hidden()
    page.locator('[data-lane="1"].sd-text').focus()
    page.keyboard.press("Home")
    expect(page.locator('[data-lane="1"] .sd-selected')).to_be_visible()  # the section with the step has opened
    expect(page.locator("#follow-row")).to_be_hidden()  # a file has no model


MARKS = """marks => marks.map(mark => {
  const box = mark.closest('[data-lane]');
  const tokens = [...box.querySelectorAll('span[data-outcome]')];
  const before = tokens.filter(token => mark.compareDocumentPosition(token) & Node.DOCUMENT_POSITION_PRECEDING);
  const textOf = (some) => some.map(token => token.textContent).join('');
  return [box.dataset.lane, mark.textContent, textOf(before), textOf(tokens.slice(before.length, before.length + 1))];
})"""


ENDS = "bars => bars.map(bar => [Number(bar.ariaValueNow), bar.ariaValueText.includes('finished first')])"
LINES = "all => all.map(e => Math.round(e.clientHeight / (1.3 * parseFloat(getComputedStyle(e).fontSize))))"


def test_a_real_model_gives_a_true_sentence_about_itself_and_marks_where_its_lanes_part(chromium, smollm2_gguf):
    """Short runs of SmolLM2 in a chat: first-run card, verdicts, the place where a lossy lane leaves the baseline's
    text, rejected tokens, and nothing moves; a second turn, texts of different lengths, and one that repeats itself."""
    link = "?preset=your-models&max_new_tokens=24&k=7&method2=ngram&k2=4&acceptance2=fly"  # a lossy lane
    with served("--target", smollm2_gguf) as (_, address), visitors(chromium, address) as visit:
        page = visit(link, before=lambda page: page.add_init_script(SHIFTS), viewport={"width": 390, "height": 844})
        expect(page.locator(".sd-headline")).to_have_text(re.compile("^Ready. Press Run"))
        expect(page.locator(".sd-playback")).to_be_hidden()  # nothing to play yet
        expect(page.locator("#prompt textarea")).to_have_value(re.compile("^Correct the spelling"))
        expect(page.locator(".sd-lane h3")).to_have_text(["Baseline", "Suffix decoding", re.compile("^Prompt lookup")])
        assert page.locator("#tasks button").all_inner_texts() == [*TASKS]
        expect(page.locator(".sd-chips button").last).to_contain_text("24 tokens")
        run(page)
        plain, suffix, lossy = (lane_text(page, lane) for lane in range(3))
        verdicts = page.locator("[data-tile=output] .sd-row b").all_text_contents()
        assert verdicts[1] == "⚠ lossy" and plain != lossy
        assert (suffix == plain) == ("identical" in verdicts[0] or "bit for bit" in verdicts[0])
        marks = [mark for mark in page.locator(".sd-parting").evaluate_all(MARKS) if "(lane 2)" in mark[1]]
        (first, words, before, one), (last, same_words, same_before, other) = marks
        assert (first, last, words, before) == ("0", "2", same_words, same_before)
        assert one != other and plain.startswith(before + one) and lossy.startswith(before + other)
        assert re.fullmatch(r"texts part \(lane 2\): \d[\d.]* between .+ and .+, accepted by the lossy rule", words)
        assert one.strip() in words and other.strip() in words
        sentence = page.locator(".sd-status").text_content()
        gains = [float(value(page, "speedup", lane)) for lane in (1, 2)]
        won = (
            "fastest|faster|No clear difference" if max(gains) >= 1 else "No clear difference|Plain decoding is faster"
        )
        assert re.search(won, sentence)
        assert ("in all with the prompt" in sentence) != ("No clear difference" in sentence)
        settings = page.locator(".sd-passes", has_text="flash attention")  # without it more texts differ
        expect(settings.first).to_be_attached()
        words = r"SmolLM2 135M · Q4_1.*\d tokens/s.*\d plain tokens.*HuggingFaceTB/SmolLM2-1.7B-Instruct"
        expect(page.locator(".sd-card")).to_contain_text(re.compile(words, re.S))
        assert str(Path(smollm2_gguf).parent) not in page.locator("body").inner_text()
        shown = "all => all.map(e => getComputedStyle(e)).map(s => s.position + s.opacity)"
        assert set(page.locator(".sd-text del").evaluate_all(shown)) == {"static1"}  # struck out in their place
        assert page.evaluate("shifts.reduce((a, b) => a + b, 0)") < 0.1
        page.locator("#message textarea").fill("Now say it in one sentence.")
        page.locator("#continue").click()
        expect(page.locator(".sd-text .sd-fold").first).to_be_visible()  # the earlier messages
        expect(page.locator("#view .sd-status")).to_have_text(re.compile("^Finished"))
        turns = [page.locator(f'[data-lane="{lane}"].sd-text .sd-turn').all_text_contents() for lane in range(3)]
        assert turns[0] == turns[1] == turns[2] and plain in turns[0][1]  # every lane continues the baseline's answer
        page.set_viewport_size({"width": 1024, "height": 800})
        for tab, place in (("Find what pays", "tune-target"), ("Other machines", "whatif-start")):
            page.get_by_role("tab", name=tab).click()  # every tab is about this model
            expect(page.locator(f"#{place} input")).to_have_value(re.compile("smollm2.135m", re.I))
        page.get_by_role("link", name="Training", exact=True).click()
        expect(page.locator("#lab-about")).to_contain_text("smollm2-135m-instruct-q4_1.gguf is a GGUF file")
        expect(page.locator("#train")).to_be_disabled()
        page.get_by_role("tab", name="Race").click()
        edit(page)
        assert page.locator("#basics .block:visible").count() <= 6
        page.locator("#method-2 input").click()
        grey = page.get_by_role("option", name=re.compile("^Layer skip — not here: .*GGUF"))
        assert grey.evaluate("option => getComputedStyle(option).pointerEvents") == "none"
        page.keyboard.press("Escape")
        expect(page.locator("#option-remember-1")).to_be_visible()  # of suffix decoding: a sentence, not a word a line
        assert max(page.locator("#drawer .info-text").evaluate_all(LINES)) <= 3
        page.locator("#prompt textarea").fill("What is the capital of France?")
        for menu in ("#method-1 input", "#target input"):  # closed without a choice, and Run at once
            page.locator(menu).click()
            page.keyboard.press("Escape")
        page.locator("#run").click()
        expect(page.locator(".sd-result").nth(2)).to_have_text(re.compile("^stopped after"))
        wait_for_text(page, "^Finished")
        ends = page.locator(".sd-race [role=progressbar]").evaluate_all(ENDS)
        assert ends[2][0] < ends[0][0] == ends[1][0] and not any(flag for _, flag in ends)  # not the same work
        page.locator("#max_new_tokens input[type=number]").fill("64")
        page.locator("#prompt textarea").fill("Count:" + 16 * " 1")
        run(page, "the text repeats itself, so this gain is not typical")
