"""Goodput of a run that loses machines and gets them back, and how long it stands still.

    python -m benchmarks.elastic --json out.jsonl

Four emulated hosts at 100 Mbit/s and 1 ms, each with a launcher, a relay and a rank (as root): a
replica, or with `--stages 2` half of one. At intervals a host is struck, but never that of rank 0,
nor with local steps one of its replica, nor with stages while another is out: SIGKILL of its rank,
of its relay or of all its processes at once, SIGSTOP of its rank for 20 s, or its link cut for
60 s. It comes back with `--join`, once its launcher has ended. `restarts` has no [elastic]: all
ranks begin anew from a checkpoint (`--max-restarts`). Ranks compute by sleeping, as hosts share
cores; launchers still slow the others down.

*Goodput* is the number of steps, *samples* that of their samples, by those of a calm time before.
*In steps*, by that of the calm time too: the time that steps would take if each took as long as
most with as many samples, as exchanges of fewer replicas are quicker. *Standing still*: time
without a step after a fault or for a join. *Join*: from its start to the end of its first step.
"""

import json
import os
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.harness import Records, Row, command_line, parse_options, summary
from tests.faults import slept
from tests.faults.hosts import HostsRun, kill_machine, unplug
from thinpipe.launch.lab.network import ShapedNetwork
from thinpipe.launch.lab.spec import NetworkSpec
from thinpipe.launch.view.report.metrics import StepRecord

_NEAR_S, _UNTIL_BACK_S = 1.0, 19.0  # who is killed is missed at once, others as all meet
HOSTS, _BATCH, _FIRST_STEPS, _CALM_S = 4, 16, 20, 60.0
_STOPPED_S, _CUT_S, _SETTLED_S, _SAVE_EVERY = 20.0, 60.0, 60.0, 50  # as in _RUN
QUIET = ("--show", "-1")
RESTARTS, LOCAL = "restarts", ("diloco", "sparse_loco")
SETTINGS = ("minutes", "every_s", "back_s", "interval", "stages", "delay", "step_s")
KINDS = ("rank", "relay", "machine", "stopped", "cut")
_COLUMNS = {
    **dict.fromkeys(("goodput", "samples", "in steps", "standing still"), ".3f"),
    **dict.fromkeys(("faults", "losses", "joins"), ".0f"),
    **dict.fromkeys(("kill to next step s", "worst s", "join stands still s"), ".2f"),
    **dict.fromkeys(("join worst s", "join s", "longest join s", "calm step s"), ".2f"),
}
_RUN = """
[model]
factory = "tests.faults.slept:model"
[data]
path = "TEXT"
train_sequences = 4096
eval_sequences = 16
[pipeline]
device = "cpu"
[[boundary]]
forward = { kind = "direct", bits = 8 }
backward = { kind = "direct", bits = 8 }
[train]
epochs = 1000
batch_size = 16
[eval]
every_epochs = 1000
[checkpoint]
every_epochs = 1000
every_steps = 50
[network]
patience_s = 3
"""


