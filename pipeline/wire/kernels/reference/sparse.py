"""What each sparse kernel means, in plain torch on any device; `sparse.py` has the contract.

Axes: N values of a vector, n chosen, R runs, G values per run, M mask bytes, k kept values.
"""

import torch
from torch import Tensor

from thinpipe.pipeline.wire.kernels.bits import pack, unpack


def gather(x_N: Tensor, base_N: Tensor | None, start_R: Tensor, run: int, out_n: Tensor) -> None:
    place_n = _places(start_R, run, x_N)
    value_n = x_N[place_n].float()
    out_n.copy_(value_n if base_N is None else value_n - base_N[place_n].float())


def scatter(value_n: Tensor, start_R: Tensor, run: int, out_N: Tensor) -> None:
    out_N[_places(start_R, run, out_N)] = value_n.to(out_N.dtype)


def select(x_n: Tensor, mask_M: Tensor, kept_k: Tensor, room_n: Tensor | None = None) -> None:
    magnitude_n = x_n.view(torch.int32) & 0x7FFFFFFF  # as integers NaN is above infinity
    order_n = magnitude_n.sort(descending=True, stable=True).indices  # stable: of ties the first
    flag_n = torch.zeros(x_n.shape, dtype=torch.bool, device=x_n.device)
    flag_n[order_n[: kept_k.numel()]] = True
    kept_k.copy_(x_n[flag_n])
    mask_M.copy_(pack(flag_n.to(torch.uint8)))


def place(mask_M: Tensor, kept_k: Tensor, out_n: Tensor) -> None:
    out_n.zero_()
    out_n[unpack(mask_M, out_n.numel()).bool()] = kept_k


def place_add(mask_M: Tensor, kept_k: Tensor, out_n: Tensor) -> None:
    out_n[unpack(mask_M, out_n.numel()).bool()] += kept_k


def apply_exchanged(
    sent_n: Tensor, mean_n: Tensor, start_R: Tensor, run: int, x_N: Tensor, base_N: Tensor
) -> None:
    place_n = _places(start_R, run, x_N)
    base_n = base_N[place_n].float()
    left_n = (x_N[place_n].float() - base_n) - sent_n
    moved_n = (base_n + mean_n).to(base_N.dtype)
    base_N[place_n] = moved_n
    x_N[place_n] = (moved_n.float() + left_n).to(x_N.dtype)


def _places(start_R: Tensor, run: int, x_N: Tensor) -> Tensor:
    place_n = (start_R.unsqueeze(1) + torch.arange(run)).flatten()
    return place_n[place_n < x_N.numel()].to(x_N.device)
