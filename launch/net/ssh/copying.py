"""Copies files to the machines of a run, over ssh: no more than sh and tar is needed there."""

import contextlib
import os
import shlex
import subprocess
import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from thinpipe.launch.config.toml import ConfigError, files_of
from thinpipe.launch.net.ssh.commands import Start, enter, ssh
from thinpipe.launch.net.ssh.hosts import HostConfig, HostsConfig
from thinpipe.launch.net.ssh.processes import SSH_FAILED, not_connected, start_ssh
from thinpipe.pipeline.models.paths import user_path

_END_S = 60.0  # how long a machine may take to write what it has received


def files_to_copy(start: Start, more: Sequence[Path]) -> list[Path]:
    """A run file and those it extends, or a program; and `more`; ConfigError if one is not here."""
    run = user_path(start.run)
    found = [*([run] if start.is_program else files_of(run)), *more]
    for file in found:
        if not file.exists():
            raise ConfigError(f"{file}: no such file, seen from {Path.cwd()}; correct the path")
    return found


def copy_files(hosts: HostsConfig, files: Sequence[Path]) -> None:
    """Copy to every machine: relative paths into its checkout, absolute ones to the same place."""
    for host in hosts.host:
        _send(host, f"{enter(host.checkout)} tar -xoPf -", files)


def _send(host: HostConfig, script: str, files: Sequence[Path]) -> None:
    process = start_ssh(ssh(host, script))
    assert process.stdin is not None
    with (
        contextlib.suppress(BrokenPipeError),  # it says why
        tarfile.open(fileobj=process.stdin, mode="w|", dereference=True) as archive,
    ):
        for file in files:
            archive.add(file, os.path.normpath(file), filter=partial(_named, file))
    try:
        _, said = process.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise ConfigError(f"{host.name}: did not take the files within {_END_S:.0f} s") from None
    if process.returncode == SSH_FAILED:
        raise ConfigError(not_connected(host))
    if process.returncode:
        reason = "; ".join(said.decode(errors="replace").strip().splitlines()[-3:])
        names = shlex.join(map(str, files))
        raise ConfigError(f"{host.name}: could not write {names}: {reason}")


def _named(file: Path, entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """tarfile takes the slash off absolute paths."""
    if file.is_absolute():
        entry.name = f"/{entry.name}"
    return entry
