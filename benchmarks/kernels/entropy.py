"""The rANS coder: bits against the entropy of its tables and against zstd, and speed on one core.

    python -m benchmarks.kernels.entropy --json entropy.jsonl

Symbols are drawn from the models of transform coding (`aqsgd/transform/logistic.py`): all from one,
or each from one of many, as coefficients are. zstd gets two symbols to a byte. Every repetition
encodes, decodes, and copies as many bytes as there are values; reported are medians.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.harness import Records, command_line, format_table
from thinpipe.aqsgd.transform import logistic
from thinpipe.pipeline.wire.coding import rans
from thinpipe.pipeline.wire.coding.entropy import compress
from thinpipe.pipeline.wire.kernels.coefficients import MIDDLE, SYMBOLS

_MODELS = {f"model {model}": (model, model) for model in (9, 13, 18, 25)}
_MANY = {"models 4 to 25": (4, 25)}


@dataclass(frozen=True)
class Row:
    """Bits per value; million values per second of one core."""

    symbols: str
    values: int
    entropy: float
    rans_bits: float
    zstd_bits: float | None
    encode_ms: float
    decode_ms: float
    copy_ms: float

    @property
    def cells(self) -> list[str]:
        """For a table."""
        speed = [f"{self.values / ms / 1e3:,.0f}" for ms in (self.encode_ms, self.decode_ms)]
        over = 100 * (self.rans_bits / self.entropy - 1)
        bits = [f"{self.entropy:.3f}", f"{self.rans_bits:.3f}", f"{over:.1f} %"]
        zstd = "-" if self.zstd_bits is None else f"{self.zstd_bits:.3f}"
        floor = f"{self.copy_ms / self.decode_ms:.3f}"
        return [self.symbols, f"{self.values:,}", *bits, zstd, *speed, floor]


def drawn(models: tuple[int, int], values: int) -> tuple[Tensor, Tensor]:
    """Symbols, and the model of each."""
    generator = torch.Generator().manual_seed(0)
    model_N = torch.randint(models[0], models[1] + 1, (values,), generator=generator)
    share_KS = logistic.tables().freq_KS.double() / 4096
    above_KS = share_KS.cumsum(1)
    place_N = torch.rand(values, generator=generator, dtype=torch.float64)
    symbol_N = torch.searchsorted(above_KS[model_N], place_N[:, None]).flatten()
    return symbol_N.clamp_max(SYMBOLS - 1).to(torch.uint8), model_N.to(torch.uint8)


def measure(name: str, models: tuple[int, int], values: int, repetitions: int) -> Row:
    """Code and decode; refuses to time what does not come back.

    Raises:
        RuntimeError: the decoded symbols are not those that were encoded.
    """
    symbol_N, model_N = drawn(models, values)
    tables, decoded_N = logistic.tables(), torch.empty_like(symbol_N)
    wire = torch.empty(rans.capacity(values), dtype=torch.uint8)
    used = rans.encode(symbol_N, model_N, tables, wire)
    copy_N = torch.empty_like(symbol_N)
    works: tuple[Callable[[], object], ...] = (
        lambda: rans.encode(symbol_N, model_N, tables, wire),
        lambda: rans.decode(wire[:used], model_N, tables, decoded_N),
        lambda: copy_N.copy_(symbol_N),
    )
    taken = [[1e3 * _seconds(work) for work in works] for _ in range(repetitions + 1)]
    if not torch.equal(decoded_N, symbol_N):
        raise RuntimeError(f"{name}: {values} symbols do not come back")
    share_N = tables.freq_KS[model_N.long(), symbol_N.long()].double() / 4096
    encode_ms, decode_ms, copy_ms = (statistics.median(ms) for ms in zip(*taken[1:], strict=True))
    return Row(
        symbols=name,
        values=values,
        entropy=float(-share_N.log2().mean()),
        rans_bits=8 * used / values,
        zstd_bits=None if name in _MANY else _zstd_bits(symbol_N),
        encode_ms=encode_ms,
        decode_ms=decode_ms,
        copy_ms=copy_ms,
    )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _zstd_bits(symbol_N: Tensor) -> float:
    """Of the symbols in half bytes; those beyond are clamped, which makes it easier."""
    half_N = (symbol_N.int() - MIDDLE + 8).clamp(0, 15)
    low_N, high_N = half_N.chunk(2)
    payload = (low_N | high_N << 4).to(torch.uint8)
    length = compress(payload, torch.empty_like(payload))
    return 4.0 if length is None else 8 * length / len(half_N)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    command = command_line("benchmarks.kernels.entropy", __doc__)
    command.add_argument("--values", type=int, nargs="+", default=[1 << 20, 1 << 16, 1 << 12])
    command.add_argument("--repetitions", type=int, default=15)
    options = command.parse_args(arguments)
    torch.set_num_threads(1)
    records, rows = Records(options.json), []
    for values in options.values:
        for name, models in (_MODELS | _MANY).items():
            rows.append(measure(name, models, values, options.repetitions))
            records.add(vars(options) | {"json": None}, asdict(rows[-1]))
    heads = ("symbols", "values", "entropy", "rANS", "over", "zstd", "encode M/s", "decode M/s")
    print(format_table((*heads, "copy / decode"), [row.cells for row in rows]))


if __name__ == "__main__":
    main()
