"""fp32, bf16 and fp16 as codecs: a cast, and the bytes of the result.

Lossless for values that the format can hold; `fp16` turns magnitudes above 65504 into infinity.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.coding.entropy import CodingError

CastFormat = Literal["fp32", "bf16", "fp16"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_IDS = {"fp32": 1, "bf16": 2, "fp16": 3}


@dataclass(frozen=True)
class Cast:
    """A row is its values in `format`, in order, little endian."""

    format: CastFormat

    @property
    def codec_id(self) -> int:
        return _IDS[self.format]

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.format]

    def capacity(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(
        self, x_BN: Tensor, wire_BW: Tensor, seen_BN: Tensor | None = None, *, noise: Noise | None
    ) -> int:
        cast_BN = x_BN.to(self.dtype).contiguous()
        wire_BW.copy_(cast_BN.view(torch.uint8))
        if seen_BN is not None:
            seen_BN.copy_(cast_BN)
        return wire_BW.shape[1]

    def decode(self, wire_BW: Tensor, out_BN: Tensor) -> None:
        """Write the rows' values; the copy aligns bytes that start anywhere in a message.

        Raises:
            CodingError: a row has another number of bytes.
        """
        if wire_BW.shape[1] != self.capacity(out_BN.shape[1]):  # one byte would count for all
            needed = self.capacity(out_BN.shape[1])
            raise CodingError(f"{wire_BW.shape[1]} bytes, where {needed} are needed")
        cast_BN = torch.empty(out_BN.shape, dtype=self.dtype, device=out_BN.device)
        cast_BN.view(torch.uint8).copy_(wire_BW)
        out_BN.copy_(cast_BN)
