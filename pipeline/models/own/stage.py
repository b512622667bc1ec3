"""A stage of a model of the user's own: of an `nn.Sequential`, some of its layers."""

import torch
from torch import Tensor, nn

from thinpipe.pipeline.models.kind import check_range
from thinpipe.pipeline.models.own.config import OwnModelConfig
from thinpipe.pipeline.models.own.forward_stage import ForwardStage, Untied, absent, as_stage


class OwnStage(Untied, nn.Module):
    """Layers `first` to `stop - 1`; parameters carry the names they have in the whole model."""

    def __init__(
        self,
        config: OwnModelConfig,
        first: int,
        stop: int,
        *,
        seed: int,
        device: torch.device | str,
    ) -> None:
        """Only these layers are given values, by the seed, whatever the cuts and the device.

        Raises:
            ValueError: the constructor leaves parameters unset.
        """
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


def build_own(
    config: OwnModelConfig, first: int, stop: int, *, seed: int, device: torch.device | str
) -> OwnStage | ForwardStage:
    """Build the stage that holds layers `first` to `stop - 1`.

    Raises:
        ValueError: there are no such layers, or the constructor leaves parameters unset.
    """
    check_range(first, stop, config.layers)
    if not config.with_inputs:
        return OwnStage(config, first, stop, seed=seed, device=device)
    deferred, cutting = config.deferred, config.cutting
    constants = absent(deferred.skeleton, cutting, first, stop)
    (whole,) = deferred.fill([deferred.skeleton], seed=seed, device=device, constants=constants)
    return as_stage(whole, cutting, first, stop)
