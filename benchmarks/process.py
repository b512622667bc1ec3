"""Effect of a rank's process settings: malloc's thresholds, and a core left for messages.

    python -m benchmarks.process --json process.jsonl

Each setting runs in processes of its own, in rotation. "malloc": plain operations on large tensors
and a training step, with glibc's defaults and after `keep_freed_memory`. "threads": matrix products
while another thread encodes changes continuously, by the number of torch's threads.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Records, format_table, quantiles
from thinpipe.launch.distributed.elastic import keep_freed_memory
from thinpipe.launch.host.resources import usable_cores
from thinpipe.pipeline.models.transformer import TransformerConfig, build_layers
from thinpipe.pipeline.wire.uniform import Uniform

Result = dict[str, float]


def _milliseconds(work: Callable[[], object], repetitions: int) -> float:
    found = []
    for turn in range(repetitions + 2):
        start = time.perf_counter()
        work()
        if turn >= 2:
            found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def malloc(kept: bool, *, repetitions: int, width: int) -> Result:
    """Times, page faults and memory of one process."""
    if kept and not keep_freed_memory():
        raise RuntimeError("malloc's thresholds are set by the environment, or there are none")
    torch.set_num_threads(1)
    x = torch.randn(16 << 20)
    plain_ms = _milliseconds(lambda: x * 2 + 1, repetitions)
    config = TransformerConfig(layers=2, width=width, heads=8, context=256)
    stage = build_layers(config, 0, 2, seed=0, device="cpu")
    tokens = torch.randint(256, (16, 256), generator=torch.Generator().manual_seed(0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def step() -> None:
        torch.autograd.backward(stage(tokens).square().mean())
        stage.zero_grad()

    step_ms = _milliseconds(step, repetitions)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "64 MB operation [ms]": plain_ms,
        "training step [ms]": step_ms,
        "page faults per step": (used.ru_minflt - before) / (repetitions + 2),
        "peak memory [MB]": used.ru_maxrss / 1024,
    }


def threads(computing: int, *, repetitions: int, width: int) -> Result:
    """Matrix products with and without a concurrent encoding thread."""
    torch.set_num_threads(computing)
    a, b = torch.randn(2 * width, 2 * width), torch.randn(2 * width, 2 * width)
    alone_ms = _milliseconds(lambda: a @ b, repetitions)
    codec, x = Uniform(4, 128), torch.randn(1, 1 << 20)
    memory, fresh = x.bfloat16(), torch.empty(1, 1 << 20, dtype=torch.bfloat16)
    wire = torch.empty(1, codec.capacity(1 << 20), dtype=torch.uint8)
    codec.encode_change(x, memory, wire, fresh, noise=None)
    stop, encoded = threading.Event(), 0

    def encode() -> None:
        nonlocal encoded
        while not stop.is_set():
            codec.encode_change(x, memory, wire, fresh, noise=None)
            encoded += 1

    thread = threading.Thread(target=encode)
    thread.start()
    start = time.perf_counter()
    beside_ms = _milliseconds(lambda: a @ b, repetitions)
    seconds = time.perf_counter() - start
    stop.set()
    thread.join()
    return {
        "product alone [ms]": alone_ms,
        "product beside encoding [ms]": beside_ms,
        "encoded [M values/s]": encoded * x.numel() / seconds / 1e6,
    }


def run_isolated(kind: str, setting: int, options: argparse.Namespace) -> Result:
    """One measurement in a fresh process."""
    sizes = [str(number) for number in (options.repetitions, options.width)]
    command = [sys.executable, "-m", "benchmarks.process", "--one", kind, str(setting), *sizes]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: Result = json.loads(done.stdout)
    return result


def measure(kind: str, settings: list[int], options: argparse.Namespace) -> None:
    """Measure all settings in rotation; print and record the medians."""
    found: dict[int, list[Result]] = {setting: [] for setting in settings}
    for _ in range(options.rounds):
        for setting in settings:
            found[setting].append(run_isolated(kind, setting, options))
    names = list(found[settings[0]][0])
    lines = []
    for setting, results in found.items():
        spread = {name: quantiles([result[name] for result in results]) for name in names}
        config: dict[str, Any] = {"kind": kind, "setting": setting, "width": options.width}
        options.records.add(config, spread)
        lines.append([str(setting), *(f"{spread[name]['p50']:.1f}" for name in names)])
    print(format_table([kind, *names], lines), flush=True)


def main() -> None:
    """The command line; it starts itself with `--one`."""
    if sys.argv[1:2] == ["--one"]:
        kind, *numbers = sys.argv[2:]
        setting, repetitions, width = map(int, numbers)
        if kind == "malloc":
            result = malloc(bool(setting), repetitions=repetitions, width=width)
        else:
            result = threads(setting, repetitions=repetitions, width=width)
        print(json.dumps(result))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write JSON lines to this new file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    options.records = Records(options.json)
    measure("malloc", [0, 1], options)
    measure("threads", list(range(1, usable_cores() + 1)), options)


if __name__ == "__main__":
    main()
