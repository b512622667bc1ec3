from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from launch.build import Built
from launch.config import RunConfig
from launch.device import choose_device
from launch.inprocess import in_process
from pipeline.staging import Staging
from tests.training import batch, config, weights

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_on_the_cpu_nothing_is_copied() -> None:
    x, staging = torch.randn(3), Staging(torch.device("cpu"))
    assert staging.now() is None
    assert staging.to_host(x, staging.now()) is x
    moved, there = staging.to_device(x)
    assert staging.use(moved, there) is x


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_by_name() -> None:
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r'pipeline.device = "cuda": torch finds no GPU'):
        choose_device("cuda")


@pytest.mark.gpu
@GPU
def test_copies_wait_for_the_compute_they_depend_on() -> None:
    device = torch.device("cuda", 0)
    staging = Staging(device)
    x = torch.ones(2048, 2048, device=device)
    for _ in range(50):  # long enough that a copy that does not wait reads old values
        x = x @ x / 2048
    expected = (x + 1).cpu()
    with ThreadPoolExecutor(1) as courier:  # whose own current stream is another
        y = x + 1
        host = courier.submit(staging.to_host, y, staging.now()).result()
        assert torch.equal(host, expected)
        moved, there = courier.submit(staging.to_device, expected).result()
        assert torch.equal((staging.use(moved, there) + 1).cpu(), expected + 1)


@pytest.mark.gpu
@GPU
def test_handing_a_tensor_over_waits_for_nothing() -> None:
    """All that the schedule's thread does returns while the GPU is still at work."""
    device = torch.device("cuda", 0)
    staging, x = Staging(device), torch.zeros(4, device=device)
    moved, there = staging.to_device(torch.ones(4))
    torch.cuda.synchronize(device)
    work = torch.zeros(8192, 8192, device=device)
    for _ in range(50):
        work = work @ work
    computed = staging.now()
    y = staging.use(moved, there) + x
    assert computed is not None
    assert not computed.query()
    assert torch.equal(staging.to_host(y, staging.now()), torch.ones(4))
    assert computed.query()


def _losses(run: RunConfig) -> tuple[list[float], Built]:
    with in_process(run, total_steps=10) as built:
        steps = [list(range(8 * step, 8 * step + 8)) for step in (0, 1, 0)]
        return [built.engine.train_step(batch(ids), i).loss for i, ids in enumerate(steps)], built


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("kind", ["raw", "direct", "aqsgd"])
def test_a_gpu_trains_what_the_cpu_does(kind: str) -> None:
    results = {}
    for device in ("cpu", "cuda"):
        run = config(pipeline={"device": device}, boundary=[{"forward": {"kind": kind}}])
        results[device], built = _losses(run)
        assert all(tensor.device.type == device for tensor in weights(built).values())
    assert results["cuda"] == pytest.approx(results["cpu"], rel=1e-3)
