"""Where machines meet: torch's c10d rendezvous, with a limit that also holds for reaching it."""

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
"""The name under which `register` makes it known to torch's launcher."""

_CAME = "thinpipe/came"


def register() -> None:
    """Let torch's launcher use it, with `join_timeout` as the most seconds that machines wait."""
    rendezvous_handler_registry.register(BACKEND, _create)


class _Wait:
    """Says what is waited for, and ends the process if it takes too long."""

    def __init__(self, parameters: RendezvousParameters, limit_s: float) -> None:
        self.store: Store | None = None
        self._what = f"{parameters.min_nodes} machines at {parameters.endpoint}"
        self._limit = f"{limit_s:.0f} s (pipeline.peer_timeout_s)"
        os.write(2, f"waiting for {self._what}, at most {self._limit}\n".encode())
        self._timer = threading.Timer(limit_s, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def over(self) -> None:
        """They have met."""
        self._timer.cancel()

    def _give_up(self) -> None:
        came = "no run answers there (has another program the port?)"
        with contextlib.suppress(RuntimeError):
            if self.store is not None:
                came = f"only {self.store.add(_CAME, 0)} came"
        failed = f"error: {self._what} did not meet within {self._limit}: {came}"
        os.write(2, f"{failed}; `thinpipe doctor` on each says why\n".encode())
        os._exit(1)


class _Meeting(DynamicRendezvousHandler):
    """A rendezvous that ends the wait when machines have met."""

    wait: _Wait

    def get_backend(self) -> str:
        """See torch."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch."""
        info = super().next_rendezvous()
        self.wait.over()
        return info


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    limit_s = parameters.get_as_int("join_timeout")
    assert limit_s is not None
    wait = _Wait(parameters, limit_s)
    backend, wait.store = create_backend(parameters)
    wait.store.add(_CAME, 1)
    meeting = _Meeting.from_backend(
        parameters.run_id,
        wait.store,
        backend,
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        timeout=RendezvousTimeout(join=timedelta(seconds=limit_s)),
    )
    assert isinstance(meeting, _Meeting)
    meeting.wait = wait
    return meeting
