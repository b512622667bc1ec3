"""SparseLoCo: nothing is lost for good."""

import torch
from torch import Tensor

from tests.gradcomp.replicas import all_of
from thinpipe.gradcomp.exchange import ExchangeKey
from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.methods.sparse_loco import Config, SparseLoCo

SIZE, NUMEL = 3, 3 * 4096 + 100


def updates(outers: list[SparseLoCo], distances: list[Tensor], step: int) -> list[Tensor]:
    found = all_of(
        list(zip(outers, distances, strict=True)),
        lambda pair: pair[0].update(0, pair[1], ExchangeKey(step, 0)),
    )
    for outer in outers:
        outer.keep()
    return found


def test_what_was_sent_and_what_is_owed_are_all_there_was() -> None:
    """The law of error feedback: E after + sent = decay E before + distance."""
    config = Config(kept=64, decay=0.95)
    outers = [SparseLoCo(peer, config) for peer in local_peers(SIZE)]
    generator = torch.Generator().manual_seed(1)
    owed = torch.zeros(SIZE, NUMEL)
    for step in range(4):
        distances = [torch.randn(NUMEL, generator=generator) for _ in range(SIZE)]
        found = updates(outers, distances, step)
        assert all(torch.equal(update, found[0]) for update in found)
        target = 0.95 * owed + torch.stack(distances)
        owed = torch.stack([outer.state_dict()["0"] for outer in outers])
        sent = (target - owed).mean(0)
        torch.testing.assert_close(found[0], sent, rtol=1e-5, atol=1e-6)


def test_the_mean_is_over_all_replicas() -> None:
    """Two values a replica, each in a bin of its own: they decode to themselves."""
    distances = [torch.zeros(4096) for _ in range(2)]
    distances[0][7], distances[0][11] = 4.0, 1.0
    distances[1][7], distances[1][9] = 2.0, 6.0
    outers = [SparseLoCo(peer, Config(kept=2)) for peer in local_peers(2)]
    found = updates(outers, distances, 0)[0]
    torch.testing.assert_close(found[[7, 9, 11]], torch.tensor([3.0, 3.0, 0.5]))
    assert int(found.count_nonzero()) == 3
