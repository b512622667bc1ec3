"""Before step 0 all ranks agree on config, data, versions and a run id, over the rendezvous store.

The same store later tells every rank which edge failed first.
"""

import contextlib
import json
import platform
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

_FAILURE_WAIT_S = 1.0
_READ_WAIT_S = 60.0
"""For ranks that have told their facts to read those of others: a busy machine may stop one."""
_POLL_S = 0.02


class HandshakeError(RuntimeError):
    """Ranks were started with different settings, or one did not come."""


def versions() -> dict[str, str]:
    """Versions that a run records and peers compare."""
    return {
        "thinpipe": version("thinpipe"),
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
    }


def fresh_store(store: Store, rank: int, world: int, *, wait_s: float) -> Store:
    """A part of the store in which nothing was written before all these ranks came.

    torchrun's agents keep one store over restarts, in which the addresses of ranks that are gone
    would be found. So rank 0 draws a name, and tells it to whoever shows a number drawn just now.

    Raises:
        HandshakeError: a rank did not come.
    """
    lobby = PrefixStore("lobby", store)
    lobby.set_timeout(timedelta(seconds=wait_s))
    if rank > 0:
        number = secrets.token_hex(8)
        lobby.set(f"hello/{rank}", number)
        name = _get(lobby, f"welcome/{rank}/{number}", 0, wait_s)
        lobby.set(f"here/{rank}/{name}", "")
        return PrefixStore(name, store)
    name, answered = secrets.token_hex(8), dict.fromkeys(range(1, world), "")
    limit_s = time.monotonic() + wait_s
    while answered:
        for other, last in list(answered.items()):
            if lobby.check([f"here/{other}/{name}"]):
                del answered[other]
            elif lobby.check([f"hello/{other}"]):
                number = lobby.get(f"hello/{other}").decode()
                if number != last:
                    lobby.set(f"welcome/{other}/{number}", name)
                    answered[other] = number
        if answered and time.monotonic() > limit_s:
            raise HandshakeError(_absent(min(answered), wait_s))
        time.sleep(_POLL_S)
    return PrefixStore(name, store)


def agree(
    store: Store,
    rank: int,
    world: int,
    facts: Mapping[str, Any],
    *,
    problem: str | None,
    wait_s: float,
) -> int:
    """Compare every rank's `facts` (JSON-able, nested) with rank 0's; return the run id.

    `problem` is what keeps this rank from starting, if anything does.

    Raises:
        HandshakeError: a rank has a problem, differs (its values and rank 0's are named), or did
            not come.
    """
    store = PrefixStore("handshake", store)
    store.set_timeout(timedelta(seconds=wait_s))
    if rank == 0:
        store.set("run_id", secrets.token_hex(8))
    store.set(f"facts/{rank}", json.dumps([problem, facts], sort_keys=True, default=str))
    everyone = [json.loads(_get(store, f"facts/{r}", r, wait_s)) for r in range(world)]
    store.set(f"read/{rank}", "")
    problems = _problems(everyone)
    if problems and rank == 0:  # the store may end with this process: let the others read first
        with contextlib.suppress(RuntimeError):
            store.wait([f"read/{r}" for r in range(world)], timedelta(seconds=_READ_WAIT_S))
    if problems:
        raise HandshakeError(problems)
    return int(_get(store, "run_id", 0, wait_s), 16)


def _problems(everyone: Sequence[tuple[str | None, Mapping[str, Any]]]) -> str:
    """What keeps ranks from starting, by (problem, facts) of each; nothing if nothing does."""
    own = {text: f"rank {r}" for r, (text, _) in reversed(list(enumerate(everyone))) if text}
    if own:
        return "; ".join(f"{who}: {text}" for text, who in own.items())
    different = [
        f"rank {other} has {name.removeprefix('config.')} = {theirs}, rank 0 has {ours}"
        for other, (_, told) in enumerate(everyone)
        for name, theirs, ours in differences(told, everyone[0][1])
    ]
    if not different:
        return ""
    shown = different[:8] + ([f"and {len(different) - 8} more"] if len(different) > 8 else [])
    return "ranks were started with different settings: " + "; ".join(shown)


def report_failure(store: Store, rank: int, message: str) -> None:
    """Tell the other ranks what failed here."""
    board = PrefixStore("failure", store)
    board.set(str(rank), json.dumps({"time": time.time(), "message": message}))


def other_failures(store: Store, rank: int, world: int) -> list[str]:
    """What other ranks reported, the earliest first; waits a moment for them."""
    board = PrefixStore("failure", store)
    time.sleep(_FAILURE_WAIT_S)
    reports = []
    for other in range(world):
        if other != rank and board.check([str(other)]):
            report = json.loads(board.get(str(other)))
            reports.append((report["time"], f"rank {other}: {report['message']}"))
    return [text for _, text in sorted(reports)]


def _get(store: Store, key: str, rank: int, wait_s: float) -> str:
    try:
        return str(store.get(key).decode())
    except RuntimeError as error:  # torch's DistStoreError
        if "timeout" not in str(error).lower():
            raise HandshakeError(
                "the rendezvous store is gone: the process or machine that holds it has ended; "
                "its own message says why"
            ) from None
        raise HandshakeError(_absent(rank, wait_s)) from None


def _absent(rank: int, wait_s: float) -> str:
    return (
        f"rank {rank} did not come within {wait_s:.0f} s; is it started, and can it reach the "
        "rendezvous host?"
    )


def differences(theirs: Any, ours: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted name, their value, our value) of every leaf in which two nested dicts differ."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        found: list[tuple[str, Any, Any]] = []
        for key in sorted(theirs.keys() | ours.keys()):
            place = f"{name}.{key}" if name else key
            found += differences(theirs.get(key), ours.get(key), place)
        return found
    return [] if theirs == ours else [(name, theirs, ours)]
