"""Starts this host's relay, and waits until all hosts of the run have joined."""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from thinpipe.launch.net.overlay.control import Client, OverlayError
from thinpipe.launch.net.overlay.membership import PeerList, loopback_address
from thinpipe.launch.net.overlay.settings import Settings

_END_S = 4.0  # twice what a relay takes (`_LEAVE_S` in relay.py), then it is killed
_RUN_GONE_S = 30.0
"""A run that does not answer for so long needs no machine any more."""


class Overlay:
    """The relay of this host, and what is known of the run's hosts."""

    def __init__(self, settings: Settings) -> None:
        """Start the process; `join` waits for the others."""
        self.name, self._waits = settings.name, settings.waits
        self._gone_s = max(_RUN_GONE_S, settings.patience_s)
        self.peer_list = PeerList(run="00", coordinator="", needed=settings.needed)
        self.on_link: Callable[[str, str, str], None] | None = None
        """Called with the peer's name, "silent", "back" or "lost", and the reason."""
        self._folder = Path(tempfile.mkdtemp(prefix="thinpipe-"))
        self.socket = str(self._folder / "relay")
        self._events: SimpleQueue[dict[str, Any]] = SimpleQueue()
        ours, theirs = socket.socketpair()
        self._alive = ours
        text = settings.model_copy(update={"socket": self.socket}).model_dump_json()
        with theirs:
            self._process = subprocess.Popen(
                # -P: files of the current folder must not be taken for modules
                [sys.executable, "-P", "-m", "thinpipe.launch.net.overlay.relay", text],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the launcher
            )
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def address(self, name: str) -> str:
        """A host's address on the loopback of every host."""
        return loopback_address(self.peer_list.run, self.peer_list.index(name))

    def join(
        self, limit_s: float, log: Callable[[str], None], *, expected: Sequence[str] = ()
    ) -> None:
        """Wait until all have joined, `expected` by name if known; OverlayError if that failed."""
        limit, news = monotonic() + limit_s, _News([self.name])
        while True:
            try:
                event = self._events.get(timeout=max(0.0, limit - monotonic()))
            except Empty:
                if self._waits and news.rejected:
                    raise OverlayError(f"the run does not answer any more. {news.reason}") from None
                needed = f"{self.peer_list.needed} machines did not join within {limit_s:.0f} s: "
                raise OverlayError(needed + news.why(expected)) from None
            if event["event"] == "joined":
                return
            if event["event"] == "failed":
                raise OverlayError(event["message"])
            if event["event"] == "spare":
                limit = monotonic() + self._gone_s
            for line in news.take(event, self.peer_list.needed):
                log(line)

    def client(self) -> Client:
        return Client(self.socket)

    def links(self) -> dict[str, dict[str, Any]]:
        """What the relay knows of the other hosts, by name; nothing if it does not answer."""
        try:
            found: dict[str, dict[str, Any]] = self.client().ask("status")["links"]
        except OverlayError:
            return {}
        return found

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        self._alive.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_END_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                event = json.loads(line)
                if event["event"] == "joined":
                    self.name = event["name"]
                    self.peer_list = PeerList.model_validate_json(json.dumps(event["peer_list"]))
                if event["event"] != "link":
                    self._events.put(event)
                elif self.on_link is not None:
                    self.on_link(event["peer"], event["state"], event["reason"])
        self._events.put({"event": "failed", "message": "the relay ended unexpectedly"})


@dataclass
class _News:
    """Of machines that join."""

    joined: list[str]
    reason: str = ""
    rejected: str = ""

    def take(self, event: Mapping[str, Any], needed: int) -> Iterator[str]:
        kind, message = event["event"], event.get("message", "")
        if kind == "spare" and not self.rejected:
            yield (
                "waiting as a spare until a machine of the run is lost; start one that it begins "
                "with as the others, with --nnodes"
            )
        if kind in ("spare", "rejected"):
            self.rejected = message
        if kind == "rejected":
            yield f"rejected: {message}"
        if kind == "unreachable" and message != self.reason:
            self.reason = message
            yield f"{message}; trying again"
        if kind == "waiting":
            come = [name for name in event["joined"] if name not in self.joined]
            self.reason, self.joined = "", event["joined"]
            if come:
                of = f" of {needed}" if needed else ""  # a newcomer does not know how many
                yield f"{', '.join(come)} joined, {len(self.joined)}{of} machines"

    def why(self, expected: Sequence[str]) -> str:
        missing = [name for name in expected if name not in self.joined]
        return (
            (self.reason or f"only {', '.join(self.joined)} did")
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + (f"; rejected: {self.rejected}" if self.rejected else "")
        )
