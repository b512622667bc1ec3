"""Ranks as replicas x pipeline positions x shards of a stage.

rank = (replica * pipeline_ranks + position) * shards + shard: the shards of a stage, which exchange
most, are neighbours. Ranks of one replica and one shard number share a data-parallel
rank (*DP rank*): they are a pipeline that runs samples of its own. Without shards, DP ranks are
replicas.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands among all."""

    pipeline_ranks: int
    replicas: int
    rank: int
    shards: int = 1

    @property
    def world_size(self) -> int:
        return self.pipeline_ranks * self.dp_size

    @property
    def dp_size(self) -> int:
        return self.replicas * self.shards

    @property
    def replica(self) -> int:
        return self.rank // (self.pipeline_ranks * self.shards)

    @property
    def position(self) -> int:
        return self.rank // self.shards % self.pipeline_ranks

    @property
    def shard(self) -> int:
        """Which part of its stages' weights this rank keeps."""
        return self.rank % self.shards

    @property
    def dp_rank(self) -> int:
        """Which samples this rank works on."""
        return self.replica * self.shards + self.shard

    def rank_at(self, position: int) -> int:
        return self._rank(self.dp_rank, position)

    @property
    def pipeline(self) -> list[int]:
        """Ranks of this rank's pipeline, by position."""
        return [self.rank_at(position) for position in range(self.pipeline_ranks)]

    @property
    def same_stage(self) -> list[int]:
        """Ranks that hold the same weights as this one, by replica."""
        own = range(self.shard, self.dp_size, self.shards)
        return [self._rank(dp_rank, self.position) for dp_rank in own]

    @property
    def stage_shards(self) -> list[int]:
        """Ranks that hold this rank's stages together, by shard."""
        first = self.replica * self.shards
        return [self._rank(dp_rank, self.position) for dp_rank in range(first, first + self.shards)]

    @property
    def all_at_position(self) -> list[int]:
        """Ranks at this rank's position, by DP rank."""
        return [self._rank(dp_rank, self.position) for dp_rank in range(self.dp_size)]

    @property
    def whole_replica(self) -> list[int]:
        """Ranks of this rank's replica, by DP rank and position."""
        first = self.replica * self.shards
        return self._by_dp_rank(range(first, first + self.shards))

    @property
    def world(self) -> list[int]:
        """All ranks, by DP rank and position."""
        return self._by_dp_rank(range(self.dp_size))

    def _by_dp_rank(self, dp_ranks: range) -> list[int]:
        positions = range(self.pipeline_ranks)
        return [self._rank(dp_rank, position) for dp_rank in dp_ranks for position in positions]

    def _rank(self, dp_rank: int, position: int) -> int:
        replica, shard = divmod(dp_rank, self.shards)
        return (replica * self.pipeline_ranks + position) * self.shards + shard


def check_world(pipeline_ranks: int, replicas: int, world_size: int, *, shards: int = 1) -> None:
    """Reject a number of processes that does not fit.

    Raises:
        ValueError: the world has not pipeline_ranks * replicas * shards ranks.
    """
    needed = pipeline_ranks * replicas * shards
    if world_size != needed:
        sharded = f" x {shards} shards" if shards > 1 else ""
        raise ValueError(
            f"{world_size} processes were started, but {pipeline_ranks} pipeline ranks x {replicas}"
            f" replicas{sharded} need {needed}; start that many"
        )
