"""What a rank does before gloo connects: others may reach its ports, and it can reach theirs."""

import json
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.overlay.control import Client


def open_ports(
    client: Client, store: Store, ports: Mapping[str, int], *, rank: int, world: int, wait_s: float
) -> None:
    """Expose this rank's `ports`, by kind of traffic, and forward those of all ranks elsewhere.

    Raises:
        OverlayError: the carrier is gone, or a port that stands for another host is in use here.
        RuntimeError: a rank did not say its ports in time.
    """
    store = PrefixStore("ports", store)
    number = client.ask("own_number")
    for port in ports.values():
        client.ask("expose", port=port)
    store.set(str(rank), json.dumps([number, ports]))
    others = [str(other) for other in range(world) if other != rank]
    if others:
        store.wait(others, timedelta(seconds=wait_s))
    for other in others:
        host, theirs = json.loads(store.get(other))
        for traffic, port in theirs.items():
            client.ask("forward", host=host, port=port, traffic=traffic)
