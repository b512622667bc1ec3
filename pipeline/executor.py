"""Our own in-order executor: runs stages without torch's schedules, whose compute it does not use.

It is the way evaluation runs, and runs of all stages in one process.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from thinpipe.pipeline.stage import CompressedStage

OutputFunction = Callable[[Tensor, int], Tensor]


def run_in_order(
    stages: Mapping[int, CompressedStage],
    inputs: Sequence[Tensor],
    *,
    finish: OutputFunction,
    train: bool,
) -> dict[int, Tensor]:
    """Run this rank's stages one after the other; every stage's `begin_pass` was called before.

    `inputs` are the first stage's microbatches, which every stage takes in ascending order;
    `finish` turns the last stage's output and the microbatch number into the loss. Gradients
    accumulate in the parameters when `train`.

    Returns:
        What `finish` returned, by microbatch; empty on ranks without the last stage.
    """
    run = _Run(stages, inputs, finish, train)
    with torch.set_grad_enabled(train):
        for index in sorted(stages):
            for m in range(len(inputs)):
                run.forward(stages[index], m)
        for index in sorted(stages, reverse=True) if train else ():
            for m in range(len(inputs)):
                run.backward(stages[index], m)
    for stage in stages.values():
        stage.end_pass()
    return run.results


class _Run:
    def __init__(
        self,
        stages: Mapping[int, CompressedStage],
        inputs: Sequence[Tensor],
        finish: OutputFunction,
        train: bool,
    ) -> None:
        self.stages, self.inputs, self.finish, self.train = stages, inputs, finish, train
        self.results: dict[int, Tensor] = {}
        self._live: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def forward(self, stage: CompressedStage, m: int) -> None:
        if stage.is_first:
            x = self.inputs[m]
        else:
            x = stage.receive_activation(m).requires_grad_(self.train)
        y = stage.compute(x, m)
        if stage.is_last:
            self.results[m] = y = self.finish(y, m)
        elif stage.channels.activations_out is None:
            self.stages[stage.stage_index + 1].set_local_fwd_input(y, m)
        else:
            stage.send_activation(m, y)
        if self.train:
            self._live[stage.stage_index, m] = (x, y)

    def backward(self, stage: CompressedStage, m: int) -> None:
        x, y = self._live.pop((stage.stage_index, m))
        gradient = None if stage.is_last else stage.receive_gradient(m)
        torch.autograd.backward(y, gradient)
        if stage.is_first:
            return
        assert x.grad is not None
        if stage.channels.gradients_out is None:
            self.stages[stage.stage_index - 1].set_local_bwd_input((x.grad,), m)
        else:
            stage.send_gradient(m, x.grad)
