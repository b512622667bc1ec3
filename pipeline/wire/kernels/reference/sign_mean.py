"""What the sign kernels mean, in plain torch on any device; `../sign_mean.py` orders the sums.

Axes: N values, K groups, G values per group, S bytes of signs.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:  # a backend that drifts fails the type check
    from thinpipe.pipeline.wire.kernels.reference import sign_mean as sign_mean_reference
    from thinpipe.pipeline.wire.kernels.sign_mean import SignKernels

_SUMS = 8


def encode(x_N: Tensor, group: int, scale_K: Tensor, sign_S: Tensor) -> None:
    """Write scales and signs; see `SignKernels.encode`."""
    numel, groups = x_N.numel(), scale_K.numel()
    padded_N = F.pad(x_N, (0, groups * group - numel))
    sizes = padded_N.abs().view(groups, group // _SUMS, _SUMS)
    total = torch.zeros(groups, _SUMS, device=x_N.device)
    for row in range(group // _SUMS):
        total = total + sizes[:, row]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    count_K = torch.full((groups,), float(group), device=x_N.device)
    if groups:
        count_K[-1] = numel - (groups - 1) * group
    mean_K = total[:, 0] / count_K
    scale_K.copy_(torch.where(mean_K.isfinite(), mean_K, torch.nan))
    bits = F.pad(torch.signbit(x_N).to(torch.uint8), (0, -numel % 8)).view(-1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=x_N.device)
    sign_S.copy_((bits * weights).sum(1, dtype=torch.uint8))


def decode(sign_S: Tensor, group: int, scale_K: Tensor, out_N: Tensor, *, add: bool) -> None:
    """Write what signs and scales stand for; see `SignKernels.decode`."""
    numel = out_N.numel()
    places = torch.arange(8, dtype=torch.uint8, device=out_N.device)
    negative_N = ((sign_S[:, None] >> places) & 1).flatten()[:numel].bool()
    value_N = scale_K.float().repeat_interleave(group)[:numel]
    value_N = torch.where(negative_N, -value_N, value_N)
    if add:
        out_N += value_N
    else:
        out_N.copy_(value_N)


if TYPE_CHECKING:
    _checked: SignKernels = sign_mean_reference
