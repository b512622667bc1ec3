"""Brings the weights of all stages to rank 0, and writes them as one file."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from thinpipe.launch.checkpoint.reshard import module_of
from thinpipe.launch.components import Built
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.launch.net.ranks.session import Session
from thinpipe.pipeline.comm.errors import TransportError
from thinpipe.pipeline.comm.transport import WEIGHTS, Link
from thinpipe.pipeline.wire.checksum import CHECKSUM_NBYTES, opened, sealed

PIECE_NBYTES = 4 << 20
"""Sent at a time, so that a slow link brings it within the timeout: 1 Mbit/s in half a minute."""


def save_model(session: Session, built: Built, path: Path) -> None:
    """Write the whole model's state dict on rank 0's machine; all ranks call it.

    Of replicas that differ, it is the model that all stand for. Rank 0 holds the whole model in RAM
    meanwhile; the weights cross the network once, uncompressed.

    Raises:
        TransportError: a rank is gone, or weights came damaged.
        OSError: the file cannot be written; on every rank.
    """
    transport, mesh = session.transport, session.mesh
    with built.sync.global_parameters():
        mine = {
            name: tensor.detach().cpu()
            for stage in built.stages
            for name, tensor in module_of(stage).state_dict().items()
        }
        listed = gather_json(transport, [describe(name, t) for name, t in mine.items()])
        if mesh.rank == 0:
            state = dict(mine)
            for rank in mesh.pipeline[1:]:
                found = make_described(rank, listed[rank])
                link = transport.link(rank, WEIGHTS, f"weights, rank {rank} -> rank 0")
                receive_tensors(link, found.values())
                state |= found
        elif mesh.rank in mesh.pipeline and mesh.replica == 0:
            link = transport.link(0, WEIGHTS, f"weights, rank {mesh.rank} -> rank 0")
            send_tensors(link, mine.values())
    problem = None
    if mesh.rank == 0:
        try:
            _write(state, path)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            problem = f"{path}: {reason}; choose a writable place with free space"
    problems = [text for text in gather_json(transport, problem) if text]
    if problems:
        raise OSError(problems[0])


def describe(name: str, tensor: Tensor) -> list[object]:
    """A tensor as JSON, for who receives it."""
    return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def send_tensors(link: Link, tensors: Iterable[Tensor]) -> None:
    """Send CPU tensors, a piece at a time; returns when all are under way."""
    number = -1
    for number, piece in enumerate(in_pieces(tensors, PIECE_NBYTES)):
        send_piece(link, number, piece)
    link.begin_pass(number + 1)  # waits for the last


def send_piece(link: Link, number: int, piece: Sequence[Tensor]) -> None:
    """Send one of `in_pieces`, once those before it are sent."""
    link.begin_pass(number)
    link.send(0, sealed(torch.cat([*piece]), number))


def receive_tensors(link: Link, tensors: Iterable[Tensor]) -> None:
    """Fill contiguous CPU tensors with what `send_tensors` sends.

    Raises:
        TransportError: the sender is gone, or something came damaged.
    """
    for number, piece in enumerate(in_pieces(tensors, PIECE_NBYTES)):
        receive_piece(link, number, piece)


def receive_piece(link: Link, number: int, piece: Sequence[Tensor]) -> None:
    """Fill one of `in_pieces`.

    Raises:
        TransportError: the sender is gone, or it came damaged.
    """
    link.begin_pass(number)
    link.expect(0, sum(part.numel() for part in piece) + CHECKSUM_NBYTES)
    data = opened(link.take(0), number)
    if data is None:
        raise TransportError(f"weights came damaged, in piece {number}")
    fill(piece, data)


def in_pieces(tensors: Iterable[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Views of all bytes, in pieces of at most so many: to send one costs a round trip.

    Tensors that are to be filled must be contiguous; none is split only to fill a piece.
    """
    piece, room = list[Tensor](), most
    for tensor in tensors:
        for part in torch.split(as_bytes(tensor), most):
            if part.numel() > room:
                yield piece
                piece, room = [], most
            piece.append(part)
            room -= part.numel()
    if room < most:
        yield piece


def fill(piece: Sequence[Tensor], data: Tensor) -> None:
    """Fill the views of a piece with its bytes."""
    for part, came in zip(piece, torch.split(data, [p.numel() for p in piece]), strict=True):
        part.copy_(came)


def make_described(
    rank: int, listed: Sequence[tuple[str, str, Sequence[int]]], device: str = "cpu"
) -> dict[str, Tensor]:
    """Empty tensors by name, as a rank describes those that it is going to send.

    Raises:
        TransportError: it offers what is no tensor.
    """
    found = {}
    for name, dtype, shape in listed:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise TransportError(f"rank {rank} offers {name} as {dtype!r}, which is no type")
        found[name] = torch.empty(tuple(shape), dtype=kind, device=device)
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    """A view."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _write(state: Mapping[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, partial)
        partial.chmod(0o644)  # safetensors lets only its owner read
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
