"""Speed of the wire kernels against the memory floor and against others, on this machine.

    python -m benchmarks.kernels --json kernels.jsonl

A floor moves the same bytes without arithmetic, in the same run: every repetition times the floor
and then the kernel, and both are reported by their medians. It is a plain loop without software
prefetch, so a share may exceed 1; compare GB/s with the row "copy" as well. Outputs are compared
with the reference first; a kernel that differs is refused. Rates count values; bytes are those
that must move (a cache line that is written is not counted as read).

Axes: B rows (one per thread), N values per row.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from pipeline.wire.codec import Noise
from pipeline.wire.kernels import Backend, Codes, KernelSet, load_kernels

GROUP = 128
SIZES = {"L2": 1 << 17, "L3": 1 << 20, "DRAM": 1 << 24}
CPU = torch.device("cpu")
Work = Callable[[int], object]  # runs one row


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
    peer: bool


@dataclass(frozen=True)
class Case:
    """A kernel call: what it does to row `b`, its floor, and the bytes it must move per value."""

    kernel: str
    bits: int
    rounding: str
    nbytes: float
    floor: Work
    run: Callable[[KernelSet], Work]


@numba.njit(nogil=True)
def _floor_read(x: Any, payload: Any, bits: Any) -> int:
    """Read every word of x, write the payload."""
    seen = np.uint32(0)
    for block in range(x.size // 1024):
        values = x[block * 1024 : (block + 1) * 1024]
        out = payload[block * 128 * bits : (block + 1) * 128 * bits]
        for i in range(1024):
            seen |= values[i]
        for i in range(out.size):
            out[i] = np.uint8(values[i])
    return int(seen)


@numba.njit(nogil=True)
def _floor_update(x: Any, memory: Any, fresh: Any, payload: Any, bits: Any) -> None:
    """Read x and the memory, write the memory and the payload."""
    for block in range(x.size // 1024):
        values = x[block * 1024 : (block + 1) * 1024]
        old, new = memory[block * 1024 :][:1024], fresh[block * 1024 :][:1024]
        out = payload[block * 128 * bits : (block + 1) * 128 * bits]
        for i in range(1024):
            new[i] = old[i] ^ np.uint16(values[i])
        for i in range(out.size):
            out[i] = np.uint8(values[i])


@numba.njit(nogil=True)
def _floor_write(payload: Any, out: Any, bits: Any) -> None:
    """Read the payload, write the values."""
    for block in range(out.size // 1024):
        source = payload[block * 128 * bits :][:128]
        for plane in range(8):
            target = out[block * 1024 + plane * 128 :][:128]
            for i in range(128):
                target[i] = np.uint32(source[i])


@numba.njit(nogil=True)
def _floor_apply(payload: Any, memory: Any, fresh: Any, out: Any, bits: Any) -> None:
    """Read the payload and the memory, write the memory and the values."""
    for block in range(out.size // 1024):
        source = payload[block * 128 * bits :][:128]
        for plane in range(8):
            start = block * 1024 + plane * 128
            old, new = memory[start:][:128], fresh[start:][:128]
            target = out[start:][:128]
            for i in range(128):
                new[i] = old[i] + np.uint16(source[i])
                target[i] = np.uint32(source[i])


@dataclass
class Buffers:
    """Inputs and outputs of one size, one row per thread."""

    rows: int
    numel: int
    bits: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (self.rows, self.numel)
        self.x = torch.randn(shape, generator=generator)
        self.memory = (self.x + 0.1 * torch.randn(shape, generator=generator)).bfloat16()
        self.fresh, self.out = torch.zeros_like(self.memory), torch.zeros(shape)
        payload = torch.zeros(self.rows, self.bits * self.numel // 8, dtype=torch.uint8)
        scale = torch.zeros(self.rows, self.numel // GROUP, dtype=torch.bfloat16)
        self.codes = Codes(payload, scale, self.bits, GROUP)
        load_kernels("numba", CPU).quantize(self.x, self.codes, noise=None)

    def row_codes(self, b: int) -> Codes:
        payload, scale, bits, group = self.codes
        return Codes(payload[b : b + 1], scale[b : b + 1], bits, group)

    def words(self, name: str) -> Any:
        """A buffer's rows as unsigned integers of its width."""
        tensor: Tensor = self.codes.payload_BP if name == "payload" else getattr(self, name)
        kind = {4: torch.uint32, 2: torch.uint16, 1: torch.uint8}[tensor.itemsize]
        return tensor.view(kind).numpy()


def _quantize_row(buffers: Buffers, noise: Noise | None, kernels: KernelSet) -> Work:
    return lambda b: kernels.quantize(buffers.x[b : b + 1], buffers.row_codes(b), noise=noise)


def _encode_row(buffers: Buffers, noise: Noise | None, kernels: KernelSet) -> Work:
    x, m, f = buffers.x, buffers.memory, buffers.fresh
    return lambda b: kernels.delta_encode(
        x[b : b + 1], m[b : b + 1], buffers.row_codes(b), f[b : b + 1], noise=noise
    )


