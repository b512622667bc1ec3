"""What steps cost more while the run's live page is under attack.

    python -m benchmarks.watch_load --json out.jsonl

Trains two stages on this machine, with `thinpipe watch` beside them. Clients come and go in blocks
of seconds: some follow the page, the others send half a request and no more. Each block under
attack is compared with the blocks before and after it, so a machine that changes slowly does not
count.
The clients have what CPU the run and its page leave: in earnest they are elsewhere.

Times of steps vary by more than a percent from block to block. How long ranks were ready and had to
wait for a core is what the kernel counts, and varies little: the other column.
"""

import contextlib
import multiprocessing
import os
import random
import re
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import psutil

from benchmarks.harness import Records, Row, command_line, parse_options, summary
from thinpipe.launch.view.report.metrics import StepRecord, read_metrics

_SETTLE_S, _PATIENCE_S, _READERS = 1.0, 120.0, 20
_STREAM = b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"
_HALF = b"GET / HTTP/1.1\r\nX: "
_COLUMNS = {
    "steps longer %": "+.2f",
    "from %": "+.2f",
    "to %": "+.2f",
    "waiting for a core %": "+.2f",
    "and without %": "+.2f",
    "step s": ".3f",
    "blocks": ".0f",
}
_RUN = """
[run]
folder = "{folder}/run"
[model]
layers = 4
width = 64
[data]
path = "{folder}/text.txt"
[pipeline]
device = "cpu"
cuts = [2]
[train]
epochs = 1000
batch_size = 8
"""


