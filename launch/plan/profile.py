"""What each block costs on this machine's device: seconds, parameters, memory per microbatch.

Blocks with the same parameters' shapes are measured once. Axes: B samples, T tokens, D width.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from thinpipe.gradcomp.sharded.traffic import sent_nbytes, units_of
from thinpipe.launch.components import build_blocks, build_objective
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.host.device import choose_device, free_gpu_memory
from thinpipe.launch.host.resources import BackgroundLoad, free_memory, usable_cores
from thinpipe.launch.report.metrics import format_duration
from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.build import build_model, trainable
from thinpipe.pipeline.models.own.config import OwnModelConfig
from thinpipe.pipeline.models.own.stage import OwnStage
from thinpipe.pipeline.schedule import fit_microbatches
from thinpipe.pipeline.timing import Stopwatch

_LEAST_ROUNDS, _LEAST_S = 5, 0.5  # of each block
_MOST_S = 3.0
"""Of all blocks, for more rounds on a busy machine."""
_WIDE = 1.5
"""Ratio of upper to lower quartile from which timings of the same work vary too much."""
_IDLE_CORES = 0.25
"""What other processes keep busy on an idle machine, at most."""
_ALIKE = 1.15
"""Rounds up to this many times the shortest ran without interference."""
_WEIGHT_NBYTES, _GRADIENT_NBYTES, _ADAM_NBYTES = 4, 4, 8  # of a parameter; Adam: two moments
_BLOCKS_UNDER_WAY = 7
"""Whose weights a shard holds as messages, gathered, copied and as gradients; measured by
`benchmarks/results/qsdp_cpu_202611.md`."""

_Shapes = tuple[torch.Size, ...]
"""Of a block's parameters."""


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


def training_nbytes(parameters: int, trained: int) -> int:
    """Bytes of fp32 weights, and of gradients and Adam's moments for those that are trained."""
    return checkpoint_nbytes(parameters, trained) + _GRADIENT_NBYTES * trained


def rank_nbytes(config: RunConfig, parameters: int, trained: int) -> int:
    """The same of one rank that holds these parameters, or its shard of them.

    Shards that gather once per step hold all weights and their gradients beside it, and once more
    all weights if they remember them.
    """
    whole = training_nbytes(parameters, trained)
    if config.pipeline.shards == 1:
        return whole
    gathers = config.shards.gather == "step"
    gathered = _WEIGHT_NBYTES * parameters + _GRADIENT_NBYTES * trained if gathers else 0
    remembered = _WEIGHT_NBYTES * parameters * (config.shards.weights == "differences")
    return whole // config.pipeline.shards + gathered + remembered


def under_way_nbytes(config: RunConfig, weights: int) -> int:
    """Bytes of blocks that a shard holds for a while if it gathers for every microbatch.

    `weights`: bytes of the heaviest block's.
    """
    each = config.pipeline.shards > 1 and config.shards.gather == "microbatch"
    return _BLOCKS_UNDER_WAY * weights * each


def shard_traffic(config: RunConfig) -> list[tuple[int, int]]:
    """Bytes of weights that a shard of each stage sends to gather them once, and of gradients."""
    sent = []
    for first, stop in pairwise((0, *config.pipeline.cuts, config.model.layers)):
        stage = build_model(config.model, first, stop, seed=0, device="meta")
        assert not isinstance(stage, OwnStage), "refused by the config"
        units = units_of(stage, stage.parts())
        sent.append(sent_nbytes(units, config.shards, config.pipeline.shards))
    return sent


def checkpoint_nbytes(parameters: int, trained: int) -> int:
    """The same without gradients, which no checkpoint holds."""
    return _WEIGHT_NBYTES * parameters + _ADAM_NBYTES * trained


def samples_at_once(config: RunConfig) -> int:
    """Samples in one pass of a pipeline, before it accumulates or steps."""
    return config.train.batch_size // (config.pipeline.lanes * config.train.accumulate)


def microbatch_count(config: RunConfig) -> int:
    """Microbatches that those samples are divided into."""
    return fit_microbatches(
        config.pipeline.schedule,
        wanted=config.pipeline.microbatches,
        samples=samples_at_once(config),
        ranks=config.pipeline.pipeline_ranks,
    )


def microbatch_shape(config: RunConfig) -> torch.Size:
    """Shape [B, T, D] of the largest microbatch at a cut."""
    per_microbatch = -(-samples_at_once(config) // microbatch_count(config))
    return torch.Size((per_microbatch, *config.message_shape))


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
    return tuple(p.shape for p in build_blocks(config, first, device="meta").parameters())


def _groups(config: RunConfig, kinds: list[_Shapes]) -> list[list[_Shapes]]:
    """All at once if half of the free memory holds their weights, otherwise one by one."""
    on_cpu = choose_device(config.pipeline.device).type == "cpu"
    free = free_memory() if on_cpu else free_gpu_memory() or 0
    numel = sum(math.prod(shape) for kind in kinds for shape in kind)
    return [kinds] if training_nbytes(numel, numel) < free / 2 else [[kind] for kind in kinds]


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


def made_up(
    config: RunConfig, first: int, shape: torch.Size, *, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Inputs of a block, and targets, for a microbatch of that shape."""
    model, (samples, tokens, _) = config.model, shape
    if isinstance(model, OwnModelConfig):
        x, target = model.example
        x = x if first == 0 else model.outputs[first - 1][0]
        inputs, targets = (
            torch.zeros(samples, *part.shape, dtype=part.dtype, device=device)
            for part in (x, target)
        )
        return (inputs.normal_() if inputs.is_floating_point() else inputs), targets
    tokens_BT = torch.randint(min(256, model.vocab), (samples, tokens), device=device)
    labels_B = torch.zeros(samples, dtype=torch.int64, device=device)
    x = tokens_BT if first == 0 else torch.randn(shape, device=device)
    return x, tokens_BT if model.classes is None else labels_B


class _Bench:
    """One block with an optimizer of its own and random inputs of the right shape."""

    def __init__(self, config: RunConfig, first: int) -> None:
        self._config = config
        self._device = device = choose_device(config.pipeline.device)
        self._watch = Stopwatch(device)
        self._block = build_blocks(config, first, device=device)
        self._parameters = list(self._block.parameters())
        trained = list(trainable(self._block))  # with adapters, a block may have none
        self._optimizer = torch.optim.AdamW(trained, lr=1e-9) if trained else None
        shape = microbatch_shape(config)
        self._is_last = first == config.model.layers - 1
        self._x, self._targets = made_up(config, first, shape, device=device)
        self._samples = Samples(torch.arange(len(self._x), device=device))
        self._objective = build_objective(config)
        self.rounds: list[tuple[float, float, float]] = []

    def cost(self, typical: Callable[[Sequence[float]], float]) -> BlockCost:
        forward_s, backward_s, optimizer_s = map(typical, zip(*self.rounds, strict=True))
        parameters = sum(p.numel() for p in self._parameters)
        trained = sum(p.numel() for p in trainable(self._block))
        return BlockCost(
            forward_s, backward_s, optimizer_s, parameters, trained, self._activations()
        )

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
