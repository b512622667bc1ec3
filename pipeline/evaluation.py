"""Evaluation: a rank's stages one after the other, without torch's schedules."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from thinpipe.pipeline.batch import PyTree
from thinpipe.pipeline.loss import Objective
from thinpipe.pipeline.metrics import Measures
from thinpipe.pipeline.shards import Shards
from thinpipe.pipeline.stage import Stage


def evaluate(
    stages: Mapping[int, Stage],
    inputs: Sequence[Tensor],
    targets: Sequence[PyTree],
    objective: Objective,
    measures: Measures,
) -> Tensor:
    """Run every stage on all microbatches; every stage's `begin_pass` was called before.

    `inputs` are those of the first stage. Returns loss sum and count (float64) of the last stage's
    microbatches, which `measures` count too; zeros on ranks without it.
    """
    head = torch.zeros(2, dtype=torch.float64)
    for index in sorted(stages):
        stage = stages[index]
        for m, x in enumerate(inputs):
            y = stage.compute(x if stage.is_first else stage.receive_activation(m), m)
            if stage.is_last:
                measures.add(y, targets[m])
                loss = objective.loss_sum(y, targets[m]).double().cpu()
                head += torch.stack([loss, loss.new_tensor(objective.count(targets[m]))])
            elif stage.channels.activations_out is None:
                stages[index + 1].set_local_fwd_input(y, m)
            else:
                stage.send_activation(m, y)
    for stage in stages.values():
        stage.end_pass()
    return head


@contextlib.contextmanager
def evaluating(modules: Sequence[nn.Module], shards: Shards | None) -> Iterator[None]:
    """Inside, modules are in evaluation mode and keep nothing for a backward."""
    for module in modules:
        module.eval()
    try:
        with contextlib.nullcontext() if shards is None else shards.evaluating(), torch.no_grad():
            yield
    finally:
        for module in modules:
            module.train()
