"""The display of a trace in Chromium without the rest of the page, with a clock that the tests set."""

import re
from dataclasses import replace

import pytest

from specdemo.core.tally import summarise
from specdemo.core.trace import compare
from specdemo.engine.messages import COMPARING, LOADING, MEASURING, STAGES, WARMING_UP, Restarted, RunStage, replay
from specdemo.engine.session import Session
from specdemo.presets.files import preset
from specdemo.presets.runnable import nearest_runnable
from specdemo.servers.address import LISTED
from specdemo.ui import assets
from specdemo.ui.job import refusal, to_line
from specdemo.ui.race import Log, replayed, with_notes
from specdemo.ui.views import Failed, Loading, view
from tests.completion_server import completion_server, piece
from tests.traces import HOSTILE, WRONG, hostile_trace

STOPPED = {"type": "end", "finish": "cancelled", "comparison": []}
LOAD = """([scripts, stages]) => {
  window.props = { value: "", stages };
  new Function("element", "props", "watch", scripts)(document.body, props, (name, read) => (window.read = read));
}"""


class Display:
    def __init__(self, page):
        self._page = page

    def show(self, log):
        self._page.evaluate("log => { props.value = log; read(); }", log)

    def describe(self, key):
        """Show settings in the row of the setup, which the page does some time after each change."""
        self._page.evaluate(
            """key => {
                 document.getElementById("setup")?.remove();
                 document.body.insertAdjacentHTML("beforeend", `<i id=setup><b data-key=${key}></b></i>`);
                 document.dispatchEvent(new CustomEvent("specdemo:settings"));
               }""",
            key,
        )

    def pace(self, value):
        self._page.locator(f'[name=sd-pace][value="{value}"]').check()

    def wait(self, ms):
        self._page.clock.run_for(ms)

    def seek(self, share):
        """Move the playhead to a fraction of the run, 0 to 1."""
        scrub = self._page.locator(".sd-scrub")
        scrub.evaluate("(e, at) => { e.value = at; e.dispatchEvent(new Event('input')); }", round(1000 * share))
        self.wait(100)

    def tones(self):
        """Return the tones of all coloured numbers: `gain` and `good` are green, `bad` is red."""
        return {
            *self._page.locator("[data-metric][data-tone], .sd-headline:not([data-tone=''])").evaluate_all(
                "nodes => nodes.map(node => node.dataset.tone)"
            )
        }

    def click(self, selector):
        self._page.locator(selector).first.click()

    def press(self, selector, key):
        self._page.locator(selector).press(key)

    def locate(self, selector):
        return self._page.locator(selector).all()

    def read(self, selector):
        return self._page.locator(selector).all_inner_texts()

    def evaluate(self, script, argument=None):
        return self._page.evaluate(script, argument)

    def reduce_motion(self):
        self._page.emulate_media(reduced_motion="reduce")

    def style(self, more=""):
        self._page.add_style_tag(content=assets.text("style.css") + more)

    def text(self, lane):
        selector = f'[data-lane="{lane}"] span[data-outcome]'
        return "".join(self._page.locator(selector).all_text_contents())

    def outcomes(self, lane):
        """Return the tokens of a lane with their outcomes."""
        tokens = self._page.locator(f'[data-lane="{lane}"] span[data-outcome]')
        return [
            (text, outcome)
            for text, outcome in tokens.evaluate_all(
                "all => all.map(token => [token.textContent, token.dataset.outcome])"
            )
        ]


@pytest.fixture
def display(chromium):
    page = chromium.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.clock.install(time=0)
    page.set_content(assets.markup("view.html"))
    page.evaluate(LOAD, ["\n".join(map(assets.text, assets.RACE)), STAGES])
    page.locator("details:has(.sd-results)").evaluate("numbers => numbers.open = true")
    yield Display(page)
    page.close()
    assert not wrong


def visible(text):
    """Return a token as the inspector writes it: spaces at its ends as dots."""
    return re.sub("^ | $", "·", text)


