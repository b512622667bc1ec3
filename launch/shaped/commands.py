"""Runs a command on every host and shows what it prints, a line at a time with the host's name."""

import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import BinaryIO

from thinpipe.launch.shaped.names import environment, fill_in, host_name
from thinpipe.launch.shaped.network import ShapedNetwork
from thinpipe.launch.shaped.ranks import Watch

NOT_FOUND, NOT_EXECUTABLE = 127, 126
_INTERRUPT_GRACE_S = 3.0
_KEPT_LINES = 20
_LONGEST_LINE = 65536


class StoppedError(Exception):
    """SIGTERM or SIGHUP: we are asked to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by signal {signum}")
        self.signum = signum


def run_command(network: ShapedNetwork, command: Sequence[str], show: int | None = None) -> int:
    """Run `command` on every host; return its exit code, the first that is not 0 if any.

    Placeholders and variables are filled in for each host. When one fails, the others are ended.
    Output is prefixed with `host0| `; but host `show` has the terminal for itself, and of the
    others only the last lines are shown, if they fail. Ctrl-C and SIGTERM end all in order.

    Raises:
        ValueError: there is no host `show`.
    """
    if show is not None and not 0 <= show < network.hosts:
        raise ValueError(f"--show = {show}: use a host from 0 to {network.hosts - 1}")
    watch = Watch()
    kept: dict[int, deque[bytes]] = {}
    with _ended_by_signals():
        try:
            for host in range(network.hosts):
                if host == show:
                    watch.process(
                        host, network.start(host, partial(_exec, command, host, network=network))
                    )
                    continue
                kept[host] = deque(maxlen=_KEPT_LINES)
                sinks = _sinks(host, kept[host] if show is not None else None)
                _start_piped(network, watch, command=command, host=host, sinks=sinks)
            failed = watch.wait()
        except (KeyboardInterrupt, StoppedError) as stop:
            return _end(watch, stop)
    if failed is None:
        return 0
    if show is not None and failed != show:
        _write(sys.stderr.buffer, b"".join(kept[failed]))
    code = watch.codes[failed]
    sys.stderr.write(f"{host_name(failed)} ended with exit code {code}; the others were ended\n")
    return code


def _end(watch: Watch, stop: KeyboardInterrupt | StoppedError) -> int:
    """Let the commands end; after Ctrl-C, which they got as well, leave them a moment for it."""
    interrupted = isinstance(stop, KeyboardInterrupt)
    watch.end(after_s=_INTERRUPT_GRACE_S if interrupted else 0.0)
    with suppress(KeyboardInterrupt, StoppedError):  # asked twice: closing the network kills them
        watch.wait()
    return 128 + (signal.SIGINT if isinstance(stop, KeyboardInterrupt) else stop.signum)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    def stop(signum: int, _: FrameType | None) -> None:
        raise StoppedError(signum)

    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _start_piped(
    network: ShapedNetwork,
    watch: Watch,
    *,
    command: Sequence[str],
    host: int,
    sinks: Sequence[Callable[[bytes], None]],
) -> None:
    pipes = [os.pipe() for _ in sinks]
    inputs = [os.open(os.devnull, os.O_RDONLY), *(send for _, send in pipes)]
    pid = network.start(host, partial(_exec, command, host, network=network, inputs=inputs))
    watch.process(host, pid)
    for descriptor in inputs:
        os.close(descriptor)
    for (receive, _), sink in zip(pipes, sinks, strict=True):
        watch.stream(receive, sink)


def _exec(
    command: Sequence[str], host: int, *, network: ShapedNetwork, inputs: Sequence[int] = ()
) -> int:
    """The body of a rank: become the command; `inputs` take the place of stdin, stdout, stderr."""
    for target, descriptor in enumerate(inputs):
        os.dup2(descriptor, target)
    variables = {"PYTHONUNBUFFERED": "1"} | os.environ | environment(host, network.hosts)
    arguments = [fill_in(argument, host) for argument in command]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; a command must not
    try:
        os.execvpe(arguments[0], arguments, variables)
    except OSError as error:
        os.write(2, f"{arguments[0]}: {error.strerror}\n".encode())
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


def _sinks(host: int, keep: deque[bytes] | None) -> list[Callable[[bytes], None]]:
    """Where a host's stdout and stderr go: to ours, or into `keep`."""
    outputs = (sys.stdout.buffer, sys.stderr.buffer)
    writes = [keep.append if keep is not None else partial(_write, output) for output in outputs]
    return [_Lines(f"{host_name(host)}| ".encode(), write).take for write in writes]


class _Lines:
    """Cuts a stream into lines and puts a prefix before each."""

    def __init__(self, prefix: bytes, write: Callable[[bytes], None]) -> None:
        self._prefix = prefix
        self._write = write
        self._rest = b""

    def take(self, data: bytes) -> None:
        """Take what arrived; `b""` is the end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE or (not data and self._rest):
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))


def _write(output: BinaryIO, text: bytes) -> None:
    output.write(text)
    output.flush()
