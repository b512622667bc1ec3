"""The devices that a run may use, and the links between them, which may differ by direction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thinpipe.launch.host.links import PAYLOAD_SHARE
from thinpipe.launch.host.network import Host, Network

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Cluster:
    """Hosts and their links: `rate_HH` in bit/s of payload (inf: unlimited), `latency_HH` in
    seconds one way; a row per sender. The diagonal holds the links between devices of one host.

    A host's uplink is as fast as its fastest link, and shared by all that its devices send;
    likewise its downlink. Axes: H hosts, D devices.

    Raises:
        ValueError: names the host or link that is wrong, and the remedy.
    """

    hosts: tuple[Host, ...]
    rate_HH: Floats
    latency_HH: Floats

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ValueError("the network has no hosts; list at least one")
        names = [host.name for host in self.hosts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"host {name!r}: named twice; give each host its own name")
        rate_HH, latency_HH = self.rate_HH, self.latency_HH
        self._check(rate_HH > 0, rate_HH, "rate {:g} bit/s; measure it again (`thinpipe doctor "
                    "--save`), or leave one of the two hosts out of the file")  # fmt: skip
        allowed_HH = (latency_HH >= 0) & (latency_HH < math.inf)
        self._check(allowed_HH, latency_HH, "latency {:g} s; use 0 or more seconds")

    def _check(self, allowed_HH: NDArray[np.bool_], x_HH: Floats, problem: str) -> None:
        for source, target in np.argwhere(~allowed_HH)[:1]:
            link = f"link {self.hosts[source].name} -> {self.hosts[target].name}"
            raise ValueError(f"{link}: {problem.format(x_HH[source, target])}")

    @classmethod
    def of(cls, network: Network) -> "Cluster":
        """The hosts of a network, whose rates include headers; one device each by default."""
        payload = network.payload()
        rates = [[math.inf if bps is None else bps for bps in row] for row in payload.rate_bps]
        names = (f"host{index}" for index in range(network.hosts))
        hosts = network.known or tuple(Host(name=name) for name in names)
        return cls(hosts, without_own(rates, math.inf), without_own(payload.latency_s, 0.0))

    def seen_from(self, name: str) -> "Cluster":
        """The same with speeds relative to that of a host; unchanged if there is none so named."""
        one = next((host.speed for host in self.hosts if host.name == name), 1.0)
        seen = (host.model_copy(update={"speed": host.speed / one}) for host in self.hosts)
        return replace(self, hosts=tuple(seen))

    @property
    def devices(self) -> int:
        return len(self.host_of_D)

    @cached_property
    def host_of_D(self) -> Ints:
        return np.repeat(np.arange(len(self.hosts)), [host.devices for host in self.hosts])

    @cached_property
    def speed_D(self) -> Floats:
        return np.array([host.speed for host in self.hosts])[self.host_of_D]

    @cached_property
    def memory_D(self) -> Floats:
        limits = [1e9 * host.memory_gb if host.memory_gb else math.inf for host in self.hosts]
        return np.array(limits)[self.host_of_D]

    @cached_property
    def rate_DD(self) -> Floats:
        """bit/s of payload between devices; unlimited within a device."""
        rate_DD = self.rate_HH[np.ix_(self.host_of_D, self.host_of_D)]
        np.fill_diagonal(rate_DD, math.inf)
        return rate_DD

    @cached_property
    def latency_DD(self) -> Floats:
        """Seconds between devices, one way."""
        latency_DD = self.latency_HH[np.ix_(self.host_of_D, self.host_of_D)]
        np.fill_diagonal(latency_DD, 0.0)
        return latency_DD

    @cached_property
    def up_H(self) -> Floats:
        """bit/s of each host's uplink."""
        return np.asarray(_between_hosts(self.rate_HH).max(axis=1))

    @cached_property
    def down_H(self) -> Floats:
        """bit/s of each host's downlink."""
        return np.asarray(_between_hosts(self.rate_HH).max(axis=0))

    def device_name(self, device: int) -> str:
        """`host3`, or `host3:1` for the second device of a host with several."""
        host = int(self.host_of_D[device])
        if self.hosts[host].devices == 1:
            return self.hosts[host].name
        return f"{self.hosts[host].name}:{device - int(np.argmax(self.host_of_D == host))}"

    def network(self, devices: Sequence[int]) -> Network:
        """Links between some devices, with rates on the wire, as the simulator takes them."""
        rate_DD = self.rate_DD[np.ix_(devices, devices)] / PAYLOAD_SHARE
        return Network(
            tuple(tuple(None if bps == math.inf else float(bps) for bps in row) for row in rate_DD),
            tuple(map(tuple, self.latency_DD[np.ix_(devices, devices)].tolist())),
        )


def without_own(rows: ArrayLike, value: float) -> Floats:
    """[H, H] with that value for the links within a host."""
    x_HH = np.array(rows, dtype=np.float64)
    np.fill_diagonal(x_HH, value)
    return x_HH


def _between_hosts(rate_HH: Floats) -> Floats:
    return np.full((1, 1), math.inf) if len(rate_HH) == 1 else without_own(rate_HH, -1.0)
