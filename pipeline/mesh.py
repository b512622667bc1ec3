"""Ranks as replicas x pipeline positions: rank = replica * pipeline_ranks + position."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands among all."""

    pipeline_ranks: int
    replicas: int
    rank: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pipeline_ranks * self.replicas

    @property
    def replica(self) -> int:
        """Which replica this rank belongs to."""
        return self.rank // self.pipeline_ranks

    @property
    def position(self) -> int:
        """Rank within its pipeline."""
        return self.rank % self.pipeline_ranks

    def rank_at(self, position: int) -> int:
        """The rank at a position of this rank's pipeline."""
        return self.replica * self.pipeline_ranks + position

    @property
    def pipeline(self) -> list[int]:
        """Ranks of this rank's pipeline, by position."""
        return [self.rank_at(position) for position in range(self.pipeline_ranks)]

    @property
    def same_stage(self) -> list[int]:
        """Ranks at this rank's position, by replica."""
        return list(range(self.position, self.world_size, self.pipeline_ranks))


def check_world(pipeline_ranks: int, replicas: int, world_size: int) -> None:
    """Refuse a number of processes that does not fit.

    Raises:
        ValueError: the world has not pipeline_ranks * replicas ranks.
    """
    if world_size != pipeline_ranks * replicas:
        raise ValueError(
            f"{world_size} processes were started, but {pipeline_ranks} pipeline ranks x {replicas}"
            f" replicas need {pipeline_ranks * replicas}; start that many"
        )
