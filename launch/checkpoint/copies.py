"""Parts of a checkpoint sent from one machine to another: second copies, and what a disk has lost.

Files travel in chunks over links of their own. A read or write that fails does not stop the
exchange, in which others wait: the target finds by the file's digest that it is not whole.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import torch

from thinpipe.launch.checkpoint.manifest import Part, file_digest
from thinpipe.launch.host import disk
from thinpipe.pipeline.comm.transport import Peers
from thinpipe.pipeline.wire.exchange_header import EXCHANGE_HEADER_NBYTES, ExchangeHeader

_CHUNK_NBYTES = 2**22  # in half a minute over 1 Mbit/s, within pipeline.peer_timeout_s


@dataclass(frozen=True)
class Transfer:
    """A part that goes from a rank's folder into that of another."""

    part: Part
    source: int
    target: int


def second_copies(parts: Sequence[Part], hosts: Sequence[int], copies: int) -> list[Transfer]:
    """Every rank's part to the hosts after its own; `hosts` is the first rank of each rank's."""
    firsts = sorted(set(hosts))
    return [
        Transfer(part, rank, firsts[(firsts.index(hosts[rank]) + further) % len(firsts)])
        for further in range(1, min(copies, len(firsts)))
        for rank, part in enumerate(parts)
    ]


def run_transfers(peers: Peers, folder: Path, transfers: Iterable[Transfer]) -> list[str]:
    """This rank's share of the transfers, in the order that all ranks use.

    Returns what went wrong with files that were to come here.
    """
    problems = []
    for number, transfer in enumerate(transfers):
        if peers.rank == transfer.source:
            _send(peers, folder, transfer, number)
        if peers.rank == transfer.target:
            problem = _receive(peers, folder, transfer, number)
            if problem is not None:
                problems.append(f"{transfer.part.path(folder)}: {problem}")
    return problems


def _chunks(nbytes: int) -> Iterable[tuple[int, int]]:
    for number, start in enumerate(range(0, nbytes, _CHUNK_NBYTES)):
        yield number, min(_CHUNK_NBYTES, nbytes - start)


def _header(transfer: Transfer, number: int, chunk: int) -> ExchangeHeader:
    return ExchangeHeader(0, 0, 0, step=number, bucket=chunk, sender=transfer.source)


def _send(peers: Peers, folder: Path, transfer: Transfer, number: int) -> None:
    with contextlib.ExitStack() as stack:
        file: BufferedReader | None = None
        with contextlib.suppress(OSError):
            file = stack.enter_context(transfer.part.path(folder).open("rb"))
        for chunk, length in _chunks(transfer.part.nbytes):
            message = torch.zeros(EXCHANGE_HEADER_NBYTES + length, dtype=torch.uint8)
            if file is not None:
                with contextlib.suppress(OSError):
                    file.readinto(message[EXCHANGE_HEADER_NBYTES:].numpy().data)
            _header(transfer, number, chunk).write(message)
            peers.exchange({transfer.target: message}, (), length)


def _receive(peers: Peers, folder: Path, transfer: Transfer, number: int) -> str | None:
    path = transfer.part.path(folder)
    scratch = path.with_name(f".{path.name}.copy")
    problems: list[str] = []
    file: BinaryIO | None = None
    with _noting(problems, path):
        file = scratch.open("wb")
    try:
        for chunk, length in _chunks(transfer.part.nbytes):
            found = peers.exchange({}, (transfer.source,), length)[transfer.source]
            _header(transfer, number, chunk).check(found)
            if file is not None and not problems:
                with _noting(problems, path):
                    file.write(found[EXCHANGE_HEADER_NBYTES:].numpy().data)
    finally:
        if file is not None:
            with _noting(problems, path):
                file.close()  # which writes what it still holds
    if not problems:
        with _noting(problems, path):
            if file_digest(scratch, flush=True) == transfer.part.sha256:
                disk.replace(scratch, path)
            else:
                problems.append("the copy on the other machine is damaged")
    with contextlib.suppress(OSError):
        scratch.unlink(missing_ok=True)
    return problems[0] if problems else None


@contextlib.contextmanager
def _noting(problems: list[str], path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problems.append(f"not written: {disk.why(error, path)}")
