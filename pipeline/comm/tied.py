"""Keeps the copies of a weight that the first and the last rank of a pipeline share equal."""

import torch
from torch import Tensor, nn

from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.transport import TIED, Transport
from thinpipe.pipeline.wire.checksum import CHECKSUM_NBYTES, digest_of, opened, sealed


class TiedWeight:
    """This rank's copy. Both get the sum of their gradients, added in the same order."""

    def __init__(self, weight: nn.Parameter, transport: Transport) -> None:
        """Both ends call it alike."""
        mesh = transport.mesh
        self.weight, self.is_first, self.nbytes_sent = weight, mesh.position == 0, 0
        peer = mesh.rank_at(mesh.pipeline_ranks - 1 if self.is_first else 0)
        name = f"tied weight, rank {mesh.rank} and rank {peer}"
        down, up = (transport.link(peer, TIED + way, name) for way in (0, 1))
        self._outgoing, self._incoming = (down, up) if self.is_first else (up, down)
        self._exchanges = 0

    def begin_alike(self) -> None:
        """Where the two copies were drawn with other bits, take those of the first stage."""
        mine = self.weight.detach().cpu()
        digest = torch.tensor([digest_of(mine)], dtype=torch.float64)
        if torch.equal(self._exchange(digest), digest):
            return
        theirs = self._exchange(mine)
        if not self.is_first:
            self.weight.data.copy_(theirs)

    def restart(self) -> None:
        """Exchanges count from 0 again: one was abandoned, or the other end is new."""
        self._exchanges = 0

    def sum_gradients(self) -> None:
        """Replace the gradient by the sum of both.

        Raises:
            TransportError: the other end is gone, or its gradient came damaged.
        """
        assert self.weight.grad is not None
        mine = self.weight.grad.cpu()
        theirs = self._exchange(mine)
        both = mine + theirs if self.is_first else theirs + mine
        self.weight.grad = both.to(self.weight.device)
        self.nbytes_sent += mine.nbytes

    def _exchange(self, mine: Tensor) -> Tensor:
        number, self._exchanges = self._exchanges, self._exchanges + 1
        for link in (self._outgoing, self._incoming):
            link.begin_pass(number)
        self._incoming.expect(0, mine.nbytes + CHECKSUM_NBYTES)
        self._outgoing.send(0, sealed(mine, number))
        data = opened(self._incoming.take(0), number)
        if data is None:
            raise TransportError(
                f"the other copy's gradient of a tied weight is damaged (exchange {number})"
            )
        return data.view(mine.dtype).view(mine.shape)
