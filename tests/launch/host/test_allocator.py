"""What the user set, and what freed memory costs."""

import os
import subprocess
import sys

import pytest

from thinpipe.launch.host.allocator import keep_freed_memory, return_freed_memory

_FAULTS = """
import resource, sys, threading, torch
from thinpipe.launch.host.allocator import keep_freed_memory
changed = keep_freed_memory() if "keep" in sys.argv else None
torch.set_num_threads(1)
x = torch.ones(12 << 20)
for turn in range(24):
    if turn == 20:  # at some addresses glibc takes a few blocks more before it reuses one
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    y = x + 1
    del y
if "thread" in sys.argv:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    other = threading.Thread(target=lambda: x + 1)
    other.start()
    other.join()
print(changed, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: str) -> tuple[str, int]:
    """Result of `keep_freed_memory`, and page faults of four additions of 48 MB.

    With the argument "thread", of another one in a thread.
    """
    known = {k: v for k, v in os.environ.items() if "MALLOC" not in k and k != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", _FAULTS, *arguments]
    kept, count = subprocess.check_output(command, env=known, text=True).split()
    return kept, int(count)


@pytest.mark.slow
def test_large_tensors_reuse_memory() -> None:
    _, before = faults()
    kept, after = faults("keep")
    assert kept == "True"
    assert after < 0.1 * before


@pytest.mark.slow
def test_threads_reuse_each_others_memory() -> None:
    _, before = faults("thread")
    _, after = faults("keep", "thread")
    assert after < 0.1 * before


@pytest.mark.parametrize(
    "setting",
    [
        "MALLOC_TRIM_THRESHOLD_=131072",
        "MALLOC_MMAP_THRESHOLD_=131072",
        "MALLOC_ARENA_MAX=2",
        "GLIBC_TUNABLES=glibc.malloc.trim_threshold=131072",
    ],
)
def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv(*setting.split("=", 1))
    assert not keep_freed_memory()
    assert not return_freed_memory()
