"""What replica 0 sends to a rank that joins, over a link of the run: all but what is its own."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from thinpipe.launch.checkpoint.contents import collect, distribute
from thinpipe.launch.checkpoint.state_file import pack_state, unpack_state
from thinpipe.launch.components import Built
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.launch.run.weights import describe, receive_described, send_tensors
from thinpipe.pipeline.comm.link import Link
from thinpipe.pipeline.comm.transport import WEIGHTS, Transport
from thinpipe.pipeline.mesh import Mesh

_SENT = Path("the state that replica 0 sent")


def bring_up(built: Built, transport: Transport, ranks: Sequence[int], *, seed: int) -> int:
    """Give these ranks the state of replica 0; a collective. How many bytes this rank sent.

    Optimizer, schedule and weights become equal. What a rank owes the others stays its own: nothing
    at first. `seed` is for its dropout.

    Raises:
        TransportError: a rank is gone, or something came damaged.
    """
    mesh, source = transport.mesh, transport.mesh.same_stage[0]
    places = {rank: Mesh(mesh.pipeline_ranks, mesh.replicas, rank, mesh.shards) for rank in ranks}
    targets = [rank for rank, place in places.items() if place.position == mesh.position]
    tree, tensors = None, dict[str, Tensor]()
    if mesh.rank == source:
        state = {**collect(built, memories=False), "sync": built.sync.shared_state()}
        tree, tensors = pack_state(state)
    listed = gather_json(transport, [tree, [describe(n, t) for n, t in tensors.items()]])
    if mesh.rank == source:
        for target in targets:
            send_tensors(_link(transport, source, target), tensors.values())
    elif mesh.rank in ranks:
        tree, kinds = listed[source]
        found = receive_described(_link(transport, source, mesh.rank), source, kinds)
        distribute(built, unpack_state(tree, found.__getitem__), _SENT)
        torch.manual_seed(seed)
    return len(targets) * sum(tensor.nbytes for tensor in tensors.values())


def _link(transport: Transport, source: int, target: int) -> Link:
    peer = target if transport.mesh.rank == source else source
    return transport.link(peer, WEIGHTS, f"state for a replica that joins, {source} -> {target}")
