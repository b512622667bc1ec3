"""`pipeline.placement`: what is rejected before and when machines join."""

import pytest

from thinpipe.launch.config.placement import check_hosts, check_placement, hosts_by_rank
from thinpipe.pipeline.config import PipelineConfig


def pipeline(placement: list[list[str]], **fields: object) -> PipelineConfig:
    return PipelineConfig.model_validate({"cuts": [1], "placement": placement, **fields})


def test_ranks_follow_replicas_and_stages() -> None:
    config = pipeline([["a", "b"], ["b", "a"]], replicas=2)
    check_placement(config)
    assert hosts_by_rank(config.placement) == ("a", "b", "b", "a")
    check_placement(pipeline([["a", "b"], ["a", "a"]], replicas=2))  # a has three


@pytest.mark.parametrize(
    ("placement", "fields", "message"),
    [
        ([["a", "b"]], {"replicas": 2}, "has 1 rows for pipeline.replicas = 2; write one per"),
        ([["a"]], {}, "replica 0 has 1 hosts for 2 ranks; write one per rank"),
        ([["a", "b"]], {"shards": 2}, "with pipeline.shards = 2"),
    ],
)
def test_what_does_not_fit_the_run_is_rejected(
    placement: list[list[str]], fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_placement(pipeline(placement, **fields))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "missing: b"),
        (["a", "a"], "missing: b; there twice: a"),
        (["a", "c"], "missing: b; not in it: c"),
    ],
)
def test_hosts_that_are_not_those_of_the_placement_are_named(
    names: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_hosts(("a", "b", "b", "a"), names, "hosts.toml")
    check_hosts(("a", "b", "b", "a"), ["b", "a"], "hosts.toml")