def race(finish="stop"):
    """Return a run of two speculative lanes; the second is faster."""
    trace = hostile_trace(2)
    for name, lane, share in zip(("Slow", "Fast"), trace.lanes[1:], (1.0, 0.5), strict=True):
        lane.name, lane.finish = name, finish
        steps = [replace(event, ms={span: share * ms for span, ms in event.ms.items()}) for event in lane.events[1:]]
        lane.events[1:] = steps
        lane.summary = summarise(lane, peak_memory_bytes=12_345_678)
    rows = [compare(trace.lanes[0], lane, greedy=True) | {"verdict": "identical"} for lane in trace.lanes[1:]]
    return replace(trace, comparison=rows)


def test_both_texts_are_marked_where_they_part(display):
    trace = race()
    trace.comparison[1] |= {"verdict": "rounding", "first_divergence": 4, "divergence_margin": 0.02}
    for _ in range(2):  # a replay marks them again
        display.show(replayed(trace).text)
        display.wait(8000)
        marks = "[...document.querySelectorAll('.sd-parting')].map(e => [e.closest('[data-lane]').dataset.lane,"
        marks = display.evaluate(f"{marks} e.textContent, e.nextSibling.textContent])")
        words = f"texts part (lane 2): a near-tie: 0.02 between “{HOSTILE[4]}”"[:60]
        assert [(lane, after) for lane, _, after in marks] == [("0", HOSTILE[4]), ("2", HOSTILE[4])]
        assert all(text.startswith(words) for _, text, _ in marks)
        assert "near-tie: 0.02" in display.read('[data-tile="output"]')[0]
        display.click(".sd-replay")
        display.wait(100)
        assert not display.locate(".sd-parting")


def test_results_follow_the_playhead(display):
    display.show(Log().add(replay(race())))
    display.wait(8000)
    display.seek(0)
    assert display.read(".sd-status") == ["Paused at the start."]
    assert display.read(".sd-headline") == ["No result yet"] and display.tones() == set()
    results = display.evaluate("[...document.querySelectorAll('[data-metric]')].map(e => e.textContent)")  # also folded
    assert results and {*results} == {"–"}
    assert not any("faster" in words or "identical" in words for words in display.read(".sd-stage"))
    display.seek(0.5)
    assert display.read(".sd-status") == ["Paused."] and "paused" in display.read(".sd-pill")
    assert display.read(".sd-headline") == ["No result yet"]  # the baseline has fewer than eight tokens
    drawn = display.evaluate("document.querySelector('.sd-slide').style.getPropertyValue('--at')")  # by a transform
    assert float(drawn) == pytest.approx(0.5, abs=0.02) and display.read(".sd-now") == ["0.04 s"]
    display.seek(0.9)
    assert (
        re.fullmatch(r"Fast is \d\.\d\d× as fast as plain decoding so far", display.read(".sd-headline")[0])
        and display.tones() == set()
    )
    display.seek(1)
    assert display.read(".sd-status")[0].startswith("Finished. Fast is fastest")


def with_top_tokens():
    """Return a run whose drafting steps have the target's most likely tokens."""
    trace = hostile_trace()
    lane = trace.lanes[1]
    for i, event in enumerate(lane.events):
        if event.drafted[0]:
            rows = [[(token, 0.625), (len(HOSTILE), 0.25)] for token in event.emitted[0]]
            lane.events[i] = replace(event, top=rows)
    return trace


def test_the_inspector_lists_the_most_likely_tokens_of_the_target(display):
    display.show(Log().add(replay(with_top_tokens())))
    display.wait(8000)
    display.click('[data-lane="1"] span[data-outcome="corrected"]')
    # accepted, rejected (with the tokens of its position), not reached, correction token
    assert display.read(".sd-table tbody td:nth-child(4)") == ["0.45", "0.10", "–", "0.63"]
    shown = [text.replace("\n", "") for text in display.read(".sd-table tbody td:nth-child(6)")]
    assert shown == [f"{visible(HOSTILE[1])} 0.63{WRONG} 0.25", f"{HOSTILE[2]} 0.63{WRONG} 0.25", "", ""]
    assert display.read(".sd-table tr[aria-current] th") == ["→"]


