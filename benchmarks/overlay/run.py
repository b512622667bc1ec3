"""`python -m benchmarks.overlay`: what strangers, broken networks and wrong bytes do to a run.

A run of 4 stages on 4 emulated hosts, 100 Mbit/s and 1 ms each way; strangers sit on a fifth.
"""

import argparse
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Records
from benchmarks.overlay import faults, strangers
from benchmarks.overlay.hosts import HostsRun
from benchmarks.overlay.mutations import mutations
from thinpipe.launch.host.links import NetworkSpec
from thinpipe.launch.overlay import keys
from thinpipe.launch.shaped.network import ShapedNetwork

HOSTS = 4
CONFIG = """
[run]
name = "overlay"
[model]
layers = 8
width = 64
heads = 4
context = 64
[data]
path = "{text}"
sequence_length = 64
train_sequences = 800
eval_sequences = 16
[pipeline]
cuts = [2, 4, 6]
microbatches = 4
device = "cpu"
[[boundary]]
forward = {{ kind = "aqsgd", bits = 4 }}
backward = {{ kind = "direct", bits = 8 }}
[train]
epochs = {epochs}
batch_size = 8
warmup_steps = 10
"""
"""100 steps an epoch."""


def _network() -> ShapedNetwork:
    return ShapedNetwork(NetworkSpec.of(HOSTS + 1, "100mbit", delay="1ms"))


def _start(net: ShapedNetwork, folder: Path, name: str, epochs: int) -> HostsRun:
    text = folder / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(8000)), encoding="utf-8")
    (folder / name).mkdir()
    config = CONFIG.format(text=text, epochs=epochs)
    return HostsRun(net, folder / name, config, hosts=HOSTS)


def _undisturbed(folder: Path, run: HostsRun) -> dict[str, Any]:
    """The same run again, by itself: how many of its losses differ, and its longest step."""
    epochs = max(record.epoch for record in run.records())
    with _network() as net:
        alone = _start(net, folder, "undisturbed", epochs)
        codes = alone.done()
    steps = sorted(record.step_s for record in alone.records()[1:])
    differ = sum(a != b for a, b in zip(run.losses(), alone.losses(), strict=True))
    return {
        "kind": "the same run undisturbed",
        "codes": [*run.codes.values(), *codes.values()],
        "losses": len(alone.losses()),
        "losses_that_differ": differ,
        "median_step_s": steps[len(steps) // 2],
        "longest_s": steps[-1],
    }


def measure_strangers(folder: Path) -> Iterator[dict[str, Any]]:
    """Strangers from before the start to the end."""
    other = folder / "stranger.key"
    keys.new(other)
    started = folder / "started"
    with _network() as net:
        knocking = threading.Thread(
            target=partial(
                net.run,
                lambda _: strangers.knock_until(started.exists, other),
                hosts=[HOSTS],
            )
        )
        knocking.start()
        run = _start(net, folder, "visited", 15)
        run.wait_for_step(3)
        started.touch()
        knocking.join()
        for visit in strangers.visits(run):
            yield asdict(visit)
        run.done()
    yield _undisturbed(folder, run)


def measure_outages(folder: Path) -> Iterator[dict[str, Any]]:
    """What a run outlives."""
    with _network() as net:
        run = _start(net, folder, "disturbed", 16)
        run.wait_for_step(5)
        for healed in faults.healed(net, run):
            yield asdict(healed)
        run.done()
    yield _undisturbed(folder, run)


def measure_ends(folder: Path) -> Iterator[dict[str, Any]]:
    """What ends a run, and how soon."""
    numbers = iter(range(100))
    with _network() as net:

        def start() -> HostsRun:
            return _start(net, folder, f"ended{next(numbers)}", 1000)

        for ended in faults.ended(start):
            yield asdict(ended)
            net.run(faults.restore)


def measure_mutations(folder: Path) -> Iterator[dict[str, Any]]:
    """Wrong bytes."""
    for mutated in mutations(folder):
        yield asdict(mutated)


PARTS = {
    "strangers": measure_strangers,
    "outages": measure_outages,
    "ends": measure_ends,
    "mutations": measure_mutations,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overlay", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--out", type=Path, help="file for JSON lines")
    given = parser.parse_args(arguments)
    records = Records(given.out)
    for part in given.parts:
        with tempfile.TemporaryDirectory() as folder:
            _measure(part, Path(folder), records)


def _measure(part: str, folder: Path, records: Records) -> None:
    for row in PARTS[part](folder):
        records.add({"part": part, "hosts": HOSTS}, row)
        print(", ".join(f"{name} {_word(value)}" for name, value in row.items()), flush=True)


def _word(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "/".join(map(_word, value))
    return f"{value:.2f}" if isinstance(value, float) else str(value)
