"""Codes of 1, 2 or 4 bits in bytes, the first one in the lowest bits: torch, on any device.

Axes: C codes (uint8), V bytes of them; any others before them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def pack(code_C: Tensor, bits: int = 1) -> Tensor:
    """The last byte is filled with zeros."""
    *rows, count = code_C.shape
    per_byte = 8 // bits
    code_V8 = F.pad(code_C, (0, -count % per_byte)).view(*rows, -(-count // per_byte), per_byte)
    return (code_V8 << _shifts(bits, code_C)).sum(-1, dtype=torch.uint8)


def unpack(packed_V: Tensor, count: int, bits: int = 1) -> Tensor:
    """The first `count` codes."""
    code_V8 = (packed_V.unsqueeze(-1) >> _shifts(bits, packed_V)) & ((1 << bits) - 1)
    return code_V8.flatten(-2)[..., :count].contiguous()


def _shifts(bits: int, like: Tensor) -> Tensor:
    return bits * torch.arange(8 // bits, dtype=torch.uint8, device=like.device)
