"""Restarts in words: which one it is, and why the attempt before ended.

torchrun's agents keep their store over restarts, so what failed is still there.
"""

import contextlib
import os

from torch.distributed.distributed_c10d import PrefixStore, Store

from thinpipe.launch.net.ranks.failures import Failures
from thinpipe.launch.net.ranks.handshake import agents_met, store_address
from thinpipe.launch.net.ranks.store import connect_store

STOPPED = "the run was asked to stop"
"""Why there are no restarts after that."""
_REJECTED = "rejected for good"
_STORE_S = 5.0  # to connect; else agents restart the run, and it is rejected again
_LAST = "last session"
_NO_RANK = "no rank said why: a machine was started again, or its ranks ended before they joined"


def last_failure(met: Store, name: str, who: str) -> str:
    """The first failure of the session before, if there was one; `name` is that of this one.

    Only rank 0 calls it.
    """
    text = ""
    if met.check([_LAST]):
        failures = Failures(PrefixStore(met.get(_LAST).decode(), met), who)
        text = failures.known() or _NO_RANK
    met.set(_LAST, name)
    return text


def report_killed(store: Store, process: str, how: str) -> None:
    """Called by an agent: which process of its own was killed, and with it a rank.

    Other ranks then meet connections that broke, which are no cause.
    """
    with contextlib.suppress(RuntimeError):  # the store is gone: so is the run
        if store.check([_LAST]):
            name = store.get(_LAST).decode()
            Failures(PrefixStore(name, store), process).report(how, cause=True)


def restart_words(failure: str) -> str | None:
    """Announces a restart, as torchrun's agent counts them; None if this is the first start."""
    if not failure:
        return None
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    which = "" if count == "0" else f", {count} of {most}"
    return f"restarting{which}: {failure}"


def reject_restarts(why: str = "a restart would end the same way") -> None:
    """Called by a rank that ends, and why the agents are to end the run."""
    if agents_met():
        with contextlib.suppress(RuntimeError):  # the store is gone: so is the run
            connect_store(store_address(), wait_s=_STORE_S).set(_REJECTED, why)


def rejected_restarts(store: Store) -> str | None:
    """Why, if a rank has done so; `store` is that of the agents, without a prefix."""
    return store.get(_REJECTED).decode() if store.check([_REJECTED]) else None
