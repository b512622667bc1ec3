"""Opens ports before gloo connects: others may reach this rank's, and it can reach theirs."""

import json
import os
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, cast

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.net.overlay.control import ADDRESS, Client, OverlayError
from thinpipe.launch.net.overlay.settings import SILENT_S

_PATIENT_S = 20.0  # for a relay that is busy, where an answer is needed


def open_ports(
    store: Store, ports: Mapping[str, int], *, rank: int, world: int, wait_s: float
) -> None:
    """Expose this rank's `ports`, by kind of traffic, and forward those of all ranks elsewhere.

    Raises:
        OverlayError: the relay is gone, or a port that stands for another host is in use here.
        RuntimeError: a rank did not say its ports in time.
    """
    store = PrefixStore("ports", store)
    for port in ports.values():
        _ask("expose", port=port)  # before others hear of it
    store.set(str(rank), json.dumps([_ask("own_number"), ports]))
    others = [str(other) for other in range(world) if other != rank]
    if others:
        store.wait(others, timedelta(seconds=wait_s))
    for other in others:
        reach(*json.loads(store.get(other)))


def own_number() -> int | None:
    """This machine's among those of the run; None if it has no relay."""
    return cast("int | None", _ask("own_number"))


def reach(host: int, ports: Mapping[str, int]) -> None:
    """Forward the ports of a rank, by kind of traffic, on the machine of that number."""
    for traffic, port in ports.items():
        _ask("forward", host=host, port=port, traffic=traffic)


def relay_status() -> dict[str, Any] | None:
    """The relay's view of its links; None if there is no relay."""
    return cast("dict[str, Any] | None", _ask("status"))


def broken_links() -> str:
    """Machines that this host's relay does not reach, as the end of a message.

    Nothing if all is well, or there is no relay.
    """
    try:
        links = _links()
    except OverlayError as error:
        return f" [{error}]"
    broken = [
        f"{name} for {link['silence_s']:.1f} s"
        for name, link in links.items()
        if link["silence_s"] > SILENT_S
    ]
    left = [f"{name} has left the run" for name, link in links.items() if link["left"]]
    found = [f"no connection to {', '.join(broken)}"] if broken else []
    return f" [{'; '.join(found + left)}]" if found or left else ""


def gone_for_good() -> str:
    """Machines that will not answer this rank any more, in words; nothing if all may."""
    try:
        gone = [name for name, link in _links().items() if link["left"] or link["lost"]]
    except OverlayError as error:
        return str(error)
    return f"{', '.join(gone)} left the run, or cannot be reached" if gone else ""


class HostWatch:
    """Machines whose connections to this one have broken for good since it was made.

    A lost machine may come back, but what ranks were connected by does not.
    """

    def __init__(self) -> None:
        """Without a relay there are no others."""
        self._before = {name: link["restarts"] for name, link in _links().items()}

    def renew(self, names: Collection[str]) -> None:
        """Machines of these names are members as they are now."""
        links = _links(_PATIENT_S).items()
        self._before |= {name: link["restarts"] for name, link in links if name in names}

    def gone(self) -> list[str]:
        """Their names; OverlayError as before."""
        return [
            name
            for name, link in _links().items()
            if link["left"] or link["lost"] or link["restarts"] > self._before[name]
        ]


def _links(wait_s: float = 1.0) -> dict[str, Any]:
    """Of this host's relay, by host; none without a relay."""
    return dict((_ask("status", wait_s) or {"links": {}})["links"])


def _ask(what: str, wait_s: float = 10.0, **arguments: Any) -> Any:
    relay = os.environ.get(ADDRESS)
    return None if relay is None else Client(relay, wait_s=wait_s).ask(what, **arguments)
