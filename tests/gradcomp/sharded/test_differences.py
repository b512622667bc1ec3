"""Weights sent as differences: what ranks remember is equal, and errors do not add up."""

from itertools import pairwise

import torch

from thinpipe.gradcomp.sharded.differences import Remembered
from thinpipe.gradcomp.sharded.qsdp import value_codec
from thinpipe.pipeline.wire.codec import Noise


def test_a_value_that_rests_is_remembered_exactly_in_the_end() -> None:
    """Three ranks, in this process; parts of 100 values, of which the second are not remembered."""
    codec, sizes = value_codec(2, "shift", 50), [100, 7]
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(3 * size, generator=generator) for size in sizes]
    memory = Remembered(sizes, [0], 3)
    assert memory.empty
    memory.add([torch.zeros(107) for _ in range(3)])
    errors = []
    for step in range(12):
        parts = [torch.cat([tensor.view(3, -1)[rank] for tensor in whole]) for rank in range(3)]
        for rank, part in enumerate(parts):
            memory.subtract(part, rank)
            wire = torch.zeros(1, codec.capacity(100), dtype=torch.uint8)
            row = part[None, :100]
            codec.encode(row, wire, row, noise=Noise(1, step, torch.tensor([rank])))
        memory.add(parts)
        gathered = torch.cat([part[:100] for part in parts])
        assert all(torch.equal(part[100:], whole[1].view(3, -1)[r]) for r, part in enumerate(parts))
        errors.append(float((gathered - whole[0]).abs().max()))
    assert all(b < 0.75 * a for a, b in pairwise(errors))
    assert errors[-1] < 1e-3 * errors[0]


def test_rows_of_all_ranks_make_the_memory_whole_again() -> None:
    memory = Remembered([4, 2, 3], [0, 2], 2)
    memory.add([torch.arange(9.0), -torch.arange(9.0)])
    again = [Remembered([4, 2, 3], [0, 2], 2) for _ in range(2)]
    for rank, one in enumerate(again):
        one.load_state_dict(memory.state_dict(rank))
        assert not one.empty
        assert one.state_dict(rank).keys() == memory.state_dict(rank).keys()
    rows = [one.row_parts(rank)[rank] for rank, one in enumerate(again)]
    for one in again:
        one.keep_parts(rows)
        assert all(map(torch.equal, one.tensors, memory.tensors))
    fresh = Remembered([4, 2, 3], [0, 2], 2)
    fresh.load_state_dict({})
    assert fresh.empty