class Faulty:
    """A run of which machines are struck and come back."""

    def __init__(
        self, run: HostsRun, seed: int, given: Namespace, *, joins: bool, spared: int
    ) -> None:
        """So many hosts are `spared`."""
        self._spared = spared
        self._run, self._draw = run, random.Random(seed)
        self._back_s, self._joins, self._stages = given.back_s, joins, given.stages
        self._heal: dict[int, tuple[float, Callable[[], None]]] = {}
        self._back_at: dict[int, float] = {}
        self._before: dict[int, tuple[int, float]] = {}  # how often let in before, since when tried
        self._kinds: list[str] = []
        self.tries = 0  # to come back
        self._came: list[tuple[float, int]] = []  # since when, after which step
        self.progress: list[tuple[float, int]] = []  # time, steps done

    def pass_time(self, until_s: float) -> None:
        """Note each step, mend what was broken, and let machines join whose launchers ended."""
        while (now := time.monotonic()) < until_s:
            self._note(now)
            for host in [host for host, (when, _) in self._heal.items() if now >= when]:
                self._heal.pop(host)[1]()
            self._run.has_ended()
            for host in [host for host, when in self._back_at.items() if now >= when]:
                self._bring_back(host, now)
            unasked = self._run.codes.keys() - self._back_at.keys()
            if self._stages > 1:  # those of a replica that is broken end, too
                self._back_at |= dict.fromkeys(unasked - {0}, now + self._back_s)
                unasked &= {0}
            if unasked:
                raise RuntimeError(f"hosts {unasked} have ended:\n{self._run.text()[-6000:]}")
            time.sleep(0.02)

    def _bring_back(self, host: int, now: float) -> None:
        """Start a host's launcher if it has ended; whole is who was let in, or was not lost."""
        if host in self._run.codes and host not in self._heal:
            self.tries += 1
            self._before[host] = len(self._joined(host)), now
            ranks = ("--ranks", "1") if self._joins and self._stages > 1 else ()
            self._run.start(host, joins=self._joins, options=ranks)
        elif self._joins and host in self._before:
            before, since_s = self._before[host]
            if joined := self._joined(host)[before:]:
                self._came.append((since_s, joined[-1]))
                del self._back_at[host], self._before[host]
        elif now > self._back_at[host] + _SETTLED_S:
            del self._back_at[host]

    def _joined(self, host: int) -> list[int]:
        """After which steps."""
        found = [note for note in _notes(self._run) if "joined: " in note["text"]]
        return [note["step"] for note in found if f"host{host}," in note["text"]]

    def joins_s(self) -> list[float]:
        """From the start of each launcher that joined to the end of its first step."""
        # a step is in the file, and counted, once the next has ended, or it is saved
        came = [(since, step) for since, step in self._came if step % _SAVE_EVERY]
        ends = [[at for at, done in self.progress if done >= step] for _, step in came]
        return [at[0] - since for at, (since, _) in zip(ends, came, strict=True) if at]

    def _note(self, now: float) -> None:
        if not self.progress or self._run.steps() != self.progress[-1][1]:
            self.progress.append((now, self._run.steps()))

    def strike(self) -> tuple[str, float] | None:
        """The kind of fault and when, unless no machine may be struck."""
        whole = [host for host in range(self._spared, HOSTS) if host not in self._back_at]
        if not whole or (self._stages > 1 and self._back_at):
            return None
        if not self._kinds:
            self._kinds = self._draw.sample(KINDS, len(KINDS))
        kind, host = self._kinds.pop(), self._draw.choice(whole)
        self._break(kind, host, time.monotonic())
        now = time.monotonic()
        self._back_at[host] = now + self._back_s
        return kind, now

    def _break(self, kind: str, host: int, now: float) -> None:
        children = psutil.Process(self._run.pids[host]).children(recursive=True)
        ranks = [one for one in children if one.name()[9:].isdecimal()]  # "thinpipe 2"
        if kind == "machine":
            kill_machine(self._run, host)
        elif kind == "relay":
            self._run.relay(host).kill()
        elif kind == "cut":
            unplug(self._run, host, True)
            self._heal[host] = now + _CUT_S, partial(unplug, self._run, host, False)
        for rank in ranks:
            if kind == "rank":
                rank.kill()
            elif kind == "stopped":
                rank.suspend()
                self._heal[host] = now + _STOPPED_S, partial(_wake, rank)

    def longest_s(self, begin_s: float, end_s: float) -> float:
        """Of the times between two steps: the longest that was under way between two moments."""
        return max(
            after - max(before, begin_s)
            for (before, _), (after, _) in pairwise([*self.progress, (time.monotonic(), 0)])
            if after > begin_s and before < end_s
        )

    def usual_s(self, records: Sequence[StepRecord]) -> float:
        """What these steps would take, if each took as long as most with as many samples."""
        known = {record.step: record.samples for record in self._run.records()}
        took_s: dict[int | None, list[float]] = {}
        for (before, done), (after, next_done) in pairwise(self.progress):
            if next_done == done + 1:
                took_s.setdefault(known.get(next_done), []).append(after - before)
        usual = {samples: median(times) for samples, times in took_s.items()}
        return sum(usual.get(record.samples, 0.0) for record in records)

    def stands_still_s(self, kind: str, at_s: float) -> float:
        killed = kind in ("rank", "relay", "machine")
        return self.longest_s(at_s, at_s + (_NEAR_S if killed else _UNTIL_BACK_S))

    def around(self, step: int) -> float:
        """The longest time between two of the steps around one."""
        near = [(a, b) for a, b in pairwise(self.progress) if step <= b[1] <= step + 2]
        return max((after - before for (before, _), (after, _) in near), default=0.0)


