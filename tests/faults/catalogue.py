"""The faults that strike a run that is under way, and what must be said of each."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import psutil

from tests.faults import damage
from tests.faults.hosts import cut_off, reset, unplug
from tests.faults.scene import Scene, kill

After = Literal["goes on", "restarts", "either"]
_KILLED = r"killed by signal 9|relay ended|is gone|has left the run|lost while|lost in an"
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


def catalogue() -> list[Fault]:
    """All faults, but those for the end of a run."""
    return [*_kills(), *_pauses(), *_links(), *_rest(), *_disks()]


def at_the_end() -> list[Fault]:
    """Faults when nothing is left to train."""
    kinds = ("rank", "agent", "relay")
    return [_kill(kind, "at the end", Scene.at_the_end, must_say=False) for kind in kinds]


_PHASES = {
    "at any time": Scene.any_time,
    "save, phase 1": Scene.while_preparing,
    "save, phase 2": Scene.while_publishing,
    "during evaluation": Scene.while_evaluating,
    "at rendezvous": Scene.while_restarting,
    "at the first step": Scene.at_the_first_step,
}


def _kills() -> Iterator[Fault]:
    for kind in ("rank", "supervisor", "fork server", "agent", "relay"):
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
        scene.machines.mark()
        kill(victim)

    after: After = "restarts" if kind != "resource tracker" else "either"
    return Fault(f"kill: {kind}, {when}", strike, says, after, must_say)


def _power_cut(scene: Scene) -> None:
    _begin(scene)
    scene.power_cut()


def _begin(scene: Scene) -> int:
    """A host, at any time; what is said from now on counts."""
    host = scene.host()
    scene.any_time(host)
    scene.machines.mark()
    return host


def _victim(scene: Scene, kind: str) -> psutil.Process:
    """The same for a process of this kind."""
    host = scene.host()
    scene.any_time(host)
    victim = scene.victim(kind, host)
    scene.machines.mark()
    return victim


def _pauses() -> Iterator[Fault]:
    for kind in ("rank", "agent", "relay", "fork server", "supervisor"):
        strike = partial(_pause, kind, 0.3, 2.0)
        yield Fault(f"stop: {kind}, 0.3 to 2 s", strike, _LOST, "goes on", must_say=False)
    long = partial(_pause, "relay", 9.0, 10.0)
    yield Fault("stop: relay, longer than patience_s", long, _LOST, "either")


def _pause(kind: str, least_s: float, most_s: float, scene: Scene) -> None:
    victim = _victim(scene, kind)
    victim.suspend()
    time.sleep(scene.chance.uniform(least_s, most_s))
    with contextlib.suppress(psutil.NoSuchProcess):  # ended by another's failure
        victim.resume()


def _links() -> Iterator[Fault]:
    for low, high in ((0.2, 1.0), (2.0, 4.0)):
        for name, cut in (("cut", cut_off), ("interface down", unplug)):
            strike = partial(_cut, cut, low, high)
            kind = f"link: {name}, {low:g} to {high:g} s"
            yield Fault(kind, strike, _LOST, "goes on", must_say=False)
    one_way = partial(_cut, partial(cut_off, ways="out"), 0.5, 3.0)
    yield Fault("link: one direction, 0.5 to 3 s", one_way, _LOST, "goes on", must_say=False)
    yield Fault("link: cut for good", _cut_for_good, _LOST, "either")
    yield Fault("link: resets", _resets, _LOST, "goes on", must_say=False)


def _cut(cut: Callable[..., None], least_s: float, most_s: float, scene: Scene) -> None:
    host = _begin(scene)
    cut(scene.machines, host, True)
    time.sleep(scene.chance.uniform(least_s, most_s))
    cut(scene.machines, host, False)


def _cut_for_good(scene: Scene) -> None:
    host = _begin(scene)
    cut_off(scene.machines, host, True)
    scene.heals.append(partial(cut_off, scene.machines, host, False))


def _resets(scene: Scene) -> None:
    _begin(scene)
    for _ in range(scene.chance.randrange(1, 6)):
        reset(scene.machines, scene.host())
        time.sleep(scene.chance.random() * 0.3)


def _rest() -> Iterator[Fault]:
    """The kernel's out-of-memory kill, and signals to stop."""
    says = r"killed by signal 9 \(SIGKILL\): this machine ran out of memory"
    yield Fault("memory: rank killed by the kernel for want of it", _out_of_memory, says)
    for number in (signal.SIGTERM, signal.SIGINT):
        strike = partial(_ask, number)
        yield Fault(f"asked to stop: {number.name} to an agent", strike, "asked to stop|is saved")


def _out_of_memory(scene: Scene) -> None:
    """The rank gets a control group without memory: its next page has the kernel kill it."""
    victim = _victim(scene, "rank")
    group = Path(f"/sys/fs/cgroup/memory/thinpipe-faults-{os.getpid()}")
    group.mkdir(exist_ok=True)
    try:
        (group / "memory.limit_in_bytes").write_text("65536", encoding="utf-8")
        (group / "cgroup.procs").write_text(str(victim.pid), encoding="utf-8")
        scene.wait(lambda: not victim.is_running() or victim.status() == "zombie")
    finally:
        scene.machines.wait(lambda: not (group / "cgroup.procs").read_text(encoding="utf-8"), 10)
        group.rmdir()


def _ask(number: signal.Signals, scene: Scene) -> None:
    _victim(scene, "agent").send_signal(number)


def _disks() -> Iterator[Fault]:
    full = r"was not saved|No space left|free disk space"
    yield Fault("disk: full for a while", damage.fill, full, "goes on")
    yield Fault("disk: full when a rank is killed", damage.fill_and_kill, full)
    says = r"cannot be used|is missing|damaged|digest|killed by signal 9"
    for kind, harm in damage.HARMS.items():
        strike = partial(damage.harm_and_kill, harm)
        must = kind not in ("latest missing", "latest wrong")
        yield Fault(f"files: {kind}, then a restart", strike, says, must_say=must)
    says = "no step is whole|missing|repaired"
    yield Fault("files: no step left, then a restart", damage.harm_all, says)
