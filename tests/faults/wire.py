"""A connection between two hosts that flips a bit of what passes, when it is told to.

Checksums of TCP would find a flip below it and send again; this is one above it, as in a faulty
router that computes checksums anew.
"""

import os
import random
import select
import socket
import threading
from functools import partial
from pathlib import Path

from thinpipe.launch.lab.network import ShapedNetwork

PORT = 29400
WIRE = f"127.0.0.1:{PORT}"
_CHUNK = 65536


class FaultyWire:
    """What `host` reaches at WIRE is `target`; the forwarder lives as long as the network."""

    def __init__(
        self, net: ShapedNetwork, host: int, target: tuple[str, int], folder: Path
    ) -> None:
        self._order = folder / "flip"
        net.start(host, partial(_serve, target, self._order))

    def flip(self, seed: int) -> None:
        """Flip a bit in the next bytes that pass."""
        self._order.write_text(str(seed), encoding="utf-8")

    @property
    def flipped(self) -> bool:
        """Whether that has happened."""
        return not self._order.exists()


def _serve(target: tuple[str, int], order: Path) -> int:
    server = socket.create_server(("127.0.0.1", PORT))
    while True:
        near, _ = server.accept()
        threading.Thread(target=_forward, args=(near, target, order), daemon=True).start()


def _forward(near: socket.socket, target: tuple[str, int], order: Path) -> None:
    with near:
        try:
            far = socket.create_connection(target, timeout=5)
        except OSError:
            return
        with far:
            far.settimeout(None)
            other = {near: far, far: near}
            while True:
                for source in select.select([near, far], [], [])[0]:
                    try:
                        data = bytearray(source.recv(_CHUNK))
                        if data:
                            other[source].sendall(_damaged(data, order))
                    except OSError:
                        return
                    if not data:
                        return


def _damaged(data: bytearray, order: Path) -> bytearray:
    taken = order.with_suffix(".taken")
    try:
        os.replace(order, taken)
    except FileNotFoundError:
        return data
    chance = random.Random(taken.read_text(encoding="utf-8"))
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return data
