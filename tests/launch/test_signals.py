"""What a run does about signals, a terminal that is closed, and processes that are paused."""

import fcntl
import os
import shutil
import signal
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.commands import PATIENCE_S
from tests.launch.test_ends import ENDLESS, steps_of, temporary
from tests.launch.test_train import command, run_file, wait_until
from tests.processes import lives, named, signal_all
from thinpipe.launch.checkpoint import files

__all__ = ["run_file", "temporary"]

pytestmark = pytest.mark.dist

GRACE_S = 25
LAUNCHER_WAITS_S = 30
"""For ranks that were asked to end."""


class OnTerminal:
    """A true `thinpipe train` on a terminal of its own, with its messages in a file.

    A context manager that waits for a few steps, and ends what is left.
    """

    def __init__(
        self,
        run_file: Path,
        temporary: Path,
        *,
        ignores: Sequence[int] = (),
        container: Sequence[str] = (),
    ) -> None:
        self._run_file, self._terminal = run_file, os.openpty()
        self._log = run_file.parent / "log"
        self._ignores = ignores
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*container, *command(run_file, *ENDLESS, f"--set=checkpoint.grace_s={GRACE_S}")],
                env={
                    **os.environ,
                    "TMPDIR": str(temporary),
                    "OMP_NUM_THREADS": "1",
                    # torch's compiler makes it as it is imported: by itself, in TMPDIR
                    "TORCHINDUCTOR_CACHE_DIR": str(run_file.parent / "torchinductor"),
                },
                stdin=subprocess.DEVNULL,
                stdout=self._terminal[1],
                stderr=log,
                start_new_session=True,
                preexec_fn=self._control,
            )
        os.close(self._terminal[1])
        os.set_blocking(self._terminal[0], False)

    def _control(self) -> None:
        """In the command: the terminal is its own, and signals are ignored as `nohup` does it."""
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)
        for number in self._ignores:
            signal.signal(number, signal.SIG_IGN)

    def __enter__(self) -> "OnTerminal":
        self.goes_on(read=True)
        launcher = psutil.Process(self.process.pid)
        self.tree = [launcher, *launcher.children(recursive=True)]
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.is_gone()

    @property
    def said(self) -> str:
        """Its messages."""
        return self._log.read_text(encoding="utf-8")

    def goes_on(self, *, read: bool = False) -> None:
        """Wait for more steps; a terminal that nobody reads would hold the run up."""
        before = steps_of(self._run_file)

        def went_on() -> bool:
            if read:
                self._read()
            assert self.process.poll() is None, self.said
            return steps_of(self._run_file) > before + 3

        wait_until(went_on, PATIENCE_S)

    def _read(self) -> None:
        try:
            while os.read(self._terminal[0], 4096):
                pass
        except (BlockingIOError, OSError):
            pass

    def close_terminal(self) -> None:
        """As a window that is closed: whoever draws there gets EIO."""
        os.close(self._terminal[0])

    def strike(self, number: int) -> None:
        """Send a signal to each process at once."""
        signal_all(self.tree, number)

    def states(self) -> set[str]:
        """What the launcher, supervisors and ranks do."""
        return {process.status() for process in named(self.tree, "thinpipe")}

    def is_gone(self) -> None:
        """Wait until none of its processes is left."""
        wait_until(lambda: not any(map(lives, self.tree)), PATIENCE_S)

    def ended_in_order(self, code: int) -> None:
        """Wait for the end: it saved its last step, said so once, and left nothing."""
        assert self.process.wait(PATIENCE_S) == code, self.said
        steps = files.steps(self._run_file.parent / "run" / "checkpoints")
        assert len(steps) == 1, self.said
        (step,) = steps
        assert step == steps_of(self._run_file)
        assert len(self.said.splitlines()) == 2, self.said
        first, last = self.said.splitlines()
        assert first == f"asked to stop: step {step} is saved, then the run ends"
        in_time = f"stopped: everything up to step {step} is saved; continue "
        assert last.startswith((in_time, f"ended after {GRACE_S} s"))  # the report can take long
        self.is_gone()


def test_nohup_a_closed_terminal_a_pause_and_ctrl_c(run_file: Path, temporary: Path) -> None:
    with OnTerminal(run_file, temporary, ignores=(signal.SIGHUP,)) as run:
        run.close_terminal()  # which sends SIGHUP to the launcher
        run.strike(signal.SIGHUP)
        run.goes_on()
        os.killpg(run.process.pid, signal.SIGTSTP)  # Ctrl-Z
        wait_until(lambda: run.states() == {psutil.STATUS_STOPPED}, PATIENCE_S)
        os.killpg(run.process.pid, signal.SIGCONT)  # fg
        run.goes_on()
        os.killpg(run.process.pid, signal.SIGINT)  # Ctrl-C
        run.ended_in_order(128 + signal.SIGINT)
    assert [*temporary.iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_to_every_process_or_a_closed_terminal_saves_and_ends(
    run_file: Path, temporary: Path, number: signal.Signals
) -> None:
    with OnTerminal(run_file, temporary) as run:
        run.strike(number) if number == signal.SIGTERM else run.close_terminal()
        run.ended_in_order(128 + number)
    assert [*temporary.iterdir()] == []


@pytest.mark.slow
def test_ctrl_c_again_ends_at_once(run_file: Path, temporary: Path) -> None:
    """A second one within a second is the same one: shells and supervisors pass it on too."""
    with OnTerminal(run_file, temporary) as run:
        *_, rank = run.tree
        rank.suspend()  # so that nothing can be saved
        start_s = time.monotonic()
        while run.process.poll() is None:
            run.process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        took_s = time.monotonic() - start_s
        assert run.process.returncode == 128 + signal.SIGINT
        *_, last = run.said.splitlines()
        assert last == "ended at once: the run is at its last checkpoint"
        assert 1 < took_s < LAUNCHER_WAITS_S
    assert [*temporary.iterdir()] == []


NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
ORPHAN = "sleep 1000 & exit"


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("nsenter"),
    reason="needs root, unshare and nsenter",
)
def test_the_first_process_of_a_container_reaps_orphans_and_ends_in_order(
    run_file: Path, temporary: Path
) -> None:
    with OnTerminal(run_file, temporary, container=NAMESPACE) as run:
        first = run.tree[1]
        enter = ["nsenter", "--pid", "--mount", "--target", str(first.pid)]
        subprocess.run([*enter, "sh", "-c", ORPHAN], check=True, timeout=PATIENCE_S)
        wait_until(lambda: named(first.children(), "sleep"), PATIENCE_S)
        (orphan,) = named(first.children(), "sleep")
        orphan.kill()
        wait_until(lambda: not orphan.is_running(), PATIENCE_S)
        first.send_signal(signal.SIGTERM)  # as `docker stop` does
        run.ended_in_order(128 + signal.SIGTERM)
    assert [*temporary.iterdir()] == []
