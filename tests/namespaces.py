"""Networks of a test's own, in Linux namespaces: they vanish with their process."""

import os
import pickle
import shutil
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from thinpipe.launch.lab import linux

_T = TypeVar("_T")


def in_namespace(function: Callable[[], _T], *, files: dict[str, str] | None = None) -> _T:
    """Call in a process with a network of its own, where only loopback is up.

    `files` stand in the places of others, as `/etc/hosts`. Skips where that is not allowed.
    """
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root, Linux and iproute2")
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                linux.unshare(linux.NEW_NET | linux.NEW_MOUNT)
            except OSError as error:
                answer = (None, f"skip: {error}")
            else:
                _prepare(files or {})
                answer = (function(), "")
        except BaseException:
            answer = (None, traceback.format_exc())
        with open(send, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(send)
    with open(receive, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    found, failed = pickle.loads(data)
    if failed.startswith("skip: "):
        pytest.skip(failed)
    assert not failed, failed
    return found


def ip(words: str) -> None:
    """`ip` with these words."""
    subprocess.run(["ip", *words.split()], check=True)


def interface(name: str, *addresses: str) -> None:
    """An interface with these addresses; what is sent there is lost."""
    ip(f"link add {name} type veth peer name {name}-far")
    for address in addresses:
        ip(f"addr add {address} dev {name}{' nodad' * (':' in address)}")
    for end in (name, f"{name}-far"):
        ip(f"link set {end} up")


def _prepare(files: dict[str, str]) -> None:
    ip("link set lo up")
    linux.make_mounts_private()
    linux.mount_tmpfs("/mnt")
    for number, (target, text) in enumerate(files.items()):
        source = Path(f"/mnt/{number}")
        source.write_text(text, encoding="utf-8")
        linux.bind(str(source), target)
