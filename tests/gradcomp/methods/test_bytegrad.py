"""ByteGrad: a quarter of a ring's bytes, an error of at most half a level on each way."""

import torch
from torch import nn

from tests.gradcomp.methods.test_allreduce import expected, summed
from tests.gradcomp.replicas import Replicas, all_of
from thinpipe.gradcomp.gradient_sync import GradientSync
from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.methods.bytegrad import Config, build


def test_sums_are_within_a_level_on_each_way() -> None:
    found = summed(Replicas(3, "bytegrad", {}))
    level = 2 * 3 * expected().abs().max() / 127
    for gradient in found:
        assert (gradient - expected()).abs().max() < level
        assert torch.equal(gradient, found[0])


def test_it_sends_a_quarter_of_a_ring() -> None:
    numel, peers = 1 << 16, local_peers(2)
    weights = [nn.Parameter(torch.zeros(numel)) for _ in peers]
    syncs = [build(Config(), [weight], peer) for weight, peer in zip(weights, peers, strict=True)]
    for weight in weights:
        weight.grad = torch.randn(numel)

    def exchange(sync: GradientSync) -> None:
        sync.begin_step(0, 0)
        sync.before_step()

    all_of(syncs, exchange)
    sent = sum(peer.bytes_sent for peer in peers)
    assert 3.9 < 2 * 4 * numel / sent < 4
