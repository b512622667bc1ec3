"""Whole runs where people's machines differ: a container that hides and forbids, an odd disk."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.host.test_disk import faults
from tests.launch.test_train import command, run_file
from tests.programs import ran
from thinpipe.launch.checkpoint import files

__all__ = ["faults", "run_file"]

pytestmark = [pytest.mark.dist, pytest.mark.slow]

PATIENCE_S = 600
CONTAINER = """
set -e
mount -t tmpfs -o size=50m,mode=1777 tmpfs "$1"
mount -t tmpfs -o size=64k tmpfs /dev/shm
mount -t proc -o hidepid=2,subset=pid proc /proc
mount -t tmpfs -o ro,size=4k tmpfs /sys
mount -o remount,bind,ro /
cd "$1"
shift
setpriv --reuid=12345 --regid=12345 --clear-groups --inh-caps=+dac_read_search \\
    --ambient-caps=+dac_read_search env -i PATH="$PATH" OMP_NUM_THREADS=1 THINPIPE_CACHE=cache "$@"
ls runs/tiny/checkpoints
"""
"""Read-only but for one folder; no /proc/net, no /sys; a user without a name and without HOME."""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Not in /dev/shm, where others may be: the container has its own."""
    with tempfile.TemporaryDirectory(prefix="thinpipe-test-", dir="/var/tmp") as folder:
        yield Path(folder)


def test_a_run_in_a_container_that_hides_and_forbids_nearly_everything(
    run_file: Path, tmp_path: Path, temporary: Path
) -> None:
    allowed = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    if shutil.which("setpriv") is None or subprocess.run(allowed, check=False).returncode:
        pytest.skip("needs root, setpriv, and to be allowed to mount")
    temporary.chmod(0o755)  # pytest's own folders are closed to others
    folder = temporary / "only"
    folder.mkdir()
    text = run_file.read_text(encoding="utf-8").replace(str(tmp_path / "run"), "runs/tiny")
    (temporary / "run.toml").write_text(text.replace(str(tmp_path), str(temporary)))
    shutil.copy(tmp_path / "text.txt", temporary)
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", CONTAINER, "sh"]
    done = ran(*words, folder, *command(temporary / "run.toml"))
    assert done.stdout.count("note: compiled kernels cannot be kept (") == 1
    assert "Traceback" not in done.stderr
    assert "step-15" in done.stdout.splitlines()


def test_a_run_on_a_disk_without_locks_flushed_folders_and_replacing_renames(
    run_file: Path, tmp_path: Path, faults: Path
) -> None:
    changed = {"LD_PRELOAD": str(faults), "FAULT_PATH": str(tmp_path / "run")}
    changed["FAULT"] = "flock=37,fsync=22,rename=17"
    done = ran(*command(run_file), **changed, OMP_NUM_THREADS="1")
    assert done.stderr.count("its file system has no locks; start no other run in it") == 1
    assert done.stderr.count("its file system cannot flush a folder") == 1
    assert "report.html: " not in done.stderr
    assert files.steps(tmp_path / "run" / "checkpoints") == [4, 8, 12, 15]
