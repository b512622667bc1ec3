"""Bases as bytes."""

import pytest
import torch

from thinpipe.aqsgd.transform.basis import Basis
from thinpipe.aqsgd.transform.proposal import Proposal, proposal_capacity
from thinpipe.pipeline.wire.coding.entropy import CodingError

WIDTH = 64


def shifts(dimensions: int) -> torch.Tensor:
    return (torch.arange(dimensions) % 4).to(torch.uint8)


def directions(dimensions: int, width: int = WIDTH) -> Proposal:
    generator = torch.Generator().manual_seed(0)
    v_DD = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    models_MK = torch.randint(0, 61, (2, dimensions), generator=generator)
    return Proposal(Basis.nearest(v_DD[:, :dimensions], shifts(dimensions)), models_MK)


def channels() -> Proposal:
    return Proposal(
        Basis.of_channels(torch.arange(WIDTH).flip(0), shifts(WIDTH)), torch.full((2, WIDTH), 20)
    )


@pytest.mark.parametrize(
    "proposal",
    [directions(WIDTH), directions(WIDTH // 2), directions(1), directions(300, 300), channels()],
)
def test_a_basis_arrives_as_it_was_sent(proposal: Proposal) -> None:
    width = len(proposal.basis.entry_DK)
    packed = proposal.packed()
    assert len(packed) <= proposal_capacity(width)
    again = Proposal.unpacked(packed, width)
    assert torch.equal(again.basis.entry_DK, proposal.basis.entry_DK)
    assert torch.equal(again.model_MK, proposal.model_MK)
    assert torch.equal(again.basis.shift_K, proposal.basis.shift_K)
    assert (again.basis.order_D is None) == (proposal.basis.order_D is None)


@pytest.mark.parametrize("width", [64, 768])
def test_a_direction_takes_about_8_bits_an_entry_at_most(width: int) -> None:
    assert 8 * len(directions(width, width).packed()) < 8.1 * width**2


@pytest.mark.parametrize("proposal", [directions(WIDTH // 2), channels()])
@pytest.mark.parametrize("cut", [0, 5, 12, 100, 200, -1])
def test_part_of_a_basis_is_rejected(proposal: Proposal, cut: int) -> None:
    with pytest.raises(CodingError):
        Proposal.unpacked(proposal.packed()[:cut], WIDTH)


def test_another_width_is_rejected() -> None:
    with pytest.raises(CodingError, match="does not fit 32 channels"):
        Proposal.unpacked(directions(WIDTH).packed(), 32)


def test_damaged_bytes_give_an_error_or_a_basis_with_entries_of_at_most_one() -> None:
    packed = directions(WIDTH // 2).packed()
    for place in range(0, len(packed), 7):
        hurt = bytearray(packed)
        hurt[place] ^= 1 << place % 8
        try:
            found = Proposal.unpacked(bytes(hurt), WIDTH).basis
        except CodingError:
            continue
        assert found.dimensions <= WIDTH
        assert int(found.entry_DK.int().abs().max()) <= 1 << 14


def test_an_order_that_is_none_is_rejected() -> None:
    packed = channels().packed()
    with pytest.raises(CodingError, match=f"each of {WIDTH} channels once"):
        Proposal.unpacked(packed[:-4] + packed[-8:-4], WIDTH)
