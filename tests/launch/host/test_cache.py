"""The user's cache lies where nobody else decides what is written over."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from thinpipe.launch.host.cache import CACHE, cache_folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link somebody else's")
def test_a_link_of_somebody_else_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, link = tmp_path / "ours", tmp_path / f"thinpipe-{os.getuid()}"
    target.mkdir()
    link.symlink_to(target)
    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "no absolute path")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert cache_folder() == link
    os.lchown(link, 12345, 12345)
    assert cache_folder() not in (link, target)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without a name")
def test_a_user_without_a_home_has_a_cache_too() -> None:
    """As in a container that is started with `--user 12345`."""
    code = "import os; from thinpipe.launch.host import cache; "
    code += "os.setuid(12345); print(cache.cache_folder())"
    environment = {"PATH": os.environ["PATH"], "TMPDIR": "/tmp"}
    found = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert found.strip() in ("/tmp/thinpipe-12345", "/dev/shm/thinpipe-12345")
