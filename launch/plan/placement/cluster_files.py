"""Reads a cluster: what `doctor --save` writes, a table of regions, or DT-FM's matrices.

    {"rate_bps": [[..]], "latency_s": [[..]],           # on the wire, a row per sender; doctor's
     "hosts": [{"name": "host0", "site": "Ohio", "devices": 1, "speed": 1.0, "memory_gb": 24}]}

    {"regions": {"Ohio": 8, "Tokyo": {"hosts": 4, "devices": 2, "speed": 0.5, "memory_gb": 16}},
     "inside": {"latency_ms": 5, "gbps": 2},
     "links": [["Ohio", "Tokyo", 130, 0.694]]}          # latency in ms, Gbit/s, both directions;
                                                        # a fifth number is Gbit/s back
    {"labels": [..], "latency_ms": [[..]], "gbps": [[..]]}                          # DT-FM's

Devices of one host have unlimited links between them. DT-FM's matrices and regions hold rates of
payload; those that doctor writes include headers.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field

from thinpipe.launch.host.network import Host, Matrix, Network, check_square, read_json
from thinpipe.launch.plan.placement.cluster import Cluster, without_own


class _Region(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, strict=True):
    hosts: int = Field(1, ge=1)
    devices: int = 1
    speed: float = 1.0
    memory_gb: float | None = None


class _Inside(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, strict=True):
    latency_ms: float = 5.0
    gbps: float = 2.0


def _as_region(given: Any) -> Any:
    return given if isinstance(given, dict) else {"hosts": given}


class _Regions(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, strict=True):
    regions: dict[str, Annotated[_Region, BeforeValidator(_as_region)]] = Field(min_length=1)
    inside: _Inside = _Inside()
    links: tuple[tuple[str | float, ...], ...] = ()


class _Dtfm(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, strict=True):
    labels: tuple[str, ...]
    latency_ms: Matrix
    gbps: Matrix


def read_cluster(path: Path) -> Cluster:
    """Read a file of any of the three kinds.

    Raises:
        ValueError: names the file, what is wrong in it and the remedy.
    """
    try:
        return parse_cluster(path.read_text(encoding="utf-8"))
    except OSError as error:
        why = f"{error.strerror}; correct the path, or write one with `doctor --save`"
    except ValueError as error:
        why = str(error)
    raise ValueError(f"{path}: {why}")


def parse_cluster(content: Any) -> Cluster:
    """A cluster from the content of such a file, as text or as an object."""
    text = content if isinstance(content, str) else json.dumps(content)
    if '"regions"' in text:
        return _regions(read_json(_Regions, text))
    if '"gbps"' in text:
        return _dtfm(read_json(_Dtfm, text))
    return Cluster.of(Network.parse(text))


def _dtfm(found: _Dtfm) -> Cluster:
    size = len(found.labels)
    for name, rows in (("gbps", found.gbps), ("latency_ms", found.latency_ms)):
        check_square(rows, size, name)
    hosts = tuple(Host(name=f"d{i}", site=label) for i, label in enumerate(found.labels))
    return _scaled(hosts, found.gbps, found.latency_ms)


def _regions(found: _Regions) -> Cluster:
    names, inside = list(found.regions), found.inside
    latency_RR = np.full((len(names), len(names)), math.nan)
    rate_RR = latency_RR.copy()
    np.fill_diagonal(latency_RR, inside.latency_ms)
    np.fill_diagonal(rate_RR, inside.gbps)
    for link in found.links:
        if len(link) not in (4, 5) or any(isinstance(number, str) for number in link[2:]):
            raise ValueError(
                f"links: {[*link]}; write two regions, milliseconds and Gbit/s, or Gbit/s twice"
            )
        for name in link[:2]:
            if name not in names:
                raise ValueError(f"links: {name!r} is no region; use one of {', '.join(names)}")
        a, b = (names.index(str(name)) for name in link[:2])
        latency_RR[a, b] = latency_RR[b, a] = link[2]
        rate_RR[a, b], rate_RR[b, a] = link[3], link[-1]
    for a, b in np.argwhere(np.isnan(latency_RR))[:1]:
        raise ValueError(f"no link between {names[a]} and {names[b]}; add one to links")
    hosts = tuple(
        Host(name=f"{name}-{index}", site=name, **region.model_dump(exclude={"hosts"}))
        for name, region in found.regions.items()
        for index in range(region.hosts)
    )
    region_H = [names.index(host.site) for host in hosts]
    of = np.ix_(region_H, region_H)
    return _scaled(hosts, rate_RR[of], latency_RR[of])


def _scaled(hosts: Sequence[Host], gbps: Any, latency_ms: Any) -> Cluster:
    """From Gbit/s of payload and milliseconds."""
    rate_HH = 1e9 * without_own(gbps, math.inf)
    return Cluster(tuple(hosts), rate_HH, 1e-3 * without_own(latency_ms, 0.0))
