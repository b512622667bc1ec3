"""The faults that strike a run that is under way, and what must be said of each."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import psutil

from benchmarks.chaos import damage
from benchmarks.chaos.machines import HOSTS
from benchmarks.chaos.scene import STEPS_PER_EPOCH, Scene, kill

After = Literal["goes on", "restarts", "either"]
_KILLED = r"killed by signal 9|carrier ended|is gone|has left the run|lost while|lost in an"
_UNMET = _KILLED + r"|did not (all )?join"
_LOST = r"connection to host\d lost|no connection to host\d|host\d is given up"


@dataclass(frozen=True)
class Fault:
    """`says` is what some host must print of it, if the run does not just go on.

    `after`: what becomes of the run, unless it ends.
    """

    kind: str
    strike: Callable[[Scene], None]
    says: str
    after: After = "restarts"
    must_say: bool = True
    exact: bool = True
    """Whether losses must stay those of the undisturbed run."""
    steps: int = 2
    """How many more show that a run goes on and has said what it was to say."""


def catalogue() -> list[Fault]:
    """All faults, but those for the end of a run."""
    return [*_kills(), *_pauses(), *_links(), *_memory(), *_disks(), *_asked()]


def at_the_end() -> list[Fault]:
    """Faults when nothing is left to train."""
    kinds = ("rank", "agent", "carrier")
    return [_kill(kind, "at the end", Scene.at_the_end, must_say=False) for kind in kinds]


def bits() -> Fault:
    """A flipped bit in the row of a memory; what it is sent anew changes the losses."""
    says = r"cached activations of the two ends differed|bytes were damaged"
    kind = "RAM: bit of a memory's row"
    steps = 2 * STEPS_PER_EPOCH + 2  # from first in an epoch to last in the next
    return Fault(kind, damage.flip_ram, says, "goes on", exact=False, steps=steps)


_PHASES = {
    "at any time": Scene.any_time,
    "save, phase 1": Scene.while_preparing,
    "save, phase 2": Scene.while_publishing,
    "during evaluation": Scene.while_evaluating,
    "at rendezvous": Scene.while_restarting,
    "at the first step": Scene.at_the_first_step,
}


def _kills() -> Iterator[Fault]:
    for kind in ("rank", "supervisor", "fork server", "agent", "carrier"):
        for name, moment in _PHASES.items():
            yield _kill(kind, name, moment)
        yield _kill(kind, "at the start", Scene.while_starting, must_say=False, says=_UNMET)
    yield _kill("resource tracker", "at any time", Scene.any_time, must_say=False)
    yield Fault("kill: all machines at once", _power_cut, "", must_say=False)


def _kill(
    kind: str,
    when: str,
    moment: Callable[[Scene, int], None],
    *,
    says: str = _KILLED,
    must_say: bool = True,
) -> Fault:
    def strike(scene: Scene) -> None:
        host = scene.host()
        moment(scene, host)
        victim = scene.victim(kind, host)
        scene.begin()
        kill(victim)

    after: After = "restarts" if kind != "resource tracker" else "either"
    return Fault(f"kill: {kind}, {when}", strike, says, after, must_say)


def _power_cut(scene: Scene) -> None:
    scene.any_time(0)
    scene.begin()
    scene.power_cut()


def _pauses() -> Iterator[Fault]:
    for kind in ("rank", "agent", "carrier", "fork server", "supervisor"):
        strike = partial(_pause, kind, 0.3, 2.0)
        yield Fault(f"stop: {kind}, 0.3 to 2 s", strike, _LOST, "goes on", must_say=False)
    long = partial(_pause, "carrier", 9.0, 10.0)
    yield Fault("stop: carrier, longer than patience_s", long, _LOST, "either", must_say=True)


def _pause(kind: str, least_s: float, most_s: float, scene: Scene) -> None:
    host = scene.host()
    scene.any_time(host)
    victim = scene.victim(kind, host)
    scene.begin()
    victim.suspend()
    time.sleep(scene.chance.uniform(least_s, most_s))
    try:
        victim.resume()
    except psutil.NoSuchProcess:  # ended by another's failure
        return


def _links() -> Iterator[Fault]:
    for low, high in ((0.2, 1.0), (2.0, 4.0)):
        for name, cut in (("cut", _blackholes), ("interface down", _interface)):
            strike = partial(_cut, cut, low, high)
            kind = f"link: {name}, {low:g} to {high:g} s"
            yield Fault(kind, strike, _LOST, "goes on", must_say=False)
    one_way = partial(_cut, _one_way, 0.5, 3.0)
    yield Fault("link: one direction, 0.5 to 3 s", one_way, _LOST, "goes on", must_say=False)
    yield Fault("link: cut for good", partial(_cut, _blackholes, None, None), _LOST, "either")
    yield Fault("link: resets", _resets, _LOST, "goes on", must_say=False)
    yield Fault("wire: flipped bit", _flip_wire, _LOST, "goes on")


Cut = Callable[[Scene, int, bool], None]


def _cut(cut: Cut, least_s: float | None, most_s: float | None, scene: Scene) -> None:
    host = scene.host()
    scene.any_time(host)
    scene.begin()
    cut(scene, host, True)
    if least_s is None or most_s is None:
        scene.heals.append(partial(cut, scene, host, False))
        return
    time.sleep(scene.chance.uniform(least_s, most_s))
    cut(scene, host, False)


def _blackholes(scene: Scene, host: int, cut: bool) -> None:
    """Nothing leaves the host or comes to it."""
    net, others = scene.machines.net, [other for other in range(HOSTS) if other != host]
    net.run(lambda _: _routes(cut, others), hosts=[host])
    net.run(lambda _: _routes(cut, [host]), hosts=others)


def _one_way(scene: Scene, host: int, cut: bool) -> None:
    """Others hear nothing from the host, which hears them."""
    others = [other for other in range(HOSTS) if other != host]
    scene.machines.net.run(lambda _: _routes(cut, others), hosts=[host])


def _routes(cut: bool, others: list[int]) -> None:
    for other in others:
        words = ["ip", "route", "add" if cut else "del", "blackhole", f"10.77.0.{other + 1}/32"]
        subprocess.run(words, check=True)


def _interface(scene: Scene, host: int, cut: bool) -> None:
    words = ["ip", "link", "set", "eth0", "down" if cut else "up"]

    def change(own: int) -> None:
        subprocess.run(words, check=True)
        for other in range(HOSTS) if not cut else ():  # neighbors are forgotten with the link
            if other != own:
                lladdr = f"02:00:00:00:00:{other + 1:02x}"
                place = ["dev", "eth0", "nud", "permanent"]
                given = ["ip", "neigh", "replace", f"10.77.0.{other + 1}", "lladdr", lladdr]
                subprocess.run([*given, *place], check=True)

    scene.machines.net.run(change, hosts=[host])


def _resets(scene: Scene) -> None:
    scene.any_time(0)
    scene.begin()
    for _ in range(scene.chance.randrange(1, 6)):
        scene.machines.net.run(_reset, hosts=[scene.host()])
        time.sleep(scene.chance.random() * 0.3)


def _reset(host: int) -> None:
    for other in range(HOSTS):
        if other != host:
            words = ["ss", "-K", "dst", f"10.77.0.{other + 1}"]
            subprocess.run(words, check=False, capture_output=True)


def _flip_wire(scene: Scene) -> None:
    assert scene.wire is not None, "made with the network"
    scene.any_time(0)
    scene.begin()
    scene.wire.flip(scene.chance.randrange(1 << 30))
    wire = scene.wire
    scene.wait(lambda: wire.flipped)


def _memory() -> Iterator[Fault]:
    says = r"killed by signal 9 \(SIGKILL\): this machine ran out of memory"
    yield Fault("memory: rank killed by the kernel for want of it", _out_of_memory, says)


def _out_of_memory(scene: Scene) -> None:
    """The rank gets a control group without memory: its next page has the kernel kill it."""
    host = scene.host()
    scene.any_time(host)
    victim = scene.victim("rank", host)
    group = Path(f"/sys/fs/cgroup/memory/thinpipe-chaos-{os.getpid()}")
    group.mkdir(exist_ok=True)
    try:
        (group / "memory.limit_in_bytes").write_text("65536", encoding="utf-8")
        scene.begin()
        (group / "cgroup.procs").write_text(str(victim.pid), encoding="utf-8")
        scene.wait(lambda: not victim.is_running() or victim.status() == "zombie")
    finally:
        scene.machines.wait(lambda: not (group / "cgroup.procs").read_text(encoding="utf-8"), 10)
        group.rmdir()


def _disks() -> Iterator[Fault]:
    """Disks and checkpoints."""
    full = r"was not saved|No space left|free disk space"
    yield Fault("disk: full for a while", damage.fill, full, "goes on")
    yield Fault("disk: full when a rank is killed", damage.fill_and_kill, full)
    for kind, harm in damage.HARMS.items():
        must = kind not in ("latest missing", "latest wrong")
        yield Fault(
            f"files: {kind}, then a restart",
            partial(damage.harm_and_kill, harm),
            r"cannot be used|is missing|damaged|digest|killed by signal 9",
            must_say=must,
        )
    yield Fault(
        "files: no step left, then a restart", damage.harm_all, "no step is whole|missing|mended"
    )


def _asked() -> Iterator[Fault]:
    for number in (signal.SIGTERM, signal.SIGINT):
        strike = partial(_ask, number)
        yield Fault(f"asked to stop: {number.name} to an agent", strike, "asked to stop|is saved")


def _ask(number: signal.Signals, scene: Scene) -> None:
    host = scene.host()
    scene.any_time(host)
    agent = scene.victim("agent", host)
    scene.begin()
    agent.send_signal(number)
