import os
import subprocess
import sys
from pathlib import Path

import pytest

_BUSY = """
import os, sys, time
from thinpipe.launch.view.watch.cli import give_way
if sys.argv[1] == "1":
    give_way()
print(flush=True)
sys.stdin.read(1)
while True:
    pass
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/autogroup").exists(), reason="this kernel does not share by session"
)


def test_one_that_gives_way_leaves_the_cpu_to_another_session() -> None:
    core = str(min(os.sched_getaffinity(0)))
    pipe = subprocess.PIPE
    both = []
    try:
        for gives_way in "10":
            words = ["taskset", "-c", core, sys.executable, "-c", _BUSY, gives_way]
            both.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, start_new_session=True))
        for process in both:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.readline()
        begin = [_ticks(process.pid) for process in both]
        for process in both:
            assert process.stdin is not None
            process.stdin.close()
        while _ticks(both[1].pid) - begin[1] < 100:
            pass
        least = _ticks(both[0].pid) - begin[0]
    finally:
        for process in both:
            process.kill()
            process.wait()
            for end in (process.stdin, process.stdout):
                if end is not None:
                    end.close()
    assert least < 33  # without autogroup's own number, as much as the other


def test_one_that_leads_no_session_leaves_that_of_its_user_alone() -> None:
    own = Path("/proc/self/autogroup")
    before = own.read_text(encoding="ascii")
    words = [sys.executable, "-c", _BUSY, "1"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert own.read_text(encoding="ascii") == before
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 19
    finally:
        process.kill()
        process.communicate()


def _ticks(pid: int) -> int:
    """CPU time of a process, in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
