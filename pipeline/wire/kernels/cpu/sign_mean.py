"""The sign kernels on CPUs, compiled by numba: one pass, no GIL."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from thinpipe.pipeline.wire.kernels.cpu.compilation import compiled
from thinpipe.pipeline.wire.kernels.cpu.llvm.vector_ir import float_of

if TYPE_CHECKING:  # a backend that drifts fails the type check
    from thinpipe.pipeline.wire.kernels.cpu import sign_mean as sign_mean_cpu
    from thinpipe.pipeline.wire.kernels.sign_mean import SignKernels

_MAGNITUDE = np.uint32(0x7FFFFFFF)


def encode(x_N: Tensor, group: int, scale_K: Tensor, sign_S: Tensor) -> None:
    """Write scales and signs; see `SignKernels.encode`."""
    mean_K = torch.empty(scale_K.numel())
    _encode(x_N.view(torch.int32).numpy().view(np.uint32), group, mean_K.numpy(), sign_S.numpy())
    scale_K.copy_(mean_K)


def decode(sign_S: Tensor, group: int, scale_K: Tensor, out_N: Tensor, *, add: bool) -> None:
    """Write what signs and scales stand for; see `SignKernels.decode`."""
    scale_words = scale_K.float().numpy().view(np.uint32)
    _decode(sign_S.numpy(), group, scale_words, out_N.numpy(), add)


@compiled
def _encode(word: Any, group: Any, mean: Any, sign: Any) -> Any:
    total = np.empty(8, np.float32)
    for k in range(mean.size):
        first, end = k * group, min((k + 1) * group, word.size)
        total[:] = 0
        for byte in range(first // 8, end // 8):
            signs = np.uint32(0)
            for i in range(8):
                value = word[8 * byte + i]
                total[i] += float_of(value & _MAGNITUDE)
                signs |= (value >> np.uint32(31)) << np.uint32(i)
            sign[byte] = signs
        if end % 8:
            signs = np.uint32(0)
            for i in range(end % 8):
                value = word[end // 8 * 8 + i]
                total[i] += float_of(value & _MAGNITUDE)
                signs |= (value >> np.uint32(31)) << np.uint32(i)
            sign[end // 8] = signs
        low = (total[0] + total[4]) + (total[2] + total[6])
        value = (low + ((total[1] + total[5]) + (total[3] + total[7]))) / np.float32(end - first)
        mean[k] = value if value < np.float32(np.inf) else np.float32(np.nan)


@compiled
def _decode(sign: Any, group: Any, scale: Any, out: Any, add: Any) -> Any:
    for k in range(scale.size):
        first, end = k * group, min((k + 1) * group, out.size)
        for start in range(first, end, 8):
            signs = np.uint32(sign[start // 8])
            for i in range(min(8, end - start)):
                bit = (signs >> np.uint32(i)) << np.uint32(31)
                value = float_of(scale[k] ^ bit)
                out[start + i] = out[start + i] + value if add else value


if TYPE_CHECKING:
    _checked: SignKernels = sign_mean_cpu