def test_a_step_names_what_it_left_out_and_the_experts_that_it_used(display):
    trace = hostile_trace()
    notes = {"experts": 12.5, "experts_per_token": 2.0, "experts_in_all": 64.0}
    for lane, more in zip(trace.lanes, ({"unverified": 2.0}, notes), strict=True):
        lane.events = [replace(event, notes=more) if event.index else event for event in lane.events]
        lane.summary = summarise(lane)
    display.show(Log().add(replay(trace)))
    display.wait(8000)
    assert display.read('[data-tile="experts"] b') == ["–", "12.50"]
    display.click('[data-lane="1"] span[data-outcome="corrected"]')
    assert display.read(".sd-step-summary")[0].endswith("used 12.5 of 64 experts per layer; one token uses 2.")
    display.click('[data-lane="0"] span[data-outcome]:last-child')
    assert "nothing verified" in display.read(".sd-step")[0]


PLACES = (
    "() => [...document.querySelectorAll('.sd-lane, .sd-legend')].map(e => JSON.stringify(e.getBoundingClientRect()))"
)


def test_the_first_playback_shows_a_step_in_slow_motion_once(display):
    display.style()
    display.show(Log().add(replay(hostile_trace())))
    places = display.evaluate(PLACES)
    display.wait(500)
    assert display.read(".sd-card-token span") == [HOSTILE[1].strip(), WRONG, WRONG]
    assert display.read(".sd-card-token b") == [HOSTILE[2].strip()]
    display.wait(3500)
    assert display.text(1) == HOSTILE[0] and display.evaluate(PLACES) == places
    display.wait(2000)
    assert display.locate(".sd-slow") == []
    display.wait(1000)
    assert display.text(1) == "".join(HOSTILE)
    display.click(".sd-replay")
    display.wait(500)
    assert display.locate(".sd-slow") == [] and len(display.text(1)) > len(HOSTILE[0])


@pytest.mark.parametrize("end", ["x", ".sd-skip"])
def test_any_key_or_press_ends_the_slow_motion(display, end):
    display.show(Log().add(replay(hostile_trace())))
    display.wait(500)
    display.evaluate("document.body.tabIndex = 0")
    display.press("body", "Shift")
    assert len(display.locate(".sd-slow")) == 1
    display.click(end) if end.startswith(".") else display.press("body", end)
    assert display.locate(".sd-slow") == []
    display.wait(1000)
    assert display.text(1) == "".join(HOSTILE)


def test_a_run_that_is_being_measured_has_no_slow_motion(display):
    log, messages = Log(), list(replay(hostile_trace()))
    display.show(log.add(messages[:9]))
    display.wait(2000)
    assert display.locate(".sd-slow") == [] and display.text(1) != ""


def test_reduced_motion_gets_four_stills(display):
    display.reduce_motion()
    display.style()
    display.show(Log().add(replay(hostile_trace())))
    display.wait(500)
    playing = (
        "[...document.querySelector('.sd-slow').getAnimations({ subtree: true })].some(e => e.playState === 'running')"
    )
    assert len(display.locate(".sd-scene")) == 4 and not display.evaluate(playing)
    looks = "nodes => nodes.map(e => [...e.children].map(face => getComputedStyle(face).opacity).join())"
    seen = display.evaluate(f"({looks})([...document.querySelectorAll('.sd-card-token[data-outcome=rejected]')])")
    assert seen == ["1,0", "1,0", "1,0", "0,1"]  # the draft token's face and the target's


VISUAL_ORDER = """lane => [
    ...document.querySelectorAll(`[data-lane="${lane}"] span[data-outcome]`)
  ].map((node) => [node.textContent, node.getBoundingClientRect().left]).sort((a, b) => a[1] - b[1])
  .map(([text]) => text)"""


def test_rejected_tokens_do_not_change_the_order_of_a_text_from_right_to_left(display):
    display.style(".sd-text { white-space: pre !important; }")  # one line, whose order can be compared
    trace = replace(hostile_trace(), prompt="مرحبا")
    texts = ["A", "b", "out", " 1", "0", "0", " c", "d", ":", " e", "f", " 7", " g", "h"]
    for lane in trace.lanes:
        lane.pieces, lane.text = texts, "".join(texts)
    trace.vocabulary |= {str(i): text for i, text in enumerate(texts)}
    trace.vocabulary[str(len(HOSTILE))] = "w"
    display.show(Log().add(replay(trace)))
    display.wait(8000)
    plain, drafted = (display.evaluate(VISUAL_ORDER, lane) for lane in (0, 1))
    assert plain == drafted and plain != sorted(plain)
    mark = display.evaluate("() => getComputedStyle(document.querySelector('[data-more]'), '::after').direction")
    assert mark == "ltr"  # "+1", not "1+"


