"""Runs a command on every host and prints its output line by line behind the host's name."""

import os
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from thinpipe.launch.config.network import KEY_FILE
from thinpipe.launch.host.resources import threads_per_rank, usable_cores
from thinpipe.launch.host.signals import handled, held
from thinpipe.launch.host.terminal import print_error
from thinpipe.launch.lab.names import environment, host_name, substitute
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.ranks import ENDING, STOPPING, ProcessMonitor
from thinpipe.launch.net.overlay import keys

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells have it
_INTERRUPT_GRACE_S = 60.0
"""For a command that saves its work: SIGTERM would be a second signal, which ends a run at once."""
_KEPT_LINES = 20  # of each host that is not shown; printed if it fails
_LONGEST_LINE = 65536  # what has no newline by then is cut, so that it does not pile up in RAM


class StoppedError(Exception):
    """SIGTERM or SIGHUP was received."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by signal {signum}")
        self.signum = signum


def run_command(network: ShapedNetwork, command: Sequence[str], show: int | None = None) -> int:
    """Run `command` on every host; return its exit code, that of the first failure if any.

    Placeholders and variables are replaced for each host. When one fails, the others are stopped.
    Output is prefixed with `host0| `; but host `show` is connected to the terminal, and of the
    others only the last lines are printed if they fail. Ctrl-C and SIGTERM stop all gracefully.
    Runs of ThinPipe get a key of their own.

    Raises:
        ValueError: there is no host `show`.
    """
    if show is not None and not 0 <= show < network.hosts:
        raise ValueError(f"--show = {show}: use a host from 0 to {network.hosts - 1}")
    with tempfile.TemporaryDirectory(prefix="thinpipe-") as folder:
        key = Path(folder) / "run.key"
        keys.new(key)
        return _run(network, command, show, key)


def _run(network: ShapedNetwork, command: Sequence[str], show: int | None, key: Path) -> int:
    monitor = ProcessMonitor()
    start = partial(_exec, command, network=network, key=key)
    kept: dict[int, deque[bytes]] = {}
    with _stopped_by_signals():
        try:
            for host in range(network.hosts):
                with held(STOPPING):  # until the monitor knows of its process
                    if host == show:
                        monitor.process(host, network.start(host, partial(start, host)))
                        continue
                    kept[host] = deque(maxlen=_KEPT_LINES)
                    sinks = _sinks(host, kept[host] if show is not None else None)
                    _start_piped(network, monitor, start, host=host, sinks=sinks)
            failed = monitor.wait()
        except (KeyboardInterrupt, StoppedError) as stop:
            return _stop(monitor, stop)
    if failed is None:
        return max(monitor.codes.values())
    if show is not None and failed != show:
        _write(sys.stderr.buffer, b"".join(kept[failed]))
    code = monitor.codes[failed]
    print_error(f"{host_name(failed)} exited with code {code}; the others were stopped")
    return code


def _stop(monitor: ProcessMonitor, stop: KeyboardInterrupt | StoppedError) -> int:
    """Stop the commands; after Ctrl-C, which they received as well, with a grace period."""
    signum = stop.signum if isinstance(stop, StoppedError) else signal.SIGINT
    monitor.end(after_s=_INTERRUPT_GRACE_S if signum == signal.SIGINT else 0.0)
    # after a second signal, closing the network kills them
    with suppress(KeyboardInterrupt, StoppedError):
        monitor.wait()
    return 128 + signum


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    def stop(signum: int, _: FrameType | None) -> None:
        raise StoppedError(signum)

    before = {signum: signal.signal(signum, stop) for signum in handled(ENDING)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _start_piped(
    network: ShapedNetwork,
    monitor: ProcessMonitor,
    start: Callable[..., int],
    *,
    host: int,
    sinks: Sequence[Callable[[bytes], None]],
) -> None:
    pipes = [os.pipe() for _ in sinks]
    inputs = [os.open(os.devnull, os.O_RDONLY), *(send for _, send in pipes)]
    pid = network.start(host, partial(start, host, inputs=inputs))
    monitor.process(host, pid)
    for descriptor in inputs:  # the host has copies: with these open, no pipe would end
        os.close(descriptor)
    for (receive, _), sink in zip(pipes, sinks, strict=True):
        monitor.stream(receive, sink)


def _exec(
    command: Sequence[str],
    host: int,
    *,
    network: ShapedNetwork,
    key: Path,
    inputs: Sequence[int] = (),
) -> int:
    """Run in a host: exec the command; `inputs` replace stdin, stdout and stderr."""
    for target, descriptor in enumerate(inputs):
        os.dup2(descriptor, target)
    threads = threads_per_rank(usable_cores(), network.hosts)  # hosts share this machine's cores
    variables = {"PYTHONUNBUFFERED": "1", KEY_FILE: str(key), "OMP_NUM_THREADS": str(threads)}
    variables |= os.environ  # the user's own count
    variables |= environment(host, network.hosts)
    arguments = [substitute(argument, host) for argument in command]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; commands expect it
    try:
        os.execvpe(arguments[0], arguments, variables)
    except OSError as error:
        print_error(f"{arguments[0]}: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


def _sinks(host: int, keep: deque[bytes] | None) -> list[Callable[[bytes], None]]:
    """Consumers of a host's stdout and stderr: they print it, or append it to `keep`."""
    outputs = (sys.stdout.buffer, sys.stderr.buffer)
    writes = [keep.append if keep is not None else partial(_write, output) for output in outputs]
    return [_Lines(f"{host_name(host)}| ".encode(), write).take for write in writes]


class _Lines:
    def __init__(self, prefix: bytes, write: Callable[[bytes], None]) -> None:
        self._prefix = prefix
        self._write = write
        self._rest = b""

    def take(self, data: bytes) -> None:
        """Consume received bytes; `b""` is the end of the stream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE or (not data and self._rest):
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))


def _write(output: BinaryIO, text: bytes) -> None:
    output.write(text)
    output.flush()
