"""How long each block takes on this machine's device.

Blocks with the same parameters' shapes are measured once.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.host.device import choose_device, free_gpu_memory
from thinpipe.launch.host.resources import BackgroundLoad, free_memory, usable_cores
from thinpipe.launch.host.words import format_duration
from thinpipe.launch.memory.microbatches import microbatch_shape
from thinpipe.launch.memory.model import ModelMemory
from thinpipe.launch.optimizer import our_optimizer
from thinpipe.pipeline.timing import Stopwatch

_LEAST_ROUNDS, _LEAST_S = 5, 0.5  # of each block
_MOST_S = 3.0  # of all blocks, for more rounds on a busy machine
_WIDE = 1.5  # ratio of upper to lower quartile from which timings of the same work vary too much
_IDLE_CORES = 0.25  # cores that other processes keep busy on an idle machine, at most
_ALIKE = 1.15  # rounds up to this many times the shortest ran without interference

_Shapes = tuple[torch.Size, ...]  # of a block's parameters


@dataclass(frozen=True)
class BlockCost:
    """Seconds of a block on one device: the first includes the embedding, the last the head and
    the loss. `forward_s` and `backward_s` are per microbatch, `optimizer_s` is per step.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0

    def on(self, speed: float) -> "BlockCost":
        """The same on a device that is `speed` times as fast."""
        return BlockCost(self.forward_s / speed, self.backward_s / speed, self.optimizer_s / speed)

    def of_microbatches(self, share: float) -> "BlockCost":
        return BlockCost(share * self.forward_s, share * self.backward_s, self.optimizer_s)


Blocks = Sequence[Sequence[BlockCost]]
"""[stage][block]: every block on the device of that stage."""


@dataclass(frozen=True)
class Measured:
    """Cost of every block, in order, and a warning if other processes interfered."""

    costs: list[BlockCost]
    warning: str | None


def steady_median(rounds_s: Sequence[float]) -> float:
    """The median of the rounds that took little longer than the shortest."""
    least_s = min(rounds_s)
    return statistics.median(round_s for round_s in rounds_s if round_s <= _ALIKE * least_s)


def measure_blocks(
    config: RunConfig, typical: Callable[[Sequence[float]], float] = steady_median
) -> Measured:
    """Time every block: the `typical` of several rounds after a discarded one.

    Blocks are timed in rotation, so that background load slows all of them alike; one after the
    other where memory does not hold them at once.
    """
    shapes = [_shapes(config, first) for first in range(config.model.layers)]
    found: dict[_Shapes, BlockCost] = {}
    warnings = []
    for group in _groups(config, list(dict.fromkeys(shapes))):
        benches = [_Bench(config, shapes.index(kind)) for kind in group]
        warnings.append(_time_in_rotation(benches))
        found |= {kind: bench.cost(typical) for kind, bench in zip(group, benches, strict=True)}
        del benches
    return Measured([found[kind] for kind in shapes], next(filter(None, warnings), None))


def typical_block_s(config: RunConfig) -> float:
    """Seconds of a forward, backward and update of the kind of block that there are most of."""
    shapes = [_shapes(config, first) for first in range(config.model.layers)]
    bench = _Bench(config, shapes.index(statistics.mode(shapes)))
    _time_in_rotation([bench])
    return sum(map(steady_median, zip(*bench.rounds, strict=True)))


def _shapes(config: RunConfig, first: int) -> _Shapes:
    return tuple(
        p.shape for p in config.model.build(first, first + 1, seed=0, device="meta").parameters()
    )


def _groups(config: RunConfig, kinds: list[_Shapes]) -> list[list[_Shapes]]:
    """All at once if half of the free memory holds their weights, otherwise one by one."""
    on_cpu = choose_device(config.pipeline.device).type == "cpu"
    free = free_memory() if on_cpu else free_gpu_memory() or 0
    numel = sum(math.prod(shape) for kind in kinds for shape in kind)
    return (
        [kinds] if ModelMemory.of(4 * numel, numel).total < free / 2 else [[kind] for kind in kinds]
    )


def _time_in_rotation(benches: Sequence["_Bench"]) -> str | None:
    """Repeat the rounds of all; return a warning if other processes interfered."""
    for bench in benches:
        bench.run_round()
        bench.rounds.clear()
    background = BackgroundLoad()
    while True:
        for bench in benches:
            bench.run_round()
        rounds_s = [[sum(times_s) for times_s in bench.rounds] for bench in benches]
        spent_s = sum(map(sum, rounds_s))
        if len(rounds_s[0]) < _LEAST_ROUNDS or spent_s < _LEAST_S * len(benches):
            continue
        warning = interference_warning(
            rounds_s, background_cores=background.cores(), threads=torch.get_num_threads()
        )
        if warning is None or spent_s >= _MOST_S:
            return warning


def interference_warning(
    rounds_s: Sequence[Sequence[float]], *, background_cores: float, threads: int
) -> str | None:
    """A warning if timings are unreliable: they vary widely, or cores were shared.

    `rounds_s` are the rounds of each of several pieces of work, `threads` those that ran them.
    """
    cores = usable_cores()
    oversubscribed = threads + background_cores > cores + _IDLE_CORES
    quartiles = [statistics.quantiles(rounds, n=4, method="inclusive") for rounds in rounds_s]
    if not oversubscribed and all(upper <= _WIDE * lower for lower, _, upper in quartiles):
        return None
    spreads = [(min(rounds), q[2]) for rounds, q in zip(rounds_s, quartiles, strict=True)]
    least_s, upper_s = max(spreads, key=lambda spread: spread[1] / spread[0])
    too_long = max(upper_s / least_s, (threads + background_cores) / cores)
    return (
        f"other processes keep {background_cores:.1f} of this machine's {cores} cores busy, and "
        f"timings of the same block vary from {format_duration(least_s)} to "
        f"{format_duration(upper_s)}: they may be {too_long:.1f} times too long; run again on an "
        "idle machine"
    )


class _Bench:
    """One block with an optimizer of its own and random inputs of the right shape."""

    def __init__(self, config: RunConfig, first: int) -> None:
        self._config = config
        self._device = device = choose_device(config.pipeline.device)
        self._watch = Stopwatch(device)
        self._block = config.model.build(first, first + 1, seed=config.run.seed, device=device)
        # With adapters, a block may have no parameters to train.
        trained = {name: p for name, p in self._block.named_parameters() if p.requires_grad}
        in_bf16 = config.model.trains_in_bf16
        self._optimizer = our_optimizer(config.train, trained, in_bf16=in_bf16) if trained else None
        shape = microbatch_shape(config)
        self._is_last = first == config.model.layers - 1
        made_up = config.model.made_up(first, shape, device=device)
        self._x, self._targets, self._samples = made_up
        self._objective = config.model.objective()
        self.rounds: list[tuple[float, float, float]] = []

    def cost(self, typical: Callable[[Sequence[float]], float]) -> BlockCost:
        return BlockCost(*map(typical, zip(*self.rounds, strict=True)))

    def run_round(self) -> None:
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
        times_s = self._watch.seconds(marks)
        forward_s, backward_s, optimizer_s = (b - a for a, b in pairwise(times_s))
        self.rounds.append((forward_s, backward_s, optimizer_s))

    def _forward(self) -> Tensor:
        x = self._x.detach()
        x.requires_grad_(x.is_floating_point())
        bf16 = self._config.pipeline.precision == "bf16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=bf16):
            wants = getattr(self._block, "wants_samples", False)
            output: Tensor = self._block(x, self._samples) if wants else self._block(x)
        return self._objective.loss_sum(output, self._targets) if self._is_last else output
