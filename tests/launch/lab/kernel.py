"""The limits of a host's link as its kernel has them."""

from pyroute2 import IPRoute


def queues(_: int) -> list[str]:
    """The kinds of queues on this host's link."""
    with IPRoute() as ip:
        (link,) = ip.link_lookup(ifname="eth0")
        return sorted(queue.get_attr("TCA_KIND") for queue in ip.get_qdiscs(index=link))


def uplink_bps(_: int) -> float:
    """The rate of this host's token bucket, as the kernel has it."""
    with IPRoute() as ip:
        (queue,) = ip.get_qdiscs(index=ip.link_lookup(ifname="eth0")[0])
        return 8.0 * queue.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")["rate"]


def class_bps(_: int) -> list[float]:
    """The ceilings of the classes on this host's link, as the kernel has them."""
    with IPRoute() as ip:
        found = ip.get_classes(index=ip.link_lookup(ifname="eth0")[0])
        options = [c.get_attr("TCA_OPTIONS") for c in found if c.get_attr("TCA_KIND") == "htb"]
        return sorted(8.0 * option.get_attr("TCA_HTB_PARMS")["ceil"] for option in options)
