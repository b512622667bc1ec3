"""A stage whose blocks are spread over several devices of one host, with torchgpipe.

torchgpipe (Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models",
2020) runs GPipe over the devices of one process; between hosts the pipeline is ours.

Axes: B samples.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torchgpipe import GPipe

from thinpipe.pipeline.batch import Samples
from thinpipe.pipeline.models.build import StageModule

StageBuilder = Callable[[int, int, torch.device], StageModule]
"""(first block, block after the last, device) -> the stage that holds them."""


class LocalPipeline(nn.Module):
    """Blocks `first` to `stop - 1` over several devices, with the parameters of the plain stage.

    Names and order of parameters are those of the stage on one device, so checkpoints are alike.
    Input and output are on the first device. A microbatch is split into as many chunks as there are
    devices, so that devices work at the same time. torchgpipe cannot split the backward pass into
    input and weight gradients, as zero-bubble schedules do.
    """

    whole_backward_only = True
    wants_samples = True

    def __init__(
        self, build: StageBuilder, first: int, stop: int, *, devices: Sequence[torch.device]
    ) -> None:
        """The range must hold a block for each device, and no weight that two devices use."""
        super().__init__()
        ranges = pairwise(even_bounds(first, stop, len(devices)))
        stages = [build(*blocks, device) for blocks, device in zip(ranges, devices, strict=True)]
        whole = build(first, stop, torch.device("meta"))
        _place_tensors(whole, stages)
        for name, child in whole.named_children():
            self.add_module(name, child)
        # The rest is hidden from torch, which would find the parameters under further names.
        self._parts = tuple(_Part(stage, is_last=stage is stages[-1]) for stage in stages)
        self._devices = tuple(devices)
        blocks, ones = nn.Sequential(*self._parts), [1] * len(stages)
        gpipe = GPipe(blocks, ones, devices=devices, chunks=len(devices), checkpoint="never")
        self._run = gpipe.forward

    def forward(self, x: Tensor, samples: Samples) -> Tensor:
        """Map input to output as the stage on one device does; never returns a view."""
        device_type = self._devices[0].type
        autocast = torch.is_autocast_enabled(device_type)
        for part in self._parts:
            part.autocast_dtype = torch.get_autocast_dtype(device_type) if autocast else None
        out: Any = self._run((x, *_to_tensors(samples)))
        on_first: Tensor = out.to(self._devices[0])
        return on_first

    def train(self, mode: bool = True) -> Self:
        for part in self._parts:
            part.train(mode)
        return super().train(mode)

    def tied_weight(self) -> nn.Parameter | None:
        weights = [part.stage.tied_weight() for part in self._parts]
        return next((weight for weight in weights if weight is not None), None)

    @property
    def base(self) -> Mapping[str, str]:
        parts = [getattr(part.stage, "base", {}) for part in self._parts]
        return {name: digest for part in parts for name, digest in part.items()}


def even_bounds(first: int, stop: int, parts: int) -> list[int]:
    """Bounds of `parts` ranges of blocks whose lengths differ by at most one."""
    return [first + (stop - first) * part // parts for part in range(parts + 1)]


class _Part(nn.Module):
    """One device's blocks, as torchgpipe calls them: samples go along as tensors.

    torchgpipe calls it in a new thread, which inherits neither autocast nor, before torch is asked
    for it, the number of threads: matrix products would take every core.
    """

    def __init__(self, stage: StageModule, *, is_last: bool) -> None:
        super().__init__()
        self.stage, self._is_last = stage, is_last
        self.autocast_dtype: torch.dtype | None = None

    def forward(self, given: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        torch.get_num_threads()  # applies it to this thread
        x, *known = given
        enabled = self.autocast_dtype is not None
        with torch.autocast(x.device.type, self.autocast_dtype, enabled=enabled):
            out: Tensor = self.stage(x, _to_samples(known))
        return out if self._is_last else (out, *known)


def _to_tensors(samples: Samples) -> tuple[Tensor, ...]:
    """Tensors that torchgpipe can split by samples and copy; [B, 0] stands for None."""
    nothing = samples.ids_B.new_empty(len(samples.ids_B), 0)
    masks = (samples.mask_BT, samples.segments_BT, samples.prefix_BT, samples.types_BT)
    return (samples.ids_B, *(nothing if mask is None else mask for mask in masks))


def _to_samples(tensors: Sequence[Tensor]) -> Samples:
    ids_B, *masks = tensors
    return Samples(ids_B, *(mask if mask.shape[1] else None for mask in masks))


def _place_tensors(whole: nn.Module, stages: Sequence[nn.Module]) -> None:
    for stage in stages:
        for name, tensor in chain(stage.named_parameters(), stage.named_buffers()):
            owner, _, own_name = name.rpartition(".")
            setattr(whole.get_submodule(owner), own_name, tensor)
