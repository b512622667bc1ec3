"""Looking at what a program wants."""

import time
from pathlib import Path

import pytest

from thinpipe.launch.config.toml import ConfigError
from thinpipe.launch.run import script


def test_a_program_that_does_not_get_to_its_run_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time; time.sleep(300)")
    monkeypatch.setattr(script, "_LOOK_S", 0.5)
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=r"slow\.py: it made no thinpipe.Run within 0 s; make"):
        script.look_at(slow, [])
    assert time.monotonic() - began_s < 200
