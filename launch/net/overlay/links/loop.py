"""One thread that waits for all sockets of a relay, and runs what they are ready for."""

import contextlib
import errno
import math
import random
import selectors
import socket
import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_TICK_S = 0.1  # padding comes as often (link.py)
_FULL_S = 0.01  # else the loop would spin, as the port stays readable
_T = TypeVar("_T")

Steps = Generator[tuple[socket.socket, int], None, _T]
"""Work that yields (socket, event) where a blocking program would wait for it."""


class Loop:
    """Waits, and calls. `late_s` says how long other processes kept this one waiting lately."""

    def __init__(self) -> None:
        self.ticks: list[Callable[[float], None]] = []
        """Called ten times a second, with the monotonic time."""
        self.late_s = 0.0
        self.urgent_s = -math.inf
        """When a link last sent what somebody waits for, by the monotonic clock."""
        self._selector = selectors.DefaultSelector()
        self.tasks: set[Task] = set()
        """Under way."""
        self._calls: list[tuple[float, Callable[[], None]]] = []
        self._running = True

    def watch(
        self, sock: socket.socket, events: int, call: Callable[[int], None] = lambda _: None
    ) -> None:
        """Call with the events that occur from now on; none: stop watching."""
        known = sock.fileno() in self._selector.get_map()
        if not events:
            if known:
                self._selector.unregister(sock)
        elif known:
            key = self._selector.get_key(sock)
            if key.events != events or key.data != call:
                self._selector.modify(sock, events, call)
        else:
            self._selector.register(sock, events, call)

    def listen(
        self, server: socket.socket, take: Callable[[socket.socket, Any], None], at_once: int = 1
    ) -> None:
        """Hand on connections with their sources; after so many, other sockets have a turn."""
        server.setblocking(False)

        def accept(_: int) -> None:
            for _ in range(at_once):
                try:
                    found = server.accept()
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE):  # no descriptor is left for it
                        time.sleep(_FULL_S)
                    return
                take(*found)

        self.watch(server, READ, accept)

    def close(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            self.watch(sock, 0)
        with contextlib.suppress(OSError):
            socket.socket.close(sock)

    def spawn(
        self,
        steps: Steps[_T],
        limit_s: float,
        *,
        done: Callable[[_T], None],
        failed: Callable[[Exception], None],
        patient: bool = False,
    ) -> "Task":
        """Run steps to their end; after `limit_s` they fail with a TimeoutError.

        Of all patient ones a single step is done at a time, after whatever else there is to do.
        """
        task = Task(self, steps, time.monotonic() + limit_s, done, failed, patient)
        self.tasks.add(task)
        task.advance(0)
        return task

    def after(self, pause_s: float, call: Callable[[], None]) -> None:
        self._calls.append((time.monotonic() + pause_s, call))

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        """Serve until `stop`; then close all sockets."""
        try:
            self._serve()
        finally:
            for task in list(self.tasks):
                task.expire()
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    self.close(key.fileobj)
            self._selector.close()

    def _serve(self) -> None:
        due_s = time.monotonic() + _TICK_S
        while self._running:
            next_s = min([due_s, *(at_s for at_s, _ in self._calls)])
            ready = self._selector.select(max(0.0, next_s - time.monotonic()))
            patient = [entry for entry in ready if _is_patient(entry[0].data)]
            urgent = [entry for entry in ready if not _is_patient(entry[0].data)]
            # one at random, so that a flood of strangers keeps no other out for good
            for key, events in [*urgent, *random.sample(patient, min(1, len(patient)))]:
                # a call may close other sockets, whose numbers new ones get
                if self._selector.get_map().get(key.fd) is key:  # not closed by another call
                    key.data(events)
            now_s = time.monotonic()
            if now_s >= due_s:
                self.late_s, due_s = now_s - due_s, now_s + _TICK_S
                for tick in self.ticks:
                    tick(now_s)
                for task in [task for task in self.tasks if now_s > task.limit_s]:
                    task.expire()
            for entry in [entry for entry in self._calls if now_s >= entry[0]]:
                self._calls.remove(entry)
                entry[1]()


class Task:
    """Steps under way."""

    def __init__(
        self,
        loop: Loop,
        steps: Steps[_T],
        limit_s: float,
        done: Callable[[_T], None],
        failed: Callable[[Exception], None],
        patient: bool,
    ) -> None:
        self.limit_s, self.patient = limit_s, patient
        self._loop, self._steps, self._done, self._failed = loop, steps, done, failed
        self._waits: socket.socket | None = None

    def advance(self, _events: int) -> None:
        self._rest()
        try:
            self._waits, events = next(self._steps)
        except StopIteration as stop:
            self._loop.tasks.discard(self)
            self._done(stop.value)
        except Exception as error:  # whatever a stranger sends, the others go on
            self._loop.tasks.discard(self)
            self._failed(error)
        else:
            self._loop.watch(self._waits, events, self.advance)

    def expire(self) -> None:
        self._rest()
        self._loop.tasks.discard(self)
        self._steps.close()
        self._failed(TimeoutError("no answer in time"))

    def _rest(self) -> None:
        if self._waits is not None and self._waits.fileno() >= 0:
            self._loop.watch(self._waits, 0)
        self._waits = None


def _is_patient(call: Callable[[int], None]) -> bool:
    task = getattr(call, "__self__", None)
    return isinstance(task, Task) and task.patient
