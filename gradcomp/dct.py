"""Parameters as 64 x 64 tiles of their cosine transform, and back.

Matrices are cut into tiles, padded with zeros where a side is no multiple of 64; what has more
dimensions is a matrix of its first one. Vectors are cut into rows of 64, which are transformed by
themselves, 64 to a tile. The transform is orthonormal (DCT-II), so lengths stay as they are.

Axes: T tiles, S = 64 the side of one.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SIDE = 64


def basis(device: torch.device) -> Tensor:
    """The orthonormal DCT-II: F F^T = 1."""
    wave = torch.arange(SIDE, dtype=torch.float64)
    matrix = torch.cos(math.pi / SIDE * wave[:, None] * (wave + 0.5)) * math.sqrt(2 / SIDE)
    matrix[0] /= math.sqrt(2)
    return matrix.float().to(device)


class Tiles:
    """The tiles of some tensors, one after the other; every tensor fills whole ones."""

    def __init__(self, shapes: Sequence[torch.Size], device: torch.device) -> None:
        self._shapes, self._basis = tuple(shapes), basis(device)
        self._counts = [_rows(s) // SIDE * (_columns(s) // SIDE) for s in shapes]

    @property
    def count(self) -> int:
        return sum(self._counts)

    def transform(self, tensors: Sequence[Tensor]) -> Tensor:
        """Coefficients (fp32) of tensors with the shapes of these tiles: [T, S, S]."""
        parts = [self._cut(t.float(), s) for t, s in zip(tensors, self._shapes, strict=True)]
        return torch.cat([self._turn(p, s) for p, s in zip(parts, self._shapes, strict=True)])

    def invert(self, coefficients_TSS: Tensor) -> list[Tensor]:
        """The tensors that have these coefficients, less what padding would hold."""
        parts = torch.split(coefficients_TSS, self._counts)
        return [
            self._join(self._turn_back(part, shape), shape)
            for part, shape in zip(parts, self._shapes, strict=True)
        ]

    def _turn(self, tile_TSS: Tensor, shape: torch.Size) -> Tensor:
        turned = tile_TSS @ self._basis.T
        return self._basis @ turned if _is_matrix(shape) else turned

    def _turn_back(self, tile_TSS: Tensor, shape: torch.Size) -> Tensor:
        turned = tile_TSS @ self._basis
        return self._basis.T @ turned if _is_matrix(shape) else turned

    @staticmethod
    def _cut(tensor: Tensor, shape: torch.Size) -> Tensor:
        rows, columns = _rows(shape), _columns(shape)
        padded = torch.zeros(rows, columns, device=tensor.device)
        if _is_matrix(shape):
            matrix = tensor.flatten(1)
            padded[: matrix.shape[0], : matrix.shape[1]] = matrix
        else:
            padded.view(-1)[: tensor.numel()] = tensor.flatten()
        grid = padded.view(rows // SIDE, SIDE, columns // SIDE, SIDE)
        return grid.transpose(1, 2).reshape(-1, SIDE, SIDE)

    @staticmethod
    def _join(tile_TSS: Tensor, shape: torch.Size) -> Tensor:
        rows, columns = _rows(shape), _columns(shape)
        grid = tile_TSS.view(rows // SIDE, columns // SIDE, SIDE, SIDE).transpose(1, 2)
        padded = grid.reshape(rows, columns)
        if not _is_matrix(shape):
            return padded.flatten()[: shape.numel()].view(shape)
        return padded[: shape[0], : shape.numel() // shape[0]].reshape(shape)


def _is_matrix(shape: torch.Size) -> bool:
    return len(shape) > 1


def _rows(shape: torch.Size) -> int:
    lines = shape[0] if _is_matrix(shape) else -(-shape.numel() // SIDE)
    return SIDE * -(-lines // SIDE)


def _columns(shape: torch.Size) -> int:
    return SIDE * -(-(shape.numel() // shape[0]) // SIDE) if _is_matrix(shape) else SIDE
