"""Settings that a launcher passes to its relay."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

SILENT_S = 2.5
"""After this long without a byte (five heartbeats) a connection is replaced by a new one."""


class Settings(BaseModel, frozen=True, extra="forbid"):
    """`coordinator` is where the hosts join; None on that host, whose `store_port` is a local port.

    `needed` hosts make the run. `peers` says where hosts are reached, if not where the coordinator
    sees them. `socket` is where processes of this host find the relay. One that joins later `waits`
    until a host is lost, if none is.
    """

    name: str
    key_file: Path
    needed: int
    listen: tuple[str, int] | None
    coordinator: tuple[str, int] | None
    peers: Mapping[str, tuple[str, int]] = {}
    patience_s: float
    store_port: int | None = None
    socket: str = ""
    waits: bool = False
