"""CocktailSGD's compressor beside a torch transcription of the published one, in the same run.

    python -m benchmarks.kernels.sparse --json results.jsonl

One vector of parameters on one core: what a replica does before it sends (draw and gather the
subset's change, top-k, quantize, assemble the message), after it has received (`apply_exchanged`),
and what the server of the vector does with the messages of several replicas. The published
replica's work, transcribed from its description: a boolean mask of every tenth coordinate, rolled
by one a step; the masked difference in fp16; torch.topk of its magnitudes; a mask packed to bits;
4-bit codes with an fp16 scale per strided bucket of 128; their decoding; the masked subtraction
from x. It is timed with the same threads. Bytes are those of real messages.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Records, command_line, format_table, quantiles
from thinpipe.pipeline.wire.sparse import SparseCodec
from thinpipe.pipeline.wire.subset import Subset, largest_size, random_subset

_BUCKET = 128


@dataclass(frozen=True)
class Row:
    """Milliseconds of one piece of work, and what was sent."""

    work: str
    method: str
    p20: float
    p50: float
    p80: float
    nbytes: int | None


@dataclass
class Vectors:
    """A replica's parameters and the shared base, some steps of small updates apart."""

    numel: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.base = torch.randn(self.numel, generator=generator)
        self.x = self.base + 0.01 * torch.randn(self.numel, generator=generator)


class Published:
    """The published worker on one vector: every 1 / p-th value, the flags moving on by one a step.

    The base is fp16, as there, and the subset is a boolean mask as long as the vector.
    """

    def __init__(self, vectors: Vectors, *, fraction: float, keep: float, bits: int) -> None:
        self._x_N, self._base_N = vectors.x.clone(), vectors.base.half()
        self._keep, self._bits = keep, bits
        self._chosen_N = torch.zeros(vectors.numel, dtype=torch.bool)
        self._chosen_N[:: int(1 / fraction)] = True

    def encode(self, step: int) -> int:
        """Compress x's change, subtract what is sent from x; returns the bytes of the message."""
        self._chosen_N = self._chosen_N.roll(1)
        change_n = (self._x_N[self._chosen_N] - self._base_N[self._chosen_N]).half()
        kept = int(self._keep * change_n.numel()) // _BUCKET * _BUCKET
        _, index_k = torch.topk(change_n.abs(), kept, sorted=False)
        flag_n = torch.zeros(change_n.shape, dtype=torch.uint8)
        flag_n[index_k] = 1
        mask = np.packbits(flag_n.numpy())
        payload, scale_C = self._quantize(change_n[flag_n.bool()])
        decoded_n = torch.zeros_like(change_n)
        decoded_n[torch.from_numpy(np.unpackbits(mask)[: len(flag_n)]).bool()] = self._dequantize(
            payload, scale_C
        )
        self._x_N[self._chosen_N] -= decoded_n
        return int(mask.nbytes + payload.nbytes + scale_C.nbytes)

    def _quantize(self, kept_k: Tensor) -> tuple[np.ndarray, Tensor]:
        """A bucket is a column: values a whole message apart share a scale."""
        value_GC = kept_k.float().view(_BUCKET, -1)
        half = 1 << (self._bits - 1)
        scale_C = value_GC.abs().amax(0, keepdim=True).half()
        code_GC = (value_GC / (scale_C.float() + 1e-6) * half).round().clamp(-half, half - 1)
        fields = np.unpackbits((code_GC + half).to(torch.uint8).numpy().reshape(-1, 1), axis=1)
        return np.packbits(fields[:, 8 - self._bits :]), scale_C

    def _dequantize(self, payload: np.ndarray, scale_C: Tensor) -> Tensor:
        fields = np.unpackbits(payload)[: scale_C.numel() * _BUCKET * self._bits]
        code = np.packbits(
            np.pad(fields.reshape(-1, self._bits), ((0, 0), (8 - self._bits, 0))), axis=1
        )
        half = 1 << (self._bits - 1)
        level_GC = torch.from_numpy(code).view(_BUCKET, -1).float() - half
        return (level_GC / half * scale_C.float()).flatten().half()