def test_noise_is_reported_once(display):
    trace = race()
    for row, own in zip(trace.comparison, "ab", strict=True):
        row |= {"noisy": True, "reasons": [f"only {own}", "the baseline waited"]}
    display.show(Log().add(replay(trace)))
    display.wait(8000)
    assert display.read(".sd-noisy") == ["noisy: pool more runs"]
    first, second, shared = display.read(".sd-explanations li")
    assert first.endswith(" Noisy: only a.") and second.endswith(" Noisy: only b.")
    assert shared == "All noisy lanes: the baseline waited."


def test_stop_message_hides_no_numbers_and_a_stopped_run_has_no_verdict(display):
    messages = list(replay(race("cancelled")))
    log = Log().add(messages[:-1]) + to_line(STOPPED)
    display.show(log)
    display.show(log + to_line(view(messages[-1])))
    display.wait(100)
    assert display.read(".sd-status")[0].startswith("Stopped. No verdict")
    assert display.read('[data-tile="output"] b') == ["identical"] * 2 and display.tones() == set()
    assert not any("faster" in words for words in display.read(".sd-stage, .sd-transport"))


@pytest.mark.parametrize("refused", [refusal(ValueError("no")), with_notes(None, ["no"])], ids=["error", "note"])
def test_a_refusal_leaves_the_run_on_show_going(display, refused):
    display.pace("0.0625")
    display.show(Log().add(replay(hostile_trace())))
    display.wait(100)
    text_before = display.text(0)
    display.show(refused)
    assert display.read(".sd-alert, .sd-notes") != ["", ""]
    display.wait(3000)
    assert text_before != display.text(0) == "".join(HOSTILE)
    assert all(words.startswith("done") for words in display.read(".sd-pill"))


def test_the_status_names_the_comparison_of_texts_after_the_last_step(display):
    *steps, _ = replay(hostile_trace())
    display.pace("1")
    display.show(Log().add([*steps, RunStage(COMPARING)]))
    display.wait(3000)
    assert display.read(".sd-status") == ["Comparing the texts."]


def test_a_run_that_was_stopped_while_it_loaded_is_no_failure(display):
    log = Log(spec=preset("smollm2-chat"))
    log.stopped = True
    display.show(
        log.add([RunStage(LOADING), Failed("stopped while reading weights; the next run reuses complete files")])
    )
    display.wait(100)
    assert display.read(".sd-status") == ["Stopped while reading weights; the next run reuses complete files."]
    assert display.read(".sd-alert:not([hidden])") == display.read(".sd-stages:not([hidden])") == []


def test_a_recording_stands_for_no_run_that_failed(display):
    label, grey = ".sd-outdated-label:not([hidden])", ".sd-stage[data-outdated]"
    display.pace("1")
    display.show(replayed(hostile_trace(), still=True).text)
    display.wait(3000)
    assert display.read(".sd-badge.sd-recorded") == ["Recorded on Abacus <b>9000</b>, 20 Nov"]
    assert not display.read(grey)
    assert display.read(".sd-headline[data-recorded]")[0].startswith("Recording: ")
    failed = Log(spec=preset("smollm2-chat"))
    display.show(failed.add([RunStage(LOADING), Failed("no GPU here; choose another model")]))
    display.wait(100)
    other = nearest_runnable(preset("smollm2-chat"), failed=True)
    assert display.read(".sd-alert") == [f"No GPU here; choose another modelRun {other.chip} instead"]
    assert display.read(".sd-headline") == ["Not run here"] and display.read(".sd-headline b") == []
    assert display.read(label) == ["Recording of another machine"] and len(display.read(grey)) == 2
    display.show(Log().add(replay(hostile_trace())))
    display.wait(3000)
    assert "1.33×" in display.read(".sd-headline")[0] and not display.read(f"{label}, {grey}")


