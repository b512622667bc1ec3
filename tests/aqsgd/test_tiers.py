"""Two ends with memories in any tier and format, of any room, stay bit-identical."""

import contextlib
import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.aqsgd.delays import delay
from thinpipe.aqsgd import coded_memory, delta
from thinpipe.aqsgd.config import AqsgdConfig, build_delta
from thinpipe.aqsgd.delta import DeltaBoundary
from thinpipe.aqsgd.disk import DiskStore, RowFile
from thinpipe.aqsgd.memory import ROWS
from thinpipe.aqsgd.store import RamStore
from thinpipe.launch.checkpoint.state_file import load_state, save_state
from thinpipe.pipeline.config import build_codec

TOKENS, WIDTH = 6, 16
FORMATS: list[Any] = ["bf16", 8]

MakeEnd = Callable[..., DeltaBoundary]


@pytest.fixture
def make_end(tmp_path: Path) -> Iterator[MakeEnd]:
    """One end of a cut; its disk, if it has one, answers after random delays."""
    opened: list[DeltaBoundary] = []

    def make(tier: str, form: Any = "bf16", capacity: int | None = None) -> DeltaBoundary:
        spec = AqsgdConfig(bits=3, memory=form)
        store: Any = RamStore()
        if tier == "disk":
            nbytes = build_codec(form, WIDTH).capacity(TOKENS * WIDTH)
            file = RowFile(tmp_path, nbytes)
            delay(file, "read", "write", dice=random.Random(len(opened)), most_s=1e-3)
            store = DiskStore(file)
        opened.append(build_delta(spec, width=WIDTH, key=3, store=store, capacity=capacity))
        return opened[-1]

    yield make
    for end in opened:
        end.memory.release()


def step(
    ends: tuple[DeltaBoundary, DeltaBoundary],
    ids: list[int],
    number: int,
    *,
    coming: list[int] | None = None,
    keep: bool = True,
    broken: bool = False,
) -> torch.Tensor:
    """One step of two microbatches; returns what the receiver got."""
    generator = torch.Generator().manual_seed(number)
    x_BTD = torch.randn(len(ids), TOKENS, WIDTH, generator=generator)
    if broken:
        x_BTD[0, 0, 0] = torch.nan
    out_BTD = torch.full_like(x_BTD, torch.nan)
    sender, receiver = ends
    for end in ends:
        end.memory.prefetch(torch.tensor(coming or [], dtype=torch.int64))
    parts = (tensor.tensor_split(2) for tensor in (x_BTD, out_BTD, torch.tensor(ids)))
    for x, out, part in zip(*parts, strict=True):
        if len(part):
            assert sender.memory.fingerprints(part).equal(receiver.memory.fingerprints(part))
            plans = [end.plan(part, x.shape, step=number) for end in ends]
            wire = torch.empty(plans[0].capacity, dtype=torch.uint8)
            sender.encode(plans[0], x, wire)
            receiver.decode(plans[1], wire, out)
    for end in ends:
        end.finish_step(keep=keep)
    return out_BTD


@contextlib.contextmanager
def coded_elsewhere() -> Iterator[None]:
    """Rows and messages are coded in memory of their own and copied, as on a GPU."""

    @contextlib.contextmanager
    def written_apart(_: torch.device, wire: torch.Tensor) -> Iterator[torch.Tensor]:
        yield (near := torch.full_like(wire, 255))
        wire.copy_(near)

    def brought(_: torch.device, wire: torch.Tensor) -> torch.Tensor:
        return wire.clone()

    with pytest.MonkeyPatch.context() as patch:
        for module in (delta, coded_memory):
            patch.setattr(module, "brought_to", brought)
        patch.setattr(delta, "written_on", written_apart)
        patch.setattr(coded_memory, "_written", lambda home, _: torch.full_like(home, 255))
        yield


