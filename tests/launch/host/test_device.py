"""The device of a rank, and errors where it is not available."""

import re
from pathlib import Path

import pytest
import torch

from thinpipe.launch.host import device
from thinpipe.launch.host.device import (
    check_gpus,
    choose_device,
    choose_devices,
    host_notices,
    make_repeatable,
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_rejected() -> None:
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="torch finds no GPU on this host; install a CUDA build"):
        choose_device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("shown", "said"), [("7", True), ("0,1", True), ("", False), ("-1", False)]
)
def test_gpus_that_a_variable_names_and_torch_does_not_find_are_told(
    shown: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    told = [
        f"note: CUDA_VISIBLE_DEVICES = {shown}, " in note for note in host_notices("auto", "fp32")
    ]
    assert any(told) == said
    assert not any("CUDA" in note for note in host_notices("cpu", "fp32"))


@pytest.mark.parametrize("fast", [False, True])
def test_a_processor_that_is_slow_in_bf16_is_told(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "multiplies_bf16", lambda: fast)
    told = ["slower than in fp32" in note for note in host_notices("cpu", "bf16")]
    assert any(told) != fast
    assert not any("bf16" in note for note in host_notices("cpu", "fp32"))


def test_every_build_of_torch_can_be_asked_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.multiplies_bf16() in (False, True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not device.multiplies_bf16()


def test_gpus_are_assigned_to_ranks_round_robin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 2)
    monkeypatch.setattr(device, "_missing_for_triton", lambda: None)
    for local_rank, index in enumerate([0, 1, 0]):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        assert choose_device("auto") == torch.device("cuda", index)


def test_ranks_with_several_gpus_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 4)
    monkeypatch.setattr(device, "_missing_for_triton", lambda: None)
    for local_rank, indices in enumerate([[0, 1], [2, 3]]):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        expected = [torch.device("cuda", index) for index in indices]
        assert choose_devices("auto", 2) == expected
    check_gpus("auto", 2, ranks_here=2)
    check_gpus("auto", 1, ranks_here=9)
    rejection = "devices_per_rank = 2: 3 ranks on this host need 6 GPUs and it has 4"
    with pytest.raises(ValueError, match=rejection):
        check_gpus("auto", 2, ranks_here=3)
    assert choose_devices("cpu", 2) == [torch.device("cpu")] * 2
    check_gpus("cpu", 2, ranks_here=9)


@pytest.mark.parametrize("lost", ["package", "compiler", "headers"])
def test_missing_requirements_of_triton_are_reported(
    lost: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda _: lost != "package" or None)
    monkeypatch.setenv("CC", "cc")
    message = "-m pip install 'triton>=3.6'`"
    if lost == "compiler":
        monkeypatch.delenv("CC")
        monkeypatch.setenv("PATH", str(tmp_path))
        message = "a C compiler; install gcc or clang, or set CC"
    elif lost == "headers":
        monkeypatch.setattr(device.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
        message = f"{tmp_path / 'Python.h'}; install Python's headers"
    with pytest.raises(ValueError, match=re.escape(message)):
        choose_device("auto")
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_gpu_is_strictly_repeatable_unless_the_run_says_otherwise(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With warnings alone torch would take attention's faster backward, which is not."""
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *args: asked.append(args))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    make_repeatable(torch.device("cpu"), deterministic=deterministic)
    assert asked == []
    make_repeatable(torch.device("cuda", 0), deterministic=deterministic)
    assert asked == [(True,)] * deterministic
