"""The page over HTTP: two addresses, nothing that is read from disk by name, nothing to change.

`/` is the page without data, `/events` what it shows, as server-sent events. It runs on uvicorn
alone: for two addresses a framework would only add code between a client and its deadlines.
"""

import asyncio
import hmac
import json
import os
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, ClassVar, TypeAlias, TypeVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from thinpipe.launch.view.report.html import content_policy, page
from thinpipe.launch.view.watch.follow import Followed, Moment, compared

_Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]

_T = TypeVar("_T")

PERIOD_S = 1.0  # at least; of long runs more, as reading may take `_SHARE`
_SHARE = 0.01  # of a core, that reading may take: less often for a run with many steps
_LONGEST_S = 30.0  # between two reads, however long they take
_ALIVE_S = 10.0  # readers give up after three of these (`_WAIT_S` in terminal.py)
_MOST_STREAMS = 64  # each reader holds a connection and a task; the next one gets a 503
_MOST_WAITING = 128  # connections without a whole request; beyond, the oldest are closed
_REQUEST_S, _WRITE_S = 10.0, 20.0  # to say what is wanted, and to take it; else it is hung up on
_LAST_S = 3.0  # to show those who follow how a run ended, before its server ends
_ASK_AGAIN_S, _LOOKS = 0.1, 10  # a killed process may lose its pipe before its lock
_MOST_HEADERS = 8192  # bytes of a request, which h11 keeps until it is whole
_NOT_YET = ""  # before the runs were compared; None if there is nothing to compare
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

_HEADERS = {
    "content-security-policy": f"{content_policy()}; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "connection": "close",
}


class Site:
    """An ASGI application that shows runs; with a `token`, only to who has it.

    Without one, it answers only to names of this machine and to the `address` where it listens.
    """

    def __init__(self, runs: Sequence[Followed], address: str, token: str | None) -> None:
        self._runs, self._token = runs, token
        self._names = {*_LOOPBACK, address}
        self._streams = 0
        self._news, self._version = asyncio.Condition(), 0
        self._reader: asyncio.Task[None] | None = None
        self._fresh = asyncio.Event()
        self._compared: str | None = _NOT_YET
        self._ending, self._is_over = asyncio.Event(), False

    async def end(self) -> None:
        """Read the folders once more, and tell who follows how the runs ended."""
        for run in self._runs:
            run.patience_s = 0.0
        self._ending.set()
        while self._streams:
            await asyncio.sleep(_ASK_AGAIN_S)

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send
    ) -> None:
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        problem = self._rejection(scope["path"], scope["method"], headers)
        if problem is not None:
            await _answer(send, *problem)
        elif scope["path"] == "/":
            await _answer(send, 200, self._page, "text/html; charset=utf-8")
        else:
            await self._stream(receive, send)

    def _rejection(
        self, path: str, method: str, headers: Mapping[str, str]
    ) -> tuple[int, bytes] | None:
        host = re.sub(r":\d*$", "", headers.get("host", "")).strip("[]").lower()
        if self._token is None and host not in self._names:
            # a site whose name was made to lead to this machine
            return 403, b"this page is at localhost; --listen serves it to other machines\n"
        if path not in ("/", "/events"):
            return 404, b"no such page\n"
        if method != "GET":
            return 405, b"this page can only be read\n"
        if path == "/events":
            given = headers.get("authorization", "").removeprefix("Bearer ").encode()
            if self._token is not None and not hmac.compare_digest(given, self._token.encode()):
                return 401, b"use the whole link that was printed where this was started\n"
            if self._streams >= _MOST_STREAMS:
                return 503, b"too many readers; try again later\n"
        return None

    @cached_property
    def _page(self) -> bytes:
        return page("ThinPipe", None).encode()

    async def _stream(self, receive: _Receive, send: _Send) -> None:
        left = asyncio.create_task(_left(receive))
        self._streams += 1
        if not self._is_over and (self._reader is None or self._reader.done()):
            self._fresh.clear()  # what was read before is as old as the last reader's leaving
            self._reader = asyncio.create_task(self._read())
            self._reader.add_done_callback(lambda _: self._fresh.set())
        try:
            await send(_start(200, "text/event-stream"))
            await _until(self._fresh.wait(), left)
            shown: list[Moment | None] = [None] * len(self._runs)
            told: str | None = None
            problem, alive = "", list[str]()
            while not left.done():
                version, over = self._version, self._is_over
                moments = [run.moment for run in self._runs]  # a thread replaces them meanwhile
                messages = [
                    moment.since(number, before)
                    for number, (moment, before) in enumerate(zip(moments, shown, strict=True))
                    if moment is not None and moment is not before
                ]
                shown = moments
                if self._compared and self._compared != told:
                    told = self._compared
                    messages.append(told)
                if (now := "; ".join(run.problem for run in self._runs if run.problem)) != problem:
                    problem = now
                    messages.append(json.dumps({"problem": problem}))
                before, alive = alive, self._alive()
                if alive != before or not messages:
                    messages += alive
                messages += ['{"over":true}'] * over
                for text in messages:
                    await send(_body(f"data: {text}\n\n"))
                if over:
                    await send({"type": "http.response.body", "body": b""})
                    break
                await self._next(version, left)
        finally:
            self._streams -= 1
            left.cancel()

    def _alive(self) -> list[str]:
        return [
            json.dumps({"run": number, "parts": {}, "silence": run.silence})
            for number, run in enumerate(self._runs)
            if run.moment is not None
        ] or ["{}"]

    async def _next(self, version: int, left: "asyncio.Task[None]") -> None:
        async def news() -> None:
            async with self._news:
                await self._news.wait_for(lambda: self._version != version)

        await _until(news(), left)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        looks = 0
        while self._streams and not self._is_over:
            began_s, looks = loop.time(), looks + self._ending.is_set()
            reads = [await asyncio.to_thread(_timed, run.refresh) for run in self._runs]
            if looks:  # a process that is killed may lose its pipe before its lock
                self._is_over = looks > _LOOKS or all(run.is_over for run in self._runs)
            if any(news for news, _ in reads) or self._compared == _NOT_YET or self._is_over:
                message, took_s = await asyncio.to_thread(_timed, partial(compared, self._runs))
                reads.append((True, took_s))
                self._compared = json.dumps(message) if message else None
                async with self._news:
                    self._version += 1
                    self._news.notify_all()
            self._fresh.set()
            # on a busy machine most of the time is waiting for a core, which takes nobody's
            least_s = max(PERIOD_S, loop.time() - began_s)
            await self._pause(min(_LONGEST_S, max(least_s, sum(s for _, s in reads) / _SHARE)))

    async def _pause(self, seconds: float) -> None:
        if self._ending.is_set():
            await asyncio.sleep(_ASK_AGAIN_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)


