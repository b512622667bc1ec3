"""An exchange that fails, anywhere: it raises, and parameters are as they were before it."""

import queue
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gradcomp.replicas import Replicas, Through, all_of
from thinpipe.gradcomp.local_peers import LocalPeers, local_peers
from thinpipe.gradcomp.registry import load_method, method_names
from thinpipe.pipeline.comm.errors import TransportError

GRADIENTS = [name for name in method_names() if load_method(name).REPLICAS_EQUAL]
AVERAGES = ["decentralized", "low_precision_decentralized"]
CUT = "replica 1 -> replica 0: cut"


@dataclass
class PatientPeers(LocalPeers):
    """Waits for messages until a replica has failed, and then for `timeout_s`."""

    failed: threading.Event = field(default_factory=threading.Event)

    def _take(self, peer: int, lane: int) -> tuple[int, Tensor]:
        mailbox = self.mailboxes[peer, self.rank, lane]
        while not self.failed.is_set():
            try:
                return mailbox.get(timeout=0.01)
            except queue.Empty:
                continue
        return super()._take(peer, lane)


@dataclass
class FailingPeers(Through):
    """Fails in exchange number `fail_at`, before or after its messages have left."""

    fail_at: int = -1
    late: bool = False
    calls: int = 0
    counting: threading.Lock = field(default_factory=threading.Lock)

    def exchange(
        self, outgoing: Mapping[int, Tensor], sources: Collection[int], capacity: int, lane: int = 0
    ) -> dict[int, Tensor]:
        with self.counting:
            self.calls += 1
            call = self.calls
        if call != self.fail_at:
            return super().exchange(outgoing, sources, capacity, lane)
        if self.late:
            super().exchange(outgoing, sources, capacity, lane)
        self.inner.failed.set()
        raise TransportError(CUT)


def outcomes(replicas: Replicas, call: Callable[[Any], Any]) -> list[str]:
    """What `call` raises on each replica, or "done"."""

    def outcome(sync: Any) -> str:
        try:
            call(sync)
        except TransportError as error:
            return str(error)
        return "done"

    return all_of(replicas.syncs, outcome)


def global_copies(replicas: Replicas) -> list[Tensor]:
    syncs: list[Any] = replicas.syncs
    every = [sync._all() if hasattr(sync, "_all") else sync._buckets for sync in syncs]
    return [torch.cat([bucket.global_N for bucket in buckets]) for buckets in every]


def start(method: str, options: dict[str, Any]) -> tuple[Replicas, FailingPeers]:
    """Three replicas after a good step; the second one's end can be made to fail."""
    failed = threading.Event()
    peers: list[Any] = [
        PatientPeers(rank, 3, peer.mailboxes, timeout_s=1.0, failed=failed)
        for rank, peer in enumerate(local_peers(3))
    ]
    peers[1] = FailingPeers(peers[1])
    fields = load_method(method).Config.model_fields
    several = {"bucket_mb": 1e-4} if "bucket_mb" in fields else {}
    replicas = Replicas(3, method, {**several, **options}, peers=peers)
    replicas.step()
    wait(replicas)
    return replicas, peers[1]


def wait(replicas: Replicas) -> None:
    """Until no exchange is under way."""
    for sync in replicas.syncs:
        sync.state_dict()


@pytest.mark.parametrize(("call", "late"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("method", [*GRADIENTS, *AVERAGES])
def test_what_did_not_arrive_moves_nothing(method: str, call: int, late: bool) -> None:
    replicas, failing = start(method, {"delayed": False} if method == "demo" else {})
    per_step = failing.calls or 1  # averages begin in the second
    failing.fail_at, failing.late = failing.calls + min(call, per_step), late
    before = replicas.parameters()
    replicas.backward()
    first = outcomes(replicas, lambda sync: sync.before_step())
    assert first[1] == CUT
    for rank in range(3) if method in GRADIENTS else [1]:
        assert torch.equal(before[rank], replicas.parameters()[rank])
    again = outcomes(replicas, lambda sync: sync.before_step())
    assert again[1] == first[1]  # it does not go on as if nothing had been


@pytest.mark.parametrize(
    ("method", "overlap", "late"),
    [("diloco", 0, False), ("diloco", 1, True), ("sparse_loco", 1, False)],
)
def test_a_fragment_that_did_not_arrive_moves_nothing(
    method: str, overlap: int, late: bool
) -> None:
    replicas, failing = start(method, {"interval": 2, "overlap": overlap})
    replicas.step()
    failing.fail_at, failing.late = failing.calls + 1, late
    before, global_before = replicas.parameters(), global_copies(replicas)
    found = outcomes(replicas, lambda sync: sync.begin_step(2, 1))
    if overlap:
        assert set(found) == {"done"}
        found = outcomes(replicas, lambda sync: sync.begin_step(3, 1))
    assert found[1] == CUT
    for rank in (r for r in range(3) if found[r] != "done"):
        assert torch.equal(before[rank], replicas.parameters()[rank])
        assert torch.equal(global_before[rank], global_copies(replicas)[rank])


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(("call", "late"), [(1, False), (2, True), (3, False), (4, True)])
def test_cocktail_is_before_or_after_an_exchange(delayed: bool, call: int, late: bool) -> None:
    options = {"subset": 1.0, "topk": 0.5, "delayed": delayed}
    replicas, failing = start("cocktail", options)
    for _ in range(2 if delayed else 1):
        replicas.step()
    assert failing.calls == 2 * 4  # two buckets, two ways each
    failing.fail_at, failing.late = failing.calls + call, late
    replicas.backward()
    if not delayed:
        replicas.optimize()
    before, global_before = replicas.parameters(), global_copies(replicas)
    apply = type(replicas.syncs[0]).before_step if delayed else type(replicas.syncs[0]).after_step
    found = outcomes(replicas, apply)
    assert found[1] == CUT
    for rank in (r for r in range(3) if found[r] != "done"):
        assert torch.equal(before[rank], replicas.parameters()[rank])
        assert torch.equal(global_before[rank], global_copies(replicas)[rank])
    late_enough = [rank for rank in range(3) if found[rank] == "done"]
    assert not late_enough or late  # the last messages of both buckets had left


def test_a_failed_last_exchange_is_raised() -> None:
    replicas, failing = start("cocktail", {"subset": 1.0})
    replicas.step()
    failing.fail_at = failing.calls + 1
    before = replicas.parameters()
    assert outcomes(replicas, lambda sync: sync.finish())[1] == CUT
    assert outcomes(replicas, lambda sync: sync.finish())[1] == CUT
    for old, new in zip(before, replicas.parameters(), strict=True):
        assert torch.equal(old, new)
