"""What a method costs in processor time, without any training around it."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import methodcaller

import torch
from torch import nn

from benchmarks.replicas.training import Adam, Method
from thinpipe.gradcomp.local_peers import local_peers
from thinpipe.gradcomp.registry import build_optimizer, load_method, parse_options
from thinpipe.pipeline.replica_sync import ReplicaSync

_SHAPES = ((512, 1024), (1024, 256), (1024,), (256, 1024))
_STEPS, _WARMUP = 16, 4


def cpu_ns(method: Method, replicas: int) -> float:
    """Nanoseconds of processor time per parameter, step and replica: codec, memories and messages.

    Random gradients and moves; what the method's optimizer takes is not counted.
    """
    options = parse_options(method.name, method.options)
    built = []
    for peer in local_peers(replicas):
        generator = torch.Generator().manual_seed(peer.rank)
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in _SHAPES]
        moves = [1e-3 * torch.randn(shape, generator=generator) for shape in _SHAPES]
        sync = load_method(method.name).build(options, parameters, peer)
        build_optimizer(method.name, options, parameters, Adam(lr=1e-3), sync)  # some follow it
        built.append((sync, parameters, moves))
    steps = max(_STEPS, 2 * int(getattr(options, "interval", 1)))
    spent_s = 0.0
    with ThreadPoolExecutor(replicas) as pool:

        def timed(call: Callable[[ReplicaSync], object]) -> float:
            begin_s = time.process_time()
            list(pool.map(call, [sync for sync, *_ in built]))
            return time.process_time() - begin_s

        for step in range(_WARMUP + steps):
            for _, parameters, moves in built:
                for parameter, move in zip(parameters, moves, strict=True):
                    parameter.grad = move.clone()
            one_s = timed(methodcaller("begin_step", step, 0))
            one_s += timed(methodcaller("before_step"))
            for _, parameters, moves in built:
                _move(parameters, moves)
            one_s += timed(methodcaller("after_step")) + timed(methodcaller("state_dict"))
            spent_s += one_s if step >= _WARMUP else 0.0
    numel = sum(parameter.numel() for parameter in built[0][1])
    return 1e9 * spent_s / numel / steps / replicas


@torch.no_grad()
def _move(parameters: Sequence[nn.Parameter], moves: Sequence[torch.Tensor]) -> None:
    for parameter, move in zip(parameters, moves, strict=True):
        parameter.add_(move)
