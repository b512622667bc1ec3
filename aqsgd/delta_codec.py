"""How the change of a known sample is coded: in one pass, or through any codec.

`Uniform` meets `ChangeCodec` with fused kernels of its own.

Axes: B samples, N values of a sample, W bytes of a sample. Caches are fp32 or bf16.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinpipe.pipeline.wire.codec import Codec, Noise


class ChangeCodec(Protocol):
    """Codes x against a cache that both ends hold, and updates it at both alike."""

    @property
    def bits(self) -> int:
        """Bits per value, scales aside."""

    def capacity(self, numel: int) -> int:
        """Exact bytes of a row of `numel` values."""

    def encode_change(
        self,
        x_BN: Tensor,
        memory_BN: Tensor,
        wire_BW: Tensor,
        fresh_BN: Tensor,
        *,
        noise: Noise | None,
    ) -> Tensor:
        """Write the bytes of x - memory, and what memory becomes to `fresh_BN`.

        Returns, bool [B], whether all of a row's new memory is finite.
        """

    def decode_change(
        self, wire_BW: Tensor, memory_BN: Tensor, fresh_BN: Tensor, out_BN: Tensor
    ) -> Tensor:
        """Write the receiver's values to `out_BN`; otherwise as `encode_change`."""


@dataclass(frozen=True)
class Composed:
    """The change through any codec, then an addition in fp32."""

    codec: Codec

    @property
    def bits(self) -> int:
        return self.codec.bits

    def capacity(self, numel: int) -> int:
        return self.codec.capacity(numel)

    def encode_change(
        self,
        x_BN: Tensor,
        memory_BN: Tensor,
        wire_BW: Tensor,
        fresh_BN: Tensor,
        *,
        noise: Noise | None,
    ) -> Tensor:
        change_BN = x_BN.float() - memory_BN.float()
        self.codec.encode(change_BN, wire_BW, noise=noise)
        return self.decode_change(wire_BW, memory_BN, fresh_BN, change_BN)

    def decode_change(
        self, wire_BW: Tensor, memory_BN: Tensor, fresh_BN: Tensor, out_BN: Tensor
    ) -> Tensor:
        value_BN = torch.empty(out_BN.shape, device=out_BN.device)
        self.codec.decode(wire_BW, value_BN)
        value_BN += memory_BN
        fresh_BN.copy_(value_BN)
        out_BN.copy_(value_BN)
        return torch.isfinite(value_BN).all(1)
