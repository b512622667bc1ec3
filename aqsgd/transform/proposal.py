"""A new basis as bytes: directions as whole numbers, entropy-coded like coefficients.

Bytes are `_HEAD` (dimensions, whether they are channels), the models that the dimensions start at
and what caches drop of them, a byte each, and the numbers: of channels 4 bytes each, of directions
`coefficients.py` with a row per channel.

Axes: D channels, K dimensions, M = 2 kinds of visits.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from thinpipe.aqsgd.transform import coefficients, logistic
from thinpipe.aqsgd.transform.basis import ONE, Basis, entry_unit
from thinpipe.aqsgd.transform.coefficients import as_bytes
from thinpipe.pipeline.wire.coding.entropy import CodingError
from thinpipe.pipeline.wire.coding.rans import PROBABILITY_BITS, Tables

_HEAD = struct.Struct("<II")
_MOST_DROPPED = 20  # as a sender's `_shifts`; what a peer sends beyond counts as this
_ENTRY_MODEL = 40  # for a mean magnitude of 32 units


class Proposal(NamedTuple):
    """A new basis, with the models that its dimensions start at."""

    basis: Basis
    model_MK: Tensor

    def packed(self) -> bytes:
        basis = self.basis
        head = _HEAD.pack(basis.dimensions, basis.order_D is not None)
        models = torch.cat([self.model_MK.to(torch.uint8), basis.shift_K[None]]).numpy().tobytes()
        if basis.order_D is not None:
            return head + models + basis.order_D.int().numpy().tobytes()
        number_DK = basis.entry_DK.int() // entry_unit(len(basis.entry_DK))
        wire = torch.empty(coefficients.capacity(*number_DK.shape), dtype=torch.uint8)
        used, _ = coefficients.encode(number_DK, *_static(basis.dimensions), wire)
        return head + models + wire[:used].numpy().tobytes()

    @staticmethod
    def unpacked(data: bytes, width: int) -> "Proposal":
        """What was sent.

        Raises:
            CodingError: the bytes are not those of a basis of this width.
        """
        if len(data) < _HEAD.size:
            raise CodingError(f"a basis of {len(data)} bytes does not fit {width} channels")
        dimensions, plain = _HEAD.unpack_from(data)
        possible = dimensions == width if plain else 0 < dimensions <= width
        start = _HEAD.size + 3 * dimensions
        if len(data) <= start or not possible or plain > 1:
            raise CodingError(
                f"a basis of {len(data)} bytes and {dimensions} dimensions does not fit {width} "
                "channels"
            )
        *models, shift_K = as_bytes(data[_HEAD.size : start]).view(3, dimensions)
        model_MK = torch.stack(models).long().clamp_max(logistic.MODELS - 1)
        shift_K = shift_K.clamp_max(_MOST_DROPPED)
        rest = as_bytes(data[start:])
        if plain:
            return Proposal(_channels(rest, shift_K), model_MK)
        return Proposal(_directions(rest, width, shift_K), model_MK)


def proposal_capacity(width: int) -> int:
    """Most bytes of a basis."""
    return _HEAD.size + 3 * width + max(coefficients.capacity(width, width), 4 * width)


def _channels(wire: Tensor, shift_D: Tensor) -> Basis:
    order_D = wire[: wire.numel() // 4 * 4].view(torch.int32).long()
    width = len(shift_D)
    if wire.numel() != 4 * width or not torch.equal(order_D.sort().values, torch.arange(width)):
        raise CodingError(f"an order that does not have each of {width} channels once")
    return Basis.of_channels(order_D, shift_D)


def _directions(wire: Tensor, width: int, shift_K: Tensor) -> Basis:
    unit = entry_unit(width)
    number_DK = coefficients.decode(wire, width, *_static(len(shift_K))).q_NK
    if int(number_DK.abs().max()) > ONE // unit:
        raise CodingError(f"a basis with an entry of {int(number_DK.abs().max()) * unit} / {ONE}")
    return Basis((number_DK * unit).to(torch.int16), shift_K)


def _static(dimensions: int) -> tuple[Tensor, Tables]:
    each = torch.full((1, coefficients.SCALES), (1 << PROBABILITY_BITS) // coefficients.SCALES)
    return torch.full((dimensions,), _ENTRY_MODEL), Tables(each)
