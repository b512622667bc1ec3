"""What a rank that joins is sent over a link of the run: a state, but for what is its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from thinpipe.gradcomp.base import GoesOn
from thinpipe.launch.checkpoint.contents import collect, distribute
from thinpipe.launch.checkpoint.state_file import pack_state, unpack_state
from thinpipe.launch.components import Built
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.launch.run.elastic.copies import Packed
from thinpipe.launch.run.weights import (
    PIECE_NBYTES,
    as_bytes,
    describe,
    in_pieces,
    make_described,
    receive_piece,
    send_piece,
)
from thinpipe.pipeline.comm.transport import WEIGHTS, Link, Transport

SENT = Path("the state that another rank sent")
"""Where errors say that it is from."""
_MOMENTS = "state['optimizer']['state']"
"""How the names of an optimizer's moments begin."""


def bring_up(
    built: Built,
    transport: Transport,
    ranks: Sequence[int],
    sync: GoesOn,
    *,
    seed: int,
    has_some: bool,
) -> int:
    """Give these ranks the state of replica 0; a collective. How many bytes this rank sent.

    Optimizer, schedule and weights become equal. What a rank owes the others stays its own: nothing
    at first. `sync` is that of `built`; `seed` is for the newcomers' dropout. One that `has_some`
    of the state gets those tensors whose digests differ, but keeps moments of local steps.

    Raises:
        TransportError: a rank is gone, or something came damaged.
    """
    mesh, source = transport.mesh, transport.mesh.same_stage[0]
    joining = [rank for rank in mesh.same_stage if rank in ranks]
    tree, tensors, links = None, dict[str, Tensor](), list[Link]()
    if mesh.rank == source:
        state = {**collect(built, memories=False), "global_model": None}
        tree, tensors = pack_state({**state, "sync": sync.shared_state()})
        links = [_link(transport, source, rank) for rank in joining]
    elif has_some:
        tensors = pack_state(collect(built, memories=False))[1]
    held = gather_json(transport, digests(tensors) if has_some else {})
    if mesh.rank == source:
        stays = () if sync.replicas_equal else _MOMENTS
        there = [held[joined] for joined in joining]
        own = digests(tensors) if any(there) else {}
        for name, digest in own.items():
            if all(h.get(name) == digest or (name in h and name.startswith(stays)) for h in there):
                del tensors[name]
    listed = gather_json(transport, [tree, [describe(n, t) for n, t in tensors.items()]])
    if mesh.rank in ranks:
        tree, kinds = listed[source]
        missing = make_described(source, kinds)
        _exchange(transport, source, links, missing)
        distribute(built, unpack_state(tree, {**tensors, **missing}.__getitem__), SENT)
        torch.manual_seed(seed)  # after `distribute`, which has set replica 0's
        return 0
    _exchange(transport, source, links, tensors if links else {})
    return len(links) * sum(tensor.nbytes for tensor in tensors.values())


def hand_over(transport: Transport, source: int, target: int, kept: Packed | None) -> Any:
    """Give one rank a state that another has `kept`; a collective. The state, at the target.

    Raises:
        TransportError: a rank is gone, or something came damaged.
    """
    said = [kept.tree, [describe(n, t) for n, t in kept.tensors.items()]] if kept else None
    tree, listed = gather_json(transport, said)[source]
    if transport.mesh.rank == target:
        tensors = make_described(source, listed)
        _exchange(transport, source, [], tensors)
        return unpack_state(tree, tensors.__getitem__)
    links = [_link(transport, source, target)] if kept else []
    _exchange(transport, source, links, kept.tensors if kept else {})
    return None


def _exchange(
    transport: Transport, source: int, links: Sequence[Link], tensors: Mapping[str, Tensor]
) -> None:
    """Send tensors over `links`, or fill them, if there are none; a collective."""
    pieces, rank = [*in_pieces(tensors.values(), PIECE_NBYTES)], transport.mesh.rank
    most = torch.tensor([len(pieces)], dtype=torch.float64)
    for number in range(int(transport.share(most, "world").max())):
        for link in links if number < len(pieces) else ():
            send_piece(link, number, pieces[number])
        if not links and number < len(pieces):
            receive_piece(_link(transport, source, rank), number, pieces[number])
        # with all ranks, as nobody waits for another longer than its timeout
        transport.share(torch.zeros(0, dtype=torch.float64), "world")
    for link in links:
        link.begin_pass(len(pieces))  # waits for the last


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Of kinds, shapes and bytes."""
    return {
        name: xxhash.xxh3_128_hexdigest(as_bytes(tensor).numpy().data) + str(describe("", tensor))
        for name, tensor in tensors.items()
    }


def _link(transport: Transport, source: int, target: int) -> Link:
    peer = target if transport.mesh.rank == source else source
    return transport.link(peer, WEIGHTS, f"state for a rank that joins, {source} -> {target}")
