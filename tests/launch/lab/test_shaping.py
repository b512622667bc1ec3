"""Limits in a kernel that is busy, that others have changed, or that refuses."""

import errno
import os
from typing import Any

import pytest
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from tests.launch.lab.kernel import queues
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.shaping import Shape, Shaper
from thinpipe.launch.lab.spec import NetworkSpec

pytestmark = pytest.mark.usefixtures("namespaces")


def test_queues_changed_by_others_are_set_up_from_scratch(net: ShapedNetwork) -> None:
    def clear(_: int) -> None:
        with IPRoute() as ip:
            ip.tc("del", index=ip.link_lookup(ifname="eth0")[0], root=True)

    net.set_rates(pairs=["0,1=20mbit"])
    try:
        shaped = net.run(queues, hosts=[0])
        net.run(clear, hosts=[0])
        assert net.run(queues, hosts=[0]) == [["noqueue"]]
        net.set_rates(pairs=["0,1=10mbit"])
        assert net.run(queues, hosts=[0]) == shaped
        net.run(clear, hosts=[0])
    finally:
        net.set_rates("none", pairs=["0,1=none"])
    assert net.run(queues, hosts=[0]) == [["noqueue"]]


class _BusyKernel:
    """A kernel that is too busy for the next `busy` changes of queues."""

    def __init__(self, ip: IPRoute) -> None:
        self._ip, self.busy = ip, 0

    def link(self, *arguments: Any, **named: Any) -> Any:
        return self._ip.link(*arguments, **named)

    def tc(self, *arguments: Any, **named: Any) -> Any:
        if self.busy:
            self.busy -= 1
            raise NetlinkError(errno.EBUSY, os.strerror(errno.EBUSY))
        return self._ip.tc(*arguments, **named)


def test_changes_are_retried_while_the_kernel_is_busy_but_not_forever(net: ShapedNetwork) -> None:
    def job(_: int) -> list[list[str]]:
        found = []
        with IPRoute() as ip:
            kernel = _BusyKernel(ip)
            shaper = Shaper(kernel, ip.link_lookup(ifname="eth0")[0])
            kernel.busy = 3
            shaper.apply(Shape(20e6))
            found.append(queues(0))
            kernel.busy = 100
            for _ in range(2):
                with pytest.raises(NetlinkError):
                    shaper.apply(Shape())
            kernel.busy = 0
            shaper.apply(Shape())
            found.append(queues(0))
        return found

    assert net.run(job, hosts=[0]) == [[["tbf"], ["noqueue"]]]


def test_a_change_that_the_kernel_refuses_is_refused_again_and_undone() -> None:
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
