"""Speed of the wire kernels against the memory floor and against torch eager, on this machine.

    python -m benchmarks.kernels --json kernels.jsonl [--quick] [--device cuda]

A floor copies as many bytes as the kernel must move, in the same run: every repetition times the
floor and then the kernel, and both are reported by their medians. Outputs are compared with the
reference first; a kernel that differs is rejected. Rates count values; bytes are those that must
move (a cache line that is written is not counted as read). On several threads each has a row.

On a GPU, "delta_encode+copy" is that and the copy of codes and scales to pinned memory: what a
stage does before its link can send. Selection there is torch.topk: no kernel of ours.

Axes: B rows (one per thread), N values per row.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Records, Row, command_line, parse_options
from thinpipe.pipeline.wire.codec import Cached, Noise
from thinpipe.pipeline.wire.kernels import Backend, Codes, KernelSet, load_kernels
from thinpipe.pipeline.wire.kernels.cpu import topk as topk_cpu
from thinpipe.pipeline.wire.pinned import host_bytes

GROUP = 128
SIZES = {"L2": 1 << 17, "L3": 1 << 20, "DRAM": 1 << 24, "64M": 1 << 26}
QUICK = {"bits": [4], "sizes": ["L3", "DRAM"], "threads": [1], "repetitions": 3}
KEPT = 0.01  # of the values, by top-k
Work = Callable[[int], object]  # on one row


class Case(NamedTuple):
    """A kernel call on row `b`, and the bytes that it must move per value."""

    kernel: str
    rounding: str
    nbytes: float
    work: Work


class Buffers:
    """Inputs and outputs of one size, one row per thread."""

    def __init__(
        self, rows: int, numel: int, bits: int, device: str = "cpu", dtype: str = "fp32"
    ) -> None:
        """Fill the inputs with the values and memories of a sample that changed a little."""
        self.rows, self.numel, self.bits, self.dtype = rows, numel, bits, dtype
        self.device, shape = torch.device(device), (rows, numel)
        generator = torch.Generator().manual_seed(0)
        x, change = (torch.randn(shape, generator=generator) for _ in range(2))
        self.x = x.to(self.device, torch.float32 if dtype == "fp32" else torch.bfloat16)
        self.memory = (x + 0.1 * change).to(self.device, torch.bfloat16)
        self.fresh, self.out = torch.zeros_like(self.memory), torch.zeros_like(self.x)
        payload = torch.zeros(rows, bits * numel // 8, dtype=torch.uint8, device=self.device)
        scale = torch.zeros(rows, numel // GROUP, dtype=torch.bfloat16, device=self.device)
        self.codes = Codes(payload, scale, bits, GROUP)

    def row(self, b: int) -> tuple[Tensor, Tensor, Codes, Tensor, Tensor]:
        """x, memory, codes, new memory and output of one row."""
        part = slice(b, b + 1)
        codes = Codes(self.codes.payload_BP[part], self.codes.scale_BK[part], self.bits, GROUP)
        return self.x[part], self.memory[part], codes, self.fresh[part], self.out[part]

    def outputs(self) -> list[Tensor]:
        """Copies of everything that kernels write."""
        return [tensor.clone() for tensor in (*self.codes[:2], self.fresh, self.out)]


def cases(buffers: Buffers, kernels: KernelSet) -> Iterator[Case]:
    """Every kernel at the buffers' size and bits."""
    bits, wide, code = buffers.bits, buffers.x.itemsize, buffers.bits / 8
    key = Noise(1, 2, torch.tensor([3], device=buffers.device))
    for rounding in ("nearest", "stochastic"):
        noise = key if rounding == "stochastic" else None
        if bits == 1 and noise:
            continue
        encode = partial(_encode, buffers, kernels, noise)
        yield Case("quantize", rounding, wide + code, partial(encode, "quantize"))
        yield Case("delta_encode", rounding, wide + 4 + code, partial(encode, "delta_encode"))
        if buffers.device.type == "cuda":
            name = "delta_encode+copy"
            yield Case(name, rounding, wide + 4 + code, _and_copied(buffers, encode))

    def dequantize(b: int) -> None:
        _, _, codes, _, out = buffers.row(b)
        kernels.dequantize(codes, out)

    def delta_decode(b: int) -> None:
        _, memory, codes, fresh, out = buffers.row(b)
        kernels.delta_decode(codes, Cached(memory, fresh), out)

    yield Case("dequantize", "nearest", wide + code, dequantize)
    yield Case("delta_decode", "nearest", wide + 4 + code, delta_decode)


def _encode(buffers: Buffers, kernels: KernelSet, noise: Noise | None, name: str, b: int) -> None:
    x, memory, codes, fresh, _ = buffers.row(b)
    if name == "quantize":
        kernels.quantize(x, codes, noise=noise)
    else:
        kernels.delta_encode(x, Cached(memory, fresh), codes, noise=noise)


def _and_copied(buffers: Buffers, encode: Callable[[str, int], None]) -> Work:
    sources = [tensor.view(torch.uint8) for tensor in buffers.codes[:2]]
    hosts = [host_bytes(source.numel(), buffers.device) for source in sources]

    def work(b: int) -> None:
        encode("delta_encode", b)
        for source, host in zip(sources, hosts, strict=True):
            host.copy_(source.flatten(), non_blocking=True)

    return work


