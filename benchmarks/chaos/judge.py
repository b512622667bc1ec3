"""What became of a fault in a run, by one rule for all faults.

The run goes on, restarts by itself, or ends and says why; a machine whose launcher ended is started
again, as a service manager would do. Whatever it does, it says what was wrong, its losses stay
those of the undisturbed run, and nothing is left of it once it has ended.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.chaos.faults import Fault
from benchmarks.chaos.outcome import Outcome, Verdict
from benchmarks.chaos.scene import Scene

LIMIT_S = 240.0
"""Until a run goes on, or has ended: five times what it may wait for machines, as those that come
back too late for the others wait anew."""
_BACK_S = 1.0
"""How long a machine whose launcher ended stays away."""
_REMEDY = re.compile(
    r"--resume|no checkpoint was saved yet|thinpipe doctor|ended the run; see its output|"
    r"free disk space|start anew|is saved"
)
_AGAIN = re.compile(r"from step \d+|resumed from step")


@dataclass
class Seen:
    """What happened after a fault."""

    said_s: float | None = None
    next_step_s: float | None = None
    ended_s: float | None = None
    refused: bool = False
    hangs: bool = False
    problem: str = ""


class Judge:
    """Follows a run after a fault."""

    def __init__(self, scene: Scene, fault: Fault, losses: Sequence[float]) -> None:
        """`losses` are those of the undisturbed run."""
        self._scene, self._machines, self._fault = scene, scene.machines, fault
        self._losses, self.seen = losses, Seen()
        self._ended_s: dict[int, float] = {}
        self._back: set[int] = set()

    def outcome(self) -> Outcome:
        """Wait for what becomes of it."""
        seen, scene = self.seen, self._scene
        self._follow()
        if seen.refused or seen.hangs:
            self._start_again()
        problem = seen.problem or self._wrong_losses()
        verdict: Verdict = "refused" if seen.refused else "survived"
        if seen.hangs:
            verdict, problem = "lost", "neither goes on nor ends"
        elif problem:
            verdict = "silent"
        scene.heals.clear()
        return Outcome(
            self._fault.kind, verdict, problem, seen.next_step_s, seen.said_s, seen.ended_s
        )

    def _follow(self) -> None:
        """Until the run goes on, or has ended."""
        machines, limit_s = self._machines, time.monotonic() + LIMIT_S
        base = machines.steps()
        restarted = False
        while time.monotonic() < limit_s:
            self._listen()
            if machines.has_ended():
                self._ended()
                return
            if not self._scene.heals:  # what is still broken ends it again
                self._bring_back()
            count = machines.steps()
            if not restarted and _AGAIN.search(machines.said(0)):
                restarted, base, self.seen.next_step_s = True, min(count, machines.steps()), None
            if count > base and self.seen.next_step_s is None:
                self.seen.next_step_s = self._since_s()
            if count >= base + self._enough(restarted):
                self._check_said()
                return
            time.sleep(0.01)
        self.seen.hangs = True

    def _enough(self, restarted: bool) -> float:
        """How many more steps show that a run goes on."""
        needed = {"goes on": float(self._fault.steps), "either": 6.0, "restarts": float("inf")}
        return 1.0 if restarted else needed[self._fault.after]

    def _since_s(self) -> float:
        return time.monotonic() - self._scene.began_s

    def _listen(self) -> None:
        if self.seen.said_s is None and self._is_named():
            self.seen.said_s = self._since_s()

    def _is_named(self) -> bool:
        return bool(self._fault.says and re.search(self._fault.says, self._machines.said()))

    def _check_said(self) -> None:
        self._listen()
        if self._fault.must_say and self.seen.said_s is None:
            self.seen.problem = f"nothing named it: {self._machines.said()[-1500:]}"

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
        machines, seen = self._machines, self.seen
        seen.ended_s = self._since_s()
        self._listen()
        if not any(machines.codes.values()):
            return  # trained to its end
        seen.refused = True
        text = machines.said()
        if self._fault.says and not self._is_named():
            seen.problem = f"ended without naming it: {text[-1500:]}"
        elif self._fault.says and not _REMEDY.search(text):
            seen.problem = f"ended without a remedy: {text[-1500:]}"
        elif not machines.wait(lambda: not machines.processes(), 20):
            seen.problem = f"still running: {machines.leftovers()}"

    def _start_again(self) -> None:
        """As a user does who has read why the run ended."""
        machines = self._machines
        if self.seen.hangs:
            self._scene.power_cut()
        for heal in self._scene.heals:
            heal()
        machines.mark()
        machines.start_all()

        def goes_on() -> bool:
            return bool(_AGAIN.search(machines.said(0))) or machines.has_ended()

        machines.wait(goes_on, LIMIT_S)
        count = machines.steps()
        if not machines.wait(lambda: machines.steps() > count or machines.has_ended(), LIMIT_S):
            self.seen.hangs = True
        elif any(machines.codes.values()):
            self.seen.problem = f"does not start again: {machines.said()[-1500:]}"
        self.seen.next_step_s = self._since_s()

    def _wrong_losses(self) -> str:
        if not self._fault.exact:
            return ""
        found = [record["loss"] for record in self._machines.records()]
        wrong = [
            step for step, (a, b) in enumerate(zip(found, self._losses, strict=False)) if a != b
        ]
        return f"losses differ from step {wrong[0] + 1} on" if wrong else ""
