"""Laws of entropy coding with tables that both ends know."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinpipe.pipeline.wire.coding import rans
from thinpipe.pipeline.wire.coding.entropy import CodingError
from thinpipe.pipeline.wire.header import crc32
from thinpipe.pipeline.wire.kernels.rans import BLOCK

SEEDS = st.integers(0, 2**31)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def laplace(symbols: int, widths: tuple[float, ...]) -> rans.Tables:
    """A table per width, each with its peak in the middle."""
    distance_S = (torch.arange(symbols) - symbols // 2).abs()
    counts_KS = torch.stack([1e6 * torch.exp(-distance_S / width) for width in widths]).long()
    return rans.Tables(torch.stack([rans.apportioned(count_S) for count_S in counts_KS]))


def drawn(tables: rans.Tables, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Symbols that follow the tables, and models that change at every value."""
    draws = generator(seed)
    model_N = torch.randint(len(tables.freq_KS), (count,), generator=draws).to(torch.uint8)
    slot_N = torch.randint(4096, (count,), generator=draws)
    return tables.lookup.symbol_KM[model_N.long(), slot_N], model_N


def coded(symbol_N: Tensor, model_N: Tensor | None, tables: rans.Tables) -> Tensor:
    wire = torch.full((rans.capacity(symbol_N.numel(), tables.symbols),), 255, dtype=torch.uint8)
    return wire[: rans.encode(symbol_N, model_N, tables, wire)].clone()


def decoded(wire: Tensor, model_N: Tensor | None, tables: rans.Tables, count: int) -> Tensor:
    out_N = torch.full((count,), 255, dtype=torch.uint8)
    rans.decode(wire, model_N, tables, out_N)
    return out_N