def seconds(work: Work, rows: int, pool: ThreadPoolExecutor) -> float:
    """Wall time of the work on all rows, one thread each; a GPU's is waited for."""
    start = time.perf_counter()
    list(map(work, range(rows)) if rows == 1 else pool.map(work, range(rows)))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measured(case: Case, backend: str, buffers: Buffers, repetitions: int) -> Row:
    """The medians of the floor and of the work, timed in turns after one warm-up."""
    half = int(buffers.numel * case.nbytes / 2)
    room = torch.zeros(2, buffers.rows, half, dtype=torch.uint8, device=buffers.device)
    found = []
    with ThreadPoolExecutor(buffers.rows) as pool:
        for _ in range(repetitions + 1):
            at_floor = seconds(lambda b: room[0, b].copy_(room[1, b]), buffers.rows, pool)
            found.append((at_floor, seconds(case.work, buffers.rows, pool)))
    values = buffers.rows * buffers.numel
    at_floor, at_work = (statistics.median(times) for times in zip(*found[1:], strict=True))
    conditions = {"backend": backend, "bits": buffers.bits, "dtype": buffers.dtype}
    conditions |= {"rounding": case.rounding, "values": values, "threads": buffers.rows}
    numbers = {
        "million values/s": values / at_work / 1e6,
        "GB/s": values * case.nbytes / at_work / 1e9,
        "floor, million values/s": values / at_floor / 1e6,
        "of the floor": at_floor / at_work,
    }
    return Row(case.kernel, numbers, conditions)


def ours(buffers: Buffers, backend: Backend, repetitions: int) -> Iterator[Row]:
    """One of our backends on all cases."""
    for case in cases(buffers, load_kernels(backend, buffers.device)):
        yield measured(case, backend, buffers, repetitions)


def top(buffers: Buffers, repetitions: int) -> Iterator[Row]:
    """Exact selection of the 1 % of largest magnitude, against torch's and numpy's."""
    x_N, kept = buffers.x[0], torch.empty(int(buffers.numel * KEPT))
    mask_M = torch.empty(-(-buffers.numel // 8), dtype=torch.uint8)
    works: dict[str, Work] = {
        "numba": lambda _: topk_cpu.select_top(x_N, mask_M, kept),
        "torch": lambda _: torch.topk(x_N.abs(), len(kept), sorted=False),
        "numpy": lambda _: np.argpartition(x_N.abs().numpy(), -len(kept)),
    }
    for backend, work in works.items():
        yield measured(Case("top_1%", "none", 4.0, work), backend, buffers, repetitions)


def check(bits: int, device: str = "cpu") -> None:
    """Reject kernels whose bytes are not the reference's.

    Raises:
        RuntimeError: naming the kernel.
    """
    buffers = [Buffers(1, 1 << 14, bits, device) for _ in range(2)]
    backends: tuple[Backend, ...] = ("reference", "auto")
    works = [
        cases(each, load_kernels(backend, each.device))
        for each, backend in zip(buffers, backends, strict=True)
    ]
    for pair in zip(*works, strict=True):
        for case in pair:
            case.work(0)
        if not all(map(torch.equal, *(each.outputs() for each in buffers))):
            name, rounding = pair[0][:2]
            raise RuntimeError(f"{name}, {bits} bits, {rounding}: not the reference's")


def run(options: argparse.Namespace) -> Iterator[Row]:
    """All measurements asked for."""
    slow, on_cpu = min(options.repetitions, 5), options.device == "cpu"
    for name in options.sizes:
        for bits in options.bits:
            check(bits, options.device)
            for dtype in ("fp32",) if on_cpu else ("fp32", "bf16"):
                for threads in options.threads if on_cpu else (1,):
                    size = SIZES[name] // threads
                    buffers = Buffers(threads, size, bits, options.device, dtype)
                    yield from ours(buffers, "numba" if on_cpu else "triton", options.repetitions)
            if name in ("L2", "L3"):  # seconds per call beyond
                buffers = Buffers(1, SIZES[name], bits, options.device)
                yield from ours(buffers, "reference", slow)
        if on_cpu:
            yield from top(Buffers(1, SIZES[name], 1), slow)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    command = command_line("benchmarks.kernels", __doc__)
    command.add_argument("--bits", type=int, nargs="+", default=[2, 4, 8])
    command.add_argument("--sizes", nargs="+", default=["L2", "L3", "DRAM"], choices=SIZES)
    command.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    command.add_argument("--repetitions", type=int, default=9)
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parse_options(command, arguments, "quick", QUICK)


def main() -> None:
    """Measure, print, append."""
    options = parse()
    torch.set_num_threads(1)
    records = Records(options.json)
    on_cpu = options.device == "cpu"
    machine = platform.processor() or platform.machine()
    print(f"{machine if on_cpu else torch.cuda.get_device_name()}, torch {torch.__version__}")
    for row in run(options):
        print(row, flush=True)
        records.add({}, row)


if __name__ == "__main__":
    main()
