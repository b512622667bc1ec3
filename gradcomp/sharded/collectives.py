"""FSDP2's two collectives over our own messages: gather weights, scatter gradients.

Given to modules by `set_custom_all_gather` and `set_custom_reduce_scatter`. While the stage
computes, one thread encodes, one exchanges and one decodes; FSDP waits where it needs the result.
Every rank starts the same exchanges in the same order, as all run the same schedule.

Axes: N values of a unit that one shard keeps, padding included.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinpipe.gradcomp.exchange import EXACT, ExchangeKey
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.gradcomp.sharded.differences import Remembered
from thinpipe.gradcomp.sharded.qsdp import Learned, is_kept, value_codec
from thinpipe.gradcomp.sharded.segments import Segmented
from thinpipe.gradcomp.sharded.sites import Exchange, Sites
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.codec import Codec, Noise
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES
from thinpipe.pipeline.wire.thread import Worker

_AHEAD = 2  # so many messages may be encoded and not sent yet


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP exchanges together, in its order.

    `local` are this rank's parts, `shapes` the whole parameters' shapes. FSDP pads every part to
    the size of the first rank's.
    """

    index: int
    local: tuple[nn.Parameter, ...]
    shapes: tuple[torch.Size, ...]


class Exchanges:
    """State that all units of a rank share: the other ranks, the thread, and how much was sent."""

    def __init__(self, peers: Peers, config: ShardsConfig, *, seed: int) -> None:
        """`seed` is this rank's own: ranks draw different numbers."""
        self.config, self.peers = config, Sites(peers, config.ranks_per_site)
        self.step, self.backwards, self._scatters = 0, 1, 0
        self.exact = False
        """Whether weights are gathered in full precision."""
        self.nbytes: Counter[str] = Counter()
        """Sent as "weights", as "gradients", and for "evaluation", which is no part of a step."""
        self._key_of_noise, self._number = seed, 0
        self._encoder, self._link, self._decoder = map(
            Worker, ("shards encode", "shards", "shards decode")
        )
        self._on_way: deque[Future[Any]] = deque(maxlen=_AHEAD)

    def begin_step(self, step: int, backwards: int) -> None:
        """All gathers of a step round weights alike; gradients are scattered that many times."""
        self.step, self.backwards, self._scatters = step, backwards, 0

    def gather(
        self,
        unit: int,
        codec: Segmented,
        parts: Sequence[Tensor],
        *,
        before: Sequence[Callable[[], None]] = (),
        after: Callable[[], None] | None = None,
    ) -> "Future[None]":
        """Fill the ranks' `parts` with what all see of them; this rank's own is in its place.

        `before` runs where it is encoded, `after` where it was decoded.
        """
        exchange = self.peers.gather(self._key(unit), self._noisy(codec, unit << 32), parts)
        what = "evaluation" if self.exact else "weights"
        return self._run(what, before, exchange, lambda _: None if after is None else after())

    def scatter(
        self, unit: int, codec: Segmented, parts: Sequence[Tensor], use: Callable[[Tensor], None]
    ) -> "Future[None]":
        """`use` the sum over ranks of what they have for this one, where it was decoded."""
        self._scatters += 1
        codec = self._noisy(codec, unit << 32 | self._scatters)
        exchange = self.peers.scatter(self._key(unit), codec, parts)
        return self._run("gradients", (), exchange, use)

    def _run(
        self,
        what: str,
        before: Sequence[Callable[[], Any]],
        exchange: Exchange,
        after: Callable[[Any], None],
    ) -> "Future[None]":
        earlier = self._on_way[0] if len(self._on_way) == _AHEAD else None

        def encode() -> Any:
            if earlier is not None:
                earlier.result()
            for job in before:
                job()
            return exchange.encode()

        def send() -> Any:
            first = self.peers.bytes_sent
            found = exchange.exchange(encoded.result())
            self.nbytes[what] += self.peers.bytes_sent - first
            return found

        encoded = self._encoder.submit(encode)
        exchanged = self._link.submit(send)
        self._on_way.append(exchanged)
        return self._decoder.submit(lambda: after(exchange.decode(exchanged.result())))

    def _key(self, unit: int) -> ExchangeKey:
        self._number += 1
        return ExchangeKey(self._number, unit)

    def _noisy(self, codec: Segmented, row: int) -> Segmented:
        """`row` tells the exchanges of a step apart."""
        return replace(codec, noise=Noise(self._key_of_noise, self.step, torch.tensor([row])))