class Ours:
    """One replica, and the server of its vector, with the buffers that an exchange reuses."""

    def __init__(self, vectors: Vectors, codec: SparseCodec, fraction: float) -> None:
        self._x, self._base, self._codec, self._fraction = vectors.x, vectors.base, codec, fraction
        size = largest_size(vectors.numel, fraction)
        self._wire = torch.empty(codec.capacity(size), dtype=torch.uint8)
        self._error = torch.zeros(vectors.numel)
        self._value, self._seen, self._left = (torch.empty(size) for _ in range(3))

    def encode(self, step: int) -> Tensor:
        """Draw the subset and write the replica's message."""
        subset = self._subset(step)
        change = self._value[: subset.size]
        subset.gather(self._x, change, self._base)
        return self._wire[: self._codec.encode(change, self._wire)]

    def mean(self, messages: Sequence[Tensor], count: int, step: int) -> Tensor:
        """The server's answer to the step's message from `count` replicas, and its error."""
        subset = self._subset(step)
        total, seen, left = (t[: subset.size] for t in (self._value, self._seen, self._left))
        self._codec.decode(messages[step], total)
        for _ in range(count - 1):
            self._codec.decode_add(messages[step], total)
        subset.gather(self._error, left)
        left += total.div_(count)
        length = self._codec.encode(left, self._wire, seen)
        subset.scatter(left.sub_(seen), self._error)
        return self._wire[:length]

    def apply_exchanged(self, sent: Tensor, mean: Tensor, step: int) -> None:
        """Decode what was sent and the answer, and apply both."""
        subset = self._subset(step)
        sent_n, mean_n = self._value[: subset.size], self._seen[: subset.size]
        self._codec.decode(sent, sent_n)
        self._codec.decode(mean, mean_n)
        subset.apply_exchanged(sent_n, mean_n, self._x, self._base)

    def _subset(self, step: int) -> Subset:
        numel = self._x.numel()
        return random_subset(numel, fraction=self._fraction, seed=1, step=step, bucket=0)


def milliseconds(work: Callable[[int], object], repetitions: int) -> dict[str, float]:
    """20, 50 and 80 % quantiles over steps, after two to warm up."""
    found = []
    for step in range(repetitions + 2):
        start = time.perf_counter()
        work(step)
        found.append(1e3 * (time.perf_counter() - start))
    return quantiles(found[2:])


def check(codec: SparseCodec) -> None:
    """Refuse to time kernels whose bytes are not the reference's.

    Raises:
        RuntimeError: they differ.
    """
    messages = []
    for same in (codec, replace(codec, backend="reference")):
        messages.append(Ours(Vectors(100_001), same, 0.1).encode(3))
    if not torch.equal(*messages):
        raise RuntimeError(f"{codec}: the numba kernels' message is not the reference's")


def run(options: argparse.Namespace) -> Iterator[Row]:
    """All rows; the published compressor first."""
    vectors = Vectors(options.numel)
    published = Published(vectors, fraction=options.fraction, keep=options.keep, bits=options.bits)
    taken = milliseconds(published.encode, options.repeat)
    yield Row("replica: encode", "published", **taken, nbytes=published.encode(0))
    for coding in ("none", "zstd"):
        codec = SparseCodec(options.keep, options.bits, coding=coding)
        check(codec)
        ours = Ours(Vectors(options.numel), codec, options.fraction)
        yield from our_rows(ours, coding, options)


def our_rows(ours: Ours, coding: str, options: argparse.Namespace) -> Iterator[Row]:
    """Each piece of work of one exchange."""
    name, repeat = f"ours, {coding}", options.repeat
    messages = [ours.encode(step).clone() for step in range(repeat + 2)]
    taken = milliseconds(ours.encode, repeat)
    yield Row("replica: encode", name, **taken, nbytes=len(messages[0]))
    for count in options.replicas:
        mean = partial(ours.mean, messages, count)
        taken, nbytes = milliseconds(mean, repeat), len(mean(0))
        yield Row(f"server: mean of {count}", name, **taken, nbytes=nbytes)
    taken = milliseconds(
        lambda step: ours.apply_exchanged(messages[step], messages[step], step), repeat
    )
    yield Row("replica: apply_exchanged", name, **taken, nbytes=None)


def table(rows: Sequence[Row], numel: int) -> str:
    """Times, how often the published encoder's, and bits per parameter and direction."""
    published = rows[0].p50
    cells = []
    for row in rows:
        bits = None if row.nbytes is None else 8 * row.nbytes / numel
        times = f"{published / row.p50:.1f}x" if row.work == rows[0].work else ""
        sent = ["", ""] if bits is None else [f"{bits:.4f}", f"{32 / bits:.0f}x"]
        spread = [f"{value:.2f}" for value in (row.p20, row.p50, row.p80)]
        cells.append([f"{row.work}, {row.method}", *spread, times, *sent])
    heads = ["work", "ms, 20 %", "50 %", "80 %", "faster", "bits/param", "less than fp32"]
    return format_table(heads, cells)


def main() -> None:
    """The command line."""
    command = command_line("benchmarks.kernels.sparse", __doc__)
    command.add_argument("--numel", type=int, default=20_971_520)
    command.add_argument("--fraction", type=float, default=0.1)
    command.add_argument("--keep", type=float, default=0.2)
    command.add_argument("--bits", type=int, default=4)
    command.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    command.add_argument("--repeat", type=int, default=15)
    options = command.parse_args()
    torch.set_num_threads(1)
    records = Records(options.json)
    config = {name: value for name, value in vars(options).items() if name != "json"}
    rows = []
    for row in run(options):
        rows.append(row)
        records.add(config, asdict(row))
    print(table(rows, options.numel))


if __name__ == "__main__":
    main()
