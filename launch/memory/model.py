"""Bytes of a stage's weights, gradients, optimizer and activations, without building it.

A forward pass over fake tensors computes shapes and types only; what autograd keeps of it is what a
microbatch keeps for its backward. Where microbatches share weights cast to bf16, only that is
counted of a second pass which the first did not keep.
"""

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from thinpipe.launch.config.model import shares_casts
from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.host.device import device_type
from thinpipe.launch.memory.exchange import ExchangeCost, measure_exchange
from thinpipe.launch.memory.microbatches import in_flight, microbatch_shape
from thinpipe.pipeline.comm.transport import LANES
from thinpipe.pipeline.models.build import trainable

if TYPE_CHECKING:
    from thinpipe.pipeline.models.kind import ModelKind

_WORD = 4  # bytes of an fp32 number
_IN_BUCKETS = 12
"""Bytes for each gradient of the buckets under way, besides its sum: a copy, messages, what is
expected, and what a server adds up (benchmarks/results/memory_count_cpu_202611.md)."""
_MOST_REPLICAS = 4  # more of them keep no more each
_MOST_KINDS = 64  # models with more blocks are taken to repeat their second one up to the last
_MOST_MIXED = 100_000
"""With more blocks it counts as if none were computed again: such a run is a mistake."""
_BLOCKS_UNDER_WAY = 7
"""Whose weights a shard holds as messages, gathered, copied and as gradients; measured with
GPT2-XL's shape."""


