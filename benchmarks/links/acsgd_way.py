"""A step as AC-SGD's published runtime takes it, over our codecs and messages.

GPipe with a barrier of all ranks before, between and after the two halves. A receive is posted when
the message before it has been decoded; receiving with decoding, computing, and encoding with
sending run beside each other (three CUDA streams there, three threads here). First visits are sent
in full precision. Read in `GpipeAsync` of github.com/DS3Lab/AC-SGD at 95a0f2e. Our kernels stand in
for its torch operations, which are ten and more times slower, so what is compared is the runtime.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.links.workloads import Workload
from thinpipe.pipeline.comm.channel import Channel
from thinpipe.pipeline.mesh import Mesh
from thinpipe.pipeline.stage import Channels


class AcSgdStep:
    """One rank's end; all ranks call `run` alike."""

    def __init__(self, module: nn.Module, channels: Channels, workload: Workload) -> None:
        self._module, self._channels, self._workload = module, channels, workload
        self._receiver, self._sender = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._passes = 0

    def run(self, mesh: Mesh, number: int, ids_S: Tensor) -> None:
        """All forwards, then all backwards."""
        for channel in self._channels.all():
            channel.begin_pass(self._passes, step=number, mode="train")
        self._passes += 1
        count = self._workload.microbatches
        ids, (inputs, targets) = ids_S.tensor_split(count), self._workload.batch(ids_S)
        xs, ys = list(inputs.tensor_split(count)), list[Tensor]()
        targets_M = targets.tensor_split(count)

        def forward(m: int, received: Tensor | None) -> Tensor:
            if received is not None:
                xs[m] = received.requires_grad_()
            y: Tensor = self._module(xs[m])
            is_last = self._channels.activations_out is None
            ys.append(self._workload.loss(y, targets_M[m]) if is_last else y)
            return y

        def backward(m: int, received: Tensor | None) -> Tensor:
            torch.autograd.backward(ys[m], received)
            gradient = xs[m].grad
            return xs[m] if gradient is None else gradient  # the first stage sends none

        dist.barrier(group=mesh.control)
        self._half(forward, ids, self._channels.activations_in, self._channels.activations_out)
        dist.barrier(group=mesh.control)
        self._half(backward, ids, self._channels.gradients_in, self._channels.gradients_out)
        dist.barrier(group=mesh.control)
        for channel in self._channels.all():
            channel.finish_step(keep=True)

    def _half(
        self,
        compute: Callable[[int, Tensor | None], Tensor],
        ids: tuple[Tensor, ...],
        incoming: Channel | None,
        outgoing: Channel | None,
    ) -> None:
        received: list[Future[Tensor]] = []
        if incoming is not None:
            received = [
                self._receiver.submit(self._receive, incoming, m, ids[m]) for m in range(len(ids))
            ]
        sent = []
        for m in range(len(ids)):
            result = compute(m, received[m].result() if received else None)
            if outgoing is not None:
                sent.append(self._sender.submit(outgoing.send, m, result.detach(), ids[m]))
        for future in sent:
            future.result()

    def _receive(self, channel: Channel, m: int, ids_B: Tensor) -> Tensor:
        channel.expect(m, self._workload.boundary)
        return channel.receive(m, self._workload.boundary, ids_B)
