"""Every few steps all ranks compare digests of what should be equal, and find silent corruption.

Both ends of a cut hold the same rows of samples, by their checksums; replicas hold the same weights
and optimizer state, unless their method lets them differ, or processors of different kinds round
differently; shards remember the same weights, if they send differences. Rows that differ have a
second copy in what will be sent again, so both ends drop them. Weights that differ have none that
is known to be right: the run ends, to resume from an earlier checkpoint.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from thinpipe.launch.checkpoint.reshard import channel_name, module_of
from thinpipe.launch.components import Built
from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.host.resources import arithmetic
from thinpipe.launch.net.ranks.gather import gather_json
from thinpipe.pipeline.comm.transport import Transport

_log = logging.getLogger(__name__)


class CorruptionError(ConfigError):
    """What should be equal is not, and nobody knows which is right."""


class Proof:
    """Compares the ranks' digests every `every` steps; 0 turns it off."""

    def __init__(self, built: Built, transport: Transport, every: int) -> None:
        self._built, self._transport, self._every = built, transport, every
        self._said_kinds = False

    def is_due(self, done: int) -> bool:
        return bool(self._every) and done % self._every == 0

    def compare(self, done: int) -> dict[str, int]:
        """After `done` steps: samples dropped because two ends differed, by channel.

        Raises:
            CorruptionError: on every rank, naming those whose weights differ.
        """
        kind = arithmetic(self._built.stages[0].device)
        answers = gather_json(self._transport, [kind, self._weights(), self._memories()])
        self._compare_weights([(kind, weights) for kind, weights, _ in answers], done)
        return self._compare_memories([memories for *_, memories in answers])

    def _weights(self) -> dict[str, int]:
        """Digests of what replicas have in common, by stage, and of what shards remember alike."""
        mesh, shards = self._transport.mesh, self._built.shards
        found, shard = {}, f", shard {mesh.shard}" if mesh.shards > 1 else ""
        if shards is not None and shards.remembered:
            place = f"position {mesh.position} of replica {mesh.replica}"
            found[f"cached shard weights at {place}"] = digest(shards.remembered)
        if mesh.replicas == 1:
            return found
        if alike := self._built.sync.alike():
            found[f"global model at position {mesh.position}{shard}"] = digest(alike)
        if not self._built.sync.replicas_equal:
            return found
        for stage in self._built.stages:
            parameters = list(module_of(stage).parameters())
            moments = [
                value
                for parameter in parameters
                for value in self._built.optimizer.state.get(parameter, {}).values()
                if isinstance(value, Tensor)
            ]
            place = f"stage {stage.stage_index}{shard}"
            found[f"weights of {place}"] = digest(parameters)
            found[f"optimizer state of {place}"] = digest(moments)
        return found

    def _memories(self) -> dict[str, int]:
        return {
            f"{self._transport.mesh.dp_rank}/{channel_name(channel)}": memory.summary()
            for channel in self._built.engine.channels
            if (memory := channel.codec.memory) is not None
        }

    def _compare_weights(
        self, everyone: Sequence[tuple[str, Mapping[str, int]]], done: int
    ) -> None:
        """Those on processors of one kind: others may round differently."""
        first: dict[tuple[str, str], tuple[int, int]] = {}
        for rank, (kind, digests) in enumerate(everyone):
            for name, value in digests.items():
                other, expected = first.setdefault((kind, name), (rank, value))
                if value != expected:
                    raise CorruptionError(
                        f"after step {done} rank {rank} and rank {other} hold different {name}: "
                        "memory, a link or a computation of one of them is faulty; resume from an "
                        "earlier checkpoint (--resume --step N) without the faulty machine"
                    )
        kinds = list(dict.fromkeys(kind for kind, digests in everyone if digests))
        if len(kinds) > 1 and not self._said_kinds and self._transport.mesh.rank == 0:
            self._said_kinds = True
            _log.warning(
                "note: replicas on different processors (%s) may round differently, so their "
                "weights are compared with those of the same kind only",
                "; ".join(kinds),
            )

    def _compare_memories(self, everyone: list[Mapping[str, int]]) -> dict[str, int]:
        first: dict[str, int] = {}
        differing = {
            name
            for summaries in everyone
            for name, value in summaries.items()
            if first.setdefault(name, value) != value
        }
        forgotten = {}
        for channel in self._built.engine.channels:
            name = f"{self._transport.mesh.dp_rank}/{channel_name(channel)}"
            memory: Any = channel.codec.memory
            if memory is not None and name in differing:
                forgotten[channel_name(channel)] = len(memory)
                memory.reset()
        if forgotten and self._transport.mesh.dp_rank == 0:
            _log.warning(
                "warning: the two ends of %s hold different rows; both drop them, "
                "and send their samples as first visits",
                ", ".join(sorted(forgotten)),
            )
        return forgotten


def digest(tensors: list[Any]) -> int:
    """Of the tensors' bytes, in their order."""
    hasher = xxhash.xxh3_64()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        hasher.update(flat.numpy().data)
    return hasher.intdigest()
