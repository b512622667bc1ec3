"""What ranks of a site forward to each other is taken apart with care."""

import pytest
import torch

from thinpipe.gradcomp.exchange import ExchangeKey, Frames
from thinpipe.gradcomp.sharded.sites import divided
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.exchange_header import TO_SERVER
from thinpipe.pipeline.wire.header import DesyncError

FRAMES = Frames(ExchangeKey(1, 0), Cast("fp32"))
MESSAGES = [FRAMES.pack(torch.full((n,), float(n)), None, TO_SERVER, n) for n in (3, 5)]
BUNDLE = torch.cat(MESSAGES)


def test_forwarded_messages_are_those_that_were_sent() -> None:
    for found, sent in zip(divided(BUNDLE, 2, 1), MESSAGES, strict=True):
        assert torch.equal(found, sent)


@pytest.mark.parametrize("cut", [0, 3, 47, len(MESSAGES[0]), len(MESSAGES[0]) + 20])
def test_a_bundle_that_was_cut_is_rejected(cut: int) -> None:
    with pytest.raises(DesyncError, match="rank 1 of this site forwarded"):
        divided(BUNDLE[:cut], 2, 1)


def test_more_than_was_agreed_is_rejected() -> None:
    with pytest.raises(DesyncError, match="20 bytes more, not 2 messages"):
        divided(torch.cat([BUNDLE, torch.zeros(20, dtype=torch.uint8)]), 2, 1)
