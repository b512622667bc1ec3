"""Names and addresses of hosts, and the files with which programs resolve them."""

import os
import tempfile
from pathlib import Path

from thinpipe.launch.lab import linux

MASTER_PORT = "29500"


def host_name(host: int) -> str:
    """`host0`."""
    return f"host{host}"


def host_address(host: int) -> str:
    """`10.77.0.1` for host 0."""
    return f"10.77.0.{host + 1}"


def host_mac(host: int) -> str:
    """The hardware address of a host's interface."""
    return f"02:00:00:00:00:{host + 1:02x}"


def environment(host: int, hosts: int) -> dict[str, str]:
    """Environment of a host's programs: rank, also in torch's names, and the interface to use.

    The NCCL variables disable shared memory and peer copies, which would bypass the link.
    """
    return {
        "SHAPED_RANK": str(host),
        "SHAPED_HOST": host_name(host),
        "SHAPED_ADDR": host_address(host),
        "SHAPED_MASTER": host_address(0),
        "RANK": str(host),
        "WORLD_SIZE": str(hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": host_address(0),
        "MASTER_PORT": os.environ.get("MASTER_PORT", MASTER_PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_HOSTID": host_name(host),
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }


def substitute(argument: str, host: int) -> str:
    """Replace `{rank}`, `{host}`, `{addr}` and `{master}`; other braces are kept."""
    values = {
        "{rank}": str(host),
        "{host}": host_name(host),
        "{addr}": host_address(host),
        "{master}": host_address(0),
    }
    for placeholder, value in values.items():
        argument = argument.replace(placeholder, value)
    return argument


def mount_names(hosts: int) -> None:
    """Make host names resolve in this mount namespace without a name server.

    Waiting for an unreachable name server costs torchrun a minute per look-up.
    """
    lines = ["127.0.0.1 localhost", "::ffff:127.0.0.1 localhost"]
    for host in range(hosts):  # the second line is for IPv6 look-ups
        address, name = host_address(host), host_name(host)
        lines += [f"{address} {name}", f"::ffff:{address} {name}"]
    files = {
        "/etc/hosts": "\n".join(lines) + "\n",
        # nobody listens there: a look-up is refused at once
        "/etc/resolv.conf": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
    }
    folder = tempfile.mkdtemp(prefix="thinpipe-shaped-")
    linux.mount_tmpfs(folder)
    for target, text in files.items():
        if not os.path.exists(target):
            continue
        source = Path(folder, os.path.basename(target))
        source.write_text(text, encoding="utf-8")
        source.chmod(0o644)  # whatever the umask is
        linux.bind(str(source), os.path.realpath(target))  # resolv.conf is often a link
    linux.unmount(folder)  # the bound files stay; nothing is left on the disk
    os.rmdir(folder)
