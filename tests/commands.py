"""The command line as a fork of a process that has everything loaded: no second for each import.

What it forks does what `thinpipe train` does, from the arguments to the exit code; only the ranks
are forked by it, not by torch's agent, so they are not started again.
`tests/launch/test_train.py` also starts true commands.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from tests.ports import free_port
from tests.ranks import CONTEXT
from tests.waiting import PATIENCE_S
from thinpipe.launch.host.signals import ENDING_SIGNALS
from thinpipe.launch.net.ranks.fork_server import PARENT, name_process


class Command:
    """`thinpipe <arguments>` that runs; its output goes to files."""

    def __init__(self, *arguments: object, environment: Mapping[str, str] | None = None) -> None:
        self.args = [*map(str, arguments)]
        self._folder = tempfile.TemporaryDirectory()
        paths = [f"{self._folder.name}/{name}" for name in ("out", "err")]
        self._out, self._err = map(Path, paths)
        changed = {**os.environ, **(environment or {})}
        self._process = CONTEXT.Process(target=_be, args=(self.args, paths, os.getcwd(), changed))
        self._process.start()

    @property
    def pid(self) -> int:
        """Of the process that ranks are children of."""
        assert self._process.pid is not None
        return self._process.pid

    def done(
        self, timeout: float = PATIENCE_S, *, code: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Wait for the end, with this exit code if one is given."""
        self._process.join(timeout)
        found = self._process.exitcode
        self.kill()
        assert found is not None, f"runs on after {timeout} s"
        written = [path.read_text(encoding="utf-8") for path in (self._out, self._err)]
        self._folder.cleanup()
        assert code in (None, found), written
        return subprocess.CompletedProcess(self.args, found, *written)

    def kill(self) -> None:
        """End it, which ends its ranks too."""
        self._process.kill()
        self._process.join()


def run(
    *arguments: object, code: int | None = 0, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`thinpipe <arguments>`, which ends with this exit code, if one is given."""
    return Command(*arguments, environment=environment).done(code=code)


def _be(arguments: list[str], paths: list[str], folder: str, environment: dict[str, str]) -> None:
    from thinpipe.launch import __main__, start
    from thinpipe.launch.net.ranks import fork_server
    from thinpipe.launch.run import script

    # blocked if a test has called the launcher's `fork_server.start` before others began this one
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    for fd, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.argv = ["thinpipe", *arguments]
    fork_server.start = lambda **_: None  # everything is loaded
    start.run_local = _fork_ranks
    script.START_METHOD = "fork"
    __main__.main()


def _fork_ranks(
    main: Callable[[], None], arguments: Sequence[str], processes: int, *, max_restarts: int = 0
) -> int:
    """In place of torch's agent: the first failure ends the others."""
    assert not max_restarts
    sys.stdout.flush()
    port = free_port()
    ranks = {_fork_rank(main, rank, processes, port) for rank in range(processes)}
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    failed = 0
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and not failed:
            failed = max(1, os.waitstatus_to_exitcode(status))
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    del store
    return failed


def _fork_rank(main: Callable[[], None], rank: int, processes: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    place: dict[str, Any] = {
        PARENT: os.getppid(), "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes,
        "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in place.items()})
    name_process(f"thinpipe {rank}")
    code = 1
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)
