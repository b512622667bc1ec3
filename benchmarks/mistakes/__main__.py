"""Tries every mistake and prints what ThinPipe answers, for a reader to judge."""

import argparse
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.mistakes.cases import CASES, Case
from benchmarks.mistakes.folder import spoil, write_good
from thinpipe.launch import cli
from thinpipe.launch.host.packages import explain
from thinpipe.launch.run import script

_LIMIT_S = 25.0
_MEMORY_NBYTES = 8 << 30
"""An endless file must not take all there is."""


def main() -> None:
    """Print one block per case: what was wrong, exit code, seconds, output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--area", help="only cases of this area")
    parser.add_argument("--lines", type=int, default=8, help="of each answer, at most")
    options = parser.parse_args()
    vars(script)["START_METHOD"] = "fork"  # everything is loaded here
    with tempfile.TemporaryDirectory() as place:
        good = Path(place, "good")
        good.mkdir()
        write_good(good)
        done = Case("", "", "train run.toml --set run.name=done --show -1")
        code, output, _ = _try(done, good)
        assert code == 0, output
        for number, case in enumerate(CASES):
            if options.area not in (None, case.area) or number < options.first:
                continue
            folder = Path(place, str(number))
            spoil(case, good, folder)
            code, output, wall_s = _try(case, folder)
            print(f"--- {number}. {case.area}: {case.what}  [exit {code}, {wall_s:.1f} s]")
            lines = output.replace(f"{folder}", ".").splitlines()
            print("\n".join(lines[: options.lines]), flush=True)
            if len(lines) > options.lines:
                print(f"... {len(lines) - options.lines} more lines")


def _try(case: Case, folder: Path) -> tuple[int | str, str, float]:
    """Exit code, or "hangs"; output; seconds."""
    since_s, out = time.monotonic(), folder / ".output"
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _be(case, folder, out)
    code: int | str = "hangs"
    while time.monotonic() - since_s < _LIMIT_S:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.02)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return code, out.read_text(errors="replace", encoding="utf-8"), time.monotonic() - since_s


def _be(case: Case, folder: Path, out: Path) -> None:
    """`thinpipe <command>` with a pipe's end for a terminal."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_NBYTES, _MEMORY_NBYTES))
    written = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.chdir(folder)
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    code = 1
    try:
        if case.command == "--":
            code = subprocess.run(["sh", "-c", case.setup]).returncode
        else:
            sys.argv = ["thinpipe", *shlex.split(case.command)]
            cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except ImportError as error:
        os.write(2, f"error: {explain(error)}\n".encode())
        code = 2
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
