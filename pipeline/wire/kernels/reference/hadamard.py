"""What each tile kernel means, in plain torch on any device; see `../hadamard.py`.

Axes: B rows, N values, K tiles, G = R * R values of a tile.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from thinpipe.pipeline.wire.codec import Cached
from thinpipe.pipeline.wire.kernels import TILE
from thinpipe.pipeline.wire.kernels.hadamard import SIDE, Plan

LARGEST_TURNED = 2.0**100  # sums of 64 such values are far below fp32's 2^128


def survey(x_BN: Tensor, memory_BN: Tensor | None, peak_BK: Tensor, turned_BK: Tensor) -> None:
    x_BKG = _tiles(x_BN, memory_BN)
    plain_BK = x_BKG.abs().amax(-1)
    rotated_BK = _rotate(x_BKG).abs().amax(-1)
    turn_BK = (rotated_BK < plain_BK) & (plain_BK < LARGEST_TURNED)  # false for NaN
    peak = torch.where(turn_BK, rotated_BK, plain_BK)
    peak_BK.copy_(torch.where(torch.isfinite(peak), peak, torch.inf))
    turned_BK.copy_(turn_BK)


def gather(x_BN: Tensor, memory_BN: Tensor | None, plan: Plan, tiles_BKG: Tensor) -> None:
    x_BKG = _tiles(x_BN, memory_BN)
    turned_BKG = torch.where(plan.turned_BK.bool().unsqueeze(-1), _rotate(x_BKG), x_BKG)
    tiles_BKG.copy_(torch.take_along_dim(turned_BKG, _index(plan.order_BK), 1))


def scatter(tiles_BKG: Tensor, plan: Plan, out_BN: Tensor) -> None:
    placed_BKG = torch.empty_like(tiles_BKG)
    placed_BKG.scatter_(1, _index(plan.order_BK).expand_as(tiles_BKG), tiles_BKG)
    x_BKG = torch.where(plan.turned_BK.bool().unsqueeze(-1), _rotate(placed_BKG), placed_BKG)
    out_BN.copy_(x_BKG.flatten(1)[:, : out_BN.shape[1]])


def scatter_change(tiles_BKG: Tensor, plan: Plan, cached: Cached, out_BN: Tensor | None) -> Tensor:
    change_BN = torch.empty(cached.old_BN.shape, device=cached.old_BN.device)
    scatter(tiles_BKG, plan, change_BN)
    value_BN = cached.old_BN.float() + change_BN
    cached.fresh_BN.copy_(value_BN)
    if out_BN is not None:
        out_BN.copy_(value_BN)
    return torch.isfinite(cached.fresh_BN).all(1)


def _tiles(x_BN: Tensor, memory_BN: Tensor | None) -> Tensor:
    x_BN = x_BN.float() if memory_BN is None else x_BN.float() - memory_BN.float()
    padded = F.pad(x_BN, (0, -x_BN.shape[1] % TILE))
    return padded.view(x_BN.shape[0], padded.shape[1] // TILE, TILE)


def _index(order_BK: Tensor) -> Tensor:
    return order_BK.to(torch.int64).unsqueeze(-1)


def _rotate(x_BKG: Tensor) -> Tensor:
    half_BKRR = _butterflies(x_BKG.reshape(*x_BKG.shape[:2], SIDE, SIDE))
    return _butterflies(half_BKRR.transpose(2, 3)).flatten(2) * (1.0 / SIDE)


def _butterflies(x_BKRR: Tensor) -> Tensor:
    """Sums and differences of rows of the squares 1, 2, 4, ... apart."""
    rows, tiles, side, _ = x_BKRR.shape
    distance = 1
    while distance < side:
        pairs = x_BKRR.reshape(rows, tiles, side // (2 * distance), 2, distance, side)
        a, b = pairs[:, :, :, 0], pairs[:, :, :, 1]
        x_BKRR = torch.stack([a + b, a - b], 3).view(rows, tiles, side, side)
        distance *= 2
    return x_BKRR
