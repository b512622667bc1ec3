"""How far the ranks' clocks are apart, so that events of several hosts fit on one time axis."""

import time

import torch

from thinpipe.pipeline.comm.transport import CLOCK, Link, Transport

_PINGS = 4
"""The shortest round trip counts: it spent the least time in queues, so its offset is the best."""


def seconds_ahead(transport: Transport) -> float:
    """How far this rank's `time.perf_counter` is ahead of rank 0's; every rank calls it alike.

    Rank 0 answers the others one after the other. Of a few round trips the quickest counts, as its
    two ways can differ least; the answer is wrong by at most half of it (Cristian 1989). Takes
    four round trips per rank.
    """
    if transport.mesh.rank == 0:
        for peer in range(1, transport.mesh.world_size):
            questions, answers = _links(transport, peer)
            for number in range(_PINGS):
                _answer(questions, answers, number)
            answers.begin_pass(_PINGS)  # waits until all are on their way
        return 0.0
    questions, answers = _links(transport, 0)
    return min(_ask(questions, answers, number) for number in range(_PINGS))[1]


def _links(transport: Transport, peer: int) -> tuple[Link, Link]:
    name = f"clocks of rank {transport.mesh.rank} and rank {peer}"
    return transport.link(peer, CLOCK, name), transport.link(peer, CLOCK + 1, name)


def _ask(questions: Link, answers: Link, number: int) -> tuple[float, float]:
    """Round trip in seconds, and how far this clock was ahead halfway through it."""
    for link in (questions, answers):
        link.begin_pass(number)
    answers.expect(0, 8)
    sent_s = time.perf_counter()
    questions.send(0, torch.zeros(1, dtype=torch.uint8))
    theirs = answers.take(0).view(torch.float64)
    answered_s = time.perf_counter()
    return answered_s - sent_s, (sent_s + answered_s) / 2 - float(theirs)


def _answer(questions: Link, answers: Link, number: int) -> None:
    for link in (questions, answers):
        link.begin_pass(number)
    questions.expect(0, 1)
    questions.take(0)
    now = torch.tensor([time.perf_counter()], dtype=torch.float64)
    answers.send(0, now.view(torch.uint8))
