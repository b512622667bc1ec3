"""All stages of a run in one process: the same boundaries and messages, without a network.

For experiments on compression: messages are passed in memory, byte for byte those that would cross
the link. Losses, weights and byte counts equal those of the run on one rank per stage, except for
dropout, whose random numbers depend on the process.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.launch.build import Wiring, build
from thinpipe.launch.components import Built
from thinpipe.launch.config.run import RunConfig
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.executor import run_in_order
from thinpipe.pipeline.schedule import LossFunction
from thinpipe.pipeline.stage import CompressedStage


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

    in_turns: ClassVar[bool] = True
    _messages: dict[int, Tensor] = field(default_factory=dict)
    _expected: dict[int, int] = field(default_factory=dict)

    def begin_pass(self, number: int) -> None:
        """Nothing is in flight between passes."""

    def expect(self, slot: int, nbytes: int) -> None:
        self._expected[slot] = nbytes

    def take(self, slot: int) -> Tensor:
        """Return the message, which must be there; a shorter one is zero-filled, as on gloo.

        Raises:
            TransportError: nothing was sent, or more than expected.
        """
        nbytes = self._expected.pop(slot)
        message = self._messages.pop(slot, None)
        if message is None or message.numel() > nbytes:
            found = "nothing" if message is None else f"{message.numel()} bytes"
            raise TransportError(
                f"loopback: expected up to {nbytes} bytes of microbatch {slot}, got {found}"
            )
        return torch.cat([message, message.new_zeros(nbytes - message.numel())])

    def send(self, slot: int, message: Tensor) -> None:
        self._messages[slot] = message.clone()


class _LoopbackLinks:
    """Gives both ends of a direction the same link."""

    def __init__(self) -> None:
        self._links: dict[tuple[int, int], LoopbackLink] = {}

    def __call__(self, upper: int, direction: int) -> LoopbackLink:
        return self._links.setdefault((upper, direction), LoopbackLink())


class _InOrder:
    """`run_in_order` with the interface of torch's schedules.

    Every stage takes microbatches in ascending order in both directions, as under GPipe, 1F1B and
    Deep1F1B; sums depend on nothing else.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[CompressedStage],
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
        found = run_in_order(
            self._stages,
            inputs_BT.tensor_split(self._microbatches),
            finish=lambda logits, m: self._loss(logits, targets[m]),
            train=True,
        )
        losses += [found[m] for m in range(self._microbatches)]
