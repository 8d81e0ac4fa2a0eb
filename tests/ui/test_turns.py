"""The order of turns on the engine, the line, and who leaves it."""

import asyncio
import time
from types import SimpleNamespace

import gradio as gr
import pytest

from specdemo.ui import job
from specdemo.ui.job import Jobs, Store
from specdemo.ui.turns import ADDRESS_PLACES, PLACES, VISITOR_PLACES, Turns
from tests.ui.test_job import Text


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def turns(clock):
    return Turns(clock)


def visitor(who):
    return who if isinstance(who, tuple) else ("", who)


def join(turns, clock, who, at):
    clock.now = at
    return turns.join(visitor(who))


def test_turns_are_in_the_order_of_arrival(turns, clock):
    running, *waiting = (join(turns, clock, who, at) for at, who in enumerate("aabca"))
    for call in waiting:
        assert not call.turn.is_set()
        turns.leave(running)
        assert call.turn.is_set()
        running = call


def test_place_and_expected_time(turns, clock):
    running = join(turns, clock, "a", 0.0)
    first, second = join(turns, clock, "b", 1.0), join(turns, clock, "c", 1.0)
    assert turns.place(first) == "Waiting: place 1 of 2 in line, about 9 s."
    clock.now = 4.0
    turns.leave(running)
    clock.now = 7.0
    assert first.turn.is_set() and turns.place(second) == "Waiting: place 1 of 1 in line, about 1 s."
    clock.now = 60.0  # longer than usual
    assert turns.place(second) == "Waiting: place 1 of 1 in line."


def test_a_turn_ends_once_and_only_by_its_own_call(turns, clock):
    running, waiting, last = (join(turns, clock, who, 0.0) for who in "abc")
    turns.leave(waiting)
    turns.leave(waiting)
    assert running.turn.is_set() and not last.turn.is_set()
    turns.leave(running)
    turns.leave(running)
    assert last.turn.is_set()
    assert not turns.join(visitor("d")).turn.is_set()


def test_places_are_limited(turns, clock):
    calls = [join(turns, clock, "a", 0.0) for _ in range(VISITOR_PLACES + 1)]
    with pytest.raises(ValueError, match=f"^{VISITOR_PLACES} of your calls are already queued; wait until"):
        join(turns, clock, "a", 0.0)
    turns.leave(calls[-1])
    join(turns, clock, "a", 0.0)
    for i in range(ADDRESS_PLACES - VISITOR_PLACES):
        join(turns, clock, f"b{i}", 0.0)
    with pytest.raises(ValueError, match=r"^the queue is full; try again in a minute$"):
        join(turns, clock, "c", 0.0)
    for i in range(PLACES - ADDRESS_PLACES):
        join(turns, clock, (f"far {i}", "d"), 0.0)
    with pytest.raises(ValueError, match="the queue is full"):
        join(turns, clock, ("elsewhere", "e"), 0.0)


# Calls in an event loop


@pytest.fixture
def engine(monkeypatch):
    turns = Turns()
    monkeypatch.setattr(job, "ENGINE", turns)
    return turns


def request(session):
    return SimpleNamespace(session_hash=session, request=None)


class Page:
    """Jobs of visitors, whose runs last until their gate opens."""

    def __init__(self):
        self.jobs, self.open, self.running = Jobs("race", Store()), set(), []

    def begin(self, values, last):
        name = values["name"]

        def work(cancelled, _):
            self.running.append(name)
            yield f"{name} runs\n"
            while name not in self.open and not cancelled():
                time.sleep(0)
            yield f"{name} ends\n"
            self.running.remove(name)

        return Text("", work)

    def call(self, session):
        return self.jobs.run(self.begin, request(session), {"name": session})

    async def read(self, session):
        return [shown["view"] async for shown in self.call(session)][-1]

    async def until(self, condition):
        while not condition():
            await asyncio.sleep(0)

    async def start(self, session):
        """Return the task of a call that waits or runs."""
        task = asyncio.create_task(self.read(session))
        await self.until(lambda: self.jobs.last(request(session)) and self.jobs.last(request(session)).text)
        return task


