"""The network of a run: rates and latencies between its hosts, uniform or measured.

`thinpipe doctor` writes network files and `thinpipe shaped --matrix` emulates them: `rate_bps`
(bit/s on the wire, headers included, of each link alone) and `latency_s` (one way), a row per
sender; and what `plan --place` wants to know of `hosts`.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from thinpipe.launch.host.links import PAYLOAD_SHARE, delay_in_range, links, rate_in_range

Rate = float | None
"""Bits per second; None is unlimited."""
_Model = TypeVar("_Model", bound=BaseModel)


class Host(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, strict=True):
    """A machine: `devices` alike, each `speed` times as fast as the one that is measured on."""

    name: str
    site: str = ""
    devices: int = Field(1, ge=1)
    speed: float = Field(1.0, gt=0)
    memory_gb: float | None = Field(None, gt=0)
    """Of each device; None if it is not known."""


Matrix = tuple[tuple[float | None, ...], ...]


class _File(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, strict=True):
    rate_bps: Matrix | None = None
    latency_s: Matrix | None = None
    hosts: tuple[
        Annotated[Host, BeforeValidator(lambda h: {"name": h} if isinstance(h, str) else h)], ...
    ] = ()

    @model_validator(mode="after")
    def _same_size(self) -> Self:
        tables = {"rate_bps": self.rate_bps, "latency_s": self.latency_s}
        size = len(self.rate_bps or self.latency_s or ())
        if not size:
            raise ValueError("needs rate_bps, latency_s or both")
        for key, rows in tables.items():
            if rows:
                check_square(rows, size, key)
        if self.hosts and len(self.hosts) != size:
            raise ValueError(
                f"hosts lists {len(self.hosts)}, the matrices have {size} rows; list one per row"
            )
        return self


@dataclass(frozen=True)
class Network:
    """Links between hosts: [from][to], `rate_bps` and one-way `latency_s`.

    A host's uplink is as fast as its fastest link and shared by all that it sends; likewise its
    downlink.
    """

    rate_bps: tuple[tuple[Rate, ...], ...]
    latency_s: tuple[tuple[float, ...], ...]
    known: tuple[Host, ...] = ()
    """What the file says of its hosts."""

    @classmethod
    def uniform(cls, hosts: int, rate_bps: Rate = None, latency_s: float = 0.0) -> Self:
        """Equal links between all hosts; nothing reads the diagonal."""
        return cls(((rate_bps,) * hosts,) * hosts, ((latency_s,) * hosts,) * hosts)

    @classmethod
    def read(cls, path: Path, option: str = "--network") -> Self:
        """Read a network file; ValueError names option, file and the error in it."""
        try:
            return cls.parse(path.read_text(encoding="utf-8"))
        except OSError as error:
            why = f"{error.strerror}; correct the path, or write one with `thinpipe doctor --save`"
        except ValueError as error:
            why = str(error)
            if "doctor" not in why:
                why += "; correct it, or write one with `thinpipe doctor --save`"
        raise ValueError(f"{option} = {path}: {why}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The network that a file's content describes; null is unlimited, or no delay."""
        found = read_json(_File, text)
        hosts = range(len(found.rate_bps or found.latency_s or ()))
        pairs = [[(i, j, i == j) for j in hosts] for i in hosts]
        rates, delays = found.rate_bps, found.latency_s
        return cls(
            tuple(tuple(_rate(rates, *pair) for pair in row) for row in pairs),
            tuple(tuple(_delay(delays, *pair) for pair in row) for row in pairs),
            found.hosts,
        )

    def write(self, path: Path) -> None:
        content: dict[str, Any] = {"rate_bps": self.rate_bps, "latency_s": self.latency_s}
        if self.known:
            content["hosts"] = [host.model_dump(exclude_unset=True) for host in self.known]
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
        return self.on([rank // (ranks // self.hosts) for rank in range(ranks)])

    def on(self, hosts: Sequence[int]) -> "Network":
        """Links between ranks on these hosts, which may come twice."""
        pairs = [[(i, j, i == j) for j in hosts] for i in hosts]
        return Network(
            tuple(tuple(None if same else self.rate_bps[i][j] for i, j, same in r) for r in pairs),
            tuple(tuple(0.0 if same else self.latency_s[i][j] for i, j, same in r) for r in pairs),
        )

    def payload(self) -> "Network":
        """The same network with rates of TCP payload, without headers."""
        rates = tuple(tuple(bps and bps * PAYLOAD_SHARE for bps in row) for row in self.rate_bps)
        return Network(rates, self.latency_s)

    def link_s(self, source: int, target: int, nbytes: int) -> float:
        return seconds(nbytes, self.rate_bps[source][target])

    def uplink_s(self, host: int, nbytes: int) -> float:
        return seconds(nbytes, _fastest([self.rate_bps[host][j] for j in self._others(host)]))

    def downlink_s(self, host: int, nbytes: int) -> float:
        return seconds(nbytes, _fastest([self.rate_bps[i][host] for i in self._others(host)]))

    def slowest_s(self, nbytes: int) -> float:
        """What these take on the slowest link."""
        pairs = links(self.hosts)
        return max((self.link_s(i, j, nbytes) + self.latency_s[i][j] for i, j in pairs), default=0)

    @property
    def limited(self) -> bool:
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


def _rate(rates: Matrix | None, i: int, j: int, own: bool) -> Rate:
    bps = rates[i][j] if rates and not own else None
    return None if bps is None else rate_in_range(bps, f"rate_bps[{i}][{j}] = {bps}")


def _delay(delays: Matrix | None, i: int, j: int, own: bool) -> float:
    delay_s = (delays[i][j] if delays and not own else None) or 0.0
    return delay_in_range(delay_s, f"latency_s[{i}][{j}] = {delay_s}")


def read_json(model: type[_Model], text: str) -> _Model:
    """JSON as such a model."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first: Any = error.errors()[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    place, what = place.lstrip(".") or "the file", first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        raise ValueError(f"not JSON ({what}); write one with `thinpipe doctor --save`")
    if first["type"] == "value_error":
        raise ValueError(f"{place}: {what}" if first["loc"] else what)
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        raise ValueError(f"{place!r} is unknown; use {', '.join(sorted(model.model_fields))}")
    given = "" if first["type"] in ("missing", "extra_forbidden") else f" = {first['input']!r}"
    what = what.replace("a valid array", "a list in brackets").replace("an object", "a JSON object")
    raise ValueError(f"{place}{given}: {what[:1].lower()}{what[1:]}")


def check_square(rows: Matrix, size: int, where: str) -> None:
    """ValueError unless a matrix has a row per sender, with a number per receiver."""
    if len(rows) != size:
        raise ValueError(f"{where}: needs {size} rows, one per sender")
    if any(len(row) != size for row in rows):
        raise ValueError(
            f"{where} is not square; give one number per receiver in each of {size} rows"
        )
