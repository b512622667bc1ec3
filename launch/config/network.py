"""`[network]`: how the machines of a run reach and know each other."""

import os
import re
import socket
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from thinpipe.launch.host.interfaces import parse_endpoint
from thinpipe.pipeline.models.paths import user_path

KEY_FILE = "THINPIPE_KEY_FILE"
"""Environment variable that stands for `network.key_file` where that is not set."""
NAME = "THINPIPE_NAME"
"""Environment variable that stands for `network.name` where that is not set."""
TAKEN = "THINPIPE_TAKEN_NAME"
"""Environment variable of a newcomer's ranks: their machine's name in the run."""
NO_KEY = (
    "network.key_file is not set, and without a key nothing leaves this machine: make one with "
    "`thinpipe key new run.key`, copy it to every machine (scp run.key host1:thinpipe/), and set "
    'network.key_file = "run.key", or THINPIPE_KEY_FILE=run.key in the environment; or, on a '
    "network where you trust everyone, set network.trusted = true"
)
NOT_LISTENING = "none"


def _as_listen(text: str) -> str:
    if text != NOT_LISTENING:
        try:
            parse_endpoint(text)
        except ValueError:
            raise ValueError(
                f"listen = {text!r}: write an address and a port, as in 0.0.0.0:29500 or "
                '[::]:29500, or "none" if no other machine can reach this one'
            ) from None
    return text


def _as_peers(peers: dict[str, str]) -> dict[str, str]:
    for name, where in peers.items():
        try:
            parse_endpoint(where)
        except ValueError:
            raise ValueError(
                f"peers.{name} = {where!r}: write a host and a port, as in 203.0.113.7:29500"
            ) from None
    return peers


def as_name(text: str) -> str:
    """A text as the name of a machine in a run."""
    return re.sub(r"[^\w.-]", "-", text)[:63]


def natural(name: str) -> list[tuple[int, str]]:
    """host2 before host10."""
    return [
        (int(part or 0), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)
    ]


class NetworkConfig(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The key that all machines of a run share, and where they find each other.

    `key_file` is made with `thinpipe key new`. `name` is this machine's in the run, by default
    THINPIPE_NAME of the environment, or its host name; machines are numbered in the order of their
    names. `listen` is the one address and port at which it takes connections. `peers` says where a
    machine is reached if that is not where the one at --rdzv sees it. A lost machine is waited for
    `patience_s` seconds.

    `trusted` does without all that: nothing is encrypted, and whoever reaches this machine's ports
    can disturb or change the run.
    """

    key_file: str | None = None
    name: str | None = Field(None, pattern=r"^[\w.-]{1,63}$")
    listen: Annotated[str, AfterValidator(_as_listen)] | None = None
    peers: Annotated[dict[str, str], AfterValidator(_as_peers)] = {}
    trusted: bool = False
    patience_s: float = Field(30.0, ge=3)

    def find_key(self) -> Path:
        """The file with the key.

        Raises:
            ValueError: none is set.
        """
        path = self.key_file or os.environ.get(KEY_FILE)
        if not path:
            raise ValueError(NO_KEY)
        return user_path(path)

    def own_name(self) -> str:
        own = os.environ.get(TAKEN) or self.name
        return own or as_name(os.environ.get(NAME) or socket.gethostname()) or "host"

    def listens_at(self, address: str, port: int) -> tuple[str, int] | None:
        """Where this machine takes connections; by default at this address and port."""
        if self.listen == NOT_LISTENING:
            return None
        return parse_endpoint(self.listen) if self.listen else (address, port)
