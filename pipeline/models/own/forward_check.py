"""Values of a cut module, compared with those of the whole one, without memory for weights.

Parameters outside of the blocks are constants, of one value each; blocks are markers that note
what they are given and return something else. So a stage that lacks what it needs differs.
"""

import contextlib
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.own.deferred import DeferredModel
from thinpipe.pipeline.models.own.forward import Cutting
from thinpipe.pipeline.models.own.stage import as_stage
from thinpipe.pipeline.models.stand_in import StandIn


class _Given(NamedTuple):
    """What a block was given, and the hidden states that it returned."""

    block: int
    tensors: list[Tensor]
    hidden: Tensor


class _Marker(StandIn):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        dims = self._returned.leaves[self._returned.hidden].ndim
        hidden = next(t for t in tensors if t.is_floating_point() and t.ndim == dims)
        pattern = torch.arange(hidden.numel(), device=hidden.device).view(hidden.shape)
        out = 0.5 * hidden + torch.sin(pattern + self._index).to(hidden.dtype)
        self._log.append(_Given(self._index, [t.clone() for t in tensors], out.clone()))
        return self._returned.around(out)


_REMEDY = (
    "cut elsewhere, train replicas of the whole model (pipeline.replicas), or change its forward"
)


def check_cuts(
    deferred: DeferredModel, cutting: Cutting, inputs: Any, cuts: Sequence[int], *, where: str
) -> None:
    """Check that a module computes the same when it is cut there; on `inputs`, if given."""
    for cut in cuts:
        if cut in cutting.why_not:
            raise ValueError(f"{where}: not at {cut}: {cutting.why_not[cut]}; {_REMEDY}")
    if inputs is None:
        return
    given = partial(_given, deferred, cutting, inputs)
    whole = given(0, cutting.count)
    for first, stop in pairwise((*cuts, cutting.count)):
        try:
            problem = _difference(given(first, stop, whole[first - 1].hidden), whole[first:stop])
        except Exception as error:  # of any kind: it is not our code
            problem = f"its forward fails ({type(error).__name__}: {error})"
        if problem:
            raise ValueError(f"{where}: when cut, {problem}; {_REMEDY}")


def _difference(cut: list[_Given], whole: list[_Given]) -> str | None:
    for found, expected in zip(cut, whole, strict=True):
        alike = (found.block, len(found.tensors)) == (expected.block, len(expected.tensors))
        if not alike or not all(map(torch.equal, found.tensors, expected.tensors)):
            return (
                f"block {expected.block} is given other hidden states, masks or positions than in "
                "the whole model"
            )
    return None


@torch.no_grad()
def _given(
    deferred: DeferredModel,
    cutting: Cutting,
    inputs: Any,
    first: int,
    stop: int,
    received: Tensor | None = None,
) -> list[_Given]:
    """What a stage's blocks are given, up to its last one: heads may be large."""
    constants: dict[int, float] = {}
    for number, (name, tensor) in enumerate(
        [*deferred.skeleton.named_parameters(), *deferred.skeleton.named_buffers()]
    ):
        held = cutting.holds(name, first, stop) if isinstance(tensor, nn.Parameter) else True
        if isinstance(tensor, nn.Parameter) or name.startswith(f"{cutting.path}."):
            constants[id(tensor)] = 1.0 + 0.01 * number if held else 0.0
    (model,) = deferred.fill([deferred.skeleton], seed=0, device="cpu", constants=constants)
    log: list[_Given] = []
    blocks = model.get_submodule(cutting.path)
    for index, (name, block) in enumerate(list(blocks.named_children())):
        blocks._modules[name] = _Marker(
            block, _index=index, _returned=cutting.returned[index], _log=log
        )
    if stop == cutting.count:  # a block more, which ends the forward
        blocks.get_submodule(name).register_forward_hook(_stop)
    stage = as_stage(model, cutting, first, stop).eval()
    with contextlib.suppress(_OverError):
        stage(received, Samples(torch.empty(0), given=inputs))
    return log


class _OverError(BaseException):
    """The last block has run."""


def _stop(*_: Any) -> None:
    raise _OverError
