"""A training step of AC-SGD's published runtime, with our codecs and messages.

GPipe with a barrier of all ranks before, between and after the two halves. A receive is posted when
the previous message has been decoded; receiving with decoding, computing, and encoding with sending
run concurrently (three CUDA streams there, three threads here). First visits are sent in full
precision. After `GpipeAsync` of github.com/DS3Lab/AC-SGD at 95a0f2e. Our kernels replace its torch
operations, which are ten and more times slower, so that only the runtimes are compared.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from benchmarks.links.workloads import Workload
from thinpipe.pipeline.comm.gloo import GlooTransport
from thinpipe.pipeline.comm.link import Link
from thinpipe.pipeline.comm.message import MessageCodec

Wire = tuple[MessageCodec, Link]


class AcSgdStep:
    """One rank's part; `run` is a collective."""

    def __init__(
        self,
        module: nn.Module,
        wires: Sequence[Wire | None],
        workload: Workload,
        transport: GlooTransport,
    ) -> None:
        """`wires`: activations in, activations out, gradients in, gradients out."""
        self._module, self._wires, self._workload = module, wires, workload
        self._transport = transport
        self._receiver, self._sender = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._passes = self._sent = 0

    def take_sent(self) -> int:
        """Bytes sent since the last call."""
        sent, self._sent = self._sent, 0
        return sent

    def run(self, number: int, ids_S: Tensor) -> None:
        """All forwards, then all backwards."""
        own = [wire for wire in self._wires if wire is not None]
        for codec, link in own:
            link.begin_pass(self._passes)
            codec.begin_pass(step=number, mode="train")
        self._passes += 1
        count = self._workload.microbatches
        ids, (inputs, targets) = ids_S.tensor_split(count), self._workload.batch(ids_S)
        xs, ys = list(inputs.tensor_split(count)), list[Tensor]()
        targets_M = targets.tensor_split(count)

        def forward(m: int, received: Tensor | None) -> Tensor:
            if received is not None:
                xs[m] = received.requires_grad_()
            y: Tensor = self._module(xs[m])
            is_last = self._wires[1] is None
            ys.append(self._workload.loss(y, targets_M[m]) if is_last else y)
            return y

        def backward(m: int, received: Tensor | None) -> Tensor:
            torch.autograd.backward(ys[m], received)
            gradient = xs[m].grad
            return xs[m] if gradient is None else gradient  # the first stage sends none

        self._barrier()
        self._half(forward, ids, self._wires[0], self._wires[1])
        self._barrier()
        self._half(backward, ids, self._wires[2], self._wires[3])
        self._barrier()
        for codec, _ in own:
            codec.finish_step(keep=True)

    def _barrier(self) -> None:
        self._transport.share(torch.zeros(0), "world")

    def _half(
        self,
        compute: Callable[[int, Tensor | None], Tensor],
        ids: tuple[Tensor, ...],
        incoming: Wire | None,
        outgoing: Wire | None,
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
                sent.append(self._sender.submit(self._send, outgoing, m, result.detach(), ids[m]))
        for future in sent:
            future.result()

    def _send(self, wire: Wire, m: int, x_BTD: Tensor, ids_B: Tensor) -> None:
        codec, link = wire
        message = codec.encode(m, x_BTD, ids_B)
        self._sent += message.numel()
        link.send(m, message)

    def _receive(self, wire: Wire, m: int, ids_B: Tensor) -> Tensor:
        (codec, link), shape_BTD = wire, self._workload.boundary
        link.expect(m, codec.capacity(shape_BTD))
        return codec.decode(m, link.take(m), ids_B, shape_BTD)
