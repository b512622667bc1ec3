"""What chooses kernels: two processes that may round differently say so."""

import pytest
import torch

from thinpipe.launch.host import resources
from thinpipe.launch.host.resources import arithmetic

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "setting", ["MKL_CBWR=COMPATIBLE", "ONEDNN_MAX_CPU_ISA=AVX2", "DNNL_MAX_CPU_ISA=SSE41"]
)
def test_settings_of_libraries_count(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    name, _, value = setting.partition("=")
    monkeypatch.delenv(name, raising=False)
    plain = arithmetic(CPU)
    monkeypatch.setenv(name, value)
    assert arithmetic(CPU) != plain
    assert setting in arithmetic(CPU)


def test_threads_count() -> None:
    assert ", 1 thread, " in arithmetic(CPU)
    torch.set_num_threads(2)
    assert ", 2 threads, " in arithmetic(CPU)


def test_flags_count_on_one_model_of_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine may hide instructions of its host's processor."""
    found = []
    for flags in ("fma avx2", "fma avx2 avx512f"):
        fields = {"model name": "Some CPU", "flags": flags}
        monkeypatch.setattr(resources, "_of_processor", lambda name, f=fields: f.get(name, ""))
        found.append(arithmetic(CPU))
    assert found[0] != found[1]
    assert all(kind.startswith("Some CPU (flags ") for kind in found)
    monkeypatch.setattr(resources, "_of_processor", lambda _: "")
    assert torch.__version__ in arithmetic(CPU), "what is not known is left out"
