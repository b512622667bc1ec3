"""Ranks that hold the same weights begin with the same bits, whatever processors they are on.

Random numbers are drawn by kernels that round as their instruction set does: torch's `normal_`
gives other last bits with AVX2 than with AVX-512 or without both.
"""

import logging

import torch

from thinpipe.launch.checkpoint.reshard import module_of
from thinpipe.launch.components import Built
from thinpipe.launch.run.proof import digest
from thinpipe.launch.run.weights import receive_tensors, send_tensors
from thinpipe.pipeline.comm.transport import WEIGHTS, Transport

_log = logging.getLogger(__name__)


def begin_alike(built: Built, transport: Transport) -> None:
    """Take the weights of replica 0 where others were drawn, and tied ones of the first stage.

    All ranks call it before their first step.
    """
    if transport.mesh.replicas > 1:
        _take_from_replica_0(built, transport)
    if built.engine.tied is not None:
        built.engine.tied.begin_alike()


def _take_from_replica_0(built: Built, transport: Transport) -> None:
    mesh = transport.mesh
    held = {
        f"{name} of stage {stage.stage_index}": parameter
        for stage in built.stages
        for name, parameter in module_of(stage).named_parameters()
    }
    wholes = {name: parameter.detach().cpu().contiguous() for name, parameter in held.items()}
    mine = torch.tensor([float(digest([*wholes.values()]) >> 12)], dtype=torch.float64)
    digests = transport.share(mine, "stage").flatten()[mesh.shard :: mesh.shards].tolist()
    first, others = mesh.same_stage[0], mesh.same_stage[1:]
    unlike = [rank for rank, d in zip(others, digests[1:], strict=True) if d != digests[0]]
    if mesh.rank == first:
        for rank in unlike:
            name = f"first weights, rank {first} -> rank {rank}"
            send_tensors(transport.link(rank, WEIGHTS, name), wholes.values())
    elif mesh.rank in unlike:
        name = f"first weights, rank {first} -> rank {mesh.rank}"
        receive_tensors(transport.link(first, WEIGHTS, name), wholes.values())
        for parameter, whole in zip(held.values(), wholes.values(), strict=True):
            parameter.data.copy_(whole)
    if mesh.rank == first == 0 and unlike:
        _log.warning(
            "note: replicas on different processors drew weights with different last bits; all "
            "take those of replica 0 (%.1f MB for each stage of one)",
            sum(whole.nbytes for whole in wholes.values()) / 1e6,
        )
