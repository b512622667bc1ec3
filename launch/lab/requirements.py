"""Kernel features of emulated networks, and remedies for missing ones."""

import errno

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from thinpipe.launch.lab.linux import ShapedError
from thinpipe.launch.lab.relay import open_port
from thinpipe.launch.lab.spec import NetworkSpec

NO_NAMESPACES = (
    "this system does not allow network namespaces ({reason}). Run as root, or allow user "
    "namespaces: sysctl user.max_user_namespaces=10000; on Debian also "
    "kernel.unprivileged_userns_clone=1; on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; "
    "in a container start it with --cap-add SYS_ADMIN --cap-add NET_ADMIN"
)
NO_MOUNTS = (
    "this system does not allow mounts inside a namespace ({reason}). On Ubuntu: sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container start it with --security-opt "
    "systempaths=unconfined --security-opt apparmor=unconfined, or run outside of it"
)
_REMEDIES = {
    "veth": "virtual links: modprobe veth, or a kernel with CONFIG_VETH",
    "bridge": "a switch: modprobe bridge, or a kernel with CONFIG_BRIDGE",
    "tbf": "rates: modprobe sch_tbf, or a kernel with CONFIG_NET_SCH_TBF",
    "htb": "rates per pair: modprobe sch_htb, or a kernel with CONFIG_NET_SCH_HTB",
    "u32": "rates per pair: modprobe cls_u32, or a kernel with CONFIG_NET_CLS_U32",
    "packet": "delays: modprobe af_packet, or Linux 4.20 or newer with CONFIG_PACKET",
}
_NOT_THERE = (errno.EOPNOTSUPP, errno.ENOENT, errno.EAFNOSUPPORT, errno.ENOPROTOOPT)
_LOOPBACK = 1


def needs(spec: NetworkSpec) -> list[str]:
    """The kernel features that a network uses."""
    limited = spec.pair_bps or any(bps is not None for bps in spec.up_bps + spec.down_bps)
    return [
        "veth",
        "packet" if spec.delay_s else "bridge",
        *(["tbf"] if limited else []),
        *(["htb", "u32"] if spec.pair_bps else []),
    ]


def check(features: list[str], ip: IPRoute) -> None:
    """Try each feature in this network namespace and leave nothing of it.

    Raises:
        ShapedError: names every feature that the kernel lacks, with its remedy.
    """
    lacking = [feature for feature in features if not _works(feature, ip)]
    if lacking:
        text = "; ".join(f"{feature} ({_REMEDIES[feature]})" for feature in lacking)
        raise ShapedError(f"this kernel lacks {text}")


def _works(feature: str, ip: IPRoute) -> bool:
    try:
        if feature == "packet":
            open_port("lo").close()
        elif feature in ("veth", "bridge"):
            ip.link("add", ifname="attempt", kind=feature)
            ip.link("del", index=ip.link_lookup(ifname="attempt")[0])
        else:
            _try_queue(feature, ip)
    except NetlinkError as error:
        if error.code not in _NOT_THERE:
            raise
        return False
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return False
    return True


def _try_queue(feature: str, ip: IPRoute) -> None:
    kind = "htb" if feature == "u32" else feature
    options: dict[str, dict[str, object]] = {
        "tbf": {"rate": 10**6, "burst": 3000, "latency": "50ms"},
        "htb": {"handle": 0x10000, "default": 2},
    }
    ip.tc("add", kind, _LOOPBACK, root=True, **options[kind])
    try:
        if feature == "u32":
            ip.tc(
                "add-filter",
                "u32",
                _LOOPBACK,
                parent=0x10000,
                prio=10,
                protocol=0x0800,
                target=0x10002,
                keys=["0x0/0x0+16"],
            )
    finally:
        ip.tc("del", index=_LOOPBACK, root=True)
