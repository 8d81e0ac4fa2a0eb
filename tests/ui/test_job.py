"""Jobs of visitors: run, follow, cancel, rejoin; their storage."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from specdemo.engine.messages import Note
from specdemo.ui import job, space
from specdemo.ui.job import ENTRY, Job, Jobs, Store, Worker, stop_all
from tests.ui.stand_ins import played, sync


class Text(Job):
    """A job whose messages are texts. gate: its work lasts until this contains its name."""

    def add(self, messages):
        self.text += "".join(message.text if isinstance(message, Note) else message for message in messages)
        return self.text


def endless(cancelled, report):
    yield "begun"
    while not cancelled():
        time.sleep(0)
    yield " and ended"


def begin(text, work, unread_s=0.0):
    """Return what creates a job."""

    def start(values, last):
        job = Text(text, work)
        job.unread_s = unread_s
        return job

    return start


def visitor(name):
    return SimpleNamespace(session_hash=name, request=None)


def test_least_recently_used_job_is_evicted():
    store = Store(3 * ENTRY + 250)
    a, b, c = (Text("x" * 100) for _ in range(3))
    store.put(("a", ""), a)
    store.put(("b", ""), b)
    assert store.get(("a", "")) is a
    store.put(("c", ""), c)  # 300 bytes: b is removed
    assert [store.get((name, "")) for name in "abc"] == [a, None, c] and store.size <= 3 * ENTRY + 250
    a.text *= 50
    assert store.get(("a", "")) is a  # it has grown
    assert store.get(("c", "")) is None and store.size == a.size
    store.forget(visitor("a"))
    assert store.size == 0


def test_storage_per_page_is_bounded():
    jobs, budget = Jobs("race", Store(100 * ENTRY)), 100 * ENTRY
    for i in range(1000):
        jobs.keep(visitor(f"page {i}"), Text("x" * 100))
    assert jobs._store.size <= budget and jobs.last(visitor("page 0")) is None
    assert jobs.last(visitor("page 999")) is not None


def test_text_is_stored_until_delivered():
    jobs = Jobs("race")
    shown = list(played(jobs, begin("begun ", lambda *_: iter(["a ", "b"])), visitor("a"), {}))
    job = jobs.last(visitor("a"))
    assert shown[-1]["view"] == "begun a b" and job.ended and job.text == ""
    assert jobs.stop(visitor("a")) == {}


def test_stop_ends_the_work_and_its_reader_gets_the_end():
    jobs = Jobs("race")
    shown = played(jobs, begin("", endless), visitor("a"), {})
    while "begun" not in next(shown)["view"]:
        pass
    texts = [update["view"] for update in (jobs.stop(visitor("a")), *shown)]
    assert texts[0].startswith('begun{"type":"stopping"}\n') and jobs.stop(visitor("a")) == {}
    assert texts[-1].endswith(' and ended{"type":"stopped"}\n')


def test_work_that_does_not_stop_is_left_behind(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(Text, "grace_s", 0.0)
    jobs = Jobs("race")
    shown = played(jobs, begin("begun", lambda *_: iter([gate.wait(60) and ""])), visitor("a"), {})
    next(shown)
    jobs.stop(visitor("a"))
    assert [*shown] or jobs.last(visitor("a")).ended
    gate.set()


def test_stop_changes_no_stored_text():
    jobs = Jobs("race")
    stored = jobs.keep(visitor("a"), Text("stored"))
    assert jobs.stop(visitor("a")) == {} and stored.text == "stored"


def test_job_of_a_closed_page_is_not_stored_again():
    jobs = Jobs("race")
    shown = played(jobs, begin("begun ", lambda *_: iter("ab")), visitor("a"), {})
    next(shown)
    jobs._store.forget(visitor("a"))
    list(shown)
    assert jobs.last(visitor("a")) is None and jobs._store.size == 0


def test_stop_all_waits_for_every_run():
    workers = [Worker(endless) for _ in range(2)]
    for worker in workers:
        worker.start()
    stop_all()
    assert [worker.messages() for worker in workers] == [["begun", " and ended"]] * 2
    assert not any(worker.alive for worker in workers) and not Worker.running


def test_work_has_a_time_limit(monkeypatch):
    monkeypatch.setenv("SPECDEMO_PUBLIC", "1")
    assert space.turn_s() == 120.0
    (*_, text) = played(Jobs("race"), lambda *_: Text("", endless, 0.0), visitor("a"), {})
    assert text["view"] == "begunstopped: the time limit is 0 seconds and ended"


def test_work_that_fails_says_why_in_one_line(caplog):
    for error, words in ((ValueError("no such file"), "no such file"), (KeyError("x"), "the run failed: 'x'")):
        worker = Worker(lambda *_, error=error: (_ for _ in ()).throw(error))
        [failed] = [message for batch in worker.batches() for message in batch]
        assert failed.text == words
    assert [record.message for record in caplog.records] == ["the run failed"]


# Readers in an event loop


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


class Page:
    """A visitor's page: it reads the text of a job until it is closed."""

    def __init__(self, jobs, name, work=endless, unread_s=60.0):
        self.jobs, self.visitor, self.texts = jobs, visitor(name), []
        jobs.keep(self.visitor, begin(f'{{"run":"{name}"}}\n', work, unread_s)({}, None))

    @property
    def job(self):
        return self.jobs.last(self.visitor)

    async def read(self):
        async for shown in self.jobs.follow(self.visitor):
            self.texts += shown.values()

    async def open(self):
        self.task = asyncio.create_task(self.read())
        await until(lambda: self.texts and "begun" in self.texts[-1])
        return self

    async def close(self):
        self.task.cancel()
        await asyncio.wait([self.task])


