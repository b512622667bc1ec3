"""Changes rates during a run: a small server in the sandbox, and its client.

The server listens on abstract Unix sockets, which leave no files behind and exist per network
namespace: one where the run was started, and one of the same name inside every host. Clients find
the run in /proc/net/unix, from another terminal as well as from a script on a host.
"""

import errno
import json
import os
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from thinpipe.launch.host.links import format_rate
from thinpipe.launch.lab.linux import ShapedError
from thinpipe.launch.lab.spec import Change, NetworkSpec

_NAME = "thinpipe-shaped-"
_LISTENS = "00010000"  # the kernel's __SO_ACCEPTCON, among the flags of /proc/net/unix
_LARGEST = 65536  # of one packet (SOCK_SEQPACKET): what is longer is cut off, and no JSON then
_TIMEOUT_S = 60.0
"""Guards against hanging: a run may still be building its network, on a busy machine."""
_CLIENT_S = 5.0  # how long other clients wait for one that has connected and sends nothing
_MOST_PAIRS = 6  # in one line; of more it says how many


def listen(run: int) -> socket.socket:
    """Listen for changes to a run, in the network namespace this process is in."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps messages apart
    server.bind(f"\0{_NAME}{run}")
    server.listen()
    return server


def answer(server: socket.socket, apply: Callable[[Change], NetworkSpec]) -> None:
    """Serve one client of `server`: pass its change to `apply`, reply with the outcome."""
    client, _ = server.accept()
    with client:
        client.settimeout(_CLIENT_S)
        ucred = struct.Struct("3i")
        peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, ucred.size)
        _, uid, _ = ucred.unpack(peer)
        try:
            message = client.recv(_LARGEST)
            client.send(json.dumps(_reply(message, uid, apply)).encode())
        except (TimeoutError, ConnectionError):  # the client disconnected; the run continues
            return


def _reply(message: bytes, uid: int, apply: Callable[[Change], NetworkSpec]) -> dict[str, str]:
    if uid != os.geteuid():  # an abstract socket has no permissions: anybody here can connect
        return {"error": "this run belongs to another user"}
    try:
        return {"done": describe(apply(Change.model_validate_json(message)))}
    except (ValueError, ShapedError) as error:
        return {"error": str(error)}


def describe(spec: NetworkSpec) -> str:
    """The rates of a network in one line."""
    up, down = (
        format_rate(rates[0]) if len(set(rates)) == 1 else ", ".join(map(format_rate, rates))
        for rates in (spec.up_bps, spec.down_bps)
    )
    pairs = "".join(f"; {i}->{j} {format_rate(bps)}" for (i, j), bps in spec.pair_bps.items())
    if len(spec.pair_bps) > _MOST_PAIRS:
        pairs = f"; limits of their own for {len(spec.pair_bps)} pairs"
    return (f"{up} each way" if up == down else f"up {up}; down {down}") + pairs


def runs() -> list[int]:
    """The runs that can be reached from this network namespace: their sockets listen."""
    listening = rf"^\S+ \S+ \S+ {_LISTENS} .* @{_NAME}(\d+)$"
    names = re.findall(listening, Path("/proc/net/unix").read_text(encoding="utf-8"), re.MULTILINE)
    return sorted({int(name) for name in names})


def request(change: Change, run: int | None = None) -> str:
    """Change the rates of a run (the only one if `run` is None); return which, and its rates.

    Raises:
        ValueError: no such run, several without `run`, or the change is rejected.
    """
    known = runs()
    listed = ", ".join(map(str, known))
    if run is None and len(known) != 1:
        found = f"runs {listed}; choose one with --run" if known else "no run"
        raise ValueError(f"thinpipe shaped: found {found}")
    if run is not None and run not in known:
        raise ValueError(f"--run = {run}: no such run; running: {listed or 'none'}")
    chosen = known[0] if run is None else run
    try:
        reply = _send(chosen, change.model_dump_json().encode())
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"--run = {chosen}: did not answer: {reason}; has it ended?") from None
    if "error" in reply:
        raise ValueError(reply["error"])
    return f"run {chosen}: {reply['done']}"


def _send(run: int, message: bytes) -> dict[str, str]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(_TIMEOUT_S)
        client.connect(f"\0{_NAME}{run}")
        client.send(message)
        answer = client.recv(_LARGEST)
    if not answer:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
    reply: dict[str, str] = json.loads(answer)
    return reply
