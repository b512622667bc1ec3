"""Bytes with a checksum behind them: for messages that have no header of their own."""

import torch
import xxhash
from torch import Tensor

CHECKSUM_NBYTES = 8  # XXH3-64
_PIECE = 1 << 20  # values that are in fp32 at a time: 4 MiB


def sealed(data: Tensor, number: int) -> Tensor:
    """The bytes of a CPU tensor, then their XXH3-64, seeded with the number of the message."""
    flat = data.contiguous().view(torch.uint8).flatten()
    digest = xxhash.xxh3_64_intdigest(flat.numpy().data, seed=number)
    return torch.cat([flat, torch.tensor([*digest.to_bytes(CHECKSUM_NBYTES, "little")]).byte()])


def opened(message: Tensor, number: int) -> Tensor | None:
    """The bytes of a sealed message; None if they are not what was sealed under this number."""
    data = message[:-CHECKSUM_NBYTES]
    expected = xxhash.xxh3_64_intdigest(data.numpy().data, seed=number)
    found = message[-CHECKSUM_NBYTES:].numpy().tobytes()
    return data if int.from_bytes(found, "little") == expected else None


def hex_digest(values: Tensor) -> str:
    """XXH3-128 of a CPU tensor's shape and values in fp32, which are never there all at once."""
    hasher = xxhash.xxh3_128(f"{tuple(values.shape)} {torch.float32}".encode())
    for piece in torch.split(values.detach().flatten(), _PIECE):
        hasher.update(piece.float().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def digest_of(values: Tensor) -> float:
    """A digest of a CPU tensor that a float64 can hold: 52 bits of XXH3-64."""
    flat = values.contiguous().view(torch.uint8).flatten()
    return float(xxhash.xxh3_64_intdigest(flat.numpy().data) >> 12)
