"""A stage of a model of the user's own: of an `nn.Sequential`, some of its layers."""

import torch
from torch import Tensor, nn

from thinpipe.pipeline.models.own.config import OwnModelConfig
from thinpipe.pipeline.models.own.forward_stage import Untied


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
