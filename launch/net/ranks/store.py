"""torch's store, which listens at one address only: by itself it takes all of a machine's."""

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not re-exported
from torch.distributed.distributed_c10d import Store

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