class _Collective:
    def __init__(self, unit: Unit, exchanges: Exchanges, *, weights: bool) -> None:
        self.unit, self.exchanges = unit, exchanges
        self.codec = segments(unit, exchanges.config, exchanges.peers.size, weights=weights)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class GatherWeights(_Collective):
    """FSDP's all-gather for one unit."""

    def __init__(self, unit: Unit, exchanges: Exchanges) -> None:
        super().__init__(unit, exchanges, weights=True)
        places = list(enumerate(self.codec.codecs))
        self._learning = {place: codec for place, codec in places if isinstance(codec, Learned)}
        quantized = [place for place, codec in places if codec != EXACT]
        memory = Remembered(self.codec.sizes, quantized, exchanges.peers.size)
        self.memory = memory if exchanges.config.weights == "differences" else None
        self._learned_at = -1
        self._last: Future[None] | None = None

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work:
        """Start; `input_tensor` is this rank's place in `output_tensor`."""
        for parameter, part_N in zip(
            self.unit.local, torch.split(input_tensor, self.codec.sizes), strict=True
        ):  # an exchange between replicas may have given the parameter other storage
            part_N[: parameter.numel()] = parameter.detach().flatten()
        parts = output_tensor.chunk(self.exchanges.peers.size)
        return _Pending(self._gather(parts, input_tensor))

    def _gather(self, parts: Sequence[Tensor], mine: Tensor) -> "Future[None]":
        exchanges, memory, unit = self.exchanges, self.memory, self.unit.index
        if exchanges.exact:
            return exchanges.gather(unit, self._exact, parts)
        if memory is not None and memory.rows:  # after a restart
            rows = memory.row_parts(exchanges.peers.rank)
            exact, keep = Segmented([len(rows[0])], [EXACT]), partial(memory.keep_parts, rows)
            self._last = exchanges.gather(unit, exact, rows, after=keep)
        before: list[Callable[[], None]] = []
        if memory is not None:
            if self._last is not None:
                before.append(self._last.result)  # it has remembered
            before.append(partial(memory.subtract, mine, exchanges.peers.rank))
        if self._learned_at != exchanges.step:
            self._learned_at = exchanges.step
            before.append(partial(self._learn, mine))
        first = memory is not None and memory.empty
        codec = self._exact if first else self.codec
        after = None if memory is None else partial(memory.add, parts)
        self._last = exchanges.gather(unit, codec, parts, before=before, after=after)
        return self._last

    @property
    def _exact(self) -> Segmented:
        return Segmented(self.codec.sizes, [EXACT] * len(self.codec.sizes))

    def _learn(self, mine: Tensor) -> None:
        parts = torch.split(mine, self.codec.sizes)
        for place, codec in self._learning.items():
            codec.learn(parts[place][None])

    def state_dict(self) -> dict[str, Tensor]:
        levels = {str(place): codec.level_L for place, codec in self._learning.items()}
        rank = self.exchanges.peers.rank
        return levels | ({} if self.memory is None else self.memory.state_dict(rank))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for place, codec in self._learning.items():
            if str(place) in state:
                codec.level_L.copy_(state[str(place)])
        if self.memory is not None:
            self.memory.load_state_dict(state)


class ScatterGradients(_Collective):
    """FSDP's reduce-scatter for one unit: sums, whatever FSDP asks for, as losses are divided."""

    def __init__(self, unit: Unit, exchanges: Exchanges) -> None:
        super().__init__(unit, exchanges, weights=False)
        self._sum_N: Tensor | None = None
        self._futures: list[Future[None]] = []

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
        add, last = self._sum_N is not None, len(self._futures) + 1 == self.exchanges.backwards
        sum_N = output_tensor if self._sum_N is None else self._sum_N
        self._sum_N = None if last else sum_N
        parts = input_tensor.chunk(self.exchanges.peers.size)

        def use(total_N: Tensor) -> None:
            sum_N.add_(total_N) if add else sum_N.copy_(total_N)
            if last:
                self._leave(sum_N)

        self._futures.append(self.exchanges.scatter(self.unit.index, self.codec, parts, use))

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
    def __init__(self, future: "Future[None]") -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: Any = None) -> bool:
        self._future.result()
        return True


def segments(unit: Unit, config: ShardsConfig, shards: int, *, weights: bool) -> Segmented:
    """How a unit's weights are coded, or the gradients of what is trained of it."""
    rounding = config.weight_rounding if weights else config.gradient_rounding
    bits = config.bits_of("weight" if weights else "gradient")
    shapes = [
        shape
        for parameter, shape in zip(unit.local, unit.shapes, strict=True)
        if parameter.requires_grad or weights
    ]
    codecs: list[Codec] = [
        EXACT if is_kept(shape, config) else value_codec(bits, rounding, config.bucket)
        for shape in shapes
    ]
    sizes = [-(-shape[0] // shards) * shape[1:].numel() for shape in shapes]  # padded
    return Segmented(sizes, codecs, coded=config.coding == "zstd")


def units_of(stage: nn.Module, parts: Sequence[nn.Module]) -> list[Unit]:
    """Units that a stage exchanges, each of its parts and the rest; sizes alone are right."""
    inside = [list(part.parameters()) for part in parts]
    known = {parameter for group in inside for parameter in group}
    rest = [parameter for parameter in stage.parameters() if parameter not in known]
    return [
        Unit(index, tuple(group), tuple(parameter.shape for parameter in group))
        for index, group in enumerate([*inside, rest])
    ]


def sent_nbytes(units: Sequence[Unit], config: ShardsConfig, shards: int) -> tuple[int, int]:
    """Bytes that a rank sends to other sites to gather all weights once, and scatter gradients.

    Known beforehand, as messages have a known size.
    """
    messages = shards // config.ranks_per_site - 1  # one for each other site
    totals = []
    for weights in (True, False):
        codecs = [segments(unit, config, shards, weights=weights) for unit in units]
        payloads = [codec.capacity(sum(codec.sizes)) for codec in codecs if codec.sizes]
        totals.append(messages * sum(EXCHANGE_HEADER_NBYTES + each for each in payloads))
    return totals[0], totals[1]
