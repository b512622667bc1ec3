"""Files that the safetensors library reads, with the digest that they were written with."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.disk import full_disk
from thinpipe.launch.checkpoint.tensor_file import DTYPES, write_tensors


def test_the_library_reads_what_was_written_and_the_digest_is_the_files(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    tensors = {
        str(dtype): torch.arange(7).view(torch.uint8)[: 3 * dtype.itemsize].view(dtype)
        for dtype in DTYPES
        if dtype != torch.bool
    }
    tensors |= {
        "bool": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
        "é\n": torch.ones(()),
    }
    digest = write_tensors(path, tensors, {"what": "é \n" + "x" * 9})
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(*(t.flatten().view(torch.uint8) for t in (found, tensor)))
    again = tmp_path / "again.safetensors"
    backwards = dict(reversed(tensors.items()))
    assert write_tensors(again, backwards, {"what": "é \n" + "x" * 9}) == digest


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too large"), full_disk():
        write_tensors(tmp_path / "w.safetensors", {"w": torch.ones(5000)}, {})
