"""How far the ranks' clocks are apart, so that events of several hosts fit on one time axis."""

import time

import torch
import torch.distributed as dist

from thinpipe.pipeline.mesh import Mesh

_PINGS = 4


def seconds_ahead(mesh: Mesh) -> float:
    """How far this rank's `time.perf_counter` is ahead of rank 0's; every rank calls it alike.

    Rank 0 answers the others one after the other. Of a few round trips the quickest counts, as its
    two ways can differ least; the answer is wrong by at most half of it (Cristian 1989). Takes
    four round trips per rank.
    """
    if mesh.rank == 0:
        for peer in range(1, mesh.world_size):
            _answer(mesh, peer)
        return 0.0
    best_s, ahead_s = float("inf"), 0.0
    for _ in range(_PINGS):
        round_trip_s, ahead_now_s = _ask(mesh)
        if round_trip_s < best_s:
            best_s, ahead_s = round_trip_s, ahead_now_s
    return ahead_s


def _ask(mesh: Mesh) -> tuple[float, float]:
    """Round trip in seconds, and how far this clock was ahead halfway through it."""
    theirs = torch.empty(1, dtype=torch.float64)
    sent_s = time.perf_counter()
    dist.send(torch.zeros(1), group=mesh.control, group_dst=0)
    dist.recv(theirs, group=mesh.control, group_src=0)
    answered_s = time.perf_counter()
    return answered_s - sent_s, (sent_s + answered_s) / 2 - float(theirs)


def _answer(mesh: Mesh, peer: int) -> None:
    for _ in range(_PINGS):
        dist.recv(torch.empty(1), group=mesh.control, group_src=peer)
        now = torch.tensor([time.perf_counter()], dtype=torch.float64)
        dist.send(now, group=mesh.control, group_dst=peer)
