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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from thinpipe.launch.host.links import PAYLOAD_SHARE
from thinpipe.launch.plan.placement.cluster import Cluster, Floats, Host

_HOST_KEYS = {"name", "site", "devices", "speed", "memory_gb"}


def read_cluster(path: Path) -> Cluster:
    """Read a file of any of the three kinds.

    Raises:
        ValueError: names the file, what is wrong in it and the remedy.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path}: {error.strerror}; correct the path, or write one with `doctor --save`"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{path}: not JSON ({error}); write one with `thinpipe doctor --save`"
        ) from None
    try:
        return parse_cluster(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_cluster(content: Any) -> Cluster:
    """A cluster from the content of such a file.

    Raises:
        ValueError: names what is wrong and the remedy.
    """
    if isinstance(content, dict) and "regions" in content:
        return _regions(content)
    if isinstance(content, dict) and "gbps" in content:
        return _dtfm(content)
    if isinstance(content, dict) and content.keys() & {"rate_bps", "latency_s"}:
        return _doctor(content)
    _refuse("needs rate_bps and latency_s, or regions, or DT-FM's labels, latency_ms and gbps")


def _doctor(content: Mapping[str, Any]) -> Cluster:
    _known(content, {"rate_bps", "latency_s", "hosts"}, "the file")
    size = len(content.get("rate_bps") or content.get("latency_s") or [])
    rate_HH = _matrix(content.get("rate_bps"), size, "rate_bps", missing=math.inf)
    latency_HH = _matrix(content.get("latency_s"), size, "latency_s", missing=0.0)
    np.fill_diagonal(rate_HH, math.inf)
    np.fill_diagonal(latency_HH, 0.0)
    entries = content.get("hosts") or [{"name": f"host{index}"} for index in range(size)]
    if len(entries) != size:
        _refuse(f"hosts lists {len(entries)}, the matrices have {size} rows; list one per row")
    hosts = tuple(_host(entry, f"hosts[{index}]") for index, entry in enumerate(entries))
    return Cluster(hosts, rate_HH * PAYLOAD_SHARE, latency_HH)


def _dtfm(content: Mapping[str, Any]) -> Cluster:
    _known(content, {"labels", "latency_ms", "gbps"}, "the file")
    labels = content.get("labels") or []
    rate_HH = 1e9 * _matrix(content["gbps"], len(labels), "gbps", missing=math.nan)
    latency_HH = 1e-3 * _matrix(content.get("latency_ms"), len(labels), "latency_ms", missing=0.0)
    np.fill_diagonal(rate_HH, math.inf)
    np.fill_diagonal(latency_HH, 0.0)
    hosts = tuple(Host(f"d{index}", site=str(label)) for index, label in enumerate(labels))
    return Cluster(hosts, rate_HH, latency_HH)


def _regions(content: Mapping[str, Any]) -> Cluster:
    _known(content, {"regions", "inside", "links"}, "the file")
    inside = content.get("inside", {"latency_ms": 5, "gbps": 2})
    _known(inside, {"latency_ms", "gbps"}, "inside")
    names = list(content["regions"])
    latency_RR = np.full((len(names), len(names)), math.nan)
    rate_RR = latency_RR.copy()
    np.fill_diagonal(latency_RR, _number(inside.get("latency_ms", 5), "inside.latency_ms"))
    np.fill_diagonal(rate_RR, _number(inside.get("gbps", 2), "inside.gbps"))
    for link in content.get("links", []):
        if not isinstance(link, list) or len(link) not in (4, 5):
            _refuse(f"links: {link!r}; write two regions, milliseconds and Gbit/s, or Gbit/s twice")
        for name in link[:2]:
            if name not in names:
                _refuse(f"links: {name!r} is no region; use one of {', '.join(names)}")
        a, b = names.index(link[0]), names.index(link[1])
        latency_RR[a, b] = latency_RR[b, a] = _number(link[2], f"links {link[:2]}")
        rate_RR[a, b] = _number(link[3], f"links {link[:2]}")
        rate_RR[b, a] = _number(link[-1], f"links {link[:2]}")
    hosts, region_H = [], []
    for number, (name, entry) in enumerate(content["regions"].items()):
        fields = dict(entry) if isinstance(entry, Mapping) else {"hosts": entry}
        count = fields.pop("hosts", 1)
        if type(count) is not int or count < 1:
            _refuse(f"regions.{name}: hosts = {count!r}; give a whole number, 1 or more")
        for index in range(count):
            where = f"regions.{name}"
            hosts.append(_host({"site": name, "name": f"{name}-{index}", **fields}, where))
            region_H.append(number)
    _check_regions(names, region_H, latency_RR)
    rate_HH = 1e9 * rate_RR[np.ix_(region_H, region_H)]
    latency_HH = 1e-3 * latency_RR[np.ix_(region_H, region_H)]
    np.fill_diagonal(rate_HH, math.inf)
    np.fill_diagonal(latency_HH, 0.0)
    return Cluster(tuple(hosts), rate_HH, latency_HH)


def _check_regions(names: list[str], region_H: list[int], latency_RR: Floats) -> None:
    missing = np.argwhere(np.isnan(latency_RR))
    if len(missing):
        a, b = missing[0]
        _refuse(f"no link between {names[a]} and {names[b]}; add one to links")
    if not region_H:
        _refuse("regions is empty; list at least one")


def _host(entry: Any, where: str) -> Host:
    fields = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, Mapping) or "name" not in fields:
        _refuse(f"{where} = {entry!r}: give it a name")
    _known(fields, _HOST_KEYS, where)
    devices = fields.get("devices", 1)
    if type(devices) is not int:
        _refuse(f"{where}: devices = {devices!r}; give a whole number")
    memory_gb = fields.get("memory_gb")
    return Host(
        name=str(fields["name"]),
        site=str(fields.get("site", "")),
        devices=devices,
        speed=_number(fields.get("speed", 1.0), f"{where}.speed"),
        memory=math.inf if memory_gb is None else 1e9 * _number(memory_gb, f"{where}.memory_gb"),
    )


def _matrix(rows: Any, size: int, where: str, *, missing: float) -> Floats:
    """[size, size]; null is `missing`, as is the whole matrix if there is none."""
    if rows is None:
        return np.full((size, size), missing)
    if not isinstance(rows, list) or len(rows) != size:
        _refuse(f"{where}: needs {size} rows, one per sender")
    for row in rows:
        if not isinstance(row, list) or len(row) != size:
            _refuse(f"{where} is not square; give one number per receiver in each of {size} rows")
    return np.array(
        [
            [
                missing if value is None else _number(value, f"{where}[{i}][{j}]")
                for j, value in enumerate(row)
            ]
            for i, row in enumerate(rows)
        ],
        dtype=np.float64,
    ).reshape(size, size)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        _refuse(f"{where} = {value!r}: not a number; correct it")
    return float(value)


def _known(fields: Any, known: set[str], where: str) -> None:
    if not isinstance(fields, Mapping):
        _refuse(f"{where} = {fields!r}: needs {', '.join(sorted(known))}")
    unknown = sorted(fields.keys() - known)
    if unknown:
        _refuse(f"{where}: {unknown[0]!r} is unknown; use {', '.join(sorted(known))}")


def _refuse(text: str) -> NoReturn:
    raise ValueError(text)
