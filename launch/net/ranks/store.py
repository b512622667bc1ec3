"""torch's store, and logs in it. It listens at one address only: by itself it takes all of a
machine's.
"""

import json
import secrets
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not re-exported
from torch.distributed.distributed_c10d import PrefixStore, Store

_FOREVER = timedelta(days=1)


def connect_store(address: tuple[str, int], *, wait_s: float) -> TCPStore:
    """The store that another process holds."""
    timeout = timedelta(seconds=max(1.0, wait_s))
    return TCPStore(*address, None, False, timeout, wait_for_workers=False)


def hold_store(server: socket.socket, *, wait_s: float) -> TCPStore:
    """A store at a listening socket, which it takes over."""
    host, port = server.getsockname()[:2]
    timeout = timedelta(seconds=max(1.0, wait_s))
    return TCPStore(
        host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=server.detach()
    )


def await_key(store: Store, key: str) -> None:
    """Wait for a key, however long that takes; the connection is blocked meanwhile."""
    while not store.check([key]):
        try:
            store.wait([key], _FOREVER)
        except RuntimeError as error:
            if "timeout" not in str(error).lower():
                raise


class StoreLog:
    """Entries that anybody adds, numbered from 1.

    A number and its entry are written in one operation: a process that ends meanwhile leaves no
    number without an entry, for which the others would wait.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store = PrefixStore(name, store)

    def add(self, entry: Any) -> None:
        said = json.dumps([secrets.token_hex(8), entry])
        number = 1 + self._store.add("count", 0)  # of which there may be more already
        while self._store.compare_set(str(number), "", said) != said.encode():
            number += 1
        self._store.add("count", 1)

    def has(self, number: int) -> bool:
        return bool(self._store.check([str(number)]))

    def get(self, number: int) -> Any:
        """The entry with this number; waits for it. RuntimeError if the store is gone."""
        await_key(self._store, str(number))
        return json.loads(self._store.get(str(number)))[1]
