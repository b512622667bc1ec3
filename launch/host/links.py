"""Description of a network: hosts, rates and delays, parsed from text and JSON."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

MAX_HOSTS = 64
MIN_RATE_BPS = 8_000.0
MAX_RATE_BPS = 30e9
"""tbf stores 32-bit bytes per second, and a core forwards about this much anyway."""
MAX_DELAY_S = 10.0
MTU = 1500
FRAME_BYTES = MTU + 14
PAYLOAD_SHARE = 1448 / FRAME_BYTES
"""Share of a link's rate for TCP payload: the rest is Ethernet, IP and TCP headers."""

_RATE_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

Pair = tuple[int, int]
Rates = tuple[float | None, ...]


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
        table = _read_matrix(matrix) if matrix is not None else _Matrix(None, {}, {})
        hosts = _known_hosts(hosts, table, matrix)
        delays = dict(table.delay_s)
        if delay is not None:
            delays |= {pair: parse_time(delay, "--delay") for pair in links(hosts)}
        delays = {pair: seconds for pair, seconds in delays.items() if seconds}
        unlimited = cls(hosts, (None,) * hosts, (None,) * hosts, table.pair_bps, delays)
        return unlimited.changed(rate=rate, up=up, down=down, pairs=pairs)

    def changed(
        self,
        *,
        rate: str | None = None,
        up: str | None = None,
        down: str | None = None,
        pairs: Sequence[str] = (),
    ) -> "NetworkSpec":
        """The same network with other rates; `0,1=none` removes the limit of a pair.

        Raises:
            ValueError: as `of`.
        """
        uplinks = _rates(up or rate or "none", self.hosts, "--up" if up else "--rate")
        downlinks = _rates(down or rate or "none", self.hosts, "--down" if down else "--rate")
        return replace(
            self,
            up_bps=uplinks if up or rate else self.up_bps,
            down_bps=downlinks if down or rate else self.down_bps,
            pair_bps=_with_pairs(self.pair_bps, pairs, self.hosts),
        )

    def rate_bps(self, source: int, target: int) -> float | None:
        """The lowest limit between `source` and `target` in bit/s; `None`: unlimited."""
        limits = (
            self.up_bps[source],
            self.pair_bps.get((source, target)),
            self.down_bps[target],
        )
        return min((bps for bps in limits if bps is not None), default=None)


@dataclass(frozen=True)
class _Matrix:
    hosts: int | None
    pair_bps: dict[Pair, float]
    delay_s: dict[Pair, float]


def links(hosts: int) -> list[Pair]:
    """Every (from, to)."""
    return [(i, j) for i in range(hosts) for j in range(hosts) if i != j]


def parse_rate(text: str, where: str = "rate") -> float | None:
    """`"100mbit"` in bit/s; `"none"` is no limit.

    Raises:
        ValueError: not a rate, or out of range; the message begins with `where`.
    """
    if text.strip().lower() == "none":
        return None
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([kmg]?)bit", text.strip().lower())
    if match is None:
        raise ValueError(f"{where} = {text!r}: not a rate; write 100mbit, 1.5gbit, 500kbit or none")
    return _rate_in_range(float(match[1]) * _RATE_UNITS[match[2]], f"{where} = {text!r}")


def parse_time(text: str, where: str = "delay") -> float:
    """`"20ms"` in seconds.

    Raises:
        ValueError: not a time, or out of range; the message begins with `where`.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(us|ms|s)", text.strip().lower())
    if match is None:
        raise ValueError(f"{where} = {text!r}: not a time; write 20ms, 0.5s or 300us")
    return _delay_in_range(float(match[1]) * _TIME_UNITS[match[2]], f"{where} = {text!r}")


def format_rate(bps: float | None) -> str:
    """`"100 Mbit/s"`."""
    if bps is None:
        return "unlimited"
    factor, unit = next((f, u) for f, u in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if bps >= f)
    return f"{bps / factor:.4g} {unit}bit/s"


def _rate_in_range(bps: float, where: str) -> float:
    if not MIN_RATE_BPS <= bps <= MAX_RATE_BPS:
        raise ValueError(f"{where}: use 8kbit to 30gbit, or none for no limit")
    return bps


def _delay_in_range(seconds: float, where: str) -> float:
    if not 0 <= seconds <= MAX_DELAY_S:
        raise ValueError(f"{where}: use 0s to {MAX_DELAY_S:g}s")
    return seconds


def _known_hosts(hosts: int | None, table: _Matrix, matrix: Path | None) -> int:
    hosts = hosts if hosts is not None else table.hosts
    if hosts is None:
        raise ValueError("--hosts is missing: give the number of hosts to emulate, or a --matrix")
    if not 1 <= hosts <= MAX_HOSTS:
        raise ValueError(f"--hosts = {hosts}: use 1 to {MAX_HOSTS}")
    if table.hosts not in (None, hosts):
        raise ValueError(f"--hosts = {hosts}: {matrix} describes {table.hosts}; leave out --hosts")
    return hosts


def _rates(text: str, hosts: int, where: str) -> Rates:
    rates = tuple(parse_rate(part, where) for part in text.split(","))
    if len(rates) not in (1, hosts):
        raise ValueError(f"{where} = {text!r}: {len(rates)} rates for {hosts} hosts; give 1 or all")
    return rates * hosts if len(rates) == 1 else rates


def _with_pairs(
    limits: Mapping[Pair, float], texts: Sequence[str], hosts: int
) -> dict[Pair, float]:
    """`limits`, changed by `--pair`."""
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


def _read_matrix(path: Path) -> _Matrix:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"--matrix = {path}: {error.strerror}; correct the path, or write one with `thinpipe "
            "doctor --save`"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"--matrix = {path}: not JSON ({error}); write one with `thinpipe doctor --save`"
        ) from error
    known = {"rate_bps", "latency_s"}
    if isinstance(content, dict):
        content.pop("hosts", None)  # their names, for `plan --place`
    if not isinstance(content, dict) or not content or not content.keys() <= known:
        raise ValueError(f"--matrix = {path}: needs an object with rate_bps, latency_s or both")
    sizes = {len(rows) if isinstance(rows, list) else 0 for rows in content.values()}
    if len(sizes) != 1:
        raise ValueError(f"--matrix = {path}: rate_bps and latency_s differ in size")
    hosts = sizes.pop()
    cells = {key: _cells(rows, hosts, f"--matrix = {path}: {key}") for key, rows in content.items()}
    rates, delays = cells.get("rate_bps", {}), cells.get("latency_s", {})
    where = f"--matrix = {path}"
    return _Matrix(
        hosts,
        {pair: _rate_in_range(bps, f"{where}: rate_bps {bps}") for pair, bps in rates.items()},
        {pair: _delay_in_range(s, f"{where}: latency_s {s}") for pair, s in delays.items()},
    )


def _cells(rows: object, hosts: int, where: str) -> dict[Pair, float]:
    """The numbers off the diagonal without `null`."""
    if not isinstance(rows, list) or any(
        not isinstance(row, list) or len(row) != hosts for row in rows
    ):
        raise ValueError(f"{where} is not square; give one row per sender, one number per receiver")
    cells: dict[Pair, float] = {}
    for i, j in links(hosts):
        value = rows[i][j]
        if value is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ValueError(f"{where}[{i}][{j}] = {value!r}: not a number; use null for none")
        cells[i, j] = float(value)
    return cells