@pytest.mark.parametrize(("finish", "marks"), [("length", 3), ("cancelled", 0)])
def test_an_answer_that_its_limit_cut_says_so_and_can_go_on(display, finish, marks):
    trace = race(finish)
    trace.lanes[0].finish = finish
    trace.config["max_new_tokens"] = len(HOSTILE)
    display.pace("1")
    display.show(Log().add(replay(trace)))
    display.wait(3000)
    assert display.read(".sd-cut") == [f"Cut at {len(HOSTILE)} tokens"] * marks
    assert display.read(".sd-text .sd-try") == ["Continue"] * marks
    display.show(replayed(trace).text)
    display.wait(3000)
    assert not display.read(".sd-text .sd-try")  # its models may be anywhere


def test_the_runs_of_the_page_are_laid_over_the_plot_and_replayed(display):
    display.pace("1")
    for share in (0.5, 0.25):
        trace = race()
        trace.comparison[0]["speedup"] = 1 / share
        display.show(Log().add(replay(trace)))
        display.wait(3000)
    display.show(replayed(hostile_trace()).text)  # a stored run is none of them
    display.wait(3000)
    fast = f"{race().comparison[1]['speedup']:.2f}× Fast"
    assert display.read(".sd-past") == ["4.00× Slow", fast]
    curves = [len(display.read("#chart .sd-curve"))]
    for event in ("pointerenter", "pointerleave"):
        display.evaluate(f"document.querySelector('.sd-past:last-child').dispatchEvent(new PointerEvent('{event}'))")
        display.wait(500)
        curves.append(len(display.read("#chart .sd-curve")))
    assert curves[1] == curves[0] + 3 and curves[2] == curves[0]
    display.evaluate("document.querySelector('.sd-past:last-child').click()")
    display.wait(9000)
    assert display.read(".sd-status")[0].startswith("Replayed. ") and display.read(".sd-badge") == [
        "Earlier run of this page"
    ]
    assert display.read(".sd-past[aria-current]") == [fast] and "Fast" in display.read(".sd-headline")[0]
    display.evaluate("document.body.insertAdjacentHTML('beforeend', '<b id=run></b>')")
    display.evaluate("document.getElementById('run').click()")
    assert display.evaluate("document.querySelector('.sd-history').inert")  # steps of a run belong to it


def test_a_refusal_stays_until_the_settings_that_it_is_about_are_changed(display):
    display.show(refusal(ValueError("no"), "refused"))
    shown = []
    for key in ("before", "refused", "next"):
        display.describe(key)
        shown.append(display.read(".sd-alert:not([hidden])"))
    assert shown == [[], ["No"], []]


def test_before_the_first_result_its_place_says_what_happens(display):
    assert display.read(".sd-headline")[0].startswith("Ready. Press Run")
    log = Log()
    for message, words in (
        (Loading(0.5, "reading a"), ["Loading 50 %", "Measuring passes", "Warming up", "Racing"]),
        (RunStage(MEASURING), ["Loading", "Measuring passes 0 %", "Warming up", "Racing"]),
        (Failed("no; try"), []),
    ):
        display.show(log.add([message]))
        display.wait(100)
        assert display.read(".sd-stages li") == words
    assert display.read(".sd-headline") == ["Not run here"]


def test_a_press_on_run_greys_the_result_on_show_before_the_server_answers(display):
    display.pace("1")
    display.show(Log().add(replay(hostile_trace())))
    display.wait(3000)
    display.evaluate("() => { document.body.insertAdjacentHTML('beforeend', '<button id=run>'); run.click(); }")
    assert display.read(".sd-outdated-label:not([hidden])") == ["Result of the run before"]
    assert len(display.read(".sd-stage[data-outdated]")) == 2
    assert display.read(".sd-stages li") == ["Loading", "Measuring passes", "Warming up", "Racing"]
    assert display.read(".sd-status") == ["Starting."]
    messages = list(replay(hostile_trace()))
    log = Log()
    display.show(log.add([RunStage(LOADING), Loading(1.0, "models ready"), RunStage(WARMING_UP), messages[0]]))
    assert not display.read(".sd-outdated-label:not([hidden]), .sd-stage[data-outdated]")
    display.show(log.add([Loading(0.5, "warming up Draft model, not timed")]))
    assert display.read(".sd-stages [aria-current]") == ["Warming up 50 %"]
    display.show(log.add(messages[1:]))
    assert not display.read(".sd-stages li")


