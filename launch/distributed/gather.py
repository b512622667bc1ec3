"""JSON from every rank to every rank; no pickle: a peer's bytes must not become code."""

import json
from typing import Any

import torch
import torch.distributed as dist

from thinpipe.pipeline.mesh import Mesh


def gather_json(mesh: Mesh, value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = mesh.share(torch.tensor([len(mine)], dtype=torch.float64))[:, 0].to(torch.int64)
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
    padded[: len(mine)] = mine
    rows = [torch.empty_like(padded) for _ in range(mesh.world_size)]
    dist.all_gather(rows, padded, group=mesh.control)
    return [
        json.loads(bytes(row[: int(length)].numpy()))
        for row, length in zip(rows, lengths, strict=True)
    ]
