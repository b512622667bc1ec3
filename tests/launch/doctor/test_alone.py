"""Checks of one host, and errors before it waits for others."""

import re
from pathlib import Path

import pytest
import tomlkit

from tests.huggingface import section
from tests.invoking import invoke, said
from tests.ports import free_port
from tests.texts import write_squares
from thinpipe.pipeline.models.build import stage_counts
from thinpipe.pipeline.models.hf.config import HuggingFaceConfig


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    pipeline = "[pipeline]\ncuts = [2, 4]\ndevice = 'cpu'\n"  # on a GPU, RAM has no weights
    path.write_text(f"[run]\nfolder = '{tmp_path}/run'\n{pipeline}")
    return path


def test_wrong_numbers_of_hosts_are_rejected_without_waiting(run_file: Path) -> None:
    wait = ("--wait", 86400, "--rdzv", "127.0.0.1:1")  # would hang
    output = said("doctor", run_file, "--nnodes", 2, *wait, code=2)
    assert "--nnodes = 2: 3 ranks (stages x replicas) cannot be shared evenly" in output
    output = said("doctor", run_file, "--nnodes", 3, code=2)
    assert "--nnodes = 3: give one of the machines: --rdzv host0:29500" in output


def test_needed_memory_is_reported_with_its_parts(run_file: Path, tmp_path: Path) -> None:
    saved = tmp_path / "net.json"
    _, output = invoke("doctor", run_file, "--rdzv", f"127.0.0.1:{free_port()}", "--save", saved)
    assert re.search(r"RAM \S+ MB of \S+ GB free \(.* of weights, .* of activations, ", output)
    assert "B of the activation cache" in output
    assert f"written: {saved}" in output


@pytest.mark.slow
def test_frozen_weights_have_neither_gradients_nor_adam(tmp_path: Path) -> None:
    model = section("llama", tmp_path / "model") | {"lora": {"rank": 2}}
    raw = [{"forward": {"kind": "raw"}}]
    tree = {"run": {"folder": f"{tmp_path}/run"}, "model": model, "boundary": raw}
    tree |= {"pipeline": {"cuts": [2], "device": "cpu"}, "data": {"sequence_length": 9}}
    path = tmp_path / "run.toml"
    path.write_text(tomlkit.dumps(tree))
    _, output = invoke("doctor", path, "--rdzv", f"127.0.0.1:{free_port()}")
    found = re.search(
        r"\((\S+) (\S+) of weights, (\S+) (\S+) of gradients, (\S+) (\S+) of optimizer", output
    )
    assert found is not None, output
    factors = {"B": 1, "kB": 1e3, "MB": 1e6}
    need = sum(float(found[i]) * factors[found[i + 1]] for i in (1, 3, 5))
    held, trained = stage_counts(HuggingFaceConfig.model_validate(model), (2,))
    assert trained < 0.2 * held
    assert need == pytest.approx(4 * held + 12 * trained, rel=0.01)


def counted(run_file: Path, *settings: str) -> tuple[int, str, str]:
    """Exit code, what AQ-SGD's memories need, and the output."""
    words = [word for setting in settings for word in ("--set", setting)]
    code, output = invoke("doctor", run_file, "--rdzv", f"127.0.0.1:{free_port()}", *words)
    found = re.search(r"(\S+ \wB) of the activation cache", output)
    return code, found[1] if found else "", output


def test_memories_of_all_samples_are_counted_by_reading_the_data(
    run_file: Path, tmp_path: Path
) -> None:
    text = write_squares(tmp_path / "text.txt", 20_000)
    data = (f"data.path={text}", "data.sequence_length=64")
    sequences = (len(text.read_bytes()) * 9 // 10 - 1) // 64
    code, need, _ = counted(run_file, *data, f"data.train_sequences={sequences}")
    assert code == 0
    assert counted(run_file, *data, "data.train_sequences=all")[:2] == (0, need)
    text.unlink()
    code, need, output = counted(run_file, *data, "data.train_sequences=all")
    assert (code, need) == (1, "")
    assert f"data.path = '{text}': no such file or folder" in output
