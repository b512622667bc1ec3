"""What ended the session before is known to the next one."""

import pytest
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from thinpipe.launch.net.ranks.failures import Failures
from thinpipe.launch.net.ranks.restarts import last_failure, report_killed, restart_words


def test_a_restart_names_what_failed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    met = HashStore()
    assert last_failure(met, "one", "rank 0") == "", "it is the first"
    assert restart_words("") is None
    Failures(PrefixStore("one", met), "rank 2 on host1").report("killed by signal 9", cause=True)
    told = last_failure(met, "two", "rank 0")
    assert told == "rank 2 on host1: killed by signal 9"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert restart_words(told) == f"restarting, 1 of 3: {told}"


def test_what_agents_found_killed_is_named_before_edges_that_broke() -> None:
    met = HashStore()
    report_killed(met, "the supervisor of local rank 0 on host1", "killed")  # before there was one
    last_failure(met, "one", "rank 0")
    Failures(PrefixStore("one", met), "rank 1 on host1").report("edge lost", cause=False)
    report_killed(met, "the supervisor of local rank 0 on host1", "killed by signal 9")
    found = last_failure(met, "two", "rank 0")
    assert found == "the supervisor of local rank 0 on host1: killed by signal 9"
    found = last_failure(met, "three", "rank 0")
    assert found.startswith("no rank said why: a machine was started again"), "to make room for it"
