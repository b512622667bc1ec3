"""What both ends learn besides samples."""

import pytest
import torch

from thinpipe.aqsgd.transform.basis import Basis
from thinpipe.aqsgd.transform.learned import Learned
from thinpipe.aqsgd.transform.proposal import Proposal
from thinpipe.pipeline.wire.coding.entropy import CodingError

WIDTH = 16
NO_SHIFT = torch.zeros(WIDTH, dtype=torch.uint8)


def test_a_basis_in_pieces_is_adopted_with_the_last_one() -> None:
    basis = Basis.nearest(torch.eye(WIDTH), NO_SHIFT)
    data = Proposal(basis, torch.full((2, WIDTH), 20)).packed()
    learned = Learned(WIDTH)
    learned.take_piece(1, 2, data[100:])
    learned.commit()
    assert (learned.version, learned.received) == (0, 1)
    learned.take_piece(0, 2, data[:100])
    learned.discard()  # that step is skipped, so the piece comes again
    assert (learned.version, learned.received) == (0, 1)
    learned.take_piece(0, 2, data[:100])
    learned.commit()
    assert (learned.version, learned.received) == (1, 0)
    assert torch.equal(learned.basis.entry_DK, basis.entry_DK)


def test_a_sender_that_begins_again_is_not_given_pieces_of_another_basis() -> None:
    """A resume in another layout may bring the other end's search, which knows of no pieces."""
    old, new = (
        Proposal(
            Basis.nearest(factor * torch.eye(WIDTH), NO_SHIFT), torch.full((2, WIDTH), 20)
        ).packed()
        for factor in (1.0, -1.0)
    )
    learned = Learned(WIDTH)
    for place in range(3):
        learned.take_piece(place, 4, old[place * 200 : (place + 1) * 200])
    learned.commit()
    for place in range(2):
        learned.take_piece(place, 2, new[place * 300 : place * 300 + 300 + place * 9999])
    learned.commit()
    assert (learned.version, learned.received) == (1, 0)
    assert torch.equal(learned.basis.matrix, -torch.eye(WIDTH))


def test_bytes_that_are_no_basis_are_rejected_when_they_come_not_when_they_count() -> None:
    learned = Learned(WIDTH)
    before = learned.digest()
    learned.take_piece(0, 2, b"\0" * 8)
    with pytest.raises(CodingError, match="a basis of 12 bytes and 0 dimensions does not fit 16"):
        learned.take_piece(1, 2, b"\0" * 4)
    learned.discard()
    assert (learned.version, learned.received, learned.digest()) == (0, 0, before)
