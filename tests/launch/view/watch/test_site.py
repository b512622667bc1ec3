"""The server of the page, without a network."""

import asyncio
import json
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, cast

import pytest

from thinpipe.launch.view.watch import server
from thinpipe.launch.view.watch.follow import Followed, Moment
from thinpipe.launch.view.watch.server import Site


class Restless:
    """A run that has steps more each time that anybody looks at it."""

    silent_s, story, problem = 0.0, None, None

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
    messages = asyncio.run(told(site_of(Restless()), lambda found: len(found) > 4))
    shown: list[int] = []
    for message in messages:
        assert message["start"] <= len(shown), "rows before it are there"
        shown[message["start"] :] = message["columns"]["step"]
    assert shown == [*range(1, len(shown) + 1)]
