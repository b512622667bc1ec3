"""Whole steps on a device that is no CPU (`tests/accelerator.py`): nothing mixes, waits count.

What this proves without a GPU: tensors are where they must be. Streams and kernels it cannot show.
All of it runs in one process of its own, as torch then has another kind of device.
"""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.backend_registration

from benchmarks.single_process import in_process
from tests.gradcomp.test_contract import assert_same, forms
from tests.gradcomp.test_contract import start as start_replicas
from tests.gradcomp.test_contract import train as train_replicas
from tests.programs import ran
from tests.training import batch, config, weights
from thinpipe.launch.checkpoint.contents import collect, distribute, snapshot

pytestmark = [
    pytest.mark.skipif(
        not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch knows no devices in Python",
    ),
    pytest.mark.slow,  # it compiles
]
ROOT = Path(__file__).parents[2]
WAITS_PER_STEP = {"raw": 8, "direct": 8, "stateless": 18, "aqsgd": 80, "transform": 22}
"""Most of a step of two microbatches of four over one cut, with both of its ends."""
FORMS = [form for form in forms() if ", " not in form or form == "ef_gradients, delayed"]
OFFLOADED: Any = {"train": {"optimizer": "muon"}, "model": {"activation_checkpointing": 2}}


def trained(kind: str, device: str) -> tuple[list[float], Any, int]:
    """Losses, weights, and how often the last step waited for the device."""
    from tests import accelerator
    from thinpipe.launch import build

    build.choose_devices = lambda name, per_rank: [torch.device(device)] * per_rank
    both, found = {"kind": kind}, []
    run = config(pipeline={"microbatches": 2}, boundary=[{"forward": both, "backward": both}])
    with in_process(run, total_steps=10) as built:
        for step in range(2):  # so that the second sends changes
            accelerator.WAITS.clear()
            found.append(built.engine.train_step(batch(list(range(8))), step).loss)
        waits = accelerator.WAITS.total()
        assert {each.device.type for each in weights(built).values()} == {device.partition(":")[0]}
        return found, {name: each.cpu() for name, each in weights(built).items()}, waits


def compare_offload(_: str) -> int:
    """With activations and state in RAM, and a restart, the same bits as on the device alone."""
    from thinpipe.launch import build

    build.choose_devices = lambda name, per_rank: [torch.device("fake:0")] * per_rank
    alone, run = (
        config(**OFFLOADED, pipeline={"microbatches": 2, "offload": offload})
        for offload in (False, True)
    )
    expected = offloaded_steps(alone, range(3))[:2]
    losses, _, saved = offloaded_steps(run, range(2))
    again, digests, _ = offloaded_steps(run, range(2, 3), saved)
    assert ([*losses, *again], digests) == expected
    return 0


def offloaded_steps(run: Any, steps: range, saved: Any = None) -> tuple[list[float], Any, Any]:
    """Losses, bytes of the weights, and a checkpoint."""
    with in_process(run, total_steps=10) as built:
        if saved is not None:
            distribute(built, saved, ROOT)
        moved: list[int] = []
        kept: Any = built.engine._kept
        if run.pipeline.offload:
            pack = kept.pack_hook
            kept.pack_hook = lambda x: moved.append(isinstance(out := pack(x), tuple)) or out
        losses = []
        for step in steps:
            losses.append(built.engine.train_step(batch(list(range(8))), step).loss)
            if run.pipeline.offload:
                check_state(built.optimizer)
        assert bool(sum(moved)) == run.pipeline.offload
        assert all(each.device.type == "fake" for each in weights(built).values())
        own = [each.cpu().numpy().tobytes() for each in weights(built).values()]
        return losses, own, snapshot(collect(built))


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """All of it is in RAM, and its parameters are all there again."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(parameters) == len(optimizer.state) > 8
    held = [x for its in optimizer.state.values() for x in its.values()]
    assert {x.device.type for x in held if isinstance(x, torch.Tensor)} == {"cpu"}


def compare_steps(kind: str) -> int:
    """Waits of a step, after a check that it is the CPU's."""
    (on_cpu, its, _), (elsewhere, others, waits) = (
        trained(kind, device) for device in ("cpu", "fake:0")
    )
    assert elsewhere == pytest.approx(on_cpu, abs=1e-5)
    for name, weight in its.items():
        torch.testing.assert_close(others[name], weight, rtol=0, atol=1e-5)
    return waits


def compare_replicas(form: str) -> int:
    """Replicas on the device that also restart, against the CPU's."""
    on_cpu = train_replicas(start_replicas(form, 2, "cpu"))
    assert_same(train_replicas(start_replicas(form, 2, "fake"), restarts=(2,)), on_cpu)
    return 0


def mix(_: str) -> int:
    """Fails, as on a GPU."""
    torch.ones(2, device="fake") + torch.ones(2)
    return 0


def _tried(work: Callable[[str], int], what: str) -> int | str:
    try:
        return work(what)
    except Exception:
        return traceback.format_exc()


def all_of_it() -> dict[str, int | str]:
    """Waits of each case, or its traceback."""
    from tests import accelerator  # noqa: F401  # makes the device

    return (
        {kind: _tried(compare_steps, kind) for kind in WAITS_PER_STEP}
        | {form: _tried(compare_replicas, form) for form in FORMS}
        | {"offload": _tried(compare_offload, ""), "mix": _tried(mix, "")}
    )


@pytest.fixture(scope="module")
def results() -> dict[str, int | str]:
    done = ran(sys.executable, __file__, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    found: dict[str, int | str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", WAITS_PER_STEP)
def test_a_step_is_the_cpus_and_waits_no_oftener_than_counted(
    kind: str, results: dict[str, int | str]
) -> None:
    waits = results[kind]
    assert isinstance(waits, int), waits
    assert 0 < waits <= WAITS_PER_STEP[kind]


@pytest.mark.parametrize("what", [*FORMS, "offload"])
def test_replicas_and_what_lies_in_ram_train_as_elsewhere_and_resume(
    what: str, results: dict[str, int | str]
) -> None:
    assert results[what] == 0, results[what]


def test_what_mixes_devices_is_rejected(results: dict[str, int | str]) -> None:
    assert "a tensor on the CPU meets one on fake" in str(results["mix"])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(all_of_it()))
