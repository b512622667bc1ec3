"""File systems that lack something, made by a preloaded library, and what a full one is told."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ran
from thinpipe.launch.host import disk

SOURCE = Path(__file__).with_name("faults.c")
USE = """
import logging, sys
from pathlib import Path
from thinpipe.launch.host import disk
logging.basicConfig(format="%(message)s", stream=sys.stdout)
folder = Path(sys.argv[1])
with (folder / "lock").open("w") as file:
    print("locked", disk.lock(file))
    disk.flush(file.fileno())
disk.flush_folder(folder)
disk.flush_folder(folder)
for text in "ab":
    (folder / "new").write_text(text)
    disk.replace(folder / "new", folder / "file")
    print((folder / "file").read_text(encoding="utf-8"), (folder / "new").exists())
"""


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def use(
    library: Path, folder: Path, faults: str, program: str = USE
) -> subprocess.CompletedProcess[str]:
    changed = {"LD_PRELOAD": str(library), "FAULT": faults, "FAULT_PATH": str(folder)}
    return ran(sys.executable, "-c", program, folder, code=None, **changed)


@pytest.mark.parametrize(
    ("lock", "flush"), [(errno.ENOLCK, errno.EINVAL), (errno.EOPNOTSUPP, errno.ENOSYS)]
)
def test_locks_replacing_renames_and_flushed_folders_are_done_without(
    faults: Path, tmp_path: Path, lock: int, flush: int
) -> None:
    """That folders cannot be flushed is told once."""
    done = use(faults, tmp_path, f"flock={lock},rename={errno.EEXIST},fsync={flush}")
    locked, warning, *others = done.stdout.splitlines()
    assert locked == "locked False", done.stderr
    assert warning.startswith(f"warning: {tmp_path}: its file system cannot flush a folder")
    assert others == ["a False", "b False"]


@pytest.mark.parametrize("fault", [f"fsync={errno.EIO}", "rename=28"])
def test_a_disk_that_fails_is_an_error(faults: Path, tmp_path: Path, fault: str) -> None:
    done = use(faults, tmp_path, fault)
    assert done.returncode == 1
    assert "OSError: [Errno " in done.stderr


KEYS = """
import sys
from pathlib import Path
from thinpipe.launch.net.overlay import keys
path = Path(sys.argv[1], "run.key")
try:
    keys.new(path)
except ValueError as error:
    print(error)
path.write_text("")
try:
    keys.read(path)
except ValueError as error:
    print(error)
"""


def test_a_key_is_rejected_where_it_cannot_be_ones_own(faults: Path, tmp_path: Path) -> None:
    """As on vfat, whose files are open to all whatever chmod is told."""
    done = use(faults, tmp_path, "modes=1", KEYS)
    made, read = done.stdout.splitlines()
    for text in (made, read):
        assert "this file system does not keep modes: keep the key on one that does" in text
    assert made.startswith(f"{tmp_path / 'run.key'}: not written: other users of this machine")
    assert "chmod" not in read


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "No space left on device; free disk space"),
        (errno.EDQUOT, "Disk quota exceeded; remove files of yours there"),
        (errno.EROFS, "Read-only file system; name a folder that is not mounted read-only"),
        (errno.EACCES, "Permission denied; name a folder that this user can write"),
        (errno.EFBIG, "File too large; name a folder on a file system that takes larger files"),
        (errno.EXDEV, "Invalid cross-device link; name another folder"),
    ],
)
def test_a_cause_has_a_remedy_of_its_own(tmp_path: Path, code: int, remedy: str) -> None:
    assert disk.why(OSError(code, os.strerror(code)), tmp_path / "new").startswith(remedy)


def test_a_file_size_limit_is_named() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        text = disk.why(OSError(errno.EFBIG, "File too large"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert text.endswith("`ulimit -f` allows 1,048,576 bytes; raise it (`ulimit -f unlimited`)")
