"""The server of the page, without a network."""

import asyncio
import json
import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, cast

import pytest

from thinpipe.launch.view.watch import server
from thinpipe.launch.view.watch.follow import Followed, Moment
from thinpipe.launch.view.watch.server import Site


class Restless:
    """A run that has steps more each time that anybody looks at it."""

    silence, story, problem, is_over = "", None, "", False

    def __init__(self) -> None:
        self._looks = 0

    def refresh(self) -> bool:
        return True

    @property
    def moment(self) -> Moment:
        self._looks += 1
        steps: list[float | None] = [*range(1, 3 * self._looks + 1)]
        return Moment(self._looks, (0, 1), {"step": steps}, {})


async def told(
    site: Site, enough: Callable[[list[Any]], bool], patience_s: float = 20.0
) -> list[Any]:
    """What a stream of the site said until it was enough, or until patience ran out."""
    messages: list[Any] = []
    over = asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(event: MutableMapping[str, Any]) -> None:
        if text := event.get("body", b"").decode().removeprefix("data: "):
            messages.append(json.loads(text))
        if enough(messages):
            over.set()

    host = [(b"host", b"localhost:8042")]
    scope = {"path": "/events", "method": "GET", "headers": host}
    stream = asyncio.create_task(site(scope, receive, send))
    await asyncio.wait({stream}, timeout=patience_s)
    over.set()
    await stream
    return messages


def site_of(*runs: object) -> Site:
    return Site(cast(Sequence[Followed], runs), "127.0.0.1", None)


def test_steps_that_come_while_others_are_sent_are_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "PERIOD_S", 0.001)
    messages = asyncio.run(told(site_of(Restless()), lambda found: len(found) > 9))
    shown: list[int] = []
    for message in (found for found in messages if "start" in found):  # not a sign of life
        assert message["start"] <= len(shown), "rows before it are there"
        shown[message["start"] :] = message["columns"]["step"]
    assert shown == [*range(1, len(shown) + 1)]


class Broken(Restless):
    """A run whose folder cannot be read since it began."""

    moment = None  # type: ignore[assignment]

    def refresh(self) -> bool:
        self.problem, before = "state.json: of another version", self.problem
        return not before


def test_what_cannot_be_read_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PERIOD_S", 0.001)
    messages = asyncio.run(told(site_of(Broken()), lambda found: len(found) > 9, 1.0))
    assert [message for message in messages if message] == [
        {"problem": "state.json: of another version"}
    ]


class Ended(Restless):
    """A run whose state says that it is over once it has been looked at a few times."""

    patience_s = 10.0

    @property
    def is_over(self) -> bool:
        return self.patience_s == 0.0 and self._looks > 20


def test_who_follows_is_told_all_and_then_that_it_is_over() -> None:
    async def end_soon() -> tuple[list[Any], float]:
        site = site_of(Ended())
        stream = asyncio.create_task(told(site, lambda _: False))
        await asyncio.sleep(0.5)
        began_s = time.monotonic()
        await site.end()
        took_s = time.monotonic() - began_s
        return await stream, took_s

    messages, took_s = asyncio.run(end_soon())
    assert took_s < Ended.patience_s, "it waits for the end only"
    assert messages[-1] == {"over": True}
    assert any(m.get("columns", {}).get("step", [0])[-1] > 3 for m in messages[-4:])


class Still(Restless):
    """A run that nothing happens to."""

    _moment = Moment(0, (0, 1), {"step": [1]}, {})

    def refresh(self) -> bool:
        return False

    @property
    def moment(self) -> Moment:
        return self._moment


def test_a_stream_sleeps_while_nothing_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PERIOD_S", 0.001)
    messages = asyncio.run(told(site_of(Still()), lambda found: len(found) > 9, 1.0))
    assert len(messages) <= 3, "the step, and signs of life that nobody waited for"


def test_a_long_run_delays_news_by_no_more_than_half_a_minute_of_its_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    async def counted(_: Site, seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0.001)

    class Slow(Still):
        def refresh(self) -> bool:
            until_s = time.thread_time() + 0.02
            while time.thread_time() < until_s:
                pass
            return False

    class Waits(Still):
        def refresh(self) -> bool:
            time.sleep(0.2)
            return False

    monkeypatch.setattr(server, "_SHARE", 1e-3)
    monkeypatch.setattr(Site, "_pause", counted)
    asyncio.run(told(site_of(Waits()), lambda _: bool(slept), 5.0))
    assert max(slept) < 15, "time in which it had no core, or waited for a disk, is nobody's"
    monkeypatch.setattr(server, "_SHARE", 1e-4)
    asyncio.run(told(site_of(Slow()), lambda _: max(slept, default=0) >= 30, 5.0))
    assert max(slept) == 30


class Counted(Still):
    """Its moment is that of the last time it was read."""

    def refresh(self) -> bool:
        self._looks += 1
        return True

    @property
    def moment(self) -> Moment:
        return Moment(self._looks, (0, 1), {"step": [float(self._looks)]}, {})


def test_who_comes_after_a_time_without_readers_is_told_nothing_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "PERIOD_S", 0.001)

    async def first_words() -> list[float]:
        run = Counted()
        site, found = site_of(run), []
        for _ in range(2):
            (first, *_) = await told(site, lambda messages: bool(messages))
            found.append(first["columns"]["step"][0])
            assert site._reader is not None
            await site._reader  # which ends as nobody is left
            run._looks += 100
        return found

    before, after = asyncio.run(first_words())
    assert after > before + 100
