"""What a saved network says of devices, also where a block could not be timed."""

import pytest

from thinpipe.launch.config.run import RunConfig
from thinpipe.launch.doctor import host
from thinpipe.launch.doctor.host import as_hosts, own_devices, untimed

CONFIG = RunConfig.model_validate({"model": {"layers": 2, "width": 16, "heads": 2}})


def test_speeds_are_relative_to_the_first_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "typical_block_s", lambda _: 0.5)
    known = own_devices(CONFIG)

    def fail(_: RunConfig) -> float:
        raise RuntimeError("not enough memory: you tried to allocate 12 TB\nand more")

    monkeypatch.setattr(host, "typical_block_s", fail)
    failed = own_devices(CONFIG)
    names, found = ["a", "b", "c"], [failed, known, known | {"block_s": 0.25}]
    assert ["speed" in host.model_fields_set for host in as_hosts(names, found)] == [
        False,
        True,
        True,
    ]
    assert [host.speed for host in as_hosts(names, found)[1:]] == [1.0, 2.0]
    assert all(host.memory_gb and host.devices >= 1 for host in as_hosts(names, found))
    (result,) = untimed(names, found)
    assert (result.level, result.where) == ("warning", "a")
    assert "could not be timed (not enough memory: you tried to allocate 12 TB" in result.text
    assert untimed(names, []) == []
