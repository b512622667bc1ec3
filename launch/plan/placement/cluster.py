"""The devices that a run may use, and the links between them, which may differ by direction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from thinpipe.launch.host.links import PAYLOAD_SHARE
from thinpipe.launch.host.network import Network

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_SAME_SITE_S = 2e-3
"""Hosts that no file assigns to sites share one if their one-way latency is at most this."""


@dataclass(frozen=True)
class Host:
    """A machine: `devices` alike, each `speed` times as fast as the one that is measured on.

    `memory` is in bytes per device.
    """

    name: str
    site: str = ""
    devices: int = 1
    speed: float = 1.0
    memory: float = math.inf


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
        _check_hosts(self.hosts)
        _check_links([host.name for host in self.hosts], self.rate_HH, self.latency_HH)

    @classmethod
    def of(cls, network: Network, names: Sequence[str] | None = None) -> "Cluster":
        """One device on each host of a network, whose rates include headers."""
        payload = network.payload()
        rate_HH = np.array(
            [[math.inf if bps is None else bps for bps in row] for row in payload.rate_bps]
        )
        latency_HH = np.array(payload.latency_s, dtype=np.float64)
        np.fill_diagonal(rate_HH, math.inf)
        np.fill_diagonal(latency_HH, 0.0)
        found = names or [f"host{index}" for index in range(network.hosts)]
        return cls(tuple(Host(name) for name in found), rate_HH, latency_HH)

    def seen_from(self, name: str) -> "Cluster":
        """The same with speeds relative to that of a host; unchanged if there is none so named."""
        for host in self.hosts:
            if host.name == name:
                own = tuple(replace(other, speed=other.speed / host.speed) for other in self.hosts)
                return replace(self, hosts=own)
        return self

    @property
    def devices(self) -> int:
        return len(self.host_of_D)

    @cached_property
    def host_of_D(self) -> Ints:
        return np.repeat(np.arange(len(self.hosts)), [host.devices for host in self.hosts])

    @cached_property
    def speed_D(self) -> Floats:
        return np.array([self.hosts[host].speed for host in self.host_of_D])

    @cached_property
    def memory_D(self) -> Floats:
        return np.array([self.hosts[host].memory for host in self.host_of_D])

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
        return np.asarray(_off_diagonal(self.rate_HH, -1.0).max(axis=1))

    @cached_property
    def down_H(self) -> Floats:
        """bit/s of each host's downlink."""
        return np.asarray(_off_diagonal(self.rate_HH, -1.0).max(axis=0))

    @cached_property
    def sites(self) -> tuple[str, ...]:
        """The site of each host, as given, or found: hosts next to each other share one."""
        if all(host.site for host in self.hosts):
            return tuple(host.site for host in self.hosts)
        near_HH = np.minimum(self.latency_HH, self.latency_HH.T) <= _SAME_SITE_S
        near_HH &= np.minimum(self.rate_HH, self.rate_HH.T) >= 0.5 * self.up_H[:, None]
        found = [-1] * len(self.hosts)
        for first in range(len(self.hosts)):
            pending = [first] if found[first] < 0 else []
            number = max(found) + 1
            while pending:
                host = pending.pop()
                if found[host] < 0:
                    found[host] = number
                    pending += [int(other) for other in np.flatnonzero(near_HH[host])]
        return tuple(f"site{number}" for number in found)

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


def _off_diagonal(x_HH: Floats, value: float) -> Floats:
    if len(x_HH) == 1:
        return np.full((1, 1), math.inf)
    found = x_HH.copy()
    np.fill_diagonal(found, value)
    return found


def _check_hosts(hosts: Sequence[Host]) -> None:
    if not hosts:
        raise ValueError("the network has no hosts; list at least one")
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:
            raise ValueError(f"host {host.name!r}: named twice; give each host its own name")
        seen.add(host.name)
        if host.devices < 1:
            raise ValueError(f"host {host.name!r}: devices = {host.devices}; use 1 or more")
        for name, value in (("speed", host.speed), ("memory", host.memory)):
            if not value > 0 or (name == "speed" and value == math.inf):
                raise ValueError(f"host {host.name!r}: {name} = {value}; use a number above 0")


def _check_links(names: Sequence[str], rate_HH: Floats, latency_HH: Floats) -> None:
    expected = (len(names), len(names))
    for what, x_HH in (("rates", rate_HH), ("latencies", latency_HH)):
        if x_HH.shape != expected:
            raise ValueError(
                f"{what} of {x_HH.shape[0]} hosts for {len(names)} names; give one row per host "
                "and one number per receiver"
            )
    bad = np.argwhere(~(rate_HH > 0))
    if len(bad):
        source, target = bad[0]
        rate = rate_HH[source, target]
        what = "no rate" if math.isnan(rate) else f"rate {rate:g} bit/s"
        raise ValueError(
            f"link {names[source]} -> {names[target]}: {what}; measure it again (`thinpipe doctor "
            "--save`), or leave one of the two hosts out of the file"
        )
    bad = np.argwhere(~((latency_HH >= 0) & (latency_HH < math.inf)))
    if len(bad):
        source, target = bad[0]
        raise ValueError(
            f"link {names[source]} -> {names[target]}: latency {latency_HH[source, target]:g} s; "
            "use 0 or more seconds"
        )
