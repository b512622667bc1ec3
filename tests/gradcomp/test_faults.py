"""An exchange that fails, anywhere: it raises, and parameters are as they were before it."""

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gradcomp.replicas import Replicas, all_of
from thinpipe.gradcomp.peers import LocalPeers, local_peers
from thinpipe.gradcomp.registry import method_names
from thinpipe.pipeline.comm.errors import TransportError

METHODS = [name for name in method_names() if name != "none"]


@dataclass
class HearingPeers(LocalPeers):
    """Waits for a message for as long as no replica has failed, and then no longer."""

    failed: threading.Event = field(default_factory=threading.Event)

    def _receive(self, peer: int, capacity: int) -> Tensor:
        mailbox = self.mailboxes[peer, self.rank]
        while not self.failed.is_set():
            try:
                return mailbox.get(timeout=0.01)
            except queue.Empty:
                continue
        return super()._receive(peer, capacity)


@dataclass
class FailingPeers:
    """Fails in exchange number `fail_at`, before or after its messages have left."""

    inner: HearingPeers
    fail_at: int = -1
    late: bool = False
    calls: int = 0

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def bytes_sent(self) -> int:
        return self.inner.bytes_sent

    def exchange(self, outgoing: Mapping[int, Tensor], capacity: int) -> dict[int, Tensor]:
        self.calls += 1
        if self.calls != self.fail_at:
            return self.inner.exchange(outgoing, capacity)
        if self.late:
            self.inner.exchange(outgoing, capacity)
        self.inner.failed.set()
        raise TransportError("replica 1 -> replica 0: cut")


def outcome(sync: Any, name: str) -> str:
    try:
        getattr(sync, name)()
    except TransportError as error:
        return str(error)
    return "done"


def start(method: str, options: dict[str, Any]) -> tuple[Replicas, FailingPeers]:
    """Three replicas after a good step; the second one's end can be made to fail."""
    failed = threading.Event()
    peers: list[Any] = [
        HearingPeers(rank, 3, peer.mailboxes, timeout_s=0.1, failed=failed)
        for rank, peer in enumerate(local_peers(3))
    ]
    peers[1] = FailingPeers(peers[1])
    replicas = Replicas(3, method, {"bucket_mb": 1e-4, **options}, peers=peers)
    replicas.step()
    with_pending = [sync.state_dict() for sync in replicas.syncs]  # waits for what is under way
    assert with_pending
    return replicas, peers[1]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "cocktail"])
def test_gradients_that_did_not_arrive_move_nothing(method: str, call: int, late: bool) -> None:
    replicas, failing = start(method, {})
    per_step = failing.calls
    failing.fail_at, failing.late = per_step + min(call, per_step), late
    before = replicas.parameters()
    replicas.backward()
    told = all_of(replicas.syncs, lambda sync: outcome(sync, "before_step"))
    assert told[1] == "replica 1 -> replica 0: cut"
    for old, new in zip(before, replicas.parameters(), strict=True):
        assert torch.equal(old, new)
    again = all_of(replicas.syncs, lambda sync: outcome(sync, "before_step"))
    assert again[1] == told[1]  # it does not go on as if nothing had been


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("delayed", [False, True])
def test_cocktail_is_before_or_after_an_exchange(delayed: bool, call: int, late: bool) -> None:
    options = {"subset": 1.0, "topk": 0.5, "delayed": delayed}
    replicas, failing = start("cocktail", options)
    replicas.step()
    [sync.state_dict() for sync in replicas.syncs]
    assert failing.calls == 2 * 4  # two buckets, two ways each
    failing.fail_at, failing.late = failing.calls + call, late
    replicas.backward()
    all_of(replicas.syncs, lambda sync: sync.before_step())
    replicas.optimize()
    before, global_before = replicas.parameters(), replicas.global_parameters()
    told = all_of(replicas.syncs, lambda sync: outcome(sync, "after_step"))
    if delayed:
        assert set(told) == {"done"}
        told = all_of(replicas.syncs, lambda sync: outcome(sync, "before_step"))
    assert told[1] == "replica 1 -> replica 0: cut"
    for rank in (r for r in range(3) if told[r] != "done"):
        assert torch.equal(before[rank], replicas.parameters()[rank])
        assert torch.equal(global_before[rank], replicas.global_parameters()[rank])
    late_enough = [rank for rank in range(3) if told[rank] == "done"]
    assert not late_enough or (call == 4 and late)  # its last messages had left