def test_one_job_runs_and_the_others_wait_without_a_thread(engine):
    async def main():
        page = Page()
        tasks = [await page.start(name) for name in "abc"]
        assert page.running == ["a"]
        texts = []
        for name, task in zip("abc", tasks, strict=True):
            page.open.add(name)
            texts.append(await task)
        return texts

    first, second, third = asyncio.run(main())
    assert "waiting" not in first and first.endswith("a runs\na ends\n")
    assert second.startswith('{"type":"waiting","text":"Waiting: place 1 of 1 in line, about 10 s."}\n')
    assert third.startswith('{"type":"waiting","text":"Waiting: place 2 of 2 in line, about 20 s."}\n')
    assert third.endswith("c runs\nc ends\n")


def test_cancelled_call_leaves_the_line_at_once(engine):
    async def main():
        page = Page()
        first, second, third = [await page.start(name) for name in "abc"]
        second.cancel()
        await asyncio.wait([second])
        page.open |= {"a", "c"}
        await first
        return second.cancelled(), await third, page.running

    cancelled, text, running = asyncio.run(main())
    assert cancelled and text.endswith("c ends\n") and running == []


def test_cancelled_run_ends_before_the_next_one_begins(engine):
    async def main():
        page = Page()
        first = await page.start("a")
        await page.until(lambda: page.running)
        second = await page.start("b")
        page.open.add("b")
        first.cancel()
        return await second, page.running

    text, running = asyncio.run(main())
    assert text.endswith("b ends\n") and running == []


def test_job_that_was_stopped_in_line_does_not_start(engine):
    async def main():
        page = Page()
        first, second = [await page.start(name) for name in "ab"]
        stopped = page.jobs.stop(request("b"))["view"]
        page.open.add("a")
        await first
        return stopped, await second, page.running

    stopped, last, running = asyncio.run(main())
    assert stopped.endswith('{"type":"stopped"}\n') and "b runs" not in last and running == []


def test_closed_page_leaves_the_line(engine):
    async def main():
        page = Page()
        first, second = [await page.start(name) for name in "ab"]
        await engine.forget(request("b"))
        await asyncio.wait([second])
        page.open.add("a")
        return second.cancelled(), await first

    cancelled, text = asyncio.run(main())
    assert cancelled and text.endswith("a ends\n")


def test_full_line_rejects_a_call(engine):
    async def main():
        page = Page()
        tasks = [await page.start("a"), *(asyncio.create_task(page.read("b")) for _ in range(VISITOR_PLACES))]
        await asyncio.sleep(0)
        with pytest.raises(gr.Error, match="of your calls are already queued"):
            await page.read("b")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(main())


class Lasting(Text):
    UNREAD_S = 60.0


class LastingPage(Page):
    def begin(self, values, last):
        job = super().begin(values, last)
        lasting = Lasting(f'{{"run":"{values["name"]}"}}\n')
        lasting.engine = job.engine
        return lasting

    async def rejoin(self, session, run):
        return [shown["view"] async for shown in self.jobs.rejoin(request(session), {"run": run})]


def test_lost_page_rejoins_its_run(engine):
    async def main():
        page = LastingPage()
        task = await page.start("a")
        await page.until(lambda: page.running)
        task.cancel()
        await asyncio.wait([task])
        assert page.running == ["a"]  # it goes on
        again = asyncio.create_task(page.rejoin("b", "a"))
        await page.until(lambda: page.jobs.last(request("b")))
        page.open.add("a")
        texts = await again
        return texts, await page.rejoin("c", "unknown"), await page.rejoin("c", "")

    texts, *unknown = asyncio.run(main())
    assert texts[0].startswith('{"run":"a"}\n') and texts[-1] == '{"run":"a"}\na runs\na ends\n'
    assert unknown == [[], []]


def test_lost_run_ends_as_soon_as_another_call_waits(engine):
    async def main():
        page = LastingPage()
        first = await page.start("a")
        await page.until(lambda: page.running)
        first.cancel()
        page.open.add("b")
        return await page.read("b"), page.running

    text, running = asyncio.run(main())
    assert text.endswith("b ends\n") and running == []


def test_lost_run_ends_after_its_time(engine, monkeypatch):
    async def main():
        page = LastingPage()
        monkeypatch.setattr(Lasting, "UNREAD_S", 0.001)
        task = await page.start("a")
        await page.until(lambda: page.running)
        task.cancel()
        await page.until(lambda: not page.running)
        return page.jobs.last(request("a"))

    assert asyncio.run(main()).worker.cancelled()