def measure(blocks: int, block_s: float, clients: int) -> Row:
    """A run under attack in every other block."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        folder = Path(name)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        text = "".join(f"{number} squared is {number**2}.\n" for number in range(20_000))
        (folder / "text.txt").write_text(text, encoding="utf-8")
        (folder / "run.toml").write_text(_RUN.format(folder=name), encoding="utf-8")
        words = [sys.executable, "-P", "-m", "thinpipe.launch", "train", str(folder / "run.toml")]
        with subprocess.Popen([*words, "--show", "-1"]) as run:
            try:
                metrics = folder / "run/metrics.jsonl"
                _wait(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 50, run)
                ranks = _ranks(run.pid)
                with _page(metrics.parent, port):
                    bounds = _blocks(metrics, ranks, port, 2 * blocks + 1, block_s, clients)
                if run.poll() is not None:
                    raise RuntimeError(f"the run ended with {run.returncode}")
            finally:
                run.terminate()
                run.wait(_PATIENCE_S)
        return _row(read_metrics(metrics), bounds, clients)


@contextlib.contextmanager
def _page(folder: Path, port: int) -> Iterator[None]:
    """It has the CPU time that ranks leave."""
    words = [sys.executable, "-P", "-m", "thinpipe.launch", "watch", str(folder)]
    words += ["--listen", f"127.0.0.1:{port}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, stdout=pipe, start_new_session=True, preexec_fn=_give_way
    ) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()  # it listens
            yield
        finally:
            server.terminate()


def _give_way() -> None:
    """Let this process, which leads a session, have only the CPU time that others leave.

    Linux shares CPUs among sessions first (`sched_autogroup`), and `nice` counts only within one.
    """
    os.nice(19)
    with contextlib.suppress(OSError):  # no such kernel
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")


@dataclass(frozen=True)
class _Block:
    """Its first step and the one after its last, and the share of it that ranks had no core."""

    first: int
    stop: int
    waiting: float


def _ranks(parent: int) -> list[int]:
    found = psutil.Process(parent).children(recursive=True)
    return [child.pid for child in found if re.fullmatch(r"thinpipe \d+", child.name())]


def _waited_s(ranks: Sequence[int]) -> float:
    """Seconds in which threads of ranks were ready and had no core, so far."""
    files = [file for rank in ranks for file in Path(f"/proc/{rank}/task").glob("*/schedstat")]
    return sum(int(file.read_text(encoding="ascii").split()[1]) for file in files) / 1e9


def _blocks(
    metrics: Path, ranks: Sequence[int], port: int, number: int, block_s: float, clients: int
) -> list[_Block]:
    """Every other one is under attack."""
    context = multiprocessing.get_context("spawn")
    attack, over = context.Event(), context.Event()
    attacker = context.Process(target=_clients, args=(port, clients, attack, over))
    attacker.start()
    bounds = []
    try:
        for block in range(number):
            (attack.set if block % 2 else attack.clear)()
            time.sleep(_SETTLE_S)
            first, before_s = metrics.read_bytes().count(b"\n"), _waited_s(ranks)
            time.sleep(block_s)
            waiting = (_waited_s(ranks) - before_s) / (block_s * len(ranks))
            bounds.append(_Block(first, metrics.read_bytes().count(b"\n"), waiting))
            if not attacker.is_alive():
                raise RuntimeError("the clients ended early")
    finally:
        over.set()
        attacker.join(_PATIENCE_S)
    return bounds


def _clients(port: int, number: int, attack: Event, over: Event) -> None:
    """While it is on, so many clients; those that are closed come back, every second."""
    os.setsid()
    _give_way()
    with selectors.DefaultSelector() as there:
        while not over.is_set():
            if not attack.is_set():
                for key in [*there.get_map().values()]:
                    _leave(there, key.fileobj)
                attack.wait(0.1)
                continue
            while len(there.get_map()) < number:
                client = socket.create_connection(("127.0.0.1", port), _PATIENCE_S)
                client.sendall(_STREAM if len(there.get_map()) < _READERS else _HALF)
                there.register(client, selectors.EVENT_READ)
            again_s = time.monotonic() + 1.0
            while (left_s := again_s - time.monotonic()) > 0 and attack.is_set():
                for key, _ in there.select(min(left_s, 0.1)):
                    _take(there, key.fileobj)


def _take(there: selectors.BaseSelector, client: object) -> None:
    assert isinstance(client, socket.socket)
    with contextlib.suppress(OSError):
        if client.recv(1 << 16):
            return
    _leave(there, client)


def _leave(there: selectors.BaseSelector, client: object) -> None:
    assert isinstance(client, socket.socket)
    there.unregister(client)
    client.close()


def _wait(there: Callable[[], bool], run: "subprocess.Popen[bytes]") -> None:
    limit_s = time.monotonic() + _PATIENCE_S
    while not there():
        if run.poll() is not None or time.monotonic() > limit_s:
            raise RuntimeError("the run ended early, or has no 50 steps yet")
        time.sleep(0.1)


def _row(records: Sequence[StepRecord], blocks: Sequence[_Block], clients: int) -> Row:
    """Each block under attack beside the mean of its neighbours; 95 % of resampled means."""
    means = [statistics.fmean(one.step_s for one in records[b.first : b.stop]) for b in blocks]
    ratios = [2 * means[at] / (means[at - 1] + means[at + 1]) for at in range(1, len(means), 2)]
    draw = random.Random(0)
    drawn = sorted(statistics.fmean(draw.choices(ratios, k=len(ratios))) for _ in range(10_000))
    longer, low, high = (100 * (x - 1) for x in (statistics.fmean(ratios), drawn[250], drawn[-251]))
    waiting = [100 * block.waiting for block in blocks]
    numbers: dict[str, float | None] = {
        "steps longer %": longer,
        "from %": low,
        "to %": high,
        "waiting for a core %": statistics.fmean(waiting[1::2]),
        "and without %": statistics.fmean(waiting[0::2]),
        "step s": statistics.fmean(means[0::2]),
        "blocks": len(ratios),
    }
    return Row(f"{clients} clients", numbers, detail={"means_s": means, "waiting %": waiting})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparison from the command line."""
    command = command_line("benchmarks.watch_load", __doc__)
    command.add_argument("--blocks", type=int, default=100, help="under attack (default 100)")
    command.add_argument("--block-s", type=float, default=3.0, help="seconds of each (default 3)")
    command.add_argument("--clients", type=int, default=1000, help=f"{_READERS} of them follow")
    options = parse_options(command, arguments, "quick", {"blocks": 15})
    records = Records(options.json)
    row = measure(options.blocks, options.block_s, options.clients)
    records.add({"block_s": options.block_s}, row)
    print(summary([row], _COLUMNS))


if __name__ == "__main__":
    main()