def test_the_next_run_ends_the_one_on_show(display):
    display.pace("0.0625")
    display.show(Log().add(replay(hostile_trace())))
    log, messages = Log(), list(replay(hostile_trace()))
    display.show(log.add([Loading(0.5, "loading a model")]))
    display.wait(3000)
    assert display.text(0) == "".join(HOSTILE)
    assert display.read(".sd-status") == ["Loading a model, 50 %"]
    display.show(log.add(messages[:1]))
    assert display.read(".sd-pill") == ["reading"] * 2  # the prompt
    assert display.text(0) == ""


def test_failed_run_shows_its_partial_result(display):
    display.pace("0.0625")
    messages = list(replay(hostile_trace()))
    display.show(Log().add([*messages[:9], Failed("out of memory")]))
    shown = display.text(0)
    assert shown == "".join(message.text[0] for message in messages[1:9] if message.lane == 0)
    display.wait(3000)
    assert (display.text(0), display.read(".sd-pill")) == (shown, ["failed", "failed"])
    assert display.read(".sd-status, .sd-alert") == ["Out of memory", "The run failed."]


def test_a_slow_run_offers_a_shorter_draft_and_a_lookup(display):
    display.evaluate("""() => {
      document.body.insertAdjacentHTML("beforeend", "<button role=tab data-tab-id=race></button>");
      window.asked = [];
      document.addEventListener("specdemo:change", ({ detail }) => asked.push(detail));
    }""")
    row = {"speedup": 0.7, "word": "slower", "advice": {"k": 2, "speed": "1.32×"}}
    trace = hostile_trace()
    trace.lanes[1].options["model"] = "stories-draft"
    log = Log().add([*replay(trace)][:-1])
    log += to_line({"type": "end", "finish": "done", "comparison": [row]})
    display.show(
        log.replace('"method": "ngram"', '"method": "draft_model"').replace(
            '"method":"ngram"', '"method":"draft_model"'
        )
    )
    display.wait(8000)
    assert display.evaluate("[...document.querySelectorAll('.sd-try')].map((e) => (e.click(), e.textContent))") == [
        "Try k = 2: predicted 1.32×",
        "Race prompt lookup on this text",
    ]
    assert display.evaluate("asked") == [{"k": 2}, {"lanes": 2, "method2": "ngram"}]


def counted(text, drafted, accepted, **more):
    """Return a chunk of llama.cpp's server with its draft counts so far."""
    return piece(text, timings={"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}, **more)


PIECES = [counted("Once", 0, 0), *(counted(text, 4, 2) for text in (" upon", " a", " time"))]
PIECES += [counted(", <b>", 6, 2), counted(" there", 6, 2, finish="length"), counted("", 6, 2, total=6)]


def test_a_server_lane_is_coloured_at_the_end_of_its_answer(display, monkeypatch):
    with completion_server(PIECES) as server:
        monkeypatch.setenv(LISTED, server.address)
        on_server = preset("embedded-draft").on_servers([server.address]).with_changes(max_new_tokens=6)
        messages = list(Session().stream(on_server))
    display.pace("1")
    log, end = Log(), next(i for i, message in enumerate(messages) if isinstance(message, Restarted))
    display.show(log.add(messages[:end]))
    display.wait(3000)
    pieces = ["Once", " upon", " a", " time", ", <b>", " there"]
    assert display.outcomes(1) == [(text, "unknown") for text in pieces]
    display.show(log.add(messages[end:]))
    display.wait(3000)
    outcomes = "target accepted accepted corrected corrected target".split()
    assert display.outcomes(1) == [*zip(pieces, outcomes, strict=True)]
    assert display.read('[data-lane="1"] del') == ["?", "?"]
    assert display.evaluate("document.querySelector('[data-lane=\"1\"] del').dataset.more") == "+1"
    assert "unknown" not in display.read(".sd-remote")[-1] and display.locate(".sd-histogram")
