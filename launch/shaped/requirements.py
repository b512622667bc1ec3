"""What the emulated network needs from the kernel, and what to do where it is missing."""

import errno

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from thinpipe.launch.host.links import NetworkSpec
from thinpipe.launch.shaped.linux import ShapedError
from thinpipe.launch.shaped.relay import open_port

NO_NAMESPACES = (
    "this system does not let us make network namespaces ({reason}). Run as root, or allow user "
    "namespaces: sysctl user.max_user_namespaces=10000; on Debian also "
    "kernel.unprivileged_userns_clone=1; on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; "
    "in a container start it with --cap-add SYS_ADMIN --cap-add NET_ADMIN"
)
NO_MOUNTS = (
    "this system does not let us mount inside a namespace of our own ({reason}). On Ubuntu: sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container start it with --security-opt "
    "systempaths=unconfined --security-opt apparmor=unconfined, or run outside of it"
)
_REMEDIES = {
    "veth": "virtual cables: modprobe veth, or a kernel with CONFIG_VETH",
    "bridge": "a switch: modprobe bridge, or a kernel with CONFIG_BRIDGE",
    "tbf": "rates: modprobe sch_tbf, or a kernel with CONFIG_NET_SCH_TBF",
    "htb": "rates per pair: modprobe sch_htb, or a kernel with CONFIG_NET_SCH_HTB",
    "u32": "rates per pair: modprobe cls_u32, or a kernel with CONFIG_NET_CLS_U32",
    "packet": "delays: modprobe af_packet, or Linux 4.20 or newer with CONFIG_PACKET",
}
_NOT_THERE = (errno.EOPNOTSUPP, errno.ENOENT, errno.EAFNOSUPPORT, errno.ENOPROTOOPT)
_LOOPBACK = 1


def needs(spec: NetworkSpec) -> list[str]:
    """The kernel's pieces that a network is made of."""
    limited = spec.pair_bps or any(bps is not None for bps in spec.up_bps + spec.down_bps)
    return [
        "veth",
        "packet" if spec.delay_s else "bridge",
        *(["tbf"] if limited else []),
        *(["htb", "u32"] if spec.pair_bps else []),
    ]


def check(pieces: list[str], ip: IPRoute) -> None:
    """Try each piece in this network namespace and leave nothing of it.

    Raises:
        ShapedError: names every piece that the kernel lacks, with its remedy.
    """
    lacking = [piece for piece in pieces if not _works(piece, ip)]
    if lacking:
        text = "; ".join(f"{piece} ({_REMEDIES[piece]})" for piece in lacking)
        raise ShapedError(f"this kernel lacks {text}")


def _works(piece: str, ip: IPRoute) -> bool:
    try:
        if piece == "packet":
            open_port("lo").close()
        elif piece in ("veth", "bridge"):
            ip.link("add", ifname="attempt", kind=piece)
            ip.link("del", index=ip.link_lookup(ifname="attempt")[0])
        else:
            _try_queue(piece, ip)
    except NetlinkError as error:
        if error.code not in _NOT_THERE:
            raise
        return False
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return False
    return True


def _try_queue(piece: str, ip: IPRoute) -> None:
    kind = "htb" if piece == "u32" else piece
    options: dict[str, dict[str, object]] = {
        "tbf": {"rate": 10**6, "burst": 3000, "latency": "50ms"},
        "htb": {"handle": 0x10000, "default": 2},
    }
    ip.tc("add", kind, _LOOPBACK, root=True, **options[kind])
    try:
        if piece == "u32":
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
