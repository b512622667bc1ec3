"""Bytes of a stage's weights, gradients, optimizer and activations, without building it.

A forward pass over fake tensors computes shapes and types only; what autograd keeps of it is what a
microbatch keeps for its backward. Of a second pass only that is counted which the first did not
keep: weights cast to bf16 are held once.
"""

from collections.abc import Container
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.plan.predict import in_flight
from thinpipe.launch.plan.profile import made_up, microbatch_shape, under_way_nbytes
from thinpipe.launch.plan.replicas import measure_exchange
from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.build import trainable
from thinpipe.pipeline.models.own.config import OwnModelConfig

_WORD = 4  # bytes of an fp32 number
_MOST_REPLICAS = 4
"""More of them keep no more each."""
_MOST_KINDS = 64
"""Models with more blocks are taken to repeat their second one up to the last."""


@dataclass(frozen=True)
class ModelMemory:
    """Bytes on one rank, or of one block: there `activations` are those of a microbatch.

    `casts` are weights in bf16, `gathered` what a shard holds of others for a while; `remembered`
    are the weights that were last gathered, of which it saves its part. `exchange` is what
    replicas keep to exchange and save, `exchanged` what they receive, or keep of their own weights
    while the model that all stand for is evaluated. `recomputed` is what checkpointed activations
    of the largest block take while it is computed again.
    `uncounted` are blocks whose activations depend on values, so that nobody knows them here.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    casts: int = 0
    gathered: int = 0
    remembered: int = 0
    exchange: int = 0
    exchanged: int = 0
    recomputed: int = 0
    uncounted: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """All at once, as at the end of a backward pass."""
        held = self.weights + self.gradients + self.optimizer + self.gathered + self.remembered
        held += self.exchange + self.exchanged
        return held + self.activations + self.casts + self.recomputed

    @property
    def saved(self) -> int:
        """What a checkpoint copies before it is written beside training."""
        own = self.weights + self.optimizer + self.exchange
        return own + (self.weights if self.remembered else 0)

    def plus(self, other: "ModelMemory", *, times: int = 1, in_flight: int = 1) -> "ModelMemory":
        """Together with some blocks, and that many microbatches of each."""
        return ModelMemory(
            self.weights + times * other.weights,
            self.gradients + times * other.gradients,
            self.optimizer + times * other.optimizer,
            self.activations + times * in_flight * other.activations,
            self.casts + times * other.casts,
            self.gathered + times * other.gathered,
            self.remembered + times * other.remembered,
            self.exchange + times * other.exchange,
            self.exchanged + times * other.exchanged,
            self.recomputed + times * other.recomputed,
            (*self.uncounted, *other.uncounted),
        )


def rank_memory(config: RunConfig) -> list[ModelMemory]:
    """What each rank of a pipeline needs for its stages; replicas are alike."""
    layers, ranks = config.model.layers, config.pipeline.pipeline_ranks
    seen: dict[Any, ModelMemory] = {}
    kinds = {block: _block(config, block, seen) for block in _representatives(layers)}
    found = [ModelMemory() for _ in range(ranks)]
    for stage, (first, stop) in enumerate(pairwise((0, *_cuts(config), layers))):
        rank, held = config.stage_ranks[stage], in_flight(config, stage)
        for block, memory in kinds.items():
            times = _times(block, first, stop, layers)
            if times:
                largest = max(found[rank].recomputed, memory.recomputed)
                whole = found[rank].plus(memory, times=times, in_flight=held)
                found[rank] = replace(whole, recomputed=largest)
    heaviest = max(memory.weights for memory in kinds.values())
    return _with_exchange(config, [_shard_of(config, memory, heaviest) for memory in found])


def _with_exchange(config: RunConfig, alone: list[ModelMemory]) -> list[ModelMemory]:
    """With what replicas hold to exchange what they train; it is measured with a few numbers."""
    replicas = min(config.pipeline.replicas, _MOST_REPLICAS)
    if replicas == 1 or config.method == "none":
        return alone
    cost = measure_exchange(config.method, config.method_options.model_dump(), replicas)
    found = []
    for memory in alone:
        trained = memory.optimizer // (2 * _WORD)
        kept = round(cost.state_nbytes * trained)
        found.append(replace(memory, exchange=kept, exchanged=_WORD * trained))
    return found


def _shard_of(config: RunConfig, whole: ModelMemory, largest: int) -> ModelMemory:
    """What one of the ranks that hold stages together has; those that gather once per step hold
    all weights and their gradients beside it, others some copies of the `largest` block.
    """
    shards = config.pipeline.shards
    if shards == 1:
        return whole
    gathered = int(config.shards.gather == "step")
    return replace(
        whole,
        weights=whole.weights // shards,
        gathered=gathered * whole.weights + under_way_nbytes(config, largest),
        remembered=whole.weights if config.shards.weights == "differences" else 0,
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


def _block(config: RunConfig, first: int, seen: dict[Any, ModelMemory]) -> ModelMemory:
    """One block; those with equal parameters are counted once, but for a user's own."""
    module: Any = config.model.build(first, first + 1, seed=0, device="meta")
    if not isinstance(config.model, OwnModelConfig):
        shapes = tuple((p.shape, p.requires_grad) for p in module.parameters())
        key = (first == 0, first == config.model.layers - 1, shapes)
        if key not in seen:
            seen[key] = _counted(config, first, module)
        return seen[key]
    return _counted(config, first, module)


