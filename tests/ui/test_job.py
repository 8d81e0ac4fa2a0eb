"""Storage for visitors: contents and lifetime."""

import asyncio
import threading
import time
from types import SimpleNamespace

from specdemo.ui.job import ENTRY, Engine, Job, Jobs, Store, in_thread, stop_all
from tests.ui.stand_ins import sync


class Text(Job):
    def __init__(self, text, work=None):
        super().__init__(text)
        self.engine = Engine(work) if work else None

    def add(self, messages):
        self.text += "".join(messages)
        return self.text


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
    shown = list(sync(jobs.run(lambda *_: Text("begun ", lambda *_: iter(["a ", "b"])), visitor("a"), {})))
    job = jobs.last(visitor("a"))
    assert shown[-1]["view"] == "begun a b" and job.ended and job.text == ""
    assert jobs.request_stop(visitor("a")) == jobs.stop(visitor("a")) == {}


def test_stop_delivers_the_end_of_a_job_that_has_just_ended():
    jobs = Jobs("race")
    shown = sync(jobs.run(lambda *_: Text("begun ", lambda *_: iter("a")), visitor("a"), {}))
    next(shown)
    job = jobs.last(visitor("a"))
    while not job.ended:
        next(shown)
    shown.close()  # Stop cancels the event of Run, whose last text may be lost
    assert jobs.stop(visitor("a")) == {"view": "begun a"} and jobs.stop(visitor("a")) == {}


def test_job_of_a_closed_page_is_not_stored_again():
    jobs = Jobs("race")
    shown = sync(jobs.run(lambda *_: Text("begun ", lambda *_: iter("ab")), visitor("a"), {}))
    next(shown)
    jobs._store.forget(visitor("a"))
    list(shown)
    assert jobs.last(visitor("a")) is None and jobs._store.size == 0


def test_stop_all_waits_for_every_run():
    def endless(cancelled, report):
        yield "begun"
        while not cancelled():
            time.sleep(0)
        yield " and ended"

    jobs = [Text("", endless) for _ in range(2)]
    shown = [job.stream() for job in jobs]
    while not all("begun" in job.text for job in jobs):
        for texts in shown:
            next(texts)
    stop_all()
    for job, texts in zip(jobs, shown, strict=True):
        assert list(texts)[-1] == "begun and ended" and job.ended
    assert not Engine.at_work


def test_items_are_closed_after_the_current_one_when_all_tasks_are_cancelled():
    started, go, closed = threading.Event(), threading.Event(), []

    def items():
        try:
            yield 1
            started.set()
            go.wait(60)
            yield 2
        finally:
            closed.append(True)

    async def read():
        async for _ in in_thread(items()):
            pass

    async def end():
        reader = asyncio.create_task(read())
        await asyncio.to_thread(started.wait)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.wait([reader], timeout=0.2)  # it waits for the second item
        go.set()
        await asyncio.wait([reader])
        return reader

    assert asyncio.run(end()).cancelled() and closed == [True]
