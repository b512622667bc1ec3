import hashlib
import math
import random
import struct
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from thinpipe.launch.checkpoint import state_file as statefile
from thinpipe.launch.checkpoint.state_file import DTYPES, write_tensors


def through_file(folder: Path, state: object) -> Any:
    statefile.save_state(folder / "state.safetensors", state)
    return statefile.load_state(folder / "state.safetensors")


def assert_same(got: Any, want: Any) -> None:
    if isinstance(want, torch.Tensor):
        assert type(got) is torch.Tensor
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        flat = [t.detach().resolve_conj().contiguous().reshape(-1) for t in (got, want)]
        assert torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8))
    elif isinstance(want, dict):
        assert type(got) is dict
        assert [(type(key), key) for key in got] == [(type(key), key) for key in want]
        for key in want:
            assert_same(got[key], want[key])
    elif isinstance(want, list | tuple):
        assert type(got) is type(want)
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)
    elif isinstance(want, float) and not math.isnan(want):
        assert type(got) is float
        assert struct.pack("<d", got) == struct.pack("<d", want)
    else:
        assert type(got) is type(want)
        assert got == want or (got != got and want != want)


def test_training_state_comes_back_bit_exact(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    model(torch.randn(4, 5, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "python": random.Random(3).getstate()},
    }

    got = through_file(tmp_path, state)
    assert_same(got, state)
    resumed = torch.optim.AdamW(model.parameters())
    resumed.load_state_dict(got["optimizer"])
    assert_same(resumed.state_dict(), optimizer.state_dict())


def test_every_kind_of_tensor_comes_back_bit_exact(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "not contiguous": base.t(),
        "strided": base[:, ::2],
        "expanded": torch.ones(1).expand(3, 2),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "also empty": torch.empty(2, 0),
        "nan and inf": torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45]),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "__metadata__": torch.ones(1),
        0: torch.zeros(1),
        "0": torch.ones(1),
        "a": {"b.c": torch.zeros(1)},
        "a.b": {"c": (torch.ones(1),)},
        **{
            str(dtype): torch.arange(300).remainder(2).to(dtype)
            for dtype in (torch.bool, torch.uint8, torch.int8, torch.float16, torch.float64)
        },
    }
    assert_same(through_file(tmp_path, state), state)


def test_tied_tensors_are_written_each_and_come_back_apart(tmp_path: Path) -> None:
    weight = torch.randn(3, 3)
    state = {"embed": weight, "head": weight, "row": weight[1], "same": weight.view(9)}
    got = through_file(tmp_path, state)
    assert_same(got, state)
    got["embed"].zero_()
    assert torch.equal(got["head"], weight)


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path: Path) -> None:
    got = through_file(tmp_path, torch.ones(5000))
    with (tmp_path / "state.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "state.safetensors").stat().st_size))
    assert got.sum() == 5000


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=50)
@given(TREES)
def test_any_tree_comes_back_with_its_types(tmp_path_factory: Any, tree: object) -> None:
    assert_same(through_file(tmp_path_factory.getbasetemp(), tree), tree)


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": [1, {2}]}, "state['a'][1] is a set"),
        ({"a": (0, object())}, "state['a'][1] is a object"),
        ({"size": torch.Size([2])}, "state['size'] is a torch.Size"),
        ({"colour": Colour.RED}, "state['colour'] is a "),
        ({"a": {1.5: 0}}, "state['a'] has the key 1.5"),
        ({True: 0}, "state has the key True"),
        ({3: torch.eye(2).to_sparse()}, "state[3] is a torch.Tensor (torch.sparse_coo"),
        ({3: torch.empty(2, device="meta")}, "state[3] is a torch.Tensor (torch.strided, on meta"),
        ([torch.ones(1, dtype=torch.complex128)], "state[0] is torch.complex128"),
    ],
)
def test_what_cannot_be_written_is_named_by_its_path(
    tmp_path: Path, state: object, path: str
) -> None:
    with pytest.raises(TypeError) as caught:
        statefile.save_state(tmp_path / "state.safetensors", state)
    assert str(caught.value).startswith(path)


def test_a_file_of_something_else_is_rejected(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors: no 'thinpipe\.state'"):
        statefile.load_state(tmp_path / "other.safetensors")


def test_a_mapped_tensor_stays_in_its_file(tmp_path: Path) -> None:
    path, state = tmp_path / "state.safetensors", {"a": torch.ones(3), "b": {"rows": torch.ones(9)}}
    statefile.save_state(path, state)
    copied = statefile.load_state(path)
    assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    found = statefile.load_state(path, mapped="rows")
    assert str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert_same(found, state)
    assert_same(copied, state)


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
