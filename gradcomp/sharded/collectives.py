"""FSDP2's two collectives over our own messages: gather weights, scatter gradients.

Given to modules by `set_custom_all_gather` and `set_custom_reduce_scatter`. A thread encodes, sends
and decodes while the stage computes; FSDP waits where it needs the result. Every rank starts the
same exchanges in the same order, as all run the same schedule.

Axes: N values of a unit that one shard keeps, padding included.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinpipe.gradcomp.exchange import ExchangeKey
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.gradcomp.sharded.differences import Remembered
from thinpipe.gradcomp.sharded.qsdp import Learned, is_kept, value_codec
from thinpipe.gradcomp.sharded.segments import Segmented
from thinpipe.gradcomp.sharded.sites import Sites
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.codec import Codec, Noise
from thinpipe.pipeline.wire.thread import Worker

_EXACT = Cast("fp32")


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP exchanges together, in its order.

    `local` are this rank's parts, `shapes` the whole parameters' shapes. FSDP pads every part to
    the size of the first rank's.
    """

    index: int
    local: tuple[nn.Parameter, ...]
    shapes: tuple[torch.Size, ...]

    def sizes(self, shards: int, *, trained: bool) -> list[int]:
        """Values per parameter of one rank's padded part; of those that are `trained`, or all."""
        return [
            -(-shape[0] // shards) * shape[1:].numel()
            for parameter, shape in zip(self.local, self.shapes, strict=True)
            if parameter.requires_grad or not trained
        ]


class Exchanges:
    """What all units of a rank share: the other ranks, the thread, and how much was sent."""

    def __init__(self, peers: Peers, config: ShardsConfig, *, seed: int) -> None:
        """`seed` is this rank's own: ranks draw different numbers."""
        self.config, self.peers = config, Sites(peers, config.ranks_per_site)
        self.step, self.backwards, self._scatters = 0, 1, 0
        self.exact = False
        """Whether weights are gathered in full precision."""
        self.weight_bytes = self.gradient_bytes = 0
        self._key_of_noise, self._number = seed, 0
        self._worker = Worker("shards")

    def begin_step(self, step: int, backwards: int) -> None:
        """All gathers of a step round weights alike; gradients are scattered that many times."""
        self.step, self.backwards, self._scatters = step, backwards, 0

    def run(self, steps: Sequence[Callable[[], None]]) -> "Future[None]":
        """Run these on the thread, one after the other."""

        def job() -> None:
            for step in steps:
                step()

        return self._worker.submit(job)

    def gather(self, unit: int, codec: Segmented, parts: Sequence[Tensor]) -> Callable[[], None]:
        """To be run in this order: fill the ranks' `parts` with what all see of them; this rank's
        own is in its place.
        """
        key, codec = self._key(unit), self._noisy(codec, unit << 32)
        counts = not self.exact  # what evaluation sends is no part of a step

        def gather() -> None:
            before = self.peers.bytes_sent
            self.peers.gather(key, codec, parts)
            if counts:
                self.weight_bytes += self.peers.bytes_sent - before

        return gather

    def scatter(
        self, unit: int, codec: Segmented, parts: Sequence[Tensor], out_N: Tensor, *, add: bool
    ) -> Callable[[], None]:
        """To be run in this order: write the sum over ranks of what they have for this one to
        `out_N`, or add it there.
        """
        self._scatters += 1
        key, codec = self._key(unit), self._noisy(codec, unit << 32 | self._scatters)

        def scatter() -> None:
            before = self.peers.bytes_sent
            total_N = self.peers.scatter(key, codec, parts)
            self.gradient_bytes += self.peers.bytes_sent - before
            out_N.add_(total_N) if add else out_N.copy_(total_N)

        return scatter

    def _key(self, unit: int) -> ExchangeKey:
        self._number += 1
        return ExchangeKey(self._number, unit)

    def _noisy(self, codec: Segmented, row: int) -> Segmented:
        """`row` tells the exchanges of a step apart."""
        return replace(codec, noise=Noise(self._key_of_noise, self.step, torch.tensor([row])))


@dataclass
class GatherWeights:
    """FSDP's all-gather for one unit."""

    unit: Unit
    exchanges: Exchanges
    memory: Remembered | None = field(init=False)
    codec: Segmented = field(init=False)
    _learned_at: int = -1

    def __post_init__(self) -> None:
        config, shards = self.exchanges.config, self.exchanges.peers.size
        self.codec = segments(self.unit, config, shards, weights=True)
        quantized = [place for place, codec in enumerate(self.codec.codecs) if codec != _EXACT]
        differs = config.weights == "differences"
        self.memory = Remembered(self.codec.sizes, quantized, shards) if differs else None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for a result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work:
        """Start; `input_tensor` is this rank's place in `output_tensor`."""
        for parameter, part_N in zip(
            self.unit.local, torch.split(input_tensor, self.codec.sizes), strict=True
        ):  # an exchange between replicas may have given the parameter other storage
            part_N[: parameter.numel()] = parameter.detach().flatten()
        parts = output_tensor.chunk(self.exchanges.peers.size)
        return _Pending(self.exchanges.run(list(self._steps(parts, input_tensor))))

    def _steps(self, parts: Sequence[Tensor], mine: Tensor) -> Iterator[Callable[[], None]]:
        exchanges, memory, unit = self.exchanges, self.memory, self.unit.index
        if exchanges.exact:
            yield exchanges.gather(unit, self._exact, parts)
            return
        if memory is not None:
            if memory.rows:  # after a restart
                rows = memory.row_parts(exchanges.peers.rank)
                yield exchanges.gather(unit, Segmented([len(rows[0])], [_EXACT]), rows)
                yield partial(memory.keep_parts, rows)
            yield partial(memory.subtract, mine, exchanges.peers.rank)
        if self._learned_at != exchanges.step:
            self._learned_at = exchanges.step
            yield partial(self._learn, mine)
        first = memory is not None and memory.empty
        yield exchanges.gather(unit, self._exact if first else self.codec, parts)
        if memory is not None:
            yield partial(memory.add, parts)

    @property
    def _exact(self) -> Segmented:
        return Segmented(self.codec.sizes, [_EXACT] * len(self.codec.sizes))

    def _learn(self, mine: Tensor) -> None:
        for codec, part_N in zip(
            self.codec.codecs, torch.split(mine, self.codec.sizes), strict=True
        ):
            if isinstance(codec, Learned):
                codec.learn(part_N[None])

    def state_dict(self) -> dict[str, Tensor]:
        """Levels that were learned, by place in the unit, and what is remembered."""
        levels = {
            str(place): codec.level_L
            for place, codec in enumerate(self.codec.codecs)
            if isinstance(codec, Learned)
        }
        rank = self.exchanges.peers.rank
        return levels | ({} if self.memory is None else self.memory.state_dict(rank))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        for place, codec in enumerate(self.codec.codecs):
            if isinstance(codec, Learned) and str(place) in state:
                codec.level_L.copy_(state[str(place)])
        if self.memory is not None:
            self.memory.load_state_dict(state)


@dataclass
class ScatterGradients:
    """FSDP's reduce-scatter for one unit: sums, whatever FSDP asks for, as losses are divided."""

    unit: Unit
    exchanges: Exchanges
    _sum_N: Tensor | None = None
    _futures: list["Future[None]"] = field(default_factory=list)
    codec: Segmented = field(init=False)

    def __post_init__(self) -> None:
        shards = self.exchanges.peers.size
        self.codec = segments(self.unit, self.exchanges.config, shards, weights=False)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for gradients, or for a result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Start; the last one of a step leaves the sum in the parameters' gradients.

        FSDP's own gradients are not to be read.
        """
        add = self._sum_N is not None
        if self._sum_N is None:
            self._sum_N = output_tensor
        parts = input_tensor.chunk(self.exchanges.peers.size)
        steps = [self.exchanges.scatter(self.unit.index, self.codec, parts, self._sum_N, add=add)]
        if len(self._futures) + 1 == self.exchanges.backwards:
            steps.append(partial(self._leave, self._sum_N))
            self._sum_N = None
        self._futures.append(self.exchanges.run(steps))

    def finish(self) -> None:
        """Wait for the gradients of a step.

        Raises:
            TransportError, DesyncError: an exchange failed.
        """
        for future in self._futures:
            future.result()
        self._futures.clear()
        if self._sum_N is not None:  # it was not needed in every backward
            self._leave(self._sum_N)
            self._sum_N = None

    def _leave(self, sum_N: Tensor) -> None:
        """Through autograd, whose hooks exchanges between replicas wait for, while other units
        still compute.
        """
        trained = [parameter for parameter in self.unit.local if parameter.requires_grad]
        parts = torch.split(sum_N, self.codec.sizes)
        for parameter, part_N in zip(trained, parts, strict=True):
            gradient = part_N[: parameter.numel()].view(parameter.shape)
            torch.autograd.backward(parameter, gradient)


class _Pending(dist.Work):
    """What FSDP waits for."""

    def __init__(self, future: "Future[None]") -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        """Raises what the exchange raised."""
        self._future.result()
        return True


def segments(unit: Unit, config: ShardsConfig, shards: int, *, weights: bool) -> Segmented:
    """How a unit's weights are coded, or the gradients of what is trained of it."""
    rounding = config.weight_rounding if weights else config.gradient_rounding
    bits = config.bits_of("weight" if weights else "gradient")
    codecs: list[Codec] = [
        _EXACT if is_kept(shape, config) else value_codec(bits, rounding, config.bucket)
        for parameter, shape in zip(unit.local, unit.shapes, strict=True)
        if parameter.requires_grad or weights
    ]
    sizes = unit.sizes(shards, trained=not weights)
    return Segmented(sizes, codecs, coded=config.coding == "zstd")
