"""Speed of the CUDA kernels, and of bringing their packed bytes to the host.

    python -m benchmarks.kernels.gpu --json kernels_gpu.jsonl

Rows have the keys of `benchmarks.kernels`. Kernel "delta_encode+copy" is that and the copy of codes
and scales to pinned memory: what a stage does before its link can send. A floor copies on the
device as many bytes as the kernel must move. Selection on a GPU is torch.topk: no kernel of ours.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import Records, command_line
from benchmarks.kernels.run import Row, publish
from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.kernels import Backend, Codes, KernelSet, load_kernels

GROUP = 128
_MOST_DRAWN = 1 << 20
"""Values that the reference, which draws random numbers block by block, is waited for."""
Work = Callable[[], object]


class Timed(NamedTuple):
    """A call, its name, and the bytes it must move per value."""

    kernel: str
    rounding: str
    nbytes: float
    work: Work


def milliseconds(work: Work, repetitions: int) -> float:
    """Median time on the device after two warm-ups; the first one compiles."""
    found: list[float] = []
    for _ in range(repetitions + 2):
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        found.append(float(start.elapsed_time(end)))
    return statistics.median(found[2:])


def works(kernels: KernelSet, numel: int, bits: int, dtype: torch.dtype) -> Iterator[Timed]:
    """The kernels on one row of values with a bf16 memory."""
    device = torch.device("cuda")
    x = torch.randn(1, numel, device=device).to(dtype)
    memory = (x.float() + 0.1 * torch.randn(1, numel, device=device)).bfloat16()
    fresh, out = torch.empty_like(memory), torch.empty_like(x)
    payload = torch.empty(1, bits * numel // 8, dtype=torch.uint8, device=device)
    scale = torch.empty(1, numel // GROUP, dtype=torch.bfloat16, device=device)
    codes, code, wide = Codes(payload, scale, bits, GROUP), bits / 8, x.itemsize
    host = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in (payload, scale)]
    key = Noise(1, 2, torch.tensor([3], device=device))
    for rounding, noise in (("nearest", None), ("stochastic", key)):
        quantize = partial(kernels.quantize, x, codes, noise=noise)
        encode = partial(kernels.delta_encode, x, memory, codes, fresh, noise=noise)
        yield Timed("quantize", rounding, wide + code, quantize)
        yield Timed("delta_encode", rounding, wide + 4 + code, encode)
        both = partial(_and_copy, encode, (payload, scale), host)
        yield Timed("delta_encode+copy", rounding, wide + 4 + code, both)
    dequantize = partial(kernels.dequantize, codes, out)
    decode = partial(kernels.delta_decode, codes, memory, fresh, out)
    yield Timed("dequantize", "nearest", wide + code, dequantize)
    yield Timed("delta_decode", "nearest", wide + 4 + code, decode)


def _and_copy(work: Work, sources: tuple[Tensor, ...], targets: list[Tensor]) -> None:
    work()
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def rows(numel: int, bits: int, dtype: torch.dtype, repetitions: int) -> Iterator[Row]:
    """Triton's kernels, and the reference as torch runs it."""
    backends: tuple[Backend, ...] = ("triton", "reference")
    for backend in backends:
        for timed in works(load_kernels(backend, torch.device("cuda")), numel, bits, dtype):
            if backend == "reference" and timed.rounding == "stochastic" and numel > _MOST_DRAWN:
                continue
            half = int(numel * timed.nbytes / 2)
            source, target = (torch.empty(half, dtype=torch.uint8, device="cuda") for _ in "st")
            at_floor = milliseconds(partial(target.copy_, source), repetitions)
            taken = milliseconds(timed.work, repetitions)
            yield Row(
                kernel=timed.kernel,
                backend=backend,
                bits=bits,
                dtype={torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype],
                rounding=timed.rounding,
                elements=numel,
                threads=0,
                melem_s=round(numel / taken / 1e3, 1),
                gb_s=round(numel * timed.nbytes / taken / 1e6, 2),
                floor_melem_s=round(numel / at_floor / 1e3, 1),
                share=round(at_floor / taken, 3),
            )


def main() -> None:
    """The command line."""
    command = command_line("benchmarks.kernels.gpu", __doc__)
    command.add_argument("--bits", type=int, nargs="+", default=[2, 4, 8], choices=range(2, 9))
    command.add_argument("--millions", type=int, nargs="+", default=[1, 16, 64])
    command.add_argument("--repetitions", type=int, default=20)
    options = command.parse_args()
    if not torch.cuda.is_available():
        command.error("there is no CUDA device; benchmarks.kernels.run measures the CPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    records = Records(options.json)
    for millions in options.millions:
        for bits in options.bits:
            for dtype in (torch.float32, torch.bfloat16):
                for row in rows(millions << 20, bits, dtype, options.repetitions):
                    publish(row, records)


if __name__ == "__main__":
    main()
