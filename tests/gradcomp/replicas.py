"""Replicas of a small model in one process, for tests of what methods do to them.

Backward passes run one after the other; where a method exchanges, every replica is on a thread of
its own. Data depends on replica and step alone.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.registry import build_optimizer, load_method, parse_options
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.replica_sync import ReplicaSync


def make_net(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """53 parameters in four tensors."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return net.to(dtype)


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().float().cpu() for p in net.parameters()])


_THREADS = ThreadPoolExecutor(8)
"""Kept: to start some for every exchange takes longer than most exchanges."""


def all_of(values: Sequence[Any], call: Callable[[Any], Any]) -> list[Any]:
    """`call` of every value, each on a thread of its own; all end before the first error."""
    assert len(values) <= 8
    futures = [_THREADS.submit(call, value) for value in values]
    wait(futures)
    return [future.result() for future in futures]


@dataclass
class Through:
    """Peers that pass all on; tests make them fail, or change whom they reach."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def expect(self, sources: Collection[int], capacity: int, lane: int = 0) -> None:
        self.inner.expect(sources, capacity, lane)

    def exchange(
        self, outgoing: Mapping[int, Tensor], sources: Collection[int], capacity: int, lane: int = 0
    ) -> dict[int, Tensor]:
        found: dict[int, Tensor] = self.inner.exchange(outgoing, sources, capacity, lane)
        return found


@dataclass(frozen=True)
class Train:
    """What a method's own optimizer is told."""

    lr: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01


class Replicas:
    """`size` replicas of a network that train with one method."""

    def __init__(
        self,
        size: int,
        method: str,
        options: dict[str, Any],
        *,
        peers: Sequence[Peers] | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.peers = peers or local_peers(size)
        self._method, self._options = method, parse_options(method, options)
        self._dtype, self._device = dtype, device
        self.step_number = self.begun = 0
        self._build()

    def _build(self) -> None:
        method = load_method(self._method)
        self.nets = [make_net(dtype=self._dtype).to(self._device) for _ in self.peers]
        self.syncs: list[ReplicaSync] = [
            method.build(self._options, list(net.parameters()), peer)
            for net, peer in zip(self.nets, self.peers, strict=True)
        ]
        pairs = zip(self.nets, self.syncs, strict=True)
        self.optimizers = [self._optimizer(net, sync) for net, sync in pairs]

    def _optimizer(self, net: nn.Module, sync: ReplicaSync) -> torch.optim.Optimizer:
        parameters = list(net.parameters())
        own = build_optimizer(self._method, self._options, parameters, Train(), sync)
        return own or torch.optim.AdamW(parameters, lr=Train.lr)

    def restart(self) -> None:
        """Save everything, and go on from it in new objects."""
        owners = (self.nets, self.optimizers, self.syncs)
        saved = copy.deepcopy([[one.state_dict() for one in each] for each in owners])
        self._build()
        owners = (self.nets, self.optimizers, self.syncs)
        for each, states in zip(owners, saved, strict=True):
            for one, state in zip(each, states, strict=True):
                one.load_state_dict(state)

    def step(self) -> None:
        self.backward()
        all_of(self.syncs, lambda sync: sync.before_step())
        self.optimize()
        all_of(self.syncs, lambda sync: sync.after_step())

    def begin(self) -> None:
        step, self.begun = self.begun, self.begun + 1
        all_of(self.syncs, lambda sync: sync.begin_step(step, 1))

    def backward(self) -> None:
        """Local gradients, as of a loss that is divided by the samples of all replicas."""
        self.begin()
        for rank, net in enumerate(self.nets):
            generator = torch.Generator().manual_seed(1000 * self.step_number + rank)
            dtype = next(net.parameters()).dtype
            x = torch.randn(4, 6, generator=generator).to(self._device, dtype)
            loss = net(x).square().sum()
            (loss / (4 * len(self.nets))).backward()
        self.step_number += 1

    def optimize(self) -> None:
        self.commit()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def commit(self) -> None:
        all_of(self.syncs, lambda sync: sync.commit())

    def finish(self) -> None:
        all_of(self.syncs, lambda sync: sync.finish())

    def parameters(self) -> list[Tensor]:
        """The parameters of every replica as a vector."""
        return [flat(net) for net in self.nets]

    def global_parameters(self) -> list[Tensor]:
        """What every replica takes for the global model."""

        def found(pair: tuple[nn.Module, ReplicaSync]) -> Tensor:
            net, sync = pair
            with sync.global_parameters():
                return flat(net)

        return all_of(list(zip(self.nets, self.syncs, strict=True)), found)
