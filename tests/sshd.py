"""OpenSSH's server and a client that knows it, for tests."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.waiting import until

SSHD = shutil.which("sshd", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin"]))
needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="needs OpenSSH's server and client"
)
_SERVER = """
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
ListenAddress {address}
Port {port}
"""
_ALIAS = """
Host {name}
    HostName {address}
    Port {port}
"""
_CLIENT = """
Host *
    IdentityFile {folder}/user
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    GlobalKnownHostsFile none
    StrictHostKeyChecking yes
"""


class OpenSsh:
    """Servers by the names under which the client knows them, each an address and a port."""

    def __init__(self, folder: Path, servers: Mapping[str, tuple[str, int]]) -> None:
        """`bin` in the folder has the client."""
        self.folder, self.servers = folder, servers
        for name in ("host", "user"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(words, check=True)
        host_key = (folder / "host.pub").read_text(encoding="utf-8")
        places = [f"[{address}]:{port}" for address, port in servers.values()]
        (folder / "known").write_text("".join(f"{place} {host_key}" for place in places))
        aliases = [
            _ALIAS.format(name=name, address=address, port=port)
            for name, (address, port) in servers.items()
        ]
        (folder / "client").write_text("".join(aliases) + _CLIENT.format(folder=folder))
        (folder / "bin").mkdir()
        client = folder / "bin" / "ssh"
        client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/client "$@"\n')
        client.chmod(0o755)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # which Debian's server demands

    def server(self, name: str) -> list[str]:
        """The command of a server, which stays in the foreground."""
        address, port = self.servers[name]
        config = self.folder / f"server.{name}"
        config.write_text(_SERVER.format(folder=self.folder, address=address, port=port))
        assert SSHD is not None
        return [SSHD, "-D", "-e", "-f", str(config)]

    def wait(self, name: str) -> None:
        """Wait until a server answers."""
        words, nothing = [str(self.folder / "bin" / "ssh"), name, "true"], subprocess.DEVNULL
        until(lambda: not subprocess.run(words, stdin=nothing, capture_output=True).returncode)
