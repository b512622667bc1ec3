"""What became of a fault in a run, by one rule for all faults.

The run goes on, restarts by itself, or ends and says why; a machine whose launcher ended is started
again, as a service manager would do. Whatever it does, it says what was wrong, its losses stay
those of the undisturbed run, and nothing is left of it once it has ended.
"""

import re
import time
from collections.abc import Sequence

from tests.faults.catalogue import Fault
from tests.faults.outcomes import Outcome
from tests.faults.scene import Scene

LIMIT_S = 240.0
"""Until a run goes on, or has ended: five times what it may wait for machines, as those that come
back too late for the others wait again."""
_BACK_S = 1.0
"""How long a machine whose launcher ended stays away."""
_REMEDY = re.compile(
    r"--resume|no checkpoint was saved yet|thinpipe doctor|ended the run; see its output|"
    r"free disk space|start (over|again)|is saved"
)
_AGAIN = re.compile(r"from step \d+|resumed from step")


class Judge:
    """Follows a run after a fault."""

    def __init__(self, scene: Scene, fault: Fault, losses: Sequence[float]) -> None:
        """`losses` are those of the undisturbed run."""
        self._scene, self._machines = scene, scene.machines
        self._fault, self._losses = fault, losses
        self._rejected, self._hangs, self._problem = False, False, ""
        self._ended_s: dict[int, float] = {}
        self._back: set[int] = set()

    def outcome(self) -> Outcome:
        """Wait for what becomes of it."""
        self._follow()
        if self._rejected or self._hangs:
            self._start_again()
        self._scene.heals.clear()
        if self._hangs:
            return Outcome(self._fault.kind, "lost", "neither goes on nor ends")
        problem = self._problem or self._wrong_losses()
        verdict = "silent" if problem else "rejected" if self._rejected else "survived"
        return Outcome(self._fault.kind, verdict, problem)

    def _follow(self) -> None:
        """Until the run goes on, or has ended."""
        machines, limit_s = self._machines, time.monotonic() + LIMIT_S
        base, restarted = machines.steps(), False
        enough = {"goes on": 2, "either": 6, "restarts": float("inf")}
        while time.monotonic() < limit_s:
            if machines.has_ended():
                self._ended()
                return
            if not self._scene.heals:  # what is still broken ends it again
                self._bring_back()
            count = machines.steps()
            if not restarted and _AGAIN.search(machines.said(0)):
                restarted, base = True, min(count, machines.steps())
            if count >= base + (1 if restarted else enough[self._fault.after]):
                if self._fault.must_say and not self._is_named():
                    self._problem = f"nothing named it: {machines.said()[-1500:]}"
                return
            time.sleep(0.01)
        self._hangs = True

    def _is_named(self) -> bool:
        return bool(self._fault.says and re.search(self._fault.says, self._machines.said()))

    def _bring_back(self) -> None:
        """Machines whose launcher has ended while others run come back.

        Once each, and not without the one that all meet at: then all end.
        """
        for host in () if 0 in self._machines.codes else self._machines.codes:
            since_s = time.monotonic() - self._ended_s.setdefault(host, time.monotonic())
            if since_s > _BACK_S and host not in self._back:
                self._back.add(host)
                del self._ended_s[host]
                self._machines.start(host)
                return

    def _ended(self) -> None:
        machines = self._machines
        if not any(machines.codes.values()):
            return  # trained to its end
        self._rejected = True
        text = machines.said()
        if self._fault.says and not self._is_named():
            self._problem = f"ended without naming it: {text[-1500:]}"
        elif self._fault.says and not _REMEDY.search(text):
            self._problem = f"ended without a remedy: {text[-1500:]}"
        elif not machines.wait(lambda: not machines.processes(), 20):
            self._problem = f"still running: {machines.leftovers()}"

    def _start_again(self) -> None:
        """As a user does who has read why the run ended."""
        machines = self._machines
        if self._hangs:
            self._scene.power_cut()
        for heal in self._scene.heals:
            heal()
        machines.mark()
        machines.start_all()
        machines.wait(lambda: _AGAIN.search(machines.said(0)) or machines.has_ended(), LIMIT_S)
        count = machines.steps()
        if not machines.wait(lambda: machines.steps() > count or machines.has_ended(), LIMIT_S):
            self._hangs = True
        elif any(machines.codes.values()):
            self._problem = f"does not start again: {machines.said()[-1500:]}"

    def _wrong_losses(self) -> str:
        found = self._machines.losses()
        pairs = zip(found, self._losses, strict=False)
        wrong = [step for step, (a, b) in enumerate(pairs, start=1) if a != b]
        return f"losses differ from step {wrong[0]} on" if wrong else ""