def _counted(config: RunConfig, first: int, module: Any) -> ModelMemory:
    numel = sum(parameter.numel() for parameter in module.parameters())
    trained = sum(parameter.numel() for parameter in trainable(module))
    counted = ModelMemory(
        weights=_WORD * numel,
        gradients=_WORD * trained,
        optimizer=2 * _WORD * trained,  # Adam's moments; other optimizers hold less
    )
    try:
        each, once = _activations(config, first, module)
        recomputed = 0
        if getattr(config.model, "activation_checkpointing", False):
            model = config.model.model_copy(update={"activation_checkpointing": False})
            run = config.model_copy(update={"model": model})
            whole = run.model.build(first, first + 1, seed=0, device="meta")
            recomputed = sum(_activations(run, first, whole)) - each
    except (RuntimeError, NotImplementedError):
        if not isinstance(config.model, OwnModelConfig):
            raise
        return replace(counted, uncounted=(first,))  # it looks at values
    return replace(counted, activations=each, casts=once, recomputed=recomputed)


def _activations(config: RunConfig, first: int, module: Any) -> tuple[int, int]:
    """Bytes of distinct storages that a microbatch keeps for its backward, with its input; and of
    those that all microbatches share.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        _fill(module)
        own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        bf16 = config.pipeline.precision == "bf16"
        with _FusedAttention(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            one, alive = _kept(config, first, module, own)
            if not bf16:
                return sum(one.values()), 0
            each, also_alive = _kept(config, first, module, own | one.keys())
    del alive, also_alive  # until now, or another storage would get the same address
    return sum(each.values()), sum(one.values()) - sum(each.values())


def _kept(
    config: RunConfig, first: int, module: Any, known: Container[int]
) -> tuple[dict[int, int], list[Any]]:
    """Bytes of a microbatch by storage, without those that are `known`; and what holds them."""
    x, targets = made_up(config, first, microbatch_shape(config), device=torch.device("cpu"))
    x.requires_grad_(x.is_floating_point())
    kept, alive = {x.untyped_storage()._cdata: x.nbytes}, [x]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        wants = getattr(module, "wants_samples", False)
        output = module(x, Samples(torch.arange(len(x)))) if wants else module(x)
        if first == config.model.layers - 1:
            output = config.model.objective().loss_sum(output, targets)
    return kept, [*alive, output]


def _fill(module: nn.Module) -> None:
    """Give a module of the meta device fake values; shared parameters stay shared."""
    made: dict[int, Any] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, old in held.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    is_parameter = isinstance(old, nn.Parameter)
                    made[id(old)] = nn.Parameter(new, old.requires_grad) if is_parameter else new
                held[name] = made[id(old)]


class _FusedAttention(TorchFunctionMode):
    """Attention keeps what fused kernels keep; torch's own for shapes keeps every probability.

    Models ask of masks whether all of them is set; yes, as of samples that are not packed.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__bool__":
            return True
        fused = not (kwargs or {}).get("dropout_p")  # with dropout, no kernel is fused on CPUs
        if func is torch.nn.functional.scaled_dot_product_attention and fused:
            query, key, value = (*args, *(kwargs or {}).values())[:3]
            if torch.is_autocast_enabled("cpu"):
                query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
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
