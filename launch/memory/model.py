"""Bytes of a stage's weights, gradients, optimizer and activations, without building it.

Blocks are made on torch's meta device, where a forward pass computes shapes only; what autograd
keeps of it is what a microbatch keeps for its backward. Counted in fp32, also for bf16. Blocks of
Hugging Face models are taken to keep what one of ours of their width does.
"""

import contextlib
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from thinpipe.launch.components import build_blocks, build_objective
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.plan.predict import in_flight
from thinpipe.launch.plan.profile import made_up, microbatch_shape
from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.build import trainable
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig
from thinpipe.pipeline.models.transformer import TransformerConfig

_WORD = 4  # bytes of an fp32 number
_BLOCKS_UNDER_WAY = 7
"""Blocks' weights that a shard holds as messages, gathered, copied and as gradients; measured by
`benchmarks.shards.memory`."""
_MOST_KINDS = 64
"""Models with more blocks are taken to repeat their second one up to the last."""


@dataclass(frozen=True)
class ModelMemory:
    """Bytes on one rank, or of one block: there `activations` are those of a microbatch."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """All at once, as at the end of a backward pass."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def saved(self) -> int:
        """What a checkpoint copies before it is written beside training."""
        return self.weights + self.optimizer

    def plus(self, other: "ModelMemory", *, times: int = 1, in_flight: int = 1) -> "ModelMemory":
        """Together with some blocks, and that many microbatches of each."""
        return ModelMemory(
            self.weights + times * other.weights,
            self.gradients + times * other.gradients,
            self.optimizer + times * other.optimizer,
            self.activations + times * in_flight * other.activations,
        )


def rank_memory(config: RunConfig) -> list[ModelMemory]:
    """What each rank of a pipeline needs for its stages; replicas are alike."""
    layers, ranks = config.model.layers, config.pipeline.pipeline_ranks
    kinds = {block: _block(config, block) for block in _representatives(layers)}
    found = [ModelMemory() for _ in range(ranks)]
    for stage, (first, stop) in enumerate(pairwise((0, *_cuts(config), layers))):
        rank, held = config.stage_ranks[stage], in_flight(config, stage)
        for block, memory in kinds.items():
            times = _times(block, first, stop, layers)
            found[rank] = found[rank].plus(memory, times=times, in_flight=held)
    largest = max(memory.weights for memory in kinds.values())
    return [_shard_of(config, memory, largest) for memory in found]


def _shard_of(config: RunConfig, whole: ModelMemory, largest: int) -> ModelMemory:
    """What one of the ranks that hold stages together has; those that gather once per step hold
    all weights and their gradients beside it, others some copies of the `largest` block.
    """
    shards = config.pipeline.shards
    if shards == 1:
        return whole
    gathered = int(config.shards.gather == "step")
    blocks = 0 if gathered else _BLOCKS_UNDER_WAY * largest
    return replace(
        whole,
        weights=whole.weights // shards + gathered * whole.weights + blocks,
        gradients=whole.gradients // shards + gathered * whole.gradients,
        optimizer=whole.optimizer // shards,
    )


def _cuts(config: RunConfig) -> tuple[int, ...]:
    """With cuts that are not decided yet, equal stages."""
    stages, layers = config.pipeline.stages, config.model.layers
    if not config.pipeline.auto_cuts:
        return config.pipeline.cuts
    return tuple(round(stage * layers / stages) for stage in range(1, stages))


def _representatives(layers: int) -> list[int]:
    if layers <= _MOST_KINDS:
        return list(range(layers))
    return [0, 1, layers - 1]


def _times(block: int, first: int, stop: int, layers: int) -> int:
    """How often a stage has the kind of a block."""
    if layers <= _MOST_KINDS or block in (0, layers - 1):
        return int(first <= block < stop)
    return max(0, min(stop, layers - 1) - max(first, 1))


def _block(config: RunConfig, first: int) -> ModelMemory:
    device = torch.device("meta")
    module = build_blocks(config, first, device=device)
    numel = sum(parameter.numel() for parameter in module.parameters())
    trained = sum(parameter.numel() for parameter in trainable(module))
    run = config
    if isinstance(config.model, HuggingFaceConfig):  # whose forward passes look at values
        run = config.model_copy(update={"model": _stand_in(config.model)})
        module = build_blocks(run, first, device=device)
    return ModelMemory(
        weights=_WORD * numel,
        gradients=_WORD * trained,
        optimizer=2 * _WORD * trained,  # Adam's moments; other optimizers hold less
        activations=_activations(run, first, module),
    )


def _stand_in(model: HuggingFaceConfig) -> TransformerConfig:
    """A block of our own that keeps about as much."""
    return TransformerConfig(
        layers=model.layers,
        width=model.width,
        heads=1,
        vocab=model.vocab,
        context=model.context,
        task=model.task,
        classes=model.classes,
    )


def _activations(config: RunConfig, first: int, module: Any) -> int:
    """Bytes of distinct storages that one microbatch keeps for its backward, and its input."""
    shape, device = microbatch_shape(config), torch.device("meta")
    x, targets = made_up(config, first, shape, device=device)
    x.requires_grad_(x.is_floating_point())
    own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept = {x.untyped_storage()._cdata: x.nbytes}
    alive: list[Tensor] = []  # or another storage would get the same address

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _FusedAttention():
        wants = getattr(module, "wants_samples", False)
        samples = Samples(torch.arange(len(x)))
        # a module of the user's own may look at values: what it kept until then is counted
        with contextlib.suppress(RuntimeError, NotImplementedError):
            output = module(x, samples) if wants else module(x)
            if first == config.model.layers - 1:
                build_objective(config).loss_sum(output, targets)
    return sum(kept.values())


class _FusedAttention(TorchFunctionMode):
    """Attention keeps what fused kernels keep; torch's own for shapes keeps every probability."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fused = not (kwargs or {}).get("dropout_p")  # with dropout, no kernel is fused on CPUs
        if func is torch.nn.functional.scaled_dot_product_attention and fused:
            query, key, value = (*args, *(kwargs or {}).values())[:3]
            return _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        *outer, heads, tokens, _ = query.shape  # token by token in memory, as fused kernels do
        out = query.new_empty((*outer, tokens, heads, value.shape[-1])).transpose(-3, -2)
        log_sums = query.new_empty(query.shape[:-1])
        ctx.save_for_backward(query, key, value, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("only shapes are computed")
