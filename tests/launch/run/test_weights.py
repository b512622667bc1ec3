"""The file that a model is saved as: whole, or not there and the reason said."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from thinpipe.launch.run.weights import _write


def test_shared_and_scalar_tensors_are_written(tmp_path: Path) -> None:
    shared = torch.arange(6.0).view(2, 3)
    _write({"a": shared, "b": shared.T, "steps": torch.tensor(3)}, tmp_path / "new" / "m.st")
    found = load_file(tmp_path / "new" / "m.st")
    assert torch.equal(found["b"], shared.T)
    assert int(found["steps"]) == 3


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "m.st"
    path.write_text("old")
    (tmp_path / "m.st.partial").mkdir()
    with pytest.raises((OSError, SafetensorError)):
        _write({"a": torch.ones(2)}, path)
    assert path.read_text(encoding="utf-8") == "old"