@pytest.mark.parametrize(
    ("step_s", "most", "least"), [(0.15, 4.0, 3.0), (0.11, 4.0, 3.0), (0.02, 8.0, 6.5), (60.0, 0.25, 0.1)]
)
def test_a_page_gets_the_text_when_it_has_changed_and_four_times_a_second_if_steps_are_slow(
    monkeypatch, step_s, most, least
):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    async def sleep(seconds):
        clock.now += seconds

    async def at_once(function):
        return function()

    class Steps(Text):
        def read(self):
            self.text = "line\n" * int(clock.now / step_s)
            self.ended = clock.now > 21.0
            return self.text

    async def main():
        return [clock.now async for _ in Steps("", endless).follow()]

    there = SimpleNamespace(sleep=sleep, to_thread=at_once, get_running_loop=asyncio.get_running_loop)
    monkeypatch.setattr(job, "asyncio", there)
    monkeypatch.setattr(job, "time", clock)
    late = [now for now in asyncio.run(main()) if 1.0 < now <= 21.0]
    assert least <= len(late) / 20.0 <= most


def test_job_that_was_stopped_in_the_queue_does_not_begin():
    async def main():
        page = Page(Jobs("race"), "a")
        stopped = page.jobs.stop(page.visitor)["view"]
        await page.read()
        return stopped, page.texts

    assert asyncio.run(main()) == ('{"run":"a"}\n{"type":"stopping"}\n{"type":"stopped"}\n', [])


def test_lost_page_rejoins_its_run():
    async def main():
        jobs = Jobs("race")
        page = await Page(jobs, "a").open()
        await page.close()
        await until(lambda: page.job.alive)  # it goes on
        assert jobs.rejoin({"run": "unknown"}, None) is jobs.rejoin({"run": ""}, None) is None
        again = visitor("b")
        jobs.keep(again, jobs.rejoin({"run": "a"}, None))
        texts = []
        async for shown in jobs.follow(again):
            texts.append(shown["view"])
            texts += [jobs.stop(again)["view"]] if len(texts) == 1 else []
        return texts[0], texts[-1]

    first, last = asyncio.run(main())
    assert first.endswith("begun") and last.endswith(' and ended{"type":"stopped"}\n')


def test_a_page_that_rejoins_a_run_ends_the_reader_of_the_page_before():
    """Until a text is sent Gradio does not notice that a page was closed, and the next reader waits in the queue."""

    async def main():
        jobs = Jobs("race")
        page = await Page(jobs, "a").open()
        jobs.rejoin({"run": "a"}, None)
        await asyncio.wait_for(page.task, 10.0)
        return page.job.alive, page.job.stop()

    alive, text = asyncio.run(main())
    assert alive and '{"type":"stopping"}' in text


@pytest.mark.parametrize("unread_s", [0.0, 60.0])
def test_lost_run_ends_before_the_next_one_begins(unread_s):
    async def main():
        jobs = Jobs("race")
        lost = await Page(jobs, "a", unread_s=unread_s).open()
        await lost.close()
        alive = []
        await Page(jobs, "b", lambda *_: alive.append(lost.job.alive) or iter("b")).read()
        return alive, lost.job.read()

    assert asyncio.run(main()) == ([False], '{"run":"a"}\nbegun and ended')


def test_lost_run_ends_after_its_time():
    async def main():
        page = await Page(Jobs("race"), "a", unread_s=0.001).open()
        await page.close()
        await until(lambda: not page.job.alive)

    asyncio.run(main())


@pytest.mark.parametrize("ended", [True, False])
def test_to_follow_no_job_changes_nothing_on_the_page(ended):
    """After a refusal Run follows the last job, if any; without an update Gradio would empty the page's view."""
    jobs, visitor = Jobs("race"), SimpleNamespace(session_hash="a")
    if ended:
        jobs.keep(visitor, Text("before", None))
    assert list(sync(jobs.follow(visitor))) == [{}]
