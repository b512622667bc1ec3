"""A stage held by several ranks: FSDP2 around each block, with our collectives.

`ShardedStage` looks like the stage, but its parameters are this rank's parts, as plain tensors:
optimizers, exchanges between replicas, clipping and checkpoints work on them as on any others.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from thinpipe.gradcomp.sharded.collectives import Exchanges, GatherWeights, ScatterGradients, Unit
from thinpipe.gradcomp.sharded.config import ShardsConfig
from thinpipe.pipeline.comm.transport import Peers


class ShardedStage(nn.Module):
    """Runs a stage whose weights are gathered when they are needed.

    Parameters and buffers carry the stage's names. Row i of a parameter belongs to the rank that
    `torch.chunk` gives it to; later ranks may have none.
    """

    wants_samples = True
    inner: Any
    """The stage, whose parameters come and go; not a submodule."""

    def __init__(
        self, stage: nn.Module, blocks: Sequence[nn.Module], group: dist.ProcessGroup
    ) -> None:
        """`stage` and its `blocks` become FSDP modules; nothing is sent over the `group`."""
        super().__init__()
        shapes = {name: p.shape for name, p in stage.named_parameters(remove_duplicate=False)}
        kept = stage.state_dict()
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(stage, mesh=mesh)
        self.__dict__["inner"] = stage
        self._wholes = dict(stage.named_parameters(remove_duplicate=False))
        self._local = {
            id(whole): nn.Parameter(
                cast(DTensor, whole).to_local().detach(), requires_grad=whole.requires_grad
            )
            for whole in self._wholes.values()
        }
        for name, whole in self._wholes.items():
            _place(self, name).register_parameter(name.split(".")[-1], self._local[id(whole)])
        for name in kept.keys() - self._wholes.keys():
            _place(self, name).register_buffer(name.split(".")[-1], kept[name])
        self.groups = [self._group(module, shapes) for module in (*blocks, stage)]
        self._backwards, self._each = 0, False

    def forward(self, x: Tensor, samples: Any) -> Tensor:
        y: Tensor = self.inner(x, samples)
        if y.requires_grad:
            y.register_hook(self._before_backward)  # type: ignore[no-untyped-call]
        return y

    def train(self, mode: bool = True) -> "ShardedStage":
        self.inner.train(mode)
        return super().train(mode)

    def in_forward_order(self) -> list[nn.Parameter]:
        """Parameters in the reverse of the order in which their gradients are there.

        What is none of the blocks' comes first: FSDP scatters its gradients in the end.
        """
        return [p for _, own, _ in (self.groups[-1], *self.groups[:-1]) for p in own]

    def tied_weight(self) -> nn.Parameter | None:
        whole = self.inner.tied_weight()
        return None if whole is None else self._local[id(whole)]

    @property
    def base(self) -> Mapping[str, str]:
        found: Mapping[str, str] = getattr(self.inner, "base", {})
        return found

    def modules_to_gather(self) -> list[FSDPModule]:
        return [module for module in self.inner.modules() if isinstance(module, FSDPModule)]

    def begin_step(self, backwards: int, *, each: bool) -> None:
        """Scatter gradients in the last of so many backward passes, or after `each`."""
        self._backwards, self._each = backwards, each

    def _before_backward(self, _gradient: Tensor) -> None:
        self._backwards -= 1
        last = self._each or self._backwards == 0
        for whole in self._wholes.values():
            whole.grad = None  # FSDP would add to it, where `ScatterGradients` sums
        self.inner.set_is_last_backward(last)
        self.inner.set_reshard_after_backward(last)
        self.inner.set_requires_gradient_sync(last)

    def _group(
        self, module: nn.Module, shapes: Mapping[str, torch.Size]
    ) -> tuple[nn.Module, tuple[nn.Parameter, ...], tuple[torch.Size, ...]]:
        """A module and its own parameters with their whole shapes, in FSDP's order."""
        names = {id(whole): name for name, whole in reversed(self._wholes.items())}
        own = dict.fromkeys(
            id(whole) for part in _own_modules(module) for whole in part.parameters(recurse=False)
        )
        parameters = tuple(self._local[key] for key in own)
        return module, parameters, tuple(shapes[names[key]] for key in own)


class StageShards:
    """The `Shards` of one rank: all its stages."""

    def __init__(
        self, stages: Sequence[ShardedStage], peers: Peers, config: ShardsConfig, *, seed: int
    ) -> None:
        """`peers` are the ranks that hold the stages together, `seed` is this rank's own."""
        self.stages, self._config = stages, config
        self._exchanges = Exchanges(peers, config, seed=seed)
        self._gathers: list[GatherWeights] = []
        self._scatters: list[ScatterGradients] = []
        for stage in stages:
            stage.inner.set_reshard_after_forward(config.gather == "microbatch")
            stage.inner.set_reduce_scatter_unused_params(True)
            for module, parameters, shapes in stage.groups:
                unit = Unit(len(self._gathers), parameters, shapes)
                self._gathers.append(GatherWeights(unit, self._exchanges))
                self._scatters.append(ScatterGradients(unit, self._exchanges))
                fsdp: Any = module
                fsdp.set_custom_all_gather(self._gathers[-1])
                fsdp.set_custom_reduce_scatter(self._scatters[-1])

    @property
    def weight_bytes(self) -> int:
        return self._exchanges.nbytes["weights"]

    @property
    def gradient_bytes(self) -> int:
        return self._exchanges.nbytes["gradients"]

    def begin_step(self, step: int, backwards: int) -> None:
        """Start to gather, if it is done once per step."""
        self._free()
        each = self._config.gather == "microbatch"
        self._exchanges.begin_step(step, backwards if each else 1)
        for stage in self.stages:
            stage.begin_step(backwards, each=each)
            if not each:
                for module in stage.modules_to_gather():
                    module.unshard(async_op=True)

    def before_step(self) -> None:
        for scatter in self._scatters:
            scatter.finish()
        self._free()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, weights are gathered as they are: what is evaluated is what is kept.

        If they are gathered once per step, they stay for the next evaluation.
        """
        self._exchanges.exact = True
        try:
            yield
        finally:
            self._exchanges.exact = False

    @property
    def remembered(self) -> list[Tensor]:
        """Cached weights of other shards, equal on all of them."""
        memories = [gather.memory for gather in self._gathers if gather.memory is not None]
        return [tensor for memory in memories for tensor in memory.tensors]

    def state_dict(self) -> dict[str, Any]:
        return {
            f"{unit}.{name}": value
            for unit, gather in enumerate(self._gathers)
            for name, value in gather.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for unit, gather in enumerate(self._gathers):
            start = f"{unit}."
            own = {name[len(start) :]: v for name, v in state.items() if name.startswith(start)}
            gather.load_state_dict(own)

    def _free(self) -> None:
        for stage in self.stages:
            for module in stage.modules_to_gather():
                module.reshard()


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """A module and its descendants, without those that are FSDP modules; children come first."""
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_modules(child)
    yield module


def _place(root: nn.Module, name: str) -> nn.Module:
    """The module that holds what has this name, made if it is not there."""
    for part in name.split(".")[:-1]:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root
