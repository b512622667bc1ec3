"""How fast a link is, before the run uses it."""

import time

import torch

from thinpipe.pipeline.comm.link import Link
from thinpipe.pipeline.comm.transport import RATE, Transport

_NBYTES, _TRIES = 1 << 20, 2  # the first one opens TCP's window


def measure_rate(transport: Transport, peer: int, *, sending: bool) -> float | None:
    """Bytes per second from the sending end to the other; both ends call it.

    A megabyte is timed until the peer has it, less a round trip. Blocks for about two of them.
    """
    name = f"rate measurement, rank {transport.mesh.rank} and rank {peer}"
    data, answers = (transport.link(peer, RATE + way, name) for way in (0, 1))
    round_trip_s, best_s = (
        min(_exchange(data, answers, number, nbytes, sending=sending) for number in numbers)
        for nbytes, numbers in ((1, range(_TRIES)), (_NBYTES, range(_TRIES, 2 * _TRIES)))
    )
    answers.begin_pass(2 * _TRIES)  # waits until all are on their way
    return _NBYTES / max(best_s - round_trip_s, best_s / 10) if sending else None


def _exchange(data: Link, answers: Link, number: int, nbytes: int, *, sending: bool) -> float:
    """Seconds from the first byte sent to the answer."""
    for link in (data, answers):
        link.begin_pass(number)
    start_s = time.perf_counter()
    if sending:
        answers.expect(0, 1)
        data.send(0, torch.zeros(nbytes, dtype=torch.uint8))
        answers.take(0)
    else:
        data.expect(0, nbytes)
        data.take(0)
        answers.send(0, torch.zeros(1, dtype=torch.uint8))
    return time.perf_counter() - start_s