class Connection(H11Protocol):
    """A client's, with deadlines for its request and for taking what it asked for.

    Of connections that lack a whole request, there is a limit.
    """

    _waiting: ClassVar[dict["Connection", asyncio.TimerHandle]] = {}
    _full: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting[self] = self.loop.call_later(_REQUEST_S, transport.abort)
        if len(self._waiting) > _MOST_WAITING:
            next(iter(self._waiting)).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self._served()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._full = self.loop.call_later(_WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._full is not None:
            self._full.cancel()

    def shutdown(self) -> None:
        if not self.transport.is_closing():  # that has still something to send
            self.transport.abort()  # streams have no end of their own

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.loop.call_later(_WRITE_S, self.transport.abort)  # all of it must have been taken

    def connection_lost(self, exc: Exception | None) -> None:
        self._served()
        super().connection_lost(exc)

    def _served(self) -> None:
        if (deadline := self._waiting.pop(self, None)) is not None:
            deadline.cancel()


class _Server(uvicorn.Server):
    """With the input of its process, if that ends first, it ends as a run does."""

    def __init__(self, site: Site, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._site, self._has_input = site, True

    def follow_input(self) -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        self._has_input, self.should_exit = False, True
        time.sleep(2 * _LAST_S)
        os._exit(0)

    async def shutdown(self, sockets: Any = None) -> None:
        for server in self.servers:
            server.close()  # the port is free for the run's next attempt
        if not self._has_input:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._site.end(), _LAST_S)
        await super().shutdown(sockets)


def serve(
    runs: Sequence[Followed], host: str, sock: Any, token: str | None, *, with_input: bool
) -> None:
    """Serve until interrupted, or until standard input ends, on a socket that listens already."""
    site = Site(runs, host, token)
    config = uvicorn.Config(
        site,
        host=host,
        http=Connection,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=_MOST_HEADERS,
    )
    server = _Server(site, config)
    if with_input:
        threading.Thread(target=server.follow_input, daemon=True).start()
    server.run(sockets=[sock])


def _timed(call: Callable[[], _T]) -> tuple[_T, float]:
    began_s = time.thread_time()
    return call(), time.thread_time() - began_s


async def _until(event: Coroutine[Any, Any, Any], left: "asyncio.Task[None]") -> None:
    waiting = asyncio.create_task(event)
    await asyncio.wait({waiting, left}, timeout=_ALIVE_S, return_when="FIRST_COMPLETED")
    waiting.cancel()


async def _left(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(
    send: _Send, status: int, body: bytes, kind: str = "text/plain; charset=utf-8"
) -> None:
    await send(_start(status, kind, str(len(body))))
    await send({"type": "http.response.body", "body": body})


def _start(status: int, kind: str, length: str | None = None) -> MutableMapping[str, Any]:
    headers = {"content-type": kind, **_HEADERS, **({"content-length": length} if length else {})}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def _body(text: str) -> MutableMapping[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}
