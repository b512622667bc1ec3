"""Flips bits of memories' rows in the RAM of a rank that runs.

Where a row lies is found by what it holds: the bytes that the newest checkpoint has of it.
"""

import random
import re
from collections.abc import Collection, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import psutil

from thinpipe.aqsgd.memory import ROWS
from thinpipe.launch.checkpoint import files

_PAGE_NBYTES = 4096
_WRITABLE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ 00:00 0")


def flip_row(
    rank: psutil.Process,
    checkpoints: Path,
    part: str,
    changed: Collection[int],
    chance: random.Random,
) -> int:
    """Flip a bit of a row that is not of the samples `changed` since; how many copies were found.

    The rank, whose `part` of checkpoints is named, must be stopped meanwhile.
    """
    rows = list(_rows(checkpoints, part, changed))
    chance.shuffle(rows)
    for row in rows:
        offset, bit = chance.randrange(len(row)), 1 << chance.randrange(8)
        found = _flip(rank.pid, row, offset, bit)
        if found:
            return found
    return 0


def _rows(checkpoints: Path, part: str, changed: Collection[int]) -> Iterator[bytes]:
    step = files.newest(checkpoints)
    if step is None:
        return
    state = files.read_part(checkpoints / f"step-{step}", part)
    for memory in _memories(state["boundaries"]):
        data, size = memory[ROWS].numpy().tobytes(), memory["row_nbytes"]
        for sample, place in zip(memory["ids"].tolist(), memory["place"].tolist(), strict=True):
            if sample not in changed:
                yield data[place * size : (place + 1) * size]


def _memories(state: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(state, Mapping):
        if ROWS in state:
            yield state
        for value in state.values():
            yield from _memories(value)


def _flip(pid: int, row: bytes, offset: int, bit: int) -> int:
    count = 0
    with FileIO(f"/proc/{pid}/mem", "r+") as memory:
        for begin, end in _regions(pid):
            data = _read(memory, begin, end)
            at = data.find(row)
            while at >= 0:
                memory.seek(begin + at + offset)
                memory.write(bytes([row[offset] ^ bit]))
                count += 1
                at = data.find(row, at + 1)
    return count


def _read(memory: FileIO, begin: int, end: int) -> bytes:
    """All that can be read; pages that cannot are zeros."""
    found = bytearray()
    while begin + len(found) < end:
        try:
            memory.seek(begin + len(found))
            piece = memory.read(end - begin - len(found))
        except (OSError, OverflowError):
            piece = b""
        found += piece or bytes(_PAGE_NBYTES)
    return bytes(found)


def _regions(pid: int) -> list[tuple[int, int]]:
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    found = (_WRITABLE.match(line) for line in lines)
    return [(int(m[1], 16), int(m[2], 16)) for m in found if m]