@dataclass(frozen=True)
class ModelMemory:
    """Bytes on one rank, or of one block: there `activations` are those of a microbatch.

    `casts` are weights in bf16 that microbatches share, and on a rank their gradients, as far as
    these take more than a microbatch's activations: they are there when its backward ends.
    `gathered` is what a shard holds of others for a while; `remembered` are the weights that were
    last gathered, of which it saves its part. `exchange` is what replicas keep to exchange and
    save, `exchanged` what they receive, or keep of their own weights while the model that all stand
    for is evaluated. `transient` is the most that is held for a moment: checkpointed activations of
    a block while it is computed again, gradients of logits, moments that an optimizer works on, and
    with `pipeline.offload` what a GPU holds of a block's activations or moments. `loss` is what a
    microbatch's logits, their log-softmax and gradients of both take; the first two are in
    `activations` too, the gradients in `transient`.
    With `reads_frozen` a checkpoint leaves out frozen weights, which files hold.
    `trained` is the number of trained weights, no bytes. `uncounted` are blocks whose activations
    cannot be computed from shapes alone.
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
    transient: int = 0
    loss: int = 0
    trained: int = 0
    reads_frozen: bool = False
    uncounted: tuple[int, ...] = ()

    @classmethod
    def of(cls, weights: int, trained: int, activations: int = 0) -> "ModelMemory":
        """So many bytes of weights; gradients of those that are trained, and Adam's two moments of
        them in fp32 (those of a user's own optimizer are not known).
        """
        return cls(weights, _WORD * trained, 2 * _WORD * trained, activations, trained=trained)

    @property
    def total(self) -> int:
        """All at once, as at the end of a backward pass."""
        return sum(getattr(self, part) for part in _PARTS if part not in ("trained", "loss"))

    @property
    def saved(self) -> int:
        """What a checkpoint copies before it is written in the background."""
        weights = _WORD * self.trained if self.reads_frozen else self.weights
        own = weights + self.optimizer + self.exchange
        return own + (self.weights if self.remembered else 0)

    def plus(self, other: "ModelMemory", *, times: int = 1, held: int = 1) -> "ModelMemory":
        """Together with some blocks, and that many microbatches of each."""
        sums = {part: getattr(self, part) + times * getattr(other, part) for part in _PARTS}
        sums["activations"] = self.activations + times * held * other.activations
        return ModelMemory(**sums, uncounted=(*self.uncounted, *other.uncounted))

    def of_microbatches(self, share: float) -> "ModelMemory":
        return replace(
            self,
            activations=round(share * self.activations),
            transient=round(share * self.transient),
            loss=round(share * self.loss),
        )


_PARTS = tuple(field.name for field in fields(ModelMemory) if field.type is int)


class BlockRun(NamedTuple):
    """Blocks that follow each other and are alike: one of them, and how many."""

    block: ModelMemory
    times: int


def rank_memory(
    config: RunConfig,
    blocks: Sequence[BlockRun] | None = None,
    exchange: ExchangeCost | None = None,
) -> list[ModelMemory]:
    """Memory of each rank of a pipeline for its stages; replicas are alike.

    The `block_memory` of a config and its `exchange_cost` take a while, if they are not known.
    """
    blocks = block_memory(config) if blocks is None else blocks
    layers, stages = config.model.layers, config.pipeline.stages
    held, cuts = in_flight(config), config.pipeline.cuts
    if config.pipeline.auto_cuts:  # not decided yet: as if stages were equal
        cuts = tuple(round(stage * layers / stages) for stage in range(1, stages))
    starts = [0, *accumulate(count for _, count in blocks)]
    found = [ModelMemory() for _ in range(config.pipeline.pipeline_ranks)]
    of_one = [0] * len(found)
    for stage, (first, stop) in enumerate(pairwise((0, *cuts, layers))):
        rank = config.stage_ranks[stage]
        for (block, count), start in zip(blocks, starts, strict=False):
            times = min(stop, start + count) - max(first, start)
            if times > 0:
                largest = max(found[rank].transient, block.transient)
                whole = found[rank].plus(block, times=times, held=held[stage])
                found[rank] = replace(whole, transient=largest)
                of_one[rank] += times * block.activations
    for rank, whole in enumerate(found):
        late = max(0, whole.casts - of_one[rank])
        found[rank] = replace(whole, casts=whole.casts + late)
    heaviest = max(block.weights for block, _ in blocks)
    exchange = exchange_cost(config) if exchange is None else exchange
    return [on_rank(config, whole, heaviest, exchange) for whole in found]


def on_rank(
    config: RunConfig, whole: ModelMemory, heaviest: int, exchange: ExchangeCost | None
) -> ModelMemory:
    """A rank's share of these blocks: its shard, and its exchange with replicas.

    Shards that gather once per step hold all weights and their gradients besides, others some
    copies of the `heaviest` block's weights.
    """
    shards = config.pipeline.shards
    if shards > 1:
        once = int(config.shards.gather == "step")
        under_way = 0 if once else _BLOCKS_UNDER_WAY * heaviest
        whole = replace(
            whole,
            weights=whole.weights // shards,
            gathered=once * whole.weights + under_way,
            remembered=whole.weights if config.shards.weights == "differences" else 0,
            gradients=whole.gradients // shards + once * whole.gradients,
            optimizer=whole.optimizer // shards,
            trained=whole.trained // shards,
        )
    whole = replace(whole, reads_frozen=config.model.reads_frozen)
    if exchange is None:
        return whole
    kept = round(exchange.state_nbytes * whole.trained)
    copied = getattr(config.method_options, "copied_nbytes", 0)  # DeMo has no buckets
    in_buckets = min(whole.trained, LANES * copied // _WORD)
    received = _WORD * whole.trained + _IN_BUCKETS * in_buckets
    return replace(whole, exchange=kept, exchanged=received)


def exchange_cost(config: RunConfig) -> ExchangeCost | None:
    """Cost of the replicas' exchange, measured with a few numbers; its bytes are rough."""
    replicas = min(config.pipeline.replicas, _MOST_REPLICAS)
    if replicas == 1 or config.method == "none":
        return None
    # what is kept does not grow after the warm-up
    return measure_exchange(config.method, config.method_options.model_dump(), replicas, steps=1)


def block_memory(config: RunConfig) -> list[BlockRun]:
    """All blocks in order."""
    seen = dict[Any, ModelMemory]()
    return [BlockRun(_block(config, block, seen), count) for block, count in _alike(config.model)]


def _alike(model: "ModelKind") -> Iterable[tuple[int, int]]:
    """A block, and how many from there on count as it does; in deep models inner ones are alike,
    but for whether they are computed again.
    """
    last = model.layers - 1
    if last < _MOST_KINDS:
        return [(block, 1) for block in range(model.layers)]
    again = next((block for block in range(1, _MOST_KINDS) if model.recomputes(block)), 0)
    inner = [(1, last - 1)]
    if again > 1 and last < _MOST_MIXED:
        runs = groupby(range(1, last), key=model.recomputes)
        inner = [(again if recomputed else 1, len(list(run))) for recomputed, run in runs]
    return [(0, 1), *inner, (last, 1)]


def _block(config: RunConfig, first: int, seen: dict[Any, ModelMemory]) -> ModelMemory:
    """One block; those with equal parameters are counted once, but for a user's own."""
    module: Any = config.model.build(first, first + 1, seed=0, device="meta")
    if config.model.is_own:
        return _counted(config, first, module)
    ends = (first == 0, first == config.model.layers - 1)
    shapes = tuple((p.shape, p.requires_grad) for p in module.parameters())
    key = (*ends, config.model.recomputes(first), shapes)
    if key not in seen:
        seen[key] = _counted(config, first, module)
    return seen[key]


def _counted(config: RunConfig, first: int, module: Any) -> ModelMemory:
    counted = ModelMemory(
        weights=config.model.held_nbytes(module),
        gradients=sum(parameter.nbytes for parameter in trainable(module)),
        optimizer=_moments(config, trainable(module)),
        trained=sum(parameter.numel() for parameter in trainable(module)),
    )
    try:
        each, once, loss = _activations(config, first, module)
        of_loss = 2 * _WORD * loss.numel  # gradients of logits and of log-softmax, in fp32
        transient = max(of_loss, _of_optimizer(config, module))
        if config.model.recomputes(first):
            model = config.model.model_copy(update={"activation_checkpointing": False})
            run = config.model_copy(update={"model": model})
            whole = run.model.build(first, first + 1, seed=0, device="meta")
            transient = max(transient, sum(_activations(run, first, whole)[:2]) - each)
        if config.pipeline.offload:  # of one block at a time
            transient = max(transient + each, counted.optimizer)
    except (RuntimeError, NotImplementedError):
        # it looks at values, or uses kernels that know no fake tensors (mixtral's in fp32)
        return replace(counted, uncounted=(first,))
    return replace(
        counted,
        activations=each,
        casts=once,
        transient=transient,
        loss=of_loss + loss.nbytes + _WORD * loss.numel,
    )


def _moments(config: RunConfig, parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of Adam's two moments: bitsandbytes' have 8 bits and a scale per 256, but for small
    parameters. Those in bf16 have what rounding took from them, too.
    """
    small = 4096 if config.train.optimizer == "adamw8bit" else math.inf
    copies = 3 if config.model.trains_in_bf16 else 2
    return sum(
        2 * (p.numel() + _WORD * math.ceil(p.numel() / 256))
        if p.numel() >= small
        else p.nbytes * (copies if p.dtype == torch.bfloat16 else 2)
        for p in parameters
    )


def _of_optimizer(config: RunConfig, module: Any) -> int:
    """Bytes of bitsandbytes' AdamW on a CPU, which makes fp32 of a parameter's moments and step."""
    if config.train.optimizer != "adamw8bit" or device_type(config.pipeline.device) != "cpu":
        return 0
    return 3 * _WORD * max((parameter.numel() for parameter in trainable(module)), default=0)


class _Logits(NamedTuple):
    """Of a microbatch, where a stage ends with them."""

    numel: int = 0
    nbytes: int = 0


def _activations(config: RunConfig, first: int, module: Any) -> tuple[int, int, _Logits]:
    """Bytes of distinct storages that a microbatch keeps for its backward, with its input; of those
    that all microbatches share; and its logits.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        _fill(module)
        own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        bf16 = config.pipeline.precision == "bf16"
        shared = bf16 and shares_casts(config.pipeline, config.model)
        with (
            _FusedAttention(),
            torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=shared),
        ):
            one, alive, logits = _kept(config, first, module, own)
            if not shared:
                return sum(one.values()), 0, logits
            each, also_alive, _ = _kept(config, first, module, own | one.keys())
    del alive, also_alive  # until now, or another storage would get the same address
    return sum(each.values()), sum(one.values()) - sum(each.values()), logits


def _kept(
    config: RunConfig, first: int, module: Any, known: Container[int]
) -> tuple[dict[int, int], list[Any], _Logits]:
    """Bytes of a microbatch by storage, without those that are `known`; what holds them; and its
    logits, which torch's stages hold until its backward has ended. A model that is not cut holds
    those that its loss keeps, so less in GPipe.
    """
    shape = microbatch_shape(config)
    x, targets, samples = config.model.made_up(first, shape, device=torch.device("cpu"))
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
        output, logits = module(x, samples) if wants else module(x), _Logits()
        if first == config.model.layers - 1:
            if isinstance(output, Tensor):
                logits = _Logits(output.numel(), output.nbytes)
                keep(output)
            output = config.model.objective().loss_sum(output, targets)
    return kept, [*alive, output], logits


def _fill(module: nn.Module) -> None:
    """Give a module of the meta device fake values; shared parameters stay shared."""
    made: dict[int, Any] = {}
    for part in module.modules():
        constants = {n: t for n, t in part.__dict__.items() if isinstance(t, Tensor)}
        for name, tensor in constants.items():  # of stages that do not hold it
            part.__dict__[name] = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
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
