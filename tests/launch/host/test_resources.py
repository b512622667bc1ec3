"""Cores and memory as containers limit them: real cgroups where we may make some, made trees."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from thinpipe.launch.host import resources
from thinpipe.launch.host.resources import (
    free_memory,
    has_spare_core,
    rank_threads,
    threads_per_rank,
    usable_cores,
)

MIB = 2**20
ALL = len(os.sched_getaffinity(0))

Tree = Callable[..., None]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """`tree("0::/a/b", {"a/cpu.max": "max"})` is what this process finds of cgroups."""

    def make(own: str, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        (tmp_path / "own").write_text(f"{own}\n")
        monkeypatch.setattr(resources, "_CGROUP", tmp_path / "cgroup")
        monkeypatch.setattr(resources, "_PROC_CGROUP", tmp_path / "own")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))

    return make


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 16),
        ("0::/", {"cpu.max": "400000 100000"}, 4),
        ("0::/", {"cpu.max": "20000 100000"}, 1),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2),
        ("0::/not/here", {"cpu.max": "300000 100000"}, 3),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
        (
            "9:cpuset:/\n4:cpu,cpuacct:/docker/1f\n0::/",
            {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "50000"},
            3,
        ),
        ("0::/", {"cpu.max": ""}, 16),
    ],
)
def test_the_smallest_quota_of_a_cgroup_and_those_above_it_counts(
    tree: Tree, own: str, files: dict[str, str], cores: int
) -> None:
    tree(own, files)
    assert usable_cores() == cores


@pytest.mark.parametrize(
    ("own", "files", "mib"),
    [
        ("0::/", {"memory.max": 900, "memory.current": 600, "memory.stat": (100, 50)}, 450),
        ("0::/", {"memory.max": 900, "memory.high": 700, "memory.current": 600}, 100),
        ("0::/", {"memory.max": 900, "memory.current": 950}, 0),
        (
            "0::/a/b",
            {"a/b/memory.max": 900, "a/b/memory.current": 1, "a/memory.max": 800}
            | {"a/memory.current": 700},
            100,
        ),
        (
            "4:memory:/docker/1f",
            {"memory/memory.limit_in_bytes": 900, "memory/memory.usage_in_bytes": 300}
            | {"memory/memory.stat": ("total", 10, 20)},
            630,
        ),
    ],
)
def test_free_memory_is_that_of_the_container_and_cached_files_count_as_free(
    tree: Tree, own: str, files: dict[str, int | tuple[int | str, ...]], mib: int
) -> None:
    def text(value: int | tuple[int | str, ...]) -> str:
        if isinstance(value, int):
            return str(value * MIB)
        *total, inactive, active = value
        prefix = "total_" if total else ""
        first = "inactive_file 1\n" if total else ""
        counts = f"{prefix}inactive_file {inactive * MIB}\n{prefix}active_file {active * MIB}"
        return f"anon 12345\n{first}{counts}"

    tree(own, {name: text(value) for name, value in files.items()})
    assert free_memory() == mib * MIB


def test_without_limits_or_cgroups_the_machine_is_counted(tree: Tree) -> None:
    tree("0::/", {"memory.max": "max", "memory.current": "5"})
    machine = psutil.virtual_memory()
    assert 0 < free_memory() <= machine.total
    resources._PROC_CGROUP.unlink()
    assert usable_cores() == 16


@pytest.fixture
def cgroups() -> Iterator[list[Path]]:
    """Real ones of v1, for cores and for memory."""
    made = [
        Path(f"/sys/fs/cgroup/{kind}/thinpipe-test-{os.getpid()}") for kind in ("cpu", "memory")
    ]
    try:
        for path in made:
            path.mkdir()
    except OSError as error:
        pytest.skip(f"cgroups of v1 cannot be made here: {error.strerror}")
    yield made
    for path in made:
        path.rmdir()


@pytest.mark.skipif(ALL < 2, reason="one core anyway")
def test_a_process_under_a_real_quota_counts_what_it_may_use(cgroups: list[Path]) -> None:
    cpu, memory = cgroups
    (cpu / "cpu.cfs_quota_us").write_text("100000")
    (memory / "memory.limit_in_bytes").write_text(str(300 * MIB))
    receive, send = os.pipe()
    if os.fork() == 0:
        for path in cgroups:
            (path / "cgroup.procs").write_text("0")
        os.write(send, f"{usable_cores()} {free_memory()}".encode())
        os._exit(0)
    os.wait()
    cores, free = map(int, os.read(receive, 100).split())
    assert cores == 1
    assert 100 * MIB < free <= 300 * MIB


@pytest.mark.parametrize(
    ("cores", "processes", "threads"),
    [(1, 3, 1), (2, 1, 2), (2, 2, 1), (8, 2, 3), (8, 3, 2), (16, 1, 15), (96, 8, 11)],
)
def test_ranks_leave_a_core_to_messages_where_there_are_enough(
    cores: int, processes: int, threads: int
) -> None:
    assert threads_per_rank(cores, processes) == threads


@pytest.mark.parametrize(
    ("setting", "threads"),
    [("3", 3), ("4,2", 4), (" 2 ", 2), ("", None), ("0", None), ("-1", None), ("many", None)],
)
def test_threads_are_those_that_openmp_is_told(
    monkeypatch: pytest.MonkeyPatch, setting: str, threads: int | None
) -> None:
    """It ignores what is no number."""
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert rank_threads(1) == (threads or threads_per_rank(usable_cores(), 1))


def test_a_core_is_to_spare_where_compute_threads_leave_each_rank_one() -> None:
    given = [(1, 1, 1), (2, 1, 1), (3, 2, 1), (4, 2, 1), (2, 1, 2)]  # cores, processes, threads
    assert [has_spare_core(*each) for each in given] == [False, True, False, True, False]
    for cores, processes, _ in given:  # what ranks are given leaves one
        assert has_spare_core(8 * cores, processes, threads_per_rank(8 * cores, processes))
