"""What each block costs on this machine's device: seconds, parameters, memory per microbatch.

Blocks with the same parameters' shapes are measured once. Axes: B samples, T tokens, D width.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from launch.build import build_blocks, build_objective
from launch.config import RunConfig
from launch.device import choose_device
from pipeline.models import trainable
from pipeline.samples import Samples
from pipeline.schedule import fit_microbatches
from pipeline.stopwatch import Stopwatch

_LEAST_ROUNDS, _LEAST_S = 5, 0.5


@dataclass(frozen=True)
class BlockCost:
    """A block on one device: the first includes the embedding, the last the head and the loss.

    `forward_s`, `backward_s` and `activations` (bytes kept for the backward) are per microbatch,
    `optimizer_s` is per step; `parameters` counts them, `trained` those that are not frozen.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    parameters: int = 0
    trained: int = 0
    activations: int = 0

    def on(self, speed: float) -> "BlockCost":
        """The same on a device that is `speed` times as fast."""
        seconds = (self.forward_s / speed, self.backward_s / speed, self.optimizer_s / speed)
        return BlockCost(*seconds, self.parameters, self.trained, self.activations)


def samples_at_once(config: RunConfig) -> int:
    """Samples that a replica sends through its pipeline before it accumulates or steps."""
    return config.train.batch_size // (config.pipeline.replicas * config.train.accumulate)


def microbatch_count(config: RunConfig) -> int:
    """Microbatches that those samples really make."""
    return fit_microbatches(
        config.pipeline.schedule,
        wanted=config.pipeline.microbatches,
        samples=samples_at_once(config),
        ranks=config.pipeline.pipeline_ranks,
    )


def microbatch_shape(config: RunConfig) -> torch.Size:
    """Shape [B, T, D] of the largest microbatch at a cut."""
    per_microbatch = -(-samples_at_once(config) // microbatch_count(config))
    return torch.Size((per_microbatch, config.data.sequence_length, config.model.width))


def measure_blocks(
    config: RunConfig, typical: Callable[[Sequence[float]], float] = statistics.median
) -> list[BlockCost]:
    """Cost of every block, in order; the `typical` one of several rounds after a dropped one."""
    found: dict[Any, BlockCost] = {}
    costs = []
    for first in range(config.model.layers):
        with torch.device("meta"):
            shapes = tuple(p.shape for p in build_blocks(config, first, device="meta").parameters())
        if shapes not in found:
            found[shapes] = _Bench(config, first).measure(typical)
        costs.append(found[shapes])
    return costs


class _Bench:
    """One block, with an optimizer of its own, fed with numbers of the right shape."""

    def __init__(self, config: RunConfig, first: int) -> None:
        self._config = config
        self._device = device = choose_device(config.pipeline.device)
        self._watch = Stopwatch(device)
        self._block = build_blocks(config, first, device=device)
        self._parameters = list(self._block.parameters())
        trained = list(trainable(self._block))  # with adapters, a block may have none
        self._optimizer = torch.optim.AdamW(trained, lr=1e-9) if trained else None
        samples, tokens, width = microbatch_shape(config)
        self._is_last = first == config.model.layers - 1
        tokens_BT = torch.randint(min(256, config.model.vocab), (samples, tokens), device=device)
        self._x = tokens_BT if first == 0 else torch.randn(samples, tokens, width, device=device)
        self._samples = Samples(torch.arange(samples, device=device))
        self._objective = build_objective(config)
        labels_B = torch.zeros(samples, dtype=torch.int64, device=device)
        self._targets = tokens_BT if config.model.classes is None else labels_B

    def measure(self, typical: Callable[[Sequence[float]], float]) -> BlockCost:
        self._round()
        rounds: list[tuple[float, float, float]] = []
        while len(rounds) < _LEAST_ROUNDS or sum(sum(times) for times in rounds) < _LEAST_S:
            rounds.append(self._round())
        forward_s, backward_s, optimizer_s = map(typical, zip(*rounds, strict=True))
        parameters = sum(p.numel() for p in self._parameters)
        trained = sum(p.numel() for p in trainable(self._block))
        return BlockCost(
            forward_s, backward_s, optimizer_s, parameters, trained, self._activations()
        )

    def _round(self) -> tuple[float, float, float]:
        marks = [self._watch.mark()]
        output = self._forward()
        marks.append(self._watch.mark())
        if output.requires_grad:  # the first block may be frozen as a whole
            torch.autograd.backward(output, None if output.ndim == 0 else torch.ones_like(output))
        marks.append(self._watch.mark())
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        marks.append(self._watch.mark())
        moments_s = self._watch.seconds(marks)
        forward_s, backward_s, optimizer_s = (b - a for a, b in pairwise(moments_s))
        return forward_s, backward_s, optimizer_s

    def _forward(self) -> Tensor:
        x = self._x.detach()
        x.requires_grad_(x.is_floating_point())
        bf16 = self._config.pipeline.precision == "bf16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=bf16):
            output: Tensor = self._block(x, self._samples)
        return self._objective.loss_sum(output, self._targets) if self._is_last else output

    def _activations(self) -> int:
        """Bytes of distinct storages that one microbatch keeps for its backward, and its input."""
        own = {p.untyped_storage().data_ptr() for p in self._parameters}
        kept = {self._x.untyped_storage().data_ptr(): self._x.nbytes}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = self._forward()
        del output
        return sum(kept.values())
