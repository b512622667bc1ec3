"""torch's c10d rendezvous, with a timeout that includes connecting to it."""

import contextlib
import os
import threading
from datetime import timedelta

from torch.distributed.distributed_c10d import Store
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

BACKEND = "thinpipe"
"""The name that `register` gives it in torch's launcher."""

_JOINED = "thinpipe/joined"


def register() -> None:
    """Register it with torch's launcher; `join_timeout` is the timeout in seconds."""
    rendezvous_handler_registry.register(BACKEND, _create)


class _Wait:
    """Logs the wait for other machines, and ends the process on timeout."""

    def __init__(self, parameters: RendezvousParameters, limit_s: float) -> None:
        self.store: Store | None = None
        self._what = f"{parameters.min_nodes} machines at {parameters.endpoint}"
        self._limit = f"{limit_s:.0f} s (pipeline.peer_timeout_s)"
        os.write(2, f"waiting for {self._what}, at most {self._limit}\n".encode())
        self._timer = threading.Timer(limit_s, self._time_out)
        self._timer.daemon = True
        self._timer.start()

    def over(self) -> None:
        """All machines have joined."""
        self._timer.cancel()

    def _time_out(self) -> None:
        joined = "no run answers there (is the port in use by another program?)"
        with contextlib.suppress(RuntimeError):
            if self.store is not None:
                joined = f"only {self.store.add(_JOINED, 0)} joined"
        failed = f"error: {self._what} did not join within {self._limit}: {joined}"
        os.write(2, f"{failed}; run `thinpipe doctor` on each\n".encode())
        os._exit(1)


class _TimedHandler(DynamicRendezvousHandler):
    """A rendezvous that cancels the timeout when all machines have joined."""

    wait: _Wait

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        info = super().next_rendezvous()
        self.wait.over()
        return info


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    limit_s = parameters.get_as_int("join_timeout")
    assert limit_s is not None
    wait = _Wait(parameters, limit_s)
    backend, wait.store = create_backend(parameters)
    wait.store.add(_JOINED, 1)
    handler = _TimedHandler.from_backend(
        parameters.run_id,
        wait.store,
        backend,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        timeout=RendezvousTimeout(join=timedelta(seconds=limit_s)),
    )
    assert isinstance(handler, _TimedHandler)
    handler.wait = wait
    return handler
