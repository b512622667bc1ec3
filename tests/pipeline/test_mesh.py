"""Ranks as replicas x positions x shards."""

import pytest

from thinpipe.pipeline.mesh import Mesh, check_world


@pytest.mark.parametrize("shape", [(2, 2, 2), (3, 1, 2), (1, 2, 3), (3, 2, 1)])
def test_every_rank_has_one_place(shape: tuple[int, int, int]) -> None:
    positions, replicas, shards = shape
    ranks = range(positions * replicas * shards)
    meshes = [Mesh(positions, replicas, rank, shards) for rank in ranks]
    for mesh in meshes:
        assert mesh.rank == (mesh.replica * positions + mesh.position) * shards + mesh.shard
        assert mesh.dp_rank == mesh.replica * shards + mesh.shard
        assert mesh.rank_at(mesh.position) == mesh.rank
        assert mesh.pipeline[mesh.position] == mesh.rank
        assert mesh.stage_shards[mesh.shard] == mesh.rank
        assert mesh.same_stage[mesh.replica] == mesh.rank
        assert mesh.all_at_position[mesh.dp_rank] == mesh.rank
        assert mesh.world.index(mesh.rank) == mesh.dp_rank * positions + mesh.position
        assert sorted(mesh.world) == list(ranks)
        assert {meshes[rank].dp_rank for rank in mesh.pipeline} == {mesh.dp_rank}
        assert {meshes[rank].replica for rank in mesh.whole_replica} == {mesh.replica}
        assert len(mesh.whole_replica) == positions * shards


def test_another_number_of_processes_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"6 processes.*2 replicas x 2 shards need 8"):
        check_world(2, 2, 6, shards=2)
