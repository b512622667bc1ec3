"""The network of a run: rates and latencies between its hosts, uniform or measured.

`thinpipe doctor` writes network files and `thinpipe shaped --matrix` emulates them: `rate_bps`
(bit/s on the wire, headers included, of each link alone) and `latency_s` (one way), a row per
sender.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from thinpipe.launch.host.links import PAYLOAD_SHARE, NetworkSpec, links

Rate = float | None
"""Bits per second; None is unlimited."""


@dataclass(frozen=True)
class Network:
    """Links between hosts: [from][to], `rate_bps` and one-way `latency_s`.

    A host's uplink is as fast as its fastest link and shared by all that it sends; likewise its
    downlink.
    """

    rate_bps: tuple[tuple[Rate, ...], ...]
    latency_s: tuple[tuple[float, ...], ...]

    @classmethod
    def uniform(cls, hosts: int, rate_bps: Rate = None, latency_s: float = 0.0) -> Self:
        """Equal links between all hosts; nothing reads the diagonal."""
        return cls(((rate_bps,) * hosts,) * hosts, ((latency_s,) * hosts,) * hosts)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a network file.

        Raises:
            ValueError: names the file and the error in it.
        """
        try:
            spec = NetworkSpec.of(matrix=path)
        except ValueError as error:
            raise ValueError(str(error).replace("--matrix", "--network")) from None
        hosts = range(spec.hosts)
        return cls(
            tuple(tuple(spec.pair_bps.get((i, j)) for j in hosts) for i in hosts),
            tuple(tuple(spec.delay_s.get((i, j), 0.0) for j in hosts) for i in hosts),
        )

    def write(self, path: Path, hosts: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write what `read` reads, and what `plan --place` knows of hosts."""
        content: dict[str, Any] = {"rate_bps": self.rate_bps, "latency_s": self.latency_s}
        if hosts:
            content["hosts"] = list(map(dict, hosts))
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @property
    def hosts(self) -> int:
        return len(self.rate_bps)

    def for_ranks(self, ranks: int) -> "Network":
        """Links between ranks, equally many on each host, in order; unlimited within a host.

        Raises:
            ValueError: the ranks cannot be divided evenly among the hosts.
        """
        if ranks % self.hosts:
            raise ValueError(
                f"the network has {self.hosts} hosts, among which {ranks} ranks cannot be "
                "divided evenly; use a network with one host per rank, or a divisor of that"
            )
        of = [rank // (ranks // self.hosts) for rank in range(ranks)]
        pairs = [[(i, j, i == j) for j in of] for i in of]
        return Network(
            tuple(tuple(None if same else self.rate_bps[i][j] for i, j, same in r) for r in pairs),
            tuple(tuple(0.0 if same else self.latency_s[i][j] for i, j, same in r) for r in pairs),
        )

    def payload(self) -> "Network":
        """The same network with rates of TCP payload, without headers."""
        rates = tuple(
            tuple(None if bps is None else bps * PAYLOAD_SHARE for bps in row)
            for row in self.rate_bps
        )
        return Network(rates, self.latency_s)

    def link_s(self, source: int, target: int, nbytes: int) -> float:
        """Seconds to send `nbytes` over the link alone."""
        return seconds(nbytes, self.rate_bps[source][target])

    def uplink_s(self, host: int, nbytes: int) -> float:
        return seconds(nbytes, _fastest([self.rate_bps[host][j] for j in self._others(host)]))

    def downlink_s(self, host: int, nbytes: int) -> float:
        return seconds(nbytes, _fastest([self.rate_bps[i][host] for i in self._others(host)]))

    @property
    def limited(self) -> bool:
        """Whether any rate is known."""
        return any(self.rate_bps[i][j] is not None for i, j in links(self.hosts))

    @property
    def highest_latency_s(self) -> float:
        return max((self.latency_s[i][j] for i, j in links(self.hosts)), default=0.0)

    def _others(self, host: int) -> list[int]:
        return [other for other in range(self.hosts) if other != host]


def seconds(nbytes: int, rate_bps: Rate) -> float:
    """Transfer time."""
    return 0.0 if rate_bps is None else 8 * nbytes / rate_bps


def _fastest(rates: Sequence[Rate]) -> Rate:
    fastest = max((math.inf if rate is None else rate for rate in rates), default=math.inf)
    return None if fastest == math.inf else fastest
