"""What a kernel lacks or rejects."""

import errno

import pytest
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from tests.launch.lab.kernel import class_bps, queues
from thinpipe.launch.lab.linux import ShapedError
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.requirements import needs
from thinpipe.launch.lab.spec import NetworkSpec


def test_a_missing_feature_is_named_with_its_remedy_and_other_errors_are_not() -> None:
    with pytest.raises(ShapedError, match=r"lacks htb \(.*CONFIG_NET_SCH_HTB"), needs("htb"):
        raise NetlinkError(errno.ENOENT)
    with pytest.raises(ShapedError, match=r"lacks packet \(.*CONFIG_PACKET"), needs("packet"):
        raise OSError(errno.EAFNOSUPPORT, "")
    with pytest.raises(NetlinkError), needs("tbf"):
        raise NetlinkError(errno.EBUSY)


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_a_change_that_the_kernel_rejects_is_rejected_again_and_undone() -> None:
    def unplug(_: int) -> None:
        with IPRoute() as ip:
            ip.link("del", index=ip.link_lookup(ifname="eth0")[0])

    with ShapedNetwork(NetworkSpec.of(3)) as net:
        net.run(unplug, hosts=[2])
        for _ in range(2):
            with pytest.raises(ValueError, match=r"rejects .*uplink of host2: No such device"):
                net.set_rates("20mbit")
            assert net.run(queues, hosts=[0, 1]) == [["noqueue"]] * 2
        assert net.spec.rate_bps(0, 1) is None


@pytest.mark.usefixtures("namespaces")
def test_limits_that_somebody_removed_are_set_up_from_scratch() -> None:
    def clear(_: int) -> None:
        with IPRoute() as ip:
            ip.tc("del", index=ip.link_lookup(ifname="eth0")[0], root=True)

    with ShapedNetwork(NetworkSpec.of(2, pairs=["0,1=20mbit"])) as net:
        before = net.run(class_bps, hosts=[0])[0]
        net.run(clear, hosts=[0])
        net.set_rates(pairs=["0,1=5mbit"])
        after = net.run(class_bps, hosts=[0])[0]
        assert 2e7 in before
        assert 5e6 in after
        assert len(after) == len(before)
