"""Speed of the wire kernels against the memory floor and against torch eager, on this machine.

    python -m benchmarks.kernels --json kernels.jsonl [--quick]
    python -m benchmarks.kernels.report kernels.jsonl --figure kernels.png

A floor moves the same bytes without arithmetic, in the same run: every repetition times the floor
and then the kernel, and both are reported by their medians. Compare GB/s with the row "copy" as
well. Outputs are compared with the reference first; a kernel that differs is refused. Rates count
values; bytes are those that must move (a cache line that is written is not counted as read). On
several threads each has a row. On a GPU, floors are copies of as many bytes on the device.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
import torch

from benchmarks.harness import Records, command_line, parse_options
from benchmarks.kernels import floors
from benchmarks.kernels.cases import CPU, Buffers, Case, Work, cases, words
from thinpipe.pipeline.wire.kernels import Backend, load_kernels
from thinpipe.pipeline.wire.kernels.cpu import topk as topk_cpu

SIZES = {"L2": 1 << 17, "L3": 1 << 20, "DRAM": 1 << 24}
QUICK = {"bits": [4], "sizes": ["L3", "DRAM"], "threads": [1], "repetitions": 3}
KEPT = 0.01  # of the values, by top-k


@dataclass(frozen=True)
class Row:
    """One measurement: rates in million values (and 10^9 bytes) per second, over all threads."""

    kernel: str
    backend: str
    bits: int
    dtype: str
    rounding: str
    elements: int
    threads: int
    melem_s: float
    gb_s: float
    floor_melem_s: float
    share: float


def seconds(work: Work, rows: int, pool: ThreadPoolExecutor) -> float:
    """Wall time of the work on all rows, one thread each."""
    start = time.perf_counter()
    if rows == 1:
        work(0)
    else:
        list(pool.map(work, range(rows)))
    return time.perf_counter() - start


def medians(floor: Work, work: Work, rows: int, *, repetitions: int) -> tuple[float, float]:
    """Median seconds of the floor and of the work, timed in turns after one warm-up."""
    found: list[tuple[float, float]] = []
    with ThreadPoolExecutor(rows) as pool:
        for _ in range(repetitions + 1):
            found.append((seconds(floor, rows, pool), seconds(work, rows, pool)))
    return (
        statistics.median(pair[0] for pair in found[1:]),
        statistics.median(pair[1] for pair in found[1:]),
    )


def row_of(case: Case, backend: str, buffers: Buffers, taken: tuple[float, float]) -> Row:
    """A measurement from the seconds of the floor and of the work."""
    values, (at_floor, at_work) = buffers.rows * buffers.numel, taken
    return Row(
        kernel=case.kernel,
        backend=backend,
        bits=case.bits,
        dtype="fp32",
        rounding=case.rounding,
        elements=values,
        threads=buffers.rows,
        melem_s=round(values / at_work / 1e6, 1),
        gb_s=round(values * case.nbytes / at_work / 1e9, 2),
        floor_melem_s=round(values / at_floor / 1e6, 1),
        share=round(at_floor / at_work, 3),
    )


def ours(buffers: Buffers, backend: Backend, repetitions: int) -> Iterator[Row]:
    """One of our backends on all cases."""
    for case in cases(buffers):
        work = case.run(load_kernels(backend, CPU))
        taken = medians(case.floor, work, buffers.rows, repetitions=repetitions)
        yield row_of(case, backend, buffers, taken)


def copy(buffers: Buffers, repetitions: int) -> Row:
    """torch's fp32 copy: the bandwidth that a floor written as a plain loop may miss."""

    def work(b: int) -> None:
        buffers.out[b].copy_(buffers.x[b])

    case = Case("copy", 32, "none", 8.0, floor=work, run=lambda _: work)
    return row_of(
        case, "torch", buffers, medians(work, work, buffers.rows, repetitions=repetitions)
    )


def top(buffers: Buffers, repetitions: int) -> Iterator[Row]:
    """Exact selection of the 1 % of largest magnitude, against torch's and numpy's."""
    x_N, kept = buffers.x[0], torch.empty(int(buffers.numel * KEPT))
    mask_M, flat = torch.empty(-(-buffers.numel // 8), dtype=torch.uint8), words(buffers.x)[0]
    works: dict[str, Work] = {
        "numba": lambda _: topk_cpu.select_top(x_N, mask_M, kept),
        "torch": lambda _: torch.topk(x_N.abs(), len(kept), sorted=False),
        "numpy": lambda _: np.argpartition(x_N.abs().numpy(), -len(kept)),
    }

    def floor(_: int) -> int:
        return int(floors.read(flat))

    case = Case("top_1%", 32, "none", 4.0, floor, run=lambda _: floor)
    for backend, work in works.items():
        taken = medians(floor, work, 1, repetitions=repetitions)
        yield row_of(case, backend, buffers, taken)


def check(bits: int) -> None:
    """Refuse to time kernels whose bytes are not the reference's.

    Raises:
        RuntimeError: naming the kernel.
    """
    found = []
    backends: tuple[Backend, ...] = ("reference", "numba")
    for backend in backends:
        buffers, results = Buffers(1, 1 << 14, bits), []
        for case in cases(buffers):
            case.run(load_kernels(backend, CPU))(0)
            results.append((case, buffers.outputs()))
        found.append(results)
    for (case, expected), (_, got) in zip(*found, strict=True):
        if not all(map(torch.equal, expected, got)):
            raise RuntimeError(f"{case.kernel}, {bits} bits, {case.rounding}: not the reference's")


def run(options: argparse.Namespace) -> Iterator[Row]:
    """All measurements asked for."""
    slow = min(options.repetitions, 5)
    for name in options.sizes:
        for bits in options.bits:
            check(bits)
            for threads in options.threads:
                buffers = Buffers(threads, SIZES[name] // threads, bits)
                yield copy(buffers, options.repetitions)
                yield from ours(buffers, "numba", options.repetitions)
            if name != "DRAM":  # seconds per call there
                yield from ours(Buffers(1, SIZES[name], bits), "reference", slow)
        yield from top(Buffers(1, SIZES[name], 1), slow)


def publish(row: Row, records: Records) -> None:
    """Print a measurement as a line, and record it."""
    print(
        f"{row.kernel:19} {row.backend:14} {row.bits:2} bits {row.dtype} {row.rounding:10} "
        f"{row.elements:>9} values {row.threads} threads "
        f"{row.melem_s:8.0f} M/s {row.gb_s:7.1f} GB/s  {row.share:5.2f} of the floor",
        flush=True,
    )
    records.add({}, asdict(row))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    command = command_line("benchmarks.kernels", __doc__)
    command.add_argument("--bits", type=int, nargs="+", default=[2, 4, 8])
    command.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    command.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    command.add_argument("--repetitions", type=int, default=9)
    return parse_options(command, arguments, "quick", QUICK)


def main() -> None:
    """Measure, print, append."""
    options = parse()
    torch.set_num_threads(1)
    records = Records(options.json)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
    for row in run(options):
        publish(row, records)