def epochs(count: int) -> list[list[int]]:
    """Nine samples in steps of three, each epoch in a new order."""
    dice = random.Random(1)
    orders = [dice.sample(range(9), 9) for _ in range(count)]
    return [order[i : i + 3] for order in orders for i in (0, 3, 6)]


@pytest.mark.parametrize("form", FORMATS)
def test_every_tier_gives_the_same_values_and_memories(make_end: MakeEnd, form: Any) -> None:
    """A sender on disk with a receiver in RAM, against both in RAM."""
    mixed = make_end("disk", form), make_end("ram", form)
    plain = make_end("ram", form), make_end("disk", form)
    steps = epochs(4)
    for number, ids in enumerate(steps):
        coming = steps[number + 1] if number + 1 < len(steps) else []
        outs = [step(ends, ids, number, coming=coming) for ends in (mixed, plain)]
        assert torch.equal(*outs)
        if number % 4 == 3:  # not always: a digest reads all rows, and reading hides a late fetch
            assert len({end.memory.digest() for end in (*mixed, *plain)}) == 1
    assert len(mixed[0].memory) == 9


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_where_rows_are_coded_changes_nothing(make_end: MakeEnd, form: Any, tier: str) -> None:
    near = make_end(tier, form), make_end(tier, form)
    far = make_end(tier, form), make_end(tier, form)
    for number, ids in enumerate(epochs(3)):
        broken, keep = number == 4, number != 5
        outs = [step(near, ids, number, keep=keep, broken=broken)]
        with coded_elsewhere():
            outs.append(step(far, ids, number, keep=keep, broken=broken))
        assert torch.equal(*(out.nan_to_num(-7) for out in outs))
    assert len({end.memory.digest() for end in (*near, *far)}) == 1


@pytest.mark.parametrize(
    ("form", "tiers"), [("bf16", ("disk", "disk")), (8, ("ram", "disk")), (4, ("disk", "ram"))]
)
def test_a_restart_goes_on_bit_for_bit_even_in_another_tier(
    make_end: MakeEnd, form: Any, tiers: tuple[str, str], tmp_path: Path
) -> None:
    before, after = tiers
    ends = make_end(before, form), make_end(before, form)
    steps = epochs(2)
    for number, ids in enumerate(steps):
        step(ends, ids, number)
    again = make_end(after, form), make_end(after, form)
    for old, new in zip(ends, again, strict=True):
        save_state(tmp_path / "state", old.state_dict())
        new.load_state_dict(load_state(tmp_path / "state", mapped=ROWS))
        (tmp_path / "state").unlink()
        assert new.memory.digest() == old.memory.digest()
        assert new.state_dict()[ROWS].equal(old.state_dict()[ROWS]) or before != after
    for number, ids in enumerate(epochs(3), start=len(steps)):
        assert torch.equal(step(ends, ids, number), step(again, ids, number))
    assert len({end.memory.digest() for end in (*ends, *again)}) == 1


