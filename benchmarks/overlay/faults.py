"""Broken networks and machines: what a run does, and how soon everyone knows."""

import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import psutil

from benchmarks.overlay.hosts import HostsRun
from thinpipe.launch.shaped.network import ShapedNetwork

_ENDLESS_S = 90.0


@dataclass(frozen=True)
class Healed:
    """A disturbance that a run outlives. `longest_s` is the longest step then; `steps` those
    during it and the ten seconds after.
    """

    kind: str
    lasted_s: float
    steps: int
    longest_s: float
    resumed: int
    """Connections that took over from a broken one."""


@dataclass(frozen=True)
class Ended:
    """A disturbance that ends the run.

    `known_s` is how long each host took to name what broke, `ended_s` to end; None if it did not.
    """

    kind: str
    expected: str
    codes: tuple[int | None, ...]
    known_s: tuple[float | None, ...]
    ended_s: tuple[float | None, ...]


def healed(net: ShapedNetwork, run: HostsRun) -> Iterator[Healed]:
    """Disturb a run in all the ways that it outlives, one after another."""

    def slower() -> None:
        net.set_rates("10mbit")
        time.sleep(8)
        net.set_rates("100mbit")

    disturbances: dict[str, Callable[[], None]] = {
        "20 resets at random moments": partial(_resets, run),
        "host 2 cut off for 3 s": partial(_cut_off, run, 3),
        "host 2 cut off for 10 s": partial(_cut_off, run, 10),
        "host 2 cut off for 25 s": partial(_cut_off, run, 25),
        "host 2 is heard but hears nothing, 5 s": partial(_deafen, run, 5),
        "host 2 hears but is not heard, 5 s": partial(_silence, run, 5),
        "host 0, where all meet, cut off for 10 s": partial(_cut_off, run, 10, 0),
        "rate cut tenfold for 8 s": slower,
    }
    for kind, disturb in disturbances.items():
        before, first, start_s = _resumed(run), run.steps(), time.monotonic()
        disturb()
        lasted_s = time.monotonic() - start_s
        time.sleep(10)
        last = run.steps()
        steps = [record.step_s for record in run.records()][first : last + 1]
        longest_s = max(steps, default=float("nan"))
        yield Healed(kind, lasted_s, last - first, longest_s, _resumed(run) - before)


def ended(start: Callable[[], HostsRun]) -> Iterator[Ended]:
    """Break a new run each time, for good. `start` starts one, of 4 hosts."""
    breaks: dict[str, tuple[Callable[[HostsRun], None], str]] = {
        "rank 2 killed": (lambda _: _rank(2).kill(), "killed by signal 9"),
        "rank 0 killed": (lambda _: _rank(0).kill(), "killed by signal 9"),
        "carrier of host 2 killed": (lambda run: run.carrier(2).kill(), "carrier"),
        "host 2 cut off for good": (partial(_block, host=2), r"connection to host\d lost"),
        "host 0 cut off for good": (partial(_block, host=0), r"connection to host\d lost"),
    }
    for kind, (disturb, expected) in breaks.items():
        run = start()
        try:
            run.wait_for_step(5)
            yield _ended(run, kind, disturb, expected)
        finally:
            run.kill()


def _ended(run: HostsRun, kind: str, disturb: Callable[[HostsRun], None], expected: str) -> Ended:
    hosts = range(run.hosts)
    printed = [len(run.log(host).read_text(encoding="utf-8")) for host in hosts]
    known: dict[int, float] = {}
    start_s = time.monotonic()

    def listen() -> None:
        for host in hosts:
            text = run.log(host).read_text(encoding="utf-8")[printed[host] :]
            if host not in known and re.search(expected, text):
                known[host] = time.monotonic() - start_s

    disturb(run)
    while not run.has_ended() and time.monotonic() - start_s < _ENDLESS_S:
        listen()
        time.sleep(0.02)
    listen()
    return Ended(
        kind,
        expected,
        tuple(run.codes.get(host) for host in hosts),
        tuple(known.get(host) for host in hosts),
        tuple(run.ended_s[host] - start_s if host in run.ended_s else None for host in hosts),
    )


def _rank(number: int) -> psutil.Process:
    name = f"thinpipe {number}"
    (found,) = (p for p in psutil.process_iter(["name"]) if p.info["name"] == name)
    return psutil.Process(found.pid)  # `process_iter` keeps what it knew of an older process


def _resets(run: HostsRun) -> None:
    moments = random.Random(0)
    for _ in range(20):
        time.sleep(moments.uniform(0.1, 1.0))
        host = moments.randrange(run.hosts)
        run.on(host, partial(_reset, host))


def _reset(host: int) -> None:
    """End all of this host's connections to others, at once and on both sides."""
    for other in range(4):
        if other != host:
            words = ["ss", "-K", "dst", f"10.77.0.{other + 1}"]
            subprocess.run(words, check=False, capture_output=True)


def _route(change: str, other: int) -> None:
    words = f"ip route {change} blackhole 10.77.0.{other + 1}/32"
    subprocess.run(words.split(), check=True)


def _silence(run: HostsRun, pause_s: float, host: int = 2) -> None:
    """What a host sends is dropped."""
    for change in ("add", "del"):
        run.on(host, partial(_routes, change, host, run.hosts))
        if change == "add":
            time.sleep(pause_s)


def _deafen(run: HostsRun, pause_s: float, host: int = 2) -> None:
    """What others send to a host is dropped."""
    others = [other for other in range(run.hosts) if other != host]
    for change in ("add", "del"):
        for other in others:
            run.on(other, partial(_route, change, host))
        if change == "add":
            time.sleep(pause_s)


def _cut_off(run: HostsRun, pause_s: float, host: int = 2) -> None:
    """Nothing leaves a host or comes to it."""
    _block(run, host)
    time.sleep(pause_s)
    run.on(host, partial(_routes, "del", host, run.hosts))
    for other in range(run.hosts):
        if other != host:
            run.on(other, partial(_route, "del", host))


def _block(run: HostsRun, host: int) -> None:
    run.on(host, partial(_routes, "add", host, run.hosts))
    for other in range(run.hosts):
        if other != host:
            run.on(other, partial(_route, "add", host))


def restore(_host: int) -> None:
    """Let everything through again that this host dropped."""
    subprocess.run(["ip", "route", "flush", "type", "blackhole"], check=False, capture_output=True)


def _routes(change: str, host: int, hosts: int) -> None:
    for other in range(hosts):
        if other != host:
            _route(change, other)


def _resumed(run: HostsRun) -> int:
    return sum(
        link["resumed"] for host in range(run.hosts) for link in run.status(host)["links"].values()
    )
