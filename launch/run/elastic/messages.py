"""Messages over a connection of two ranks: a length, a header, which is JSON, and its tensors."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thinpipe.launch.run.weights import as_bytes, fill, in_pieces, make_described

_PIECE_NBYTES = 1 << 20
"""Sent at a time; a loss is noticed between two."""
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TELL_S = 5.0

Move = Callable[[Tensor], None]
"""Sends a tensor, or fills one with what comes."""

Tell = Callable[[int], None]
"""Told how many bytes are left."""


def send_message(move: Move, header: dict[str, Any], tensors: Iterable[Tensor] = ()) -> int:
    """Send a message, whose header describes the `tensors`; return the bytes sent.

    Raises:
        TransportError: the other end is gone.
    """
    text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    move(as_bytes(torch.tensor([text.numel()])))
    move(text)
    sent = text.numel()
    for piece in in_pieces(tensors, _PIECE_NBYTES):
        data = piece[0] if len(piece) == 1 else torch.cat(piece)
        move(data)
        sent += data.numel()
    return sent


def receive_header(move: Move, most: int) -> dict[str, Any]:
    """Take a header.

    Raises:
        TransportError: the other end is gone.
        ValueError: more than `most` bytes are offered.
    """
    length = torch.zeros(1, dtype=torch.int64)
    move(as_bytes(length))
    _check(int(length), most)
    text = torch.empty(int(length), dtype=torch.uint8)
    move(text)
    header: dict[str, Any] = json.loads(text.numpy().tobytes())
    return header


def receive_tensors(
    move: Move,
    header: dict[str, Any],
    most: int,
    came: Tell = lambda _: None,
    into: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Take the tensors of a header; `came` is told after each piece how many bytes are left.

    Those of `into` are filled again where they fit: new memory costs as much CPU as what is sent.

    Raises:
        TransportError: the other end is gone.
        ValueError: more than `most` bytes are offered, besides those that fit.
    """
    # on "meta" nothing is allocated: sizes are checked first
    offered = make_described(0, header["tensors"], "meta")
    known = {name: into[name] for name, tensor in offered.items() if _fits(tensor, into.get(name))}
    left = sum(tensor.nbytes for tensor in offered.values())
    _check(left - sum(tensor.nbytes for tensor in known.values()), most)
    new = make_described(0, [one for one in header["tensors"] if one[0] not in known])
    tensors = {name: (known | new)[name] for name in offered}
    for piece in in_pieces(tensors.values(), _PIECE_NBYTES):
        if len(piece) == 1:
            (data,) = piece
            move(data)
        else:
            data = torch.empty(sum(part.numel() for part in piece), dtype=torch.uint8)
            move(data)
            fill(piece, data)
        left -= data.nbytes
        came(left)
    return tensors


def now_and_then(say: Callable[[str], None], what: str) -> Tell:
    """Says every five seconds how many bytes are left, if any are."""
    told_s = time.monotonic()

    def tell(left: int) -> None:
        nonlocal told_s
        if left > 0 and time.monotonic() > told_s + _TELL_S:
            told_s = time.monotonic()
            say(f"{what}: {left / 1e6:,.1f} MB are left")

    return tell


def without_zeros(gradient: Tensor | None) -> list[Tensor]:
    """Which values are not zero, a bit each, and these; all, if most are; nothing for none."""
    if gradient is None:
        return []
    flat = gradient.detach().cpu().contiguous().flatten()
    there = flat.view(_WHOLE[flat.element_size()]) != 0  # -0.0 is a value
    values = flat[there]
    if 2 * values.numel() > flat.numel():
        return [flat.clone()]  # the gradient is gone before it is sent
    return [torch.from_numpy(np.packbits(there.numpy())), values]


def with_zeros(parts: Sequence[Tensor], parameter: nn.Parameter) -> Tensor:
    """What `without_zeros` was given, in the shape of that parameter."""
    if len(parts) == 1:
        return parts[0].view_as(parameter).to(parameter.device)
    bits, values = parts
    there = torch.from_numpy(np.unpackbits(bits.numpy(), count=parameter.numel())).bool()
    flat = torch.zeros(parameter.numel(), dtype=values.dtype)
    flat[there] = values
    return flat.view_as(parameter).to(parameter.device)


def _fits(offered: Tensor, before: Tensor | None) -> bool:
    kind = (offered.shape, offered.dtype)
    return before is not None and before.is_contiguous() and (before.shape, before.dtype) == kind


def _check(nbytes: int, most: int) -> None:
    """Before memory is taken for it."""
    if not 0 <= nbytes <= most:
        raise ValueError(f"the other end offers {nbytes:,} bytes, where at most {most:,} can be")
