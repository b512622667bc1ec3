"""One bit per value and one scale per group: the sign, times the mean magnitude of the group.

Of all messages with a bit per value and a number per group this has the smallest squared error
(Seide et al. 2014; with error feedback: Karimireddy et al. 2019). A row holds one bf16 scale per
group, then ceil(N / 8) bytes of sign bits, that of value e in bit e % 8 of byte e // 8.

Axes: B rows, N values per row, W bytes per row.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from thinpipe.pipeline.wire.codec import Noise
from thinpipe.pipeline.wire.coding.entropy import CodingError
from thinpipe.pipeline.wire.kernels import load
from thinpipe.pipeline.wire.kernels.sign_mean import SignKernels
from thinpipe.pipeline.wire.pinned import brought_to


@dataclass(frozen=True)
class SignMean:
    """`group` values, a multiple of 8, share a scale. A group that is not finite decodes to NaN.

    Equal inputs give equal bytes on any device.

    Raises:
        ValueError: a group that is no multiple of 8.
    """

    group: int = 128
    codec_id, bits = 20, 1

    def __post_init__(self) -> None:
        if self.group < 8 or self.group % 8:
            raise ValueError(f"group = {self.group}: use a multiple of 8, such as 128")

    def capacity(self, numel: int) -> int:
        return self._scale_nbytes(numel) + -(-numel // 8)

    def encode(
        self,
        x_BN: Tensor,
        wire_BW: Tensor,
        seen_BN: Tensor | None = None,
        *,
        noise: Noise | None = None,
    ) -> int:
        x_BN, split = x_BN.detach().float(), self._scale_nbytes(x_BN.shape[1])
        for x_N, wire_W in zip(x_BN, wire_BW, strict=True):
            scale_K = self._scales(x_N)
            self._kernels(x_N).encode(x_N.contiguous(), self.group, scale_K, wire_W[split:])
            wire_W[:split] = scale_K.view(torch.uint8)
        if seen_BN is not None:
            self.decode(wire_BW, seen_BN)
        return wire_BW.shape[1]

    def decode(self, wire_BW: Tensor, out_BN: Tensor) -> None:
        """Write the rows' values.

        Raises:
            CodingError: there are fewer bytes than a row has.
        """
        for wire_W, out_N in zip(wire_BW, out_BN, strict=True):
            self._decode(wire_W, out_N, add=False)

    def decode_add(self, wire_W: Tensor, sum_N: Tensor) -> None:
        """Add a row's values to `sum_N` (fp32, contiguous); the bytes may be in host memory.

        Raises:
            CodingError: there are fewer bytes than a row has.
        """
        self._decode(brought_to(sum_N.device, wire_W.view(-1)), sum_N, add=True)

    def _decode(self, wire_W: Tensor, out_N: Tensor, *, add: bool) -> None:
        if len(wire_W) < self.capacity(out_N.numel()):  # compiled code would read past the end
            needed = self.capacity(out_N.numel())
            raise CodingError(f"{len(wire_W)} bytes, where {needed} are needed")
        scale_K, split = self._scales(out_N), self._scale_nbytes(out_N.numel())
        scale_K.view(torch.uint8).copy_(wire_W[:split])
        into_N = out_N
        if out_N.dtype != torch.float32 or not out_N.is_contiguous():
            into_N = torch.empty(out_N.shape, device=out_N.device)
        signs = wire_W[split : split + -(-out_N.numel() // 8)].contiguous()
        self._kernels(out_N).decode(signs, self.group, scale_K, into_N, add=add)
        if into_N is not out_N:
            out_N.copy_(into_N)

    def _scales(self, x_N: Tensor) -> Tensor:
        groups = -(-x_N.numel() // self.group)
        return torch.empty(groups, dtype=torch.bfloat16, device=x_N.device)

    def _scale_nbytes(self, numel: int) -> int:
        return 2 * -(-numel // self.group)

    def _kernels(self, x_N: Tensor) -> SignKernels:
        return cast(SignKernels, load("sign_mean", device=x_N.device))