def decoded_one_by_one(
    wire: Tensor, model_N: Tensor | None, tables: rans.Tables, count: int
) -> Tensor:
    """The text of `kernels/rans.py`, symbol by symbol."""
    data, freq_KS = wire.numpy().tobytes(), tables.freq_KS.tolist()
    model_N = torch.zeros(count).long() if model_N is None else model_N
    at, found = 2 * -(-count // BLOCK), list[int]()
    for block in range(-(-count // BLOCK)):
        models = model_N[block * BLOCK : (block + 1) * BLOCK].tolist()
        if int.from_bytes(data[2 * block :][:2], "little") == 0xFFFF:
            planes, nbytes = (tables.symbols - 1).bit_length(), -(-len(models) // 8)
            for i in range(len(models)):
                bits = [data[at + p * nbytes + i // 8] >> i % 8 & 1 for p in range(planes)]
                found.append(sum(bit << p for p, bit in enumerate(bits)))
            at += planes * nbytes
            continue
        states = [int.from_bytes(data[at + 4 * lane :][:4], "little") for lane in range(8)]
        at += 32
        for i, model in enumerate(models):
            x, symbol, start = states[i % 8], 0, 0
            while x % 4096 >= start + freq_KS[model][symbol]:
                start, symbol = start + freq_KS[model][symbol], symbol + 1
            x = freq_KS[model][symbol] * (x // 4096) + x % 4096 - start
            if x < 1 << 16:
                x, at = x << 16 | int.from_bytes(data[at : at + 2], "little"), at + 2
            states[i % 8] = x
            found.append(symbol)
        total = 257 * block + sum(found[block * BLOCK :])
        assert states == [(1 << 16) + total % (1 << 16)] * 8
    assert at == len(data)
    return torch.tensor(found, dtype=torch.uint8)


def entropy_bits(symbol_N: Tensor, model_N: Tensor, tables: rans.Tables) -> float:
    shares = tables.freq_KS[model_N.long(), symbol_N.long()].double() / 4096
    return -float(shares.log2().sum())


@st.composite
def messages(draw: st.DrawFn) -> tuple[Tensor, Tensor | None, rans.Tables]:
    """Any tables, and symbols that need not follow them."""
    models, symbols = draw(st.integers(1, 128)), draw(st.integers(1, 32))
    draws = generator(draw(SEEDS))
    count_KS = torch.randint(1000, (models, symbols), generator=draws) ** draw(st.integers(1, 4))
    tables = rans.Tables(torch.stack([rans.apportioned(count_S) for count_S in count_KS]))
    count = draw(st.integers(0, 40) | st.integers(0, 3000))
    symbol_N, model_N = drawn(tables, count, draw(SEEDS))
    if draw(st.booleans()):
        symbol_N = torch.randint(symbols, (count,), generator=draws).to(torch.uint8)
    return symbol_N, model_N if draw(st.booleans()) else None, tables


@settings(max_examples=60, deadline=None)
@given(messages())
def test_what_was_coded_comes_back_and_bytes_are_those_described(
    message: tuple[Tensor, Tensor | None, rans.Tables],
) -> None:
    symbol_N, model_N, tables = message
    wire = coded(symbol_N, model_N, tables)
    for decoder in (decoded, decoded_one_by_one):
        assert torch.equal(decoder(wire, model_N, tables, len(symbol_N)), symbol_N)


@pytest.mark.parametrize("count", [BLOCK - 1, BLOCK, 2 * BLOCK + 4003])
def test_blocks_come_back(count: int) -> None:
    tables = laplace(16, (0.5, 1.0, 5.0))
    symbol_N, model_N = drawn(tables, count)
    symbol_N[2 * BLOCK :] = 15  # rare: such a block is stored
    wire = coded(symbol_N, model_N, tables)
    for decoder in (decoded, decoded_one_by_one):
        assert torch.equal(decoder(wire, model_N, tables, count), symbol_N)


@pytest.mark.parametrize("symbols", [1, 3, 17, 32])
@pytest.mark.parametrize("count", [0, 1, 9, BLOCK + 1])
def test_the_rarest_symbols_stay_within_the_capacity(count: int, symbols: int) -> None:
    """`encode` would write past the end of `wire` otherwise, or be rejected."""
    tables = laplace(symbols, (0.01,))
    symbol_N = torch.full((count,), symbols - 1, dtype=torch.uint8)
    wire = coded(symbol_N, None, tables)
    assert torch.equal(decoded(wire, None, tables, count), symbol_N)
    bits = (symbols - 1).bit_length()
    assert rans.capacity(count, symbols) <= bits * -(-count // 8) + 2 * -(-count // BLOCK)


@pytest.mark.parametrize(
    ("count", "bits", "most"),
    [
        *((1 << 18, 0.3, 0.015), (1 << 18, 1.0, 0.005), (1 << 18, 2.0, 0.003)),
        *((1 << 18, 3.5, 0.002), (BLOCK, 0.3, 0.015), (BLOCK, 2.0, 0.003)),
        *((4096, 0.3, 0.25), (4096, 2.0, 0.035)),
    ],
)
def test_the_length_is_close_to_the_entropy(count: int, bits: float, most: float) -> None:
    symbols, width = {0.3: (8, 0.259), 1.0: (16, 0.439), 2.0: (16, 0.81), 3.5: (32, 2.13)}[bits]
    tables = laplace(symbols, (width,))
    symbol_N, model_N = drawn(tables, count)
    least = entropy_bits(symbol_N, model_N, tables)
    assert least / count == pytest.approx(bits, rel=0.05)
    assert least < 8 * coded(symbol_N, model_N, tables).numel() < least * (1 + most)


def test_a_table_of_its_own_makes_every_value_cheaper() -> None:
    tables = laplace(32, (0.3, 1.0, 3.0, 8.0))
    symbol_N, model_N = drawn(tables, 50_000)
    together = rans.counted(symbol_N, 32)
    assert coded(symbol_N, model_N, tables).numel() < 0.9 * coded(symbol_N, None, together).numel()


def test_counted_shares_are_those_of_the_symbols() -> None:
    symbol_N, _ = drawn(laplace(16, (1.0,)), 100_003)
    freq_S = rans.counted(symbol_N, 16).freq_KS[0]
    count_S = torch.bincount(symbol_N, minlength=16)
    assert ((freq_S - count_S * 4096 / 100_003).abs() < 1).logical_or(freq_S == 1).all()
    least = -float((count_S * (count_S / 100_003).clamp(min=1e-9).log2()).sum())
    assert -float((count_S * (freq_S / 4096).log2()).sum()) < 1.001 * least


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=32))
def test_any_counts_make_a_table(counts: list[int]) -> None:
    freq_S = rans.apportioned(torch.tensor(counts))
    assert int(freq_S.sum()) == 4096
    assert int(freq_S.min()) >= 1


@pytest.mark.parametrize(("models", "symbols"), [(1, 1), (1, 16), (128, 32)])
def test_tables_travel(models: int, symbols: int) -> None:
    tables = laplace(symbols, tuple(0.1 + 0.1 * k for k in range(models)))
    wire = tables.packed()
    assert wire.numel() == 2 * models * symbols
    assert torch.equal(rans.unpacked(wire, symbols).freq_KS, tables.freq_KS)
    for damaged in (wire[:-1], wire[:-2], torch.cat([wire, wire[:1]]), wire ^ 1, wire[:0]):
        with pytest.raises(CodingError, match="a table in"):
            rans.unpacked(damaged, symbols)


@pytest.mark.parametrize(
    ("freq_KS", "words"),
    [
        (torch.full((1, 16), 255), "add up to"),
        (torch.tensor([[4096, 0]]), "use >= 1"),
        (torch.tensor([[4097, -1]]), "use >= 1"),
        (torch.full((1, 16), 256.0), "use integers"),
        (torch.full((16,), 256), "use integers"),
        (torch.full((1, 64), 64), "64 symbols"),
        (torch.full((129, 16), 256), "129 models"),
        (torch.empty(0, 16, dtype=torch.int64), "0 models"),
    ],
)
def test_tables_are_checked(freq_KS: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rans.Tables(freq_KS)


def test_what_the_tables_do_not_have_is_rejected() -> None:
    tables, symbol_N = laplace(16, (1.0, 2.0)), torch.full((100,), 3, dtype=torch.uint8)
    wire, two_N = torch.empty(100, dtype=torch.uint8), torch.full((100,), 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="symbol 16: the tables have 16"):
        rans.encode(symbol_N + 13, None, tables, wire)
    with pytest.raises(ValueError, match="model 2: the tables have 2"):
        rans.encode(symbol_N, two_N, tables, wire)
    with pytest.raises(ValueError, match="model 2: the tables have 2"):
        rans.decode(wire, two_N, tables, symbol_N)
    with pytest.raises(ValueError, match="99 models for 100 symbols"):
        rans.encode(symbol_N, two_N[1:], tables, wire)
    with pytest.raises(ValueError, match=r"symbols of torch\.int64"):
        rans.encode(symbol_N.long(), None, tables, wire)
    with pytest.raises(ValueError, match="53 bytes: 100 symbols can take 54"):
        rans.encode(symbol_N, None, tables, wire[:53])


def mutated(wire: Tensor, seed: int) -> Tensor:
    dice, data = random.Random(seed), bytearray(wire.tolist())
    at = dice.randrange(len(data))
    match dice.randrange(6):
        case 0:
            data[at] ^= 1 << dice.randrange(8)
        case 1:
            data[at] = dice.randrange(256)
            data[dice.randrange(len(data))] ^= dice.randrange(1, 256)
        case 2:
            del data[at:]
        case 3:
            data += data[: dice.randrange(1, 101)]
        case 4:
            del data[at : at + dice.randrange(1, 21)]
        case _:
            data = bytearray(dice.randbytes(at))
    return torch.tensor([*data], dtype=torch.uint8)


def test_damage_is_noticed() -> None:
    """What decodes nevertheless decodes to other symbols, and is next to nothing."""
    tables, missed = laplace(16, (0.5, 1.0, 3.0)), 0
    for seed in range(40):
        symbol_N, model_N = drawn(tables, 150 + 23 * seed, seed)
        wire = coded(symbol_N, model_N, tables)
        for number in range(125):
            damaged = mutated(wire, 125 * seed + number)
            if torch.equal(damaged, wire):
                continue
            try:
                out_N = decoded(damaged, model_N, tables, len(symbol_N))
            except CodingError:
                continue
            assert int(out_N.max()) < 16
            missed += 1
    assert missed <= 1


@pytest.mark.parametrize("other", [0, 999, 1001, BLOCK + 1000])
def test_another_number_of_symbols_is_rejected(other: int) -> None:
    tables = laplace(16, (1.0,))
    wire = coded(drawn(tables, 1000)[0], None, tables)
    with pytest.raises(CodingError, match=f"do not decode to {other} symbols"):
        decoded(wire, None, tables, other)


def test_swapped_blocks_are_noticed() -> None:
    tables = laplace(16, (1.0,))
    symbol_N, _ = drawn(tables, 2 * BLOCK)
    wire = coded(symbol_N, None, tables)
    head, length = wire[:4], 32 + 2 * (int(wire[0]) + 256 * int(wire[1]))
    first, second = wire[4 : 4 + length], wire[4 + length :]
    swapped = torch.cat([head[2:], head[:2], second, first])
    with pytest.raises(CodingError):
        decoded(swapped, None, tables, 2 * BLOCK)


def test_stored_symbols_that_the_tables_do_not_have_are_rejected() -> None:
    tables = laplace(5, (1.0,))
    wire = coded(torch.full((8,), 4, dtype=torch.uint8), None, tables)
    assert wire.tolist() == [255, 255, 0, 0, 255]
    wire[2] = 1
    with pytest.raises(CodingError):
        decoded(wire, None, tables, 8)


def test_bytes_are_those_of_before() -> None:
    """A change here is a change of the format."""
    tables = laplace(16, (1.0, 2.0))
    symbol_N = (torch.arange(200) * 7 % 5 + 6).to(torch.uint8)
    model_N = (torch.arange(200) % 2).to(torch.uint8)
    wire = coded(symbol_N, model_N, tables)
    assert wire.numel() == 98
    assert crc32(wire) == 425992792
