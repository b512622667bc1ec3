"""Linux calls for emulated hosts: namespaces, mounts, processes that die with their parent."""

import ctypes
import os
import select
import signal

# linux/sched.h
NEW_MOUNT = 0x00020000
NEW_UTS = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PID = 0x20000000
NEW_NET = 0x40000000

SHARED = (("user", NEW_USER), ("mnt", NEW_MOUNT), ("ipc", NEW_IPC), ("pid", NEW_PID))
"""Namespaces that all hosts share, in the order to enter them; net and uts are each host's own."""

# sys/mount.h, linux/prctl.h
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class ShapedError(RuntimeError):
    """The emulated network could not be created, or failed; the message has the remedy."""


def unshare(flags: int) -> None:
    """Move this process into new namespaces (for `NEW_PID`: its next children)."""
    _check("unshare", _libc.unshare(flags))


def setns(namespace_fd: int, flag: int) -> None:
    """Move this process into the namespace of the descriptor `namespace_fd`."""
    _check("setns", _libc.setns(namespace_fd, flag))


def namespace(kind: str) -> int:
    """A descriptor of this process's own namespace: `net`, `uts`, `mnt`, `ipc`, `pid`, `user`."""
    return os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)


def make_mounts_private() -> None:
    """Hide later mounts from other mount namespaces."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)


def mount_proc() -> None:
    """Mount a new /proc, which shows this process's pid namespace."""
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def mount_tmpfs(folder: str) -> None:
    """Mount an empty file system in memory."""
    _mount("none", folder, "tmpfs", _MS_NOSUID | _MS_NODEV)


def bind(source: str, target: str) -> None:
    """Bind-mount the file `source` over the file `target`."""
    _mount(source, target, None, _MS_BIND)


def unmount(folder: str) -> None:
    """Detach a mount; processes that use it keep it."""
    _check(f"umount {folder}", _libc.umount2(folder.encode(), _MNT_DETACH))


def die_with_parent(parent_pidfd: int) -> None:
    """Have the kernel kill this process when its parent, `parent_pidfd`, exits for any reason."""
    # the parent by pidfd: across pid namespaces getppid() is 0, and numbers are used again
    _check("prctl", _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
    if has_ended(parent_pidfd):  # before prctl
        os._exit(1)


def has_ended(pidfd: int) -> bool:
    """Whether the process behind a pidfd has ended."""
    return bool(select.select([pidfd], [], [], 0)[0])


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    name = kind.encode() if kind else None
    # flags are an unsigned long; a plain number would be passed as an int
    result = _libc.mount(source.encode(), target.encode(), name, ctypes.c_ulong(flags), None)
    _check(f"mount {target}", result)


def _check(what: str, result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
