"""An emulated network from Python: `with ShapedNetwork(NetworkSpec.of(2, "100mbit")) as net:`."""

import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from thinpipe.launch.host.links import NetworkSpec
from thinpipe.launch.host.packages import require
from thinpipe.launch.shaped import control, linux
from thinpipe.launch.shaped.linux import ShapedError
from thinpipe.launch.shaped.names import environment, host_name
from thinpipe.launch.shaped.ranks import Watch, start

T = TypeVar("T")

_MESSAGE_BYTES, _MOST_DESCRIPTORS = 65536, 253
_CLOSE_S = 10.0


class HostError(ShapedError):
    """What ran on a host failed; the message holds its traceback."""


class ShapedNetwork:
    """Emulated hosts joined by slow links; they and all that runs on them end with `close`.

    Host i is called `host0`, `host1`, ... and reaches the others at `10.77.0.<i + 1>`, over a real
    TCP/IP stack of its own. Also ends when this process does, however it does.
    """

    def __init__(self, spec: NetworkSpec) -> None:
        """Build the network; takes about half a second.

        Raises:
            ShapedError: the system does not allow it or lacks something; says what to do.
            ModuleNotFoundError: pyroute2 is not installed.
        """
        if sys.platform != "linux":
            raise ShapedError(f"emulated networks need Linux; this is {sys.platform}")
        require("pyroute2")
        self.hosts = spec.hosts
        self._spec = spec
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._keeper = _start_keeper(spec, theirs.fileno())
        descriptors = self._receive_descriptors()
        shared = len(descriptors) - 2 * spec.hosts
        flags = [flag for _, flag in linux.SHARED[-shared:]]  # without the first when root
        self._shared = list(zip(descriptors[:shared], flags, strict=True))
        self._own = descriptors[shared:]

    @property
    def run_id(self) -> int:
        """What `thinpipe shaped set --run` calls this network."""
        return self._keeper.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs on the hosts, then the hosts."""
        if self._socket.fileno() < 0:
            return
        self._socket.shutdown(socket.SHUT_RDWR)  # closing is not enough: forks hold it too
        self._socket.close()
        try:
            self._keeper.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        for descriptor in [fd for fd, _ in self._shared] + self._own:
            os.close(descriptor)
        self._shared, self._own = [], []

    def start(self, host: int, body: Callable[[], int]) -> int:
        """Fork a process into a host; see `ranks.start`."""
        net, uts = self._own[2 * host : 2 * host + 2]
        namespaces = [*self._shared, (net, linux.NEW_NET), (uts, linux.NEW_UTS)]
        return start(namespaces, body)

    def run(
        self,
        function: Callable[[int], T],
        *,
        hosts: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> list[T]:
        """Call `function(host)` on every host (or on `hosts`) at once; return what they return.

        Each call is in a process forked from this one, so nothing is imported again; results are
        pickled. `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and the like are set for torch.distributed.

        Raises:
            HostError: a call raised or its process died; the others are ended.
            TimeoutError: after `timeout_s`; all are ended.
        """
        hosts = range(self.hosts) if hosts is None else hosts
        watch = Watch()
        answers = {host: bytearray() for host in hosts}
        try:
            for host, answer in answers.items():
                receive, send = os.pipe()
                body = partial(_call, function, host, hosts=self.hosts, send=send)
                watch.process(host, self.start(host, body))
                os.close(send)
                watch.stream(receive, answer.extend)
            failed = watch.wait(timeout_s)
        except BaseException:
            watch.end()
            watch.wait()
            raise
        if failed is not None:
            raise HostError(_failure(failed, watch.codes[failed], answers[failed]))
        return [pickle.loads(answer) for answer in answers.values()]

    def set_rates(
        self,
        rate: str | None = None,
        *,
        up: str | None = None,
        down: str | None = None,
        pairs: Sequence[str] = (),
    ) -> None:
        """Change rates while traffic flows, also from inside `run`; as in `NetworkSpec.of`.

        Raises:
            ValueError: a rate is not understood or out of range.
        """
        change = control.Change(rate=rate, up=up, down=down, pairs=list(pairs))
        control.request(change, self.run_id)
        self._spec = self._spec.changed(rate=rate, up=up, down=down, pairs=pairs)

    @property
    def spec(self) -> NetworkSpec:
        """The network as built, with the rates that this process set since."""
        return self._spec

    def _receive_descriptors(self) -> list[int]:
        flags = socket.MSG_CMSG_CLOEXEC
        message, descriptors, _, _ = socket.recv_fds(
            self._socket, _MESSAGE_BYTES, _MOST_DESCRIPTORS, flags
        )
        if not descriptors:
            self._socket.close()
            code = self._keeper.wait()
            raise ShapedError(message.decode() or f"the sandbox ended with exit code {code}")
        return list(descriptors)


def _start_keeper(spec: NetworkSpec, socket_fd: int) -> "subprocess.Popen[bytes]":
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    arguments = [str(os.getpid()), str(socket_fd)]
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", "thinpipe.launch.shaped.sandbox", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[socket_fd],
        env=os.environ | {"PYTHONPATH": path},
        start_new_session=True,  # a terminal's Ctrl-C is for the run; we end the sandbox ourselves
    )
    assert keeper.stdin is not None
    with keeper.stdin as pipe:
        pickle.dump(spec, pipe)
    return keeper


def _call(function: Callable[[int], object], host: int, *, hosts: int, send: int) -> int:
    """The body of a rank: call, and write the pickled result or the text of the error."""
    os.environ.update(environment(host, hosts))
    try:
        answer, code = pickle.dumps(function(host)), 0
    except BaseException:
        answer, code = traceback.format_exc().encode(), 1
    with open(send, "wb") as pipe:
        pipe.write(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _failure(host: int, code: int, answer: bytearray) -> str:
    how = f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
    text = answer.decode(errors="replace")
    return f"{host_name(host)}:\n{text}" if text else f"{host_name(host)} {how}"
