"""Dropout whose masks may repeat: a sample at the same site loses the same elements every time.

AQ-SGD sends how much an activation changed since the sample's last visit. With fresh masks most of
an activation changes at every visit; with a mask that depends on the sample alone, only training
moves it. A mask here is a function of run seed, layer, site, sample id and position, computed by
hashing a counter, so it depends neither on cut, microbatch and schedule nor on the device, and
computing a block again under activation checkpointing gives the same mask.

Axes: B samples, T tokens, D width, H heads.
"""

import hashlib
import math
import struct
from typing import Literal

import torch
from torch import Tensor, nn

DropoutMasks = Literal["random", "repeated"]
DropoutSite = Literal["embedding", "attention", "mixed", "feed_forward"]

_WORD = 1 << 32  # words of 32 bits; numbers from half of it on are negative in int32


class Dropout(nn.Module):
    """Dropout at one site of one layer; its masks are drawn from torch's generator or repeated."""

    def __init__(
        self, rate: float, masks: DropoutMasks, *, seed: int, layer: int, site: DropoutSite
    ):
        super().__init__()
        self.rate, self.masks = rate, masks
        digest = hashlib.sha256(f"dropout/{seed}/{layer}/{site}".encode()).digest()
        first, second = struct.unpack(">2i", digest[:8])
        self._key = (first, second)

    @property
    def repeats(self) -> bool:
        """Whether this forward needs the ids of its samples."""
        return self.training and self.rate > 0 and self.masks == "repeated"

    def forward(self, x: Tensor, ids_B: Tensor | None) -> Tensor:
        """Drop elements of `x` [B, ...] and scale up the rest; nothing in evaluation.

        Raises:
            ValueError: repeated masks without sample ids.
        """
        if not self.repeats:
            return nn.functional.dropout(x, self.rate, self.training)
        if ids_B is None:
            raise ValueError(
                'model.dropout_masks = "repeated": the masks belong to samples and this stage was '
                'called without their ids; call it with samples, or use "random"'
            )
        keep = keep_mask(ids_B.to(x.device), x.shape[1:], rate=self.rate, key=self._key)
        return x * torch.where(keep, 1 / (1 - self.rate), 0.0).to(x.dtype)


def keep_mask(ids_B: Tensor, shape: torch.Size, *, rate: float, key: tuple[int, int]) -> Tensor:
    """Boolean [B, *shape]: False with probability `rate`, a function of id, position and key.

    `key` is two signed 32-bit numbers.
    """
    low_B = _mix(ids_B.to(torch.int32) ^ key[0])
    high_B = _mix((ids_B >> 32).to(torch.int32) ^ low_B ^ key[1])
    count = torch.arange(math.prod(shape), dtype=torch.int32, device=ids_B.device)
    words = _mix(count + low_B[:, None])
    words = _mix(words.bitwise_xor_(high_B[:, None]))
    return (words >= round(rate * _WORD) - _WORD // 2).view(len(ids_B), *shape)


def _mix(words: Tensor) -> Tensor:
    """`lowbias32`, a bijection of 32-bit words (C. Wellons, "Prospecting for Hash Functions")."""
    words = words ^ ((words >> 16) & 0xFFFF)  # the mask: int32 shifts copy the sign
    words.mul_(0x7FEB352D)
    words.bitwise_xor_((words >> 15) & 0x1FFFF)
    words.mul_(0x846CA68B - _WORD)
    return words.bitwise_xor_((words >> 16) & 0xFFFF)
