"""Folders of runs that nobody trained, and servers that show them."""

import json
import math
import random
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.records import run_info, step_record, wire_totals
from tests.waiting import until
from thinpipe.launch.host import disk
from thinpipe.launch.view.report.edges import Traces, edges_of
from thinpipe.launch.view.report.journal import Journal, Place, add_note
from thinpipe.launch.view.report.metrics import MetricsWriter, StepRecord
from thinpipe.launch.view.report.summary import summarize

HOSTS = ("amsterdam", "berlin")
EVIL = "</script><script>document.title='pwned'</script><img src=x onerror=document.title='pwned'>"


def records(count: int, *, seed: int = 0) -> list[StepRecord]:
    """A loss that falls, four epochs, evaluations at their ends, a skipped step."""
    noise, found = random.Random(seed), []
    for step in range(1, count + 1):
        loss = 2 + 6 * math.exp(-5 * step / count) + noise.gauss(0, 0.1)
        last = step % max(1, count // 4) == 0
        found.append(
            step_record(
                step,
                epoch=1 + 4 * (step - 1) // count,
                loss=loss,
                bubble=0.2 + 0.1 * noise.random(),
                tokens_per_s=12_000 + noise.gauss(0, 300),
                skipped=step == count // 3,
                wire=wire_totals((6, 12), nbytes=1000, channel_error=0.1, error=0.1),
                eval={"loss": loss, "loss_compressed": loss + 0.1} if last else None,
            )
        )
    return found


def write_run(
    folder: Path, steps: Sequence[StepRecord], *, cuts: Sequence[int] = (6, 12), **changes: Any
) -> Path:
    """A run of two replicas on two hosts, with `changes` of its facts; `steps` are done."""
    folder.mkdir(parents=True, exist_ok=True)
    info = run_info(cuts, folder=folder, replicas=2, **{"total_steps": 40, **changes})
    link = {"sent_nbytes": 10**8, "round_trip_s": 0.03, "retransmitted": 7, "resumed": 1,
            "longest_silence_s": 1.5}  # fmt: skip
    sample = {"target": HOSTS[1], "seconds": 1.0, "sent_Bps": 2e6, "received_Bps": 1e6,
              "round_trip_s": 0.03, "retransmitted": 0, "resumed": 0, "silence_s": 0.0}  # fmt: skip
    trace = [{**sample, "end_s": float(second)} for second in range(1, 20)]
    host = {"name": HOSTS[0], "links": {HOSTS[1]: link}, "trace": trace}
    places = [
        Place(rank=r, host=HOSTS[r % 2], stages=[r % 3], replica=r // 3, shard=0) for r in range(6)
    ]
    Journal(info, places, lambda: [host]).write()
    add_note(folder, "resumed from step 12", 12)
    add_note(folder, f"warning: channel 5 is massive {EVIL}", 20)
    add_note(folder, f"Once upon a time {EVIL}", len(steps), "sample")
    if not (folder / "metrics.jsonl").exists():
        append(folder, steps)
    traces: Traces = {HOSTS[0]: trace}  # type: ignore[dict-item]
    if steps:
        summary = summarize(info, steps, edges_of([host]))
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (folder / "edges.json").write_text(json.dumps(traces), encoding="utf-8")
    return folder


def own_lock(folder: Path, host: str | None = None, process: int = 1) -> None:
    """Whose lock it is, in words: a process of this machine, or of another."""
    owner = {"run": 1, "process": process, "host": host or socket.gethostname()}
    (folder / disk.RUN_LOCK).write_text(json.dumps(owner), encoding="utf-8")


@contextmanager
def trainer(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a folder's lock as a rank does, until it is killed."""
    code = "import sys; from pathlib import Path; from thinpipe.launch.host import disk\n"
    code += "file = Path(sys.argv[1]).open('a'); disk.lock(file); print('held'); sys.stdin.read()"
    own_lock(folder)
    command = [sys.executable, "-P", "-c", code, str(folder / disk.RUN_LOCK)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def append(folder: Path, steps: Sequence[StepRecord]) -> None:
    """As a run that goes on; a resume instead replaces the file."""
    with MetricsWriter(folder / "new", None) as writer:
        for step in steps:
            writer.write(step)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write((folder / "new").read_bytes())
    (folder / "new").unlink()


@contextmanager
def served(*folders: Path, listen: str = "127.0.0.1") -> Iterator[tuple[int, list[str]]]:
    """`thinpipe watch` in a process of its own: its port, and the links that it printed."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "thinpipe.launch", "watch", *map(str, folders)]
    command += ["--listen", f"{listen}:{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            links = [server.stdout.readline().removeprefix("watch at ").strip()]
            assert links[0].startswith("http://")
            until(lambda: _answers(listen.replace("0.0.0.0", "127.0.0.1"), port))
            yield port, links
        finally:
            server.terminate()


def _answers(address: str, port: int) -> bool:
    """Whether something does, and be it with a rejection."""
    try:
        with urllib.request.urlopen(f"http://{address}:{port}/", timeout=60):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