@settings(max_examples=40)
@given(
    coding=st.sampled_from([(1, "nearest"), *product(range(2, 9), ("nearest", "stochastic"))]),
    changes=st.sampled_from([None, "uniform"]),
    memory=st.sampled_from(["fp32", "bf16", 4, 8]),
    first_visit=st.sampled_from(["fp32", "bf16", 4, 8, {"bits": 4}, "same"]),
    capacity=st.integers(0, 9),
    visits=st.lists(
        st.tuples(
            st.lists(st.integers(0, 8), min_size=1, max_size=4, unique=True),
            st.booleans(),
            st.booleans(),
        ),
        max_size=10,
    ),
    forgotten=st.sets(st.integers(0, 8)),
)
def test_both_ends_hold_the_same_whatever_comes(
    coding: tuple[int, str],
    changes: Any,
    memory: Any,
    first_visit: Any,
    capacity: int,
    visits: list[tuple[list[int], bool, bool]],
    forgotten: set[int],
) -> None:
    """What the receiver decoded, of finite samples of steps that count, as far as there is room."""
    bits, rounding = coding
    how: Any = {"bits": bits, "rounding": rounding, "delta": changes}
    spec = AqsgdConfig(**how, memory=memory, first_visit=first_visit)
    sender, receiver = (build_delta(spec, width=WIDTH, key=3, capacity=capacity) for _ in range(2))
    everything = torch.arange(9)
    for number, (ids, keep, broken) in enumerate(visits):
        before = receiver.memory.digest()
        out_BTD = step((sender, receiver), ids, number, keep=keep, broken=broken)
        assert keep or receiver.memory.digest() == before
        assert bool(out_BTD[0].isnan().any()) == broken
        assert not (keep and broken and ids[0] in receiver.memory)
        for sample, out_TD in zip(ids, out_BTD, strict=True):
            if keep and memory == "fp32" and sample in receiver.memory:
                kept_1N = receiver.memory.read(torch.tensor([sample]), TOKENS * WIDTH)
                assert torch.equal(kept_1N[0], out_TD.flatten())
        if number == len(visits) // 2:
            for end in (sender, receiver):
                end.memory.forget(torch.tensor(sorted(forgotten), dtype=torch.int64))
        assert sender.memory.digest() == receiver.memory.digest()
        assert len(sender.memory) <= capacity
        held = sender.memory.fingerprints(everything)
        assert held.equal(receiver.memory.fingerprints(everything))
        assert (held > 0).equal(held != 0)


def test_a_fixed_set_is_found_again_in_every_epoch(make_end: MakeEnd) -> None:
    ends = make_end("ram", capacity=4), make_end("disk", capacity=4)
    found = []
    for number, ids in enumerate(epochs(4)):
        found.append(sum(sample in ends[0].memory for sample in ids))
        step(ends, ids, number)
    assert [sum(found[i : i + 3]) for i in range(0, 12, 3)] == [0, 4, 4, 4]


def test_the_memory_in_ram_never_has_more_rows_than_room_and_a_step(
    make_end: MakeEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    empty = torch.empty

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal made
        made += args == (2 * TOKENS * WIDTH,)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", counted)
    ends = make_end("ram", capacity=4), make_end("ram", capacity=4)
    for number, ids in enumerate(epochs(5)):
        step(ends, ids, number)
    assert 0 < made <= 2 * (4 + 3)


def test_a_smaller_room_after_a_restart_keeps_the_lowest_ids(make_end: MakeEnd) -> None:
    ends = make_end("ram"), make_end("ram")
    step(ends, [5, 1, 4, 2], 0)
    again = make_end("disk", capacity=3)
    again.load_state_dict(ends[0].state_dict())
    assert [sample for sample in range(9) if sample in again.memory] == [1, 2, 4]
    assert again.memory.state_dict()[ROWS].numel() == 3 * 2 * TOKENS * WIDTH


def test_restrict_keeps_samples_of_this_replica_up_to_the_room(make_end: MakeEnd) -> None:
    ends = make_end("ram"), make_end("disk")
    step(ends, [1, 2, 3, 4, 5, 6], 0)
    for end in ends:
        end.memory.restrict(torch.tensor([2, 4, 6, 8]), 2)
        assert [sample for sample in range(9) if sample in end.memory] == [2, 4]
    step(ends, [8, 2], 1)
    assert ends[0].memory.digest() == ends[1].memory.digest()
    assert len(ends[0].memory) == 2


def test_a_sample_visited_twice_differs_from_one_visited_once(make_end: MakeEnd) -> None:
    ends = make_end("ram"), make_end("ram")
    step(ends, [1, 2], 0)
    before = ends[0].memory.fingerprints(torch.tensor([1, 2, 3]))
    assert before[2] == 0
    step(ends, [2], 1)
    after = ends[0].memory.fingerprints(torch.tensor([1, 2]))
    assert (after == before[:2]).tolist() == [True, False]