def _wake(rank: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        rank.resume()


def measure(method: str, seed: int, given: Namespace) -> Row:
    """A run that is struck at intervals."""
    elastic = method != RESTARTS
    settings = [f"gradcomp.method={method if elastic else 'allreduce'}", f"run.seed={seed}"]
    settings += ["elastic.min_replicas=1"] * elastic
    settings += [f"gradcomp.{method}.interval={given.interval}"] * (method in LOCAL)
    layout = {"replicas": HOSTS // given.stages, "cuts": [3] * (given.stages - 1)}
    settings += [f"pipeline.{name}={value}" for name, value in layout.items()]
    options = (*QUIET, *(() if elastic else ("--max-restarts", "1000")))
    with hosts_run("100mbit", given.delay, _RUN, *settings, options=options) as run:
        run.wait_for_step(_FIRST_STEPS)
        spared = given.stages if method in LOCAL else 1
        faulty = Faulty(run, seed, given, joins=elastic, spared=spared)
        begin_s = time.monotonic()
        strikes = list[tuple[str, float]]()
        faulty.pass_time(begin_s + _CALM_S)
        end_s = begin_s + _CALM_S + 60 * given.minutes
        for number in range(int(60 * given.minutes / given.every_s)):
            strikes += filter(None, [faulty.strike()])
            faulty.pass_time(begin_s + _CALM_S + (number + 1) * given.every_s)
        faulty.pass_time(end_s)
        return _row(method, seed, run, faulty, strikes, begin_s + _CALM_S, end_s)


@contextmanager
def hosts_run(
    rate: str, delay: str, config: str, *settings: str, options: Sequence[str] = QUIET
) -> Iterator[HostsRun]:
    """A run on `HOSTS` of a network that has one more; TEXT in its `config` is a file of text."""
    spec = NetworkSpec.of(HOSTS + 1, rate, delay=delay)
    with tempfile.TemporaryDirectory() as place, ShapedNetwork(spec) as net:
        text = Path(place) / "text.txt"
        squares = (f"{number} squared is {number**2}.\n" for number in range(90_000))
        text.write_text("".join(squares), encoding="utf-8")
        config = config.replace("TEXT", str(text))
        run = HostsRun(net, Path(place), config, *settings, hosts=HOSTS, options=options)
        try:
            yield run
        finally:
            run.kill()


def _row(
    method: str,
    seed: int,
    run: HostsRun,
    faulty: Faulty,
    strikes: Sequence[tuple[str, float]],
    first_s: float,
    end_s: float,
) -> Row:
    (begin_s, begun), done = faulty.progress[0], run.steps()
    calm = max(step for when, step in faulty.progress if when <= first_s)
    calm_s = (first_s - begin_s) / (calm - begun)
    struck = run.records()[calm:done]
    samples = sum(record.samples or _BATCH for record in struck)
    still = {
        kind: [faulty.stands_still_s(kind, at) for k, at in strikes if k == kind] for kind in KINDS
    }
    calm_share = faulty.usual_s(run.records()[begun:calm]) / (first_s - begin_s)
    killed = [s for kind in ("rank", "relay", "machine") for s in still[kind]]
    joined = [faulty.around(step) for step in _noted(run, "joined: ")]
    joins = faulty.joins_s()
    numbers: dict[str, float | None] = {
        "goodput": (done - calm) / ((end_s - first_s) / calm_s),
        "samples": samples / (_BATCH * (end_s - first_s) / calm_s),
        "in steps": faulty.usual_s(struck) / (end_s - first_s) / calm_share,
        "in steps, calm": calm_share,
        "standing still": sum([*chain(*still.values()), *joined]) / (end_s - first_s),
        "faults": len(strikes),
        "losses": len(_noted(run, "lost: ")),
        "tries to join": faulty.tries,
        "joins": len(joined),
        "kill to next step s": median(killed) if killed else None,
        "worst s": max(killed, default=None),
        "join stands still s": median(joined) if joined else None,
        "join worst s": max(joined, default=None),
        "join s": median(joins) if joins else None,
        "longest join s": max(joins, default=None),
        "calm step s": calm_s,
    }
    detail = {"still_s": still, "joined_s": joined, "joins_s": joins}
    return Row(method, numbers, seed=seed, detail=detail)


def _noted(run: HostsRun, what: str) -> list[int]:
    return [note["step"] for note in _notes(run) if note["text"].startswith(what)]


def _notes(run: HostsRun) -> list[dict[str, Any]]:
    notes = run.run_folder(0) / "notes.jsonl"
    lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    return [json.loads(line) for line in lines]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison from the command line."""
    command = command_line("benchmarks.elastic", __doc__)
    methods = ["allreduce", "ef_gradients", *LOCAL, RESTARTS]
    command.add_argument("--methods", nargs="+", default=methods)
    command.add_argument("--seeds", type=int, default=3, help="runs of each (default 3)")
    command.add_argument("--minutes", type=float, default=15.0, help="of faults (default 15)")
    command.add_argument("--every-s", type=float, default=30.0, help="a fault (default 30)")
    command.add_argument("--back-s", type=float, default=20.0, help="until a join (default 20)")
    command.add_argument("--interval", type=int, default=30, help="of local steps (default 30)")
    command.add_argument("--delay", default="1ms", help="each way (default 1ms)")
    command.add_argument("--step-s", type=float, default=1.0, help="sleep of a step (default 1)")
    command.add_argument("--stages", type=int, choices=[1, 2], default=1, help="of a replica")
    options = parse_options(command, arguments, "quick", {"seeds": 1, "minutes": 2.5})
    os.environ[slept.STEP_S] = str(options.step_s)
    records, rows = Records(options.json), []
    settings = {name: value for name, value in vars(options).items() if name in SETTINGS}
    for method in options.methods:
        for seed in range(options.seeds):
            rows.append(measure(method, seed, options))
            print(rows[-1], flush=True)
            records.add(settings, rows[-1])
    print(summary(rows, _COLUMNS))


if __name__ == "__main__":
    main()
