"""Changes at 8 bits: neighbours remember exactly what was sent, and the mean stays."""

from typing import Any

import torch

from tests.gradcomp.methods.test_decentralized import apart, exchange
from tests.gradcomp.replicas import Replicas

METHOD = "low_precision_decentralized"


def test_neighbours_remember_what_a_replica_holds_bit_for_bit() -> None:
    replicas = Replicas(4, METHOD, {"bucket_mb": 1e-4, "bits": 4})
    for _ in range(10):
        replicas.step()
    states: Any = [sync.state_dict()["averaging"] for sync in replicas.syncs]
    for rank in range(4):
        for bucket in range(2):
            own = states[rank][f"{bucket}-{rank}"]
            for side in ((rank - 1) % 4, (rank + 1) % 4):
                assert torch.equal(states[side][f"{bucket}-{rank}"], own)


def test_the_mean_stays_to_rounding_and_replicas_meet() -> None:
    replicas = apart(5, METHOD, {})
    before = torch.stack(replicas.parameters())
    spread = before.var(0).sum()
    for _ in range(30):
        exchange(replicas)
    after = torch.stack(replicas.parameters())
    assert (after.mean(0) - before.mean(0)).norm() < 0.02 * before.norm()
    assert after.var(0).sum() < 0.02 * spread
