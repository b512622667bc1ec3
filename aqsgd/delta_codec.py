"""How the change of a known sample is coded: `Uniform` and `Hadamard` meet this contract.

Axes: B samples, N values of a sample, W bytes of a sample. Caches are fp32 or bf16.
"""

from typing import Protocol

from torch import Tensor

from thinpipe.pipeline.wire.codec import Noise


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
