"""What each tile kernel means, in plain torch on any device; see `../hadamard.py`.

Axes: B rows, N values, K tiles, G = R * R values of a tile.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from thinpipe.pipeline.wire.kernels import TILE
from thinpipe.pipeline.wire.kernels.hadamard import SIDE

if TYPE_CHECKING:  # a backend that drifts fails the type check
    from thinpipe.pipeline.wire.kernels.hadamard import TileKernels
    from thinpipe.pipeline.wire.kernels.reference import hadamard as hadamard_reference

LARGEST_TURNED = 2.0**100  # sums of 64 such values are far below fp32's 2^128


def survey(x_BN: Tensor, memory_BN: Tensor | None, peak_BK: Tensor, turned_BK: Tensor) -> None:
    """Write each tile's smaller peak and whether it is the rotated one's."""
    x_BKG = _tiles(x_BN, memory_BN)
    plain_BK = x_BKG.abs().amax(-1)
    rotated_BK = _rotate(x_BKG).abs().amax(-1)
    turn_BK = (rotated_BK < plain_BK) & (plain_BK < LARGEST_TURNED)  # false for NaN
    peak = torch.where(turn_BK, rotated_BK, plain_BK)
    peak_BK.copy_(torch.where(torch.isfinite(peak), peak, torch.inf))
    turned_BK.copy_(turn_BK)


def gather(
    x_BN: Tensor,
    memory_BN: Tensor | None,
    order_BK: Tensor,
    turned_BK: Tensor,
    tiles_BKG: Tensor,
) -> None:
    """Write tiles in the order given, rotated where they are turned."""
    x_BKG = _tiles(x_BN, memory_BN)
    turned_BKG = torch.where(turned_BK.bool().unsqueeze(-1), _rotate(x_BKG), x_BKG)
    tiles_BKG.copy_(torch.take_along_dim(turned_BKG, _index(order_BK), 1))


def scatter(tiles_BKG: Tensor, order_BK: Tensor, turned_BK: Tensor, out_BN: Tensor) -> None:
    """Write tiles to their places, rotated back where they were turned."""
    placed_BKG = torch.empty_like(tiles_BKG)
    placed_BKG.scatter_(1, _index(order_BK).expand_as(tiles_BKG), tiles_BKG)
    x_BKG = torch.where(turned_BK.bool().unsqueeze(-1), _rotate(placed_BKG), placed_BKG)
    out_BN.copy_(x_BKG.flatten(1)[:, : out_BN.shape[1]])


def scatter_change(
    tiles_BKG: Tensor,
    order_BK: Tensor,
    turned_BK: Tensor,
    memory_BN: Tensor,
    fresh_BN: Tensor,
    out_BN: Tensor | None,
) -> Tensor:
    """Add tiles to a memory; see `TileKernels.scatter_change`."""
    change_BN = torch.empty(memory_BN.shape, device=memory_BN.device)
    scatter(tiles_BKG, order_BK, turned_BK, change_BN)
    value_BN = memory_BN.float() + change_BN
    fresh_BN.copy_(value_BN)
    if out_BN is not None:
        out_BN.copy_(value_BN)
    return torch.isfinite(fresh_BN).all(1)


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


if TYPE_CHECKING:
    _checked: TileKernels = hadamard_reference
