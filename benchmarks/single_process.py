"""All stages of a run in one process: the same boundaries and messages, without a network.

For experiments on compression: messages are passed in memory, byte for byte those that would cross
the link. Losses, weights and byte counts equal those of the run on one rank per stage, except for
dropout, whose random numbers depend on the process.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.launch.build import Wiring, build
from thinpipe.launch.components import Built
from thinpipe.launch.config.run import RunConfig
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.stage import LossFunction, Stage


@contextmanager
def in_process(config: RunConfig, *, total_steps: int) -> Iterator[Built]:
    """Build every stage of `config` here; `engine` runs them in turn.

    torch's stages and collectives need a process group: within the context, it is this process.

    Raises:
        ValueError: several replicas, or a schedule that puts several stages on a rank.
    """
    pipeline = config.pipeline
    if pipeline.replicas > 1 or pipeline.pipeline_ranks < pipeline.stages:
        raise ValueError(
            f"pipeline.replicas = {pipeline.replicas}, {pipeline.stages} stages on "
            f"{pipeline.pipeline_ranks} ranks: a single process runs one pipeline with one "
            'stage per rank; use replicas = 1 and schedule = "GPipe", "1F1B" or "Deep1F1B"'
        )
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not re-exported
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        transport = GlooTransport(1, 1, timeout_s=pipeline.peer_timeout_s)
        wiring = Wiring(range(pipeline.stages), _LoopbackLinks(), _InOrder)
        yield build(config, transport, run_id=0, total_steps=total_steps, wiring=wiring)
    finally:
        dist.destroy_process_group()


@dataclass
class LoopbackLink:
    """Both ends in one process: for simulations and tests, where stages take turns."""

    patience_s: float = 60.0
    _messages: dict[int, "SimpleQueue[Tensor]"] = field(default_factory=dict)
    _expected: dict[int, int] = field(default_factory=dict)

    def begin_pass(self, number: int) -> None:
        """What nobody took of the pass before is dropped."""
        self._messages.clear()

    def expect(self, slot: int, nbytes: int) -> None:
        self._expected[slot] = nbytes

    def take(self, slot: int) -> Tensor:
        """Wait for a message; a shorter one is zero-filled, as on gloo.

        Raises:
            TransportError: nothing was sent, or more than expected.
        """
        nbytes, found = self._expected.pop(slot), "nothing"
        with suppress(Empty):
            message = self._arriving(slot).get(timeout=self.patience_s)
            found = f"{message.numel()} bytes"
        if found == "nothing" or message.numel() > nbytes:
            raise TransportError(
                f"loopback: expected up to {nbytes} bytes of microbatch {slot}, got {found}"
            )
        return torch.cat([message, message.new_zeros(nbytes - message.numel())])

    def send(self, slot: int, message: Tensor) -> None:
        self._arriving(slot).put(message.clone())

    def _arriving(self, slot: int) -> "SimpleQueue[Tensor]":
        return self._messages.setdefault(slot, SimpleQueue())


class _LoopbackLinks:
    """Gives both ends of a direction the same link."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], LoopbackLink] = {}

    def __call__(self, upper: int, direction: int) -> LoopbackLink:
        return self._links.setdefault((upper, direction), LoopbackLink())


class _InOrder:
    """All stages, one after the other, with the interface of torch's schedules.

    Every stage takes microbatches in ascending order in both directions, as under GPipe, 1F1B and
    Deep1F1B; sums depend on nothing else.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[Stage],
        microbatches: int,
        *,
        loss: LossFunction,
        depth: int,
    ) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self._microbatches, self._loss = microbatches, loss

    def step(
        self, inputs_BT: Tensor, *, target: Tensor, losses: list[Tensor], return_outputs: bool
    ) -> None:
        """Run one pass and add every microbatch's loss to `losses`."""
        targets = target.tensor_split(self._microbatches)
        parts = inputs_BT.tensor_split(self._microbatches)
        ends: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for index, stage in self._stages.items():
            for m, x in enumerate(parts):
                x = x if stage.is_first else stage.receive_activation(m).requires_grad_()
                y = stage.compute(x, m)
                if stage.is_last:
                    y = self._loss(y, targets[m])
                    losses.append(y)
                stage.send_activation(m, y)
                ends[index, m] = x, y
        for index, stage in reversed(self._stages.items()):
            for m in range(self._microbatches):
                x, y = ends.pop((index, m))
                torch.autograd.backward(y, None if stage.is_last else stage.receive_gradient(m))
                if x.grad is not None:
                    stage.send_gradient(m, x.grad)
