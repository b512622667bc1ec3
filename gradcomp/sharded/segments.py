"""A vector whose parts are coded differently: the parameters that travel together.

Axes: B rows (always 1), N values of a row, W bytes of it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinpipe.pipeline.wire.codec import Codec, Noise
from thinpipe.pipeline.wire.coding.entropy import compress, expand


@dataclass(frozen=True)
class Segmented:
    """`sizes` values each for the `codecs`, one after the other.

    With `coded`, messages are shortened by zstd where that helps; one of full length is not.
    `noise` is what every call draws from, as a message is coded without more being said. Segments
    draw different numbers.
    """

    sizes: list[int]
    codecs: list[Codec]
    noise: Noise | None = None
    coded: bool = False
    codec_id = 26

    @property
    def bits(self) -> int:
        """Of the segment that has the fewest."""
        return min(codec.bits for codec in self.codecs)

    def capacity(self, numel: int) -> int:
        """Bytes of the segments; the most if they are coded, exact otherwise."""
        assert numel == sum(self.sizes), f"{numel} values for segments of {sum(self.sizes)}"
        return sum(
            codec.capacity(size) for size, codec in zip(self.sizes, self.codecs, strict=True)
        )

    def encode(
        self, x_BN: Tensor, wire_BW: Tensor, seen_BN: Tensor | None = None, *, noise: Noise | None
    ) -> int:
        if self.coded:
            plain_BW = torch.empty_like(wire_BW)
            length = replace(self, coded=False).encode(x_BN, plain_BW, seen_BN, noise=noise)
            shorter = compress(plain_BW[0, :length], wire_BW[0])
            if shorter is None:
                wire_BW.copy_(plain_BW)
            return length if shorter is None else shorter
        noise = noise or self.noise
        start = at = 0
        for number, (size, codec) in enumerate(zip(self.sizes, self.codecs, strict=True)):
            part, end = slice(start, start + size), at + codec.capacity(size)
            own = noise and Noise(noise.key, noise.step, noise.row_B + (number << 44))
            seen = None if seen_BN is None else seen_BN[:, part]
            codec.encode(x_BN[:, part], wire_BW[:, at:end], seen, noise=own)
            start, at = part.stop, end
        return at

    def decode(self, wire_BW: Tensor, out_BN: Tensor) -> None:
        if self.coded and wire_BW.shape[1] < self.capacity(out_BN.shape[1]):
            plain_BW = wire_BW.new_empty(1, self.capacity(out_BN.shape[1]))
            expand(wire_BW[0], plain_BW[0])
            wire_BW = plain_BW
        start = at = 0
        for size, codec in zip(self.sizes, self.codecs, strict=True):
            end = at + codec.capacity(size)
            codec.decode(wire_BW[:, at:end], out_BN[:, start : start + size])
            start, at = start + size, end