def cases(buffers: Buffers) -> Iterator[Case]:
    """Every kernel at the buffers' size and bits."""
    x, m, f, o, p = (buffers.words(name) for name in ("x", "memory", "fresh", "out", "payload"))
    bits, code = buffers.bits, buffers.bits / 8

    def rows(b: int) -> tuple[Tensor, ...]:
        tensors = (buffers.x, buffers.memory, buffers.fresh, buffers.out)
        return tuple(tensor[b : b + 1] for tensor in tensors)

    for rounding in ("nearest", "stochastic"):
        noise = Noise(1, 2, torch.tensor([3])) if rounding == "stochastic" else None
        yield Case(
            *("quantize", bits, rounding, 4 + code),
            floor=lambda b: _floor_read(x[b], p[b], bits),
            run=partial(_quantize_row, buffers, noise),
        )
        yield Case(
            *("delta_encode", bits, rounding, 8 + code),
            floor=lambda b: _floor_update(x[b], m[b], f[b], p[b], bits),
            run=partial(_encode_row, buffers, noise),
        )
    yield Case(
        *("dequantize", bits, "nearest", 4 + code),
        floor=lambda b: _floor_write(p[b], o[b], bits),
        run=lambda k: lambda b: k.dequantize(buffers.row_codes(b), rows(b)[3]),
    )
    yield Case(
        *("delta_decode", bits, "nearest", 8 + code),
        floor=lambda b: _floor_apply(p[b], m[b], f[b], o[b], bits),
        run=lambda k: lambda b: k.delta_decode(buffers.row_codes(b), *rows(b)[1:]),
    )


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


def measure(case: Case, backend: Backend, buffers: Buffers, repetitions: int) -> Row:
    """One of our backends on one case."""
    work = case.run(load_kernels(backend, CPU))
    at_floor, taken = medians(case.floor, work, buffers.rows, repetitions=repetitions)
    return row_of(case, backend, buffers, at_floor, taken)


def row_of(case: Case, backend: str, buffers: Buffers, at_floor: float, taken: float) -> Row:
    """A measurement from seconds."""
    values = buffers.rows * buffers.numel
    return Row(
        kernel=case.kernel,
        backend=backend,
        bits=case.bits,
        dtype="fp32",
        rounding=case.rounding,
        elements=values,
        threads=buffers.rows,
        melem_s=round(values / taken / 1e6, 1),
        gb_s=round(values * case.nbytes / taken / 1e9, 2),
        floor_melem_s=round(values / at_floor / 1e6, 1),
        share=round(at_floor / taken, 3),
        peer=backend not in ("numba", "reference"),
    )


def peers(buffers: Buffers, repetitions: int) -> Iterator[Row]:
    """FBGEMM's quantizer, which ships with torch, and the reference through torch.compile."""
    by_name = {(case.kernel, case.rounding): case for case in cases(buffers)}
    values_KG = buffers.x.view(-1, GROUP)
    prepack: Any = {
        2: torch.ops.quantized.embedding_bag_2bit_prepack,
        4: torch.ops.quantized.embedding_bag_4bit_prepack,
        8: torch.ops.quantized.embedding_bag_byte_prepack,
    }[buffers.bits]
    case = by_name["quantize", "nearest"]
    timed = medians(case.floor, lambda _: prepack(values_KG), 1, repetitions=repetitions)
    yield row_of(case, "fbgemm", buffers, *timed)
    reference = load_kernels("reference", CPU)
    for name in ("quantize", "delta_encode"):
        case = by_name[name, "nearest"]
        compiled = torch.compile(case.run(reference))
        timed = medians(case.floor, compiled, 1, repetitions=repetitions)
        yield row_of(case, "torch.compile", buffers, *timed)


def copy(buffers: Buffers, repetitions: int) -> Row:
    """torch's fp32 copy: the bandwidth that a floor written as a plain loop may miss."""
    work = copying(buffers)
    case = Case("copy", 32, "none", 8.0, floor=work, run=lambda _: work)
    return row_of(
        case, "torch", buffers, *medians(work, work, buffers.rows, repetitions=repetitions)
    )


def copying(buffers: Buffers) -> Work:
    """Copies a row of x."""
    return lambda b: buffers.out[b].copy_(buffers.x[b])


def check(bits: int) -> None:
    """Refuse to time kernels whose bytes are not the reference's.

    Raises:
        RuntimeError: naming the kernel.
    """
    found = []
    backends: tuple[Backend, ...] = ("reference", "numba")
    for backend in backends:
        buffers = Buffers(1, 1 << 14, bits)
        results = []
        for case in cases(buffers):
            case.run(load_kernels(backend, CPU))(0)
            tensors = (buffers.codes.payload_BP, buffers.codes.scale_BK, buffers.fresh, buffers.out)
            results.append((case, [tensor.clone() for tensor in tensors]))
        found.append(results)
    for (case, expected), (_, got) in zip(*found, strict=True):
        if not all(map(torch.equal, expected, got)):
            raise RuntimeError(f"{case.kernel}, {bits} bits, {case.rounding}: not the reference's")


def run(options: argparse.Namespace) -> Iterator[Row]:
    """All measurements asked for."""
    for bits in options.bits:
        check(bits)
        for name in options.sizes:
            for threads in options.threads:
                buffers = Buffers(threads, SIZES[name] // threads, bits)
                yield copy(buffers, options.repetitions)
                for case in cases(buffers):
                    yield measure(case, "numba", buffers, options.repetitions)
            buffers = Buffers(1, SIZES[name], bits)
            if options.peers:
                for case in cases(buffers):
                    yield measure(case, "reference", buffers, 5)
                yield from peers(buffers, 5)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="append JSON lines to this file")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--peers", action="store_true", help="also torch eager, compile, FBGEMM")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
    for row in run(options):
        print(
            f"{row.kernel:13} {row.backend:14} {row.bits} bits {row.rounding:10} "
            f"{row.elements:>9} values {row.threads} threads "
            f"{row.melem_s:8.0f} M/s {row.gb_s:6.1f} GB/s  {row.share:5.2f} of the floor",
            flush=True,
        )
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
