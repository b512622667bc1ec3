"""What each kernel means, in plain torch on any device; `../__init__.py` has the layout.

Axes: B rows, N values, K groups, G values per group, P payload bytes, L lanes of a block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from thinpipe.pipeline.wire.codec import Cached, Noise
from thinpipe.pipeline.wire.kernels import Codes

_BLOCK, _PLANES, _LANES = 1024, 8, 128  # the layout in `kernels/__init__.py`
_WIDTHS = (8, 4, 2, 1)  # of a code's fields
_MASK32 = 0xFFFFFFFF  # words are int64: torch has few operations on uint32
_SMALLEST_NORMAL = 2.0**-126  # of fp32; some devices flush what is smaller to zero


def quantize(x_BN: Tensor, codes: Codes, *, noise: Noise | None) -> None:
    payload_BP, scale_BK, bits, group = codes
    numel = x_BN.shape[1]
    x_BKG = _grouped(x_BN.float(), group)
    step_BK = _scale(x_BKG, bits, unbiased=noise is not None)
    if scale_BK.dtype == torch.bfloat16:
        step_BK = _round_up_bf16(step_BK)
    step_BK1 = step_BK.float().unsqueeze(-1)
    usable = step_BK1.abs() >= _SMALLEST_NORMAL  # false for NaN as well
    inverse = torch.where(usable, 1.0 / step_BK1, 0.0)
    y_BN = torch.where(usable, x_BKG * inverse, 0.0).flatten(1)[:, :numel]
    half = 1 << (bits - 1)
    y_BN = y_BN.clamp(-half, half - 1)
    q_BN = y_BN.round() if noise is None else _round_stochastic(y_BN, noise)
    code_BN = (q_BN + half).to(torch.uint8)
    payload_BP.copy_(pack(code_BN, bits))
    scale_BK.copy_(step_BK)


def dequantize(codes: Codes, out_BN: Tensor) -> None:
    code_BN = unpack(codes.payload_BP, codes.bits, out_BN.shape[1])
    q_BKG = _grouped(code_BN.float() - (1 << (codes.bits - 1)), codes.group)
    value_BKG = q_BKG * codes.scale_BK.float().unsqueeze(-1)
    out_BN.copy_(value_BKG.flatten(1)[:, : out_BN.shape[1]])


def delta_encode(x_BN: Tensor, cached: Cached, codes: Codes, *, noise: Noise | None) -> Tensor:
    change_BN = x_BN.float() - cached.old_BN.float()
    quantize(change_BN, codes, noise=noise)
    return delta_decode(codes, cached, change_BN)


def delta_decode(codes: Codes, cached: Cached, out_BN: Tensor) -> Tensor:
    change_BN = torch.empty(out_BN.shape, device=out_BN.device)
    dequantize(codes, change_BN)
    value_BN = cached.old_BN.float() + change_BN
    out_BN.copy_(value_BN)
    cached.fresh_BN.copy_(value_BN)
    return torch.isfinite(cached.fresh_BN).all(1)


def _grouped(x_BN: Tensor, group: int) -> Tensor:
    group = max(1, min(group, x_BN.shape[1]))
    pad = -x_BN.shape[1] % group
    groups = (x_BN.shape[1] + pad) // group
    return F.pad(x_BN, (0, pad)).reshape(x_BN.shape[0], groups, group)


def _scale(x_BKG: Tensor, bits: int, *, unbiased: bool) -> Tensor:
    """Signed step per group: NaN if a value is not finite, 0 if the group is too small to hold.

    From 3 bits on, both extremes of the group land within half a step. At 1 and 2 bits the step is
    the largest magnitude / 2^(b-1), which has the smaller squared error and saturates the other
    extreme by at most one step. Stochastic rounding needs both extremes inside the range.
    """
    half = float(1 << (bits - 1))
    high, low = x_BKG.amax(-1).clamp_min(0), (-x_BKG.amin(-1)).clamp_min(0)
    large, small = torch.maximum(high, low), torch.minimum(high, low)
    if unbiased:
        step = torch.maximum(_divide(large, half), _divide(small, half - 1))
    elif bits <= 2:
        step = _divide(large, half)
    else:
        step = torch.maximum(_divide(large, half + 0.5), _divide(small, half - 0.5))
    step = torch.where(torch.isfinite(step), step, torch.nan)
    step = torch.where(step < _SMALLEST_NORMAL, 0.0, step)  # 1 / step may overflow below
    return torch.where((high > low) & (step > 0), -step, step)


def _divide(value_BK: Tensor, divisor: float) -> Tensor:
    """A true division: torch on CUDA multiplies by the reciprocal of a number."""
    return value_BK / torch.full_like(value_BK, divisor)


def _round_up_bf16(scale_BK: Tensor) -> Tensor:
    """Round magnitudes up to bf16, so that the group's extremes stay inside the range."""
    word = scale_BK.view(torch.int32).to(torch.int64)
    up = ((word + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)  # NaN would leave int32
    return torch.where(torch.isfinite(scale_BK) & torch.isfinite(up), up, torch.nan)


def _round_stochastic(y_BN: Tensor, noise: Noise) -> Tensor:
    """Round to 1 / 65536 of a step, then up with a probability that equals the rest."""
    fixed_BN = (y_BN * 65536.0).round().to(torch.int64)
    return (fixed_BN + uniform16(noise, y_BN.shape[1])) >> 16


def uniform16(noise: Noise, numel: int) -> Tensor:
    """Random integers below 2^16 for rows of `numel` values, int64 [B, numel]."""
    device = noise.row_B.device
    lanes = _block_lanes(numel)
    counter = torch.cat(
        [_LANES * k + torch.arange(lane_count, device=device) for k, lane_count in enumerate(lanes)]
    )
    words = _philox(counter, noise)
    halves_B8C = torch.stack([half for w in words for half in (w & 0xFFFF, w >> 16)], 1)
    parts = torch.split(halves_B8C, lanes, dim=2)
    return torch.cat([part.flatten(1) for part in parts], 1)[:, :numel]


def _philox(counter_C: Tensor, noise: Noise) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32; four int64 tensors [B, C] of 32-bit words."""
    row_B1 = noise.row_B.unsqueeze(1)
    c0 = counter_C.unsqueeze(0).expand(row_B1.shape[0], -1) & _MASK32
    c1 = (row_B1 & _MASK32).expand_as(c0)
    c2 = ((row_B1 >> 32) & _MASK32).expand_as(c0)
    c3 = torch.full_like(c0, noise.step & _MASK32)
    k0, k1 = noise.key & _MASK32, (noise.key >> 32) & _MASK32
    for _ in range(10):
        high0, low0 = _multiply_32(c0, 0xD2511F53)
        high1, low1 = _multiply_32(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def _multiply_32(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * constant; int64 would overflow, so in 16-bit halves."""
    low = a * (constant & 0xFFFF)
    middle = (low >> 16) + a * (constant >> 16)
    return (middle >> 16) & _MASK32, ((middle << 16) | (low & 0xFFFF)) & _MASK32


def _block_lanes(numel: int) -> list[int]:
    full, rest = divmod(numel, _BLOCK)
    return [_LANES] * full + ([-(-rest // _PLANES)] if rest else [])


def pack(code_BN: Tensor, bits: int) -> Tensor:
    """The bytes of codes (uint8 [B, N]), in the layout of `kernels/__init__.py`."""
    rows, numel = code_BN.shape
    full = numel // _BLOCK * _BLOCK
    parts = [_pack_blocks(code_BN[:, :full].reshape(rows, full // _BLOCK, _PLANES, _LANES), bits)]
    if numel > full:
        rest = F.pad(code_BN[:, full:], (0, -(numel - full) % _PLANES))
        parts.append(_pack_blocks(rest.reshape(rows, 1, _PLANES, rest.shape[1] // _PLANES), bits))
    return torch.cat(parts, 1)


def _pack_blocks(code_BK8L: Tensor, bits: int) -> Tensor:
    rows, shift = [], 0
    for width in _widths(bits):
        field = (code_BK8L >> shift) & ((1 << width) - 1)
        planes = field.view(*field.shape[:2], _PLANES // width, width, field.shape[3])
        packed = planes[:, :, 0]
        for i in range(1, _PLANES // width):
            packed = packed | (planes[:, :, i] << (i * width))
        rows.append(packed)
        shift += width
    return torch.cat(rows, 2).flatten(1)


def unpack(payload_BP: Tensor, bits: int, numel: int) -> Tensor:
    """The codes (uint8 [B, N]) of such bytes."""
    rows = payload_BP.shape[0]
    full, rest = divmod(numel, _BLOCK)
    split = full * bits * _LANES
    blocks = payload_BP[:, :split].reshape(rows, full, bits, _LANES)
    parts = [_unpack_blocks(blocks, bits)]
    if rest:
        lanes = -(-rest // _PLANES)
        parts.append(_unpack_blocks(payload_BP[:, split:].reshape(rows, 1, bits, lanes), bits))
    return torch.cat(parts, 1)[:, :numel]


def _unpack_blocks(packed_BKbL: Tensor, bits: int) -> Tensor:
    rows, blocks, _, lanes = packed_BKbL.shape
    code = packed_BKbL.new_zeros(rows, blocks, _PLANES, lanes)
    shift = offset = 0
    for width in _widths(bits):
        field_rows = packed_BKbL[:, :, offset : offset + width]
        mask = (1 << width) - 1
        planes = [(field_rows >> (i * width)) & mask for i in range(_PLANES // width)]
        code |= torch.cat(planes, 2) << shift
        shift += width
        offset += width
    return code.flatten(1)


def _widths(bits: int) -> tuple[int, ...]:
    return tuple(width for width in _WIDTHS if bits & width)
