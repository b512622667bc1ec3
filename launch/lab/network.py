"""An emulated network from Python: `with ShapedNetwork(NetworkSpec.of(2, "100mbit")) as net:`."""

import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self, TypeVar

from thinpipe.launch.host.packages import require
from thinpipe.launch.lab import control, linux
from thinpipe.launch.lab.linux import ShapedError
from thinpipe.launch.lab.names import environment, host_name
from thinpipe.launch.lab.ranks import ProcessMonitor, start
from thinpipe.launch.lab.spec import Change, NetworkSpec

T = TypeVar("T")

_MESSAGE_BYTES, _MOST_DESCRIPTORS = 65536, 253  # room for a traceback; the kernel's SCM_MAX_FD
_CLOSE_S = 10.0  # then the supervisor is killed, and with it all hosts


class HostError(ShapedError):
    """A function failed on a host; the message has its traceback."""


class ShapedNetwork:
    """Emulated hosts connected by slow links; `close` ends them and all of their processes.

    The hosts are `host0`, `host1`, ... at `10.77.0.1`, `10.77.0.2`, ..., each with its own TCP/IP
    stack. They also end when this process exits for any reason.
    """

    def __init__(self, spec: NetworkSpec) -> None:
        """Create the network; takes about half a second.

        Raises:
            ShapedError: the system does not allow it or lacks a feature.
            ModuleNotFoundError: pyroute2 is not installed.
        """
        if sys.platform != "linux":
            raise ShapedError(f"emulated networks need Linux; this is {sys.platform}")
        require("pyroute2")
        self.hosts = spec.hosts
        self.spec = spec
        """The network as created, with the rates that this process has set since."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:  # closed here, so that the end of the sandbox is seen
            self._supervisor = _start_supervisor(spec, theirs.fileno())
        descriptors = self._receive_descriptors()
        shared = len(descriptors) - 2 * spec.hosts
        flags = [flag for _, flag in linux.SHARED[-shared:]]  # without the first when root
        self._shared = list(zip(descriptors[:shared], flags, strict=True))
        self._own = descriptors[shared:]

    @property
    def run_id(self) -> int:
        """The number of this network for `thinpipe shaped set --run`."""
        return self._supervisor.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        # closing is not enough: forked processes hold it too
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self._supervisor.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        for descriptor in [fd for fd, _ in self._shared] + self._own:
            os.close(descriptor)
        self._shared, self._own = [], []

    def start(self, host: int, body: Callable[[], int]) -> int:
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
        """Call `function(host)` on every host (or on `hosts`) concurrently; return the results.

        Each call runs in a process forked from this one, so nothing is imported again; results
        are pickled. `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and the like are set for torch.distributed.

        Raises:
            HostError: a call raised or its process died; the others are stopped.
            TimeoutError: after `timeout_s`; all are stopped.
        """
        hosts = range(self.hosts) if hosts is None else hosts
        monitor = ProcessMonitor()
        answers = {host: bytearray() for host in hosts}
        try:
            for host, answer in answers.items():
                receive, send = os.pipe()
                body = partial(_call, function, host, hosts=self.hosts, send=send)
                monitor.process(host, self.start(host, body))
                os.close(send)
                monitor.stream(receive, answer.extend)
            failed = monitor.wait(timeout_s)
        except BaseException:
            monitor.end()
            monitor.wait()
            raise
        if failed is not None:
            raise HostError(_failure(failed, monitor.codes[failed], answers[failed]))
        return [pickle.loads(answer) for answer in answers.values()]

    def set_rates(
        self,
        rate: str | None = None,
        *,
        up: str | None = None,
        down: str | None = None,
        pairs: Sequence[str] = (),
    ) -> None:
        """Change rates while traffic flows, also from inside `run`; as in `NetworkSpec.of`."""
        change = Change(rate=rate, up=up, down=down, pairs=pairs)
        control.request(change, self.run_id)
        self.spec = self.spec.changed(change)

    def _receive_descriptors(self) -> list[int]:
        sizes = _MESSAGE_BYTES, _MOST_DESCRIPTORS
        flags = socket.MSG_CMSG_CLOEXEC
        message, descriptors, _, _ = socket.recv_fds(self._socket, *sizes, flags)
        if not descriptors:
            self._socket.close()
            code = self._supervisor.wait()
            raise ShapedError(message.decode() or f"the sandbox exited with code {code}")
        return list(descriptors)


def _start_supervisor(spec: NetworkSpec, socket_fd: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "thinpipe.launch.lab.sandbox"]
    supervisor = subprocess.Popen(
        [*command, str(os.getpid()), str(socket_fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[socket_fd],
        start_new_session=True,  # Ctrl-C goes to the run only; we end the sandbox
    )
    assert supervisor.stdin is not None
    with supervisor.stdin as pipe:
        pickle.dump(spec, pipe)
    return supervisor


def _call(function: Callable[[int], object], host: int, *, hosts: int, send: int) -> int:
    os.environ.update(environment(host, hosts))
    try:
        answer, code = pickle.dumps(function(host)), 0
    except BaseException:
        answer, code = traceback.format_exc().encode(), 1
    with open(send, "wb") as pipe:
        pipe.write(answer)
    sys.stdout.flush()  # the process ends by _exit, which flushes nothing
    sys.stderr.flush()
    return code


def _failure(host: int, code: int, answer: bytearray) -> str:
    how = f"was killed by signal {code - 128}" if code > 128 else f"exited with code {code}"
    text = answer.decode(errors="replace")
    return f"{host_name(host)}:\n{text}" if text else f"{host_name(host)} {how}"
