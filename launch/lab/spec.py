"""Description of an emulated network: hosts, rates and delays, parsed from options and a file."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel

from thinpipe.launch.host.links import Pair, links, parse_rate, parse_time
from thinpipe.launch.host.network import Network

MAX_HOSTS = 64  # two descriptors each: 124 would fit the message that brings them (network.py)

Rates = tuple[float | None, ...]


class Change(BaseModel):
    """Other rates of a network, as users write them: arguments of `NetworkSpec.of`."""

    rate: str | None = None
    up: str | None = None
    down: str | None = None
    pairs: Sequence[str] = ()


@dataclass(frozen=True)
class NetworkSpec:
    """Rates in bit/s (`None`: unlimited) and one-way delays in seconds between `hosts` hosts.

    A message from i to j passes i's uplink, the pair's limit if it has one, then j's downlink.
    """

    hosts: int
    up_bps: Rates
    down_bps: Rates
    pair_bps: Mapping[Pair, float] = field(default_factory=dict)
    """Limits by direction (from, to)."""
    delay_s: Mapping[Pair, float] = field(default_factory=dict)
    """One-way delays by direction (from, to); absent means none."""

    @classmethod
    def of(
        cls,
        hosts: int | None = None,
        rate: str | None = None,
        *,
        delay: str | None = None,
        up: str | None = None,
        down: str | None = None,
        pairs: Sequence[str] = (),
        matrix: Path | None = None,
    ) -> "NetworkSpec":
        """Parse a network from command-line values: `of(4, "100mbit", delay="20ms")`.

        `rate` is that of every up- and downlink; `up` and `down` (one rate, or one per host, with
        commas) replace it; `delay` is one way; `matrix` is a JSON file with `rate_bps` and
        `latency_s`, lists of one row per sender; `pairs` are like `"0,1=20mbit"`, both directions,
        and override the matrix; `"0,1=none"` removes a limit.

        Raises:
            ValueError: a value is invalid or out of range, or a host does not exist.
        """
        table = None if matrix is None else Network.read(matrix, "--matrix")
        hosts = _known_hosts(hosts, table, matrix)
        apart = links(table.hosts) if table else ()
        limits = {(i, j): bps for i, j in apart if table and (bps := table.rate_bps[i][j])}
        delays = {(i, j): table.latency_s[i][j] for i, j in apart if table}
        if delay is not None:
            delays |= {pair: parse_time(delay, "--delay") for pair in links(hosts)}
        delays = {pair: seconds for pair, seconds in delays.items() if seconds}
        unlimited = cls(hosts, (None,) * hosts, (None,) * hosts, limits, delays)
        return unlimited.changed(Change(rate=rate, up=up, down=down, pairs=pairs))

    def changed(self, to: Change) -> "NetworkSpec":
        """The same network with other rates; `0,1=none` removes the limit of a pair."""
        up, down = to.up or to.rate, to.down or to.rate
        return replace(
            self,
            up_bps=_rates(up, self.hosts, "--up" if to.up else "--rate") if up else self.up_bps,
            down_bps=(
                _rates(down, self.hosts, "--down" if to.down else "--rate")
                if down
                else self.down_bps
            ),
            pair_bps=_with_pairs(self.pair_bps, to.pairs, self.hosts),
        )

    def rate_bps(self, source: int, target: int) -> float | None:
        """The lowest limit between `source` and `target` in bit/s; `None`: unlimited."""
        pair_bps = self.pair_bps.get((source, target))
        limits = (self.up_bps[source], pair_bps, self.down_bps[target])
        return min((bps for bps in limits if bps is not None), default=None)


def _known_hosts(hosts: int | None, table: Network | None, matrix: Path | None) -> int:
    if hosts is None and table is None:
        raise ValueError("--hosts is missing: give the number of hosts to emulate, or a --matrix")
    found = hosts if hosts is not None else table.hosts if table else 0
    if not 1 <= found <= MAX_HOSTS:
        raise ValueError(f"--hosts = {found}: use 1 to {MAX_HOSTS}")
    if table and table.hosts != found:
        raise ValueError(f"--hosts = {found}: {matrix} describes {table.hosts}; leave out --hosts")
    return found


def _rates(text: str, hosts: int, where: str) -> Rates:
    rates = tuple(parse_rate(part, where) for part in text.split(","))
    if len(rates) not in (1, hosts):
        raise ValueError(f"{where} = {text!r}: {len(rates)} rates for {hosts} hosts; give 1 or all")
    return rates * hosts if len(rates) == 1 else rates


def _with_pairs(
    limits: Mapping[Pair, float], texts: Sequence[str], hosts: int
) -> dict[Pair, float]:
    changes = _parse_pairs(texts, hosts)
    for (a, b), bps in changes.items():
        if bps is None and not limits.keys() & {(a, b), (b, a)}:
            raise ValueError(
                f"--pair = '{a},{b}=none': this pair has no limit of its own to remove; it is "
                "limited by its up- and downlinks (--rate, --up, --down)"
            )
    return {pair: bps for pair, bps in {**limits, **changes}.items() if bps is not None}


def _parse_pairs(texts: Sequence[str], hosts: int) -> dict[Pair, float | None]:
    pairs: dict[Pair, float | None] = {}
    for text in texts:
        match = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*=(.*)", text)
        if match is None:
            raise ValueError(f"--pair = {text!r}: write two hosts and a rate, such as 0,1=20mbit")
        a, b = int(match[1]), int(match[2])
        if a == b or max(a, b) >= hosts:
            raise ValueError(f"--pair = {text!r}: use two different hosts from 0 to {hosts - 1}")
        if (a, b) in pairs:
            raise ValueError(
                f"--pair = {text!r}: hosts {a} and {b} are given twice; give them once"
            )
        pairs[a, b] = pairs[b, a] = parse_rate(match[3], "--pair")
    return pairs
