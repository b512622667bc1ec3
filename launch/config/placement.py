"""`pipeline.placement`: which host has which rank, by name."""

from collections import Counter
from collections.abc import Sequence

from thinpipe.pipeline.config import PipelineConfig


def check_placement(pipeline: PipelineConfig) -> None:
    """Reject a placement that does not fit the replicas and ranks of the run.

    Raises:
        ValueError: naming the setting, its value and the remedy.
    """
    if not pipeline.placement:
        return
    where = "pipeline.placement"
    if pipeline.shards > 1:
        raise ValueError(
            f"{where} with pipeline.shards = {pipeline.shards}: it has one host per replica and "
            "rank; remove one of the two"
        )
    if len(pipeline.placement) != pipeline.replicas:
        raise ValueError(
            f"{where} has {len(pipeline.placement)} rows for pipeline.replicas = "
            f"{pipeline.replicas}; write one per replica, or plan again (`thinpipe plan --place`)"
        )
    for replica, row in enumerate(pipeline.placement):
        if len(row) != pipeline.pipeline_ranks:
            raise ValueError(
                f"{where}: replica {replica} has {len(row)} hosts for {pipeline.pipeline_ranks} "
                "ranks; write one per rank, or plan again (`thinpipe plan --place`)"
            )


def hosts_by_rank(placement: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The host of each rank."""
    return tuple(host for row in placement for host in row)


def check_hosts(placed: Sequence[str], names: Sequence[str], where: str) -> None:
    """Reject machines that are not those of the placement.

    Raises:
        ValueError: names those that are missing, unknown or there twice.
    """
    twice = [name for name, count in Counter(names).items() if count > 1]
    missing = [name for name in dict.fromkeys(placed) if name not in names]
    unknown = [name for name in dict.fromkeys(names) if name not in placed]
    found = (("missing", missing), ("not in it", unknown), ("there twice", twice))
    faults = [f"{what}: {', '.join(hosts)}" for what, hosts in found if hosts]
    if faults:
        raise ValueError(
            f"pipeline.placement and {where}: {'; '.join(faults)}; each machine's network.name "
            "(by default its host name) must be one of the placement's, and its own"
        )
