"""A stage of a model of the user's own.

Of an `nn.Sequential` it has some of the layers. Of a module with a forward of its own it runs the
whole forward, with its own blocks alone. The block before the stage's first one returns what came
over the cut; those before that hand on what they are given; the one after the stage's last ends the
forward. Parameters of other stages are zeros that take no memory, and nothing that the stage
returns depends on them.

Axes: B samples, T tokens, D width.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.own.forward import Cutting, Returned, call_of
from thinpipe.pipeline.models.stand_in import StandIn

if TYPE_CHECKING:
    from thinpipe.pipeline.models.own.config import OwnModelConfig


class _Reached(BaseException):
    """The forward has come to a block of the next stage."""


class _State:
    """What the stand-ins of a stage know of the microbatch under way."""

    received: Tensor | None = None
    found: Tensor | None = None
    running = False


class _Earlier(StandIn):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        returned: Returned = self._returned
        shape = returned.leaves[returned.hidden].shape
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim == len(shape):
                return returned.around(leaf)
        return returned.around(torch.zeros(shape))


class _Before(StandIn):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._returned.around(self._state.received)


class _After(StandIn):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Reached


class Untied:
    """A stage that shares no weight with another one."""

    def tied_weight(self) -> None:
        return

    def share_tied_weight(self, weight: nn.Parameter) -> None:
        raise AssertionError("a model of one's own ties nothing across stages")


class OwnStage(Untied, nn.Module):
    """Layers `first` to `stop - 1`; parameters carry the names they have in the whole model."""

    def __init__(
        self,
        config: "OwnModelConfig",
        first: int,
        stop: int,
        *,
        seed: int,
        device: torch.device | str,
    ) -> None:
        """Only these layers are given values, by the seed, whatever the cuts and the device."""
        super().__init__()
        skeleton = list(config.deferred.skeleton.children())[first:stop]
        layers = config.deferred.fill(skeleton, seed=seed, device=device)
        for name, layer in zip(config.names[first:stop], layers, strict=True):
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers; never returns a view, so that schedules may detach it in place."""
        for layer in self.children():
            x = layer(x)
        return x if x._base is None else x.clone()


class ForwardStage(Untied, nn.Module):
    """Mixed into the class of a module by `as_stage`; parameters keep their names."""

    wants_samples = True

    def forward(self, x: Tensor, samples: Samples) -> Any:
        """Run on hidden states `x` [B, T, D], or on the first stage on the samples' inputs alone.

        Returns hidden states, or on the last stage what the whole module does; never a view, so
        that schedules may detach it in place.
        """
        state: _State = self.__dict__["_stage_state"]
        args, kwargs = call_of(samples.given)
        state.received, state.found, state.running = x, None, True
        try:
            out = super().forward(*args, **kwargs)
        except _Reached:
            out = state.found
        finally:
            state.received, state.found, state.running = None, None, False
        return tree_map_only(Tensor, lambda y: y if y._base is None else y.clone(), out)


def as_stage(whole: nn.Module, cutting: Cutting, first: int, stop: int) -> ForwardStage:
    """Make a module, in place, the stage of its blocks `first` to `stop - 1`."""
    state = _State()
    blocks = whole.get_submodule(cutting.path)
    for index, (name, block) in enumerate(list(blocks.named_children())):
        kind: type[StandIn] | None = _After if index >= stop else None
        if index < first:
            kind = _Before if index == first - 1 else _Earlier
        if kind is not None:
            blocks._modules[name] = kind(block, _returned=cutting.returned[index], _state=state)
        elif index == stop - 1 < cutting.count - 1:
            block.register_forward_hook(_keep(cutting.returned[index], state))
    mixed = type(f"{type(whole).__name__}Stage", (ForwardStage, type(whole)), {})
    whole.__class__ = mixed
    whole.__dict__["_stage_state"] = state
    assert isinstance(whole, ForwardStage)
    return whole


def absent(model: nn.Module, cutting: Cutting, first: int, stop: int) -> Mapping[int, float]:
    """Zero, by the ids of parameters and of blocks' buffers that a stage does not hold."""
    named: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    named += [
        (name, buffer)
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if name.startswith(f"{cutting.path}.")
    ]
    return {id(tensor): 0.0 for name, tensor in named if not cutting.holds(name, first, stop)}


def _keep(returned: Returned, state: _State) -> Any:
    def keep(_block: nn.Module, _args: Any, output: Any) -> None:
        if state.running:  # not when checkpointing computes it again
            state.found = tree_leaves(output)[returned.hidden]

    return keep
