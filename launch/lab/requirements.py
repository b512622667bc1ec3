"""Kernel features of emulated networks, and remedies for missing ones."""

import contextlib
import errno
from collections.abc import Iterator

from pyroute2.netlink.exceptions import NetlinkError

from thinpipe.launch.lab.linux import ShapedError

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


@contextlib.contextmanager
def needs(feature: str) -> Iterator[None]:
    """Around what uses a kernel feature.

    Raises:
        ShapedError: the kernel lacks it; the message has its remedy.
    """
    try:
        yield
    except (NetlinkError, OSError) as error:
        code = error.code if isinstance(error, NetlinkError) else error.errno
        if code not in _NOT_THERE:
            raise
        raise ShapedError(f"this kernel lacks {feature} ({_REMEDIES[feature]})") from None
