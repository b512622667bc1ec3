"""How fast a link is, before the run uses it."""

import time

import torch
import torch.distributed as dist

_NBYTES, _TRIES = 1 << 20, 2  # the first one opens TCP's window
_TAG = 1  # below every tag of `thinpipe.pipeline.comm.link`


def measure_rate(group: dist.ProcessGroup, peer: int, *, sending: bool) -> float | None:
    """Bytes per second from the sending end to the other; both ends call it, the sender is told.

    A megabyte is timed until the peer has it, less a round trip. Blocks for about two of them.
    """
    round_trip_s, best_s = (
        min(_exchange(group, peer, nbytes, sending=sending) for _ in range(_TRIES))
        for nbytes in (1, _NBYTES)
    )
    return _NBYTES / max(best_s - round_trip_s, best_s / 10) if sending else None


def _exchange(group: dist.ProcessGroup, peer: int, nbytes: int, *, sending: bool) -> float:
    """Seconds from the first byte sent to the answer."""
    message, answer = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    start_s = time.perf_counter()
    if sending:
        dist.send(message, group=group, group_dst=peer, tag=_TAG)
        dist.recv(answer, group=group, group_src=peer, tag=_TAG)
    else:
        dist.recv(message, group=group, group_src=peer, tag=_TAG)
        dist.send(answer, group=group, group_dst=peer, tag=_TAG)
    return time.perf_counter() - start_s
