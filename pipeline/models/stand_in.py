"""What runs in the place of a block while a model is cut, or it is found out how."""

from typing import Any

from torch import nn


class StandIn(nn.Module):
    """Stands for a block, whose attributes it has, but not its parameters."""

    def __init__(self, block: nn.Module, **known: Any) -> None:
        """`known` are attributes of its own; torch does not look for parameters in them."""
        super().__init__()
        self.__dict__.update(known, _block=block)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"], name)
