"""Hidden states and gradients at the cuts of a run, as they are at each visit of some samples.

What slept stages send must be coded like what trained stages send, so it is recorded from training.

Axes: B samples of a microbatch, T tokens, D channels, M microbatches.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.data.load import load
from thinpipe.launch.data.sampler import EpochSampler
from thinpipe.pipeline.batch import Batch

Visit = tuple[list[Tensor], list[Tensor]]
"""Hidden states and gradients [M, B, T, D] by cut."""


def record(config: RunConfig, path: Path) -> None:
    """Train in one process, and save one batch's `Visit` in the middle of each epoch as a list.

    Cuts and microbatches are those of `config`.
    """
    torch.manual_seed(config.run.seed)
    bounds = pairwise((0, *config.pipeline.cuts, config.model.layers))
    stages: list[Any] = [
        config.model.build(*pair, seed=config.run.seed, device="cpu") for pair in bounds
    ]
    parameters = [p for stage in stages for p in stage.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=config.train.lr)
    samples, _ = load(config.data)
    size = config.train.batch_size
    sampler = EpochSampler(
        len(samples), batch_size=size, replicas=1, replica=0, seed=config.run.seed
    )
    watched = samples.batch(torch.arange(size)).split(config.pipeline.microbatches)
    visits = []
    middle = sampler.steps_per_epoch // 2
    for epoch in range(config.train.epochs):
        last = epoch == config.train.epochs - 1
        for step in range(middle if last else sampler.steps_per_epoch):
            if step == middle:
                visits.append(_visit(config, stages, watched))
                optimizer.zero_grad()
            batch = samples.batch(sampler.ids(epoch * sampler.steps_per_epoch + step))
            torch.autograd.backward(_forward(config, stages, batch)[0] / batch.targets.numel())
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    torch.save([*visits, _visit(config, stages, watched)], path)


def _visit(config: RunConfig, stages: Sequence[nn.Module], parts: Sequence[Batch]) -> Visit:
    found, count = [], sum(part.targets.numel() for part in parts)
    for part in parts:
        loss, hidden = _forward(config, stages, part)
        torch.autograd.backward(loss / count)
        found.append(([h.detach() for h in hidden], [h.grad for h in hidden]))
    forward, backward = (
        [torch.stack(cut) for cut in zip(*way, strict=True)] for way in zip(*found, strict=True)
    )
    return forward, backward


def _forward(
    config: RunConfig, stages: Sequence[nn.Module], batch: Batch
) -> tuple[Tensor, list[Tensor]]:
    """The sum of the losses, and what crossed each cut, in fp32."""
    x, hidden = batch.inputs_BT, []
    for number, stage in enumerate(stages):
        with torch.autocast("cpu", torch.bfloat16, enabled=config.pipeline.precision == "bf16"):
            x = stage(x, batch.samples) if getattr(stage, "wants_samples", False) else stage(x)
        if number < len(stages) - 1:
            x = x.float()
            x.retain_grad()
            hidden.append(x)
    return config.model.objective().loss_sum(x, batch.targets), hidden
