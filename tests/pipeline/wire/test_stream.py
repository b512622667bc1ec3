"""Side streams wait for the compute they depend on, and for nothing else."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from thinpipe.pipeline.wire.pinned import brought_to, host_bytes, written_on
from thinpipe.pipeline.wire.stream import SideStream

CPU = torch.device("cpu")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_on_the_cpu_there_are_no_events_and_no_copies() -> None:
    side, x, wire = SideStream(CPU), torch.randn(3), host_bytes(4, CPU)
    assert side.now() is None
    with side.after(None), written_on(CPU, wire) as near:
        assert near is wire
    assert side.hand_over(x, None) is x
    assert brought_to(CPU, wire) is wire


@pytest.mark.gpu
@GPU
def test_a_side_stream_waits_for_the_compute_it_depends_on() -> None:
    device = torch.device("cuda", 0)
    side = SideStream(device)
    x = torch.ones(2048, 2048, device=device)
    for _ in range(50):  # long enough that a copy that does not wait reads old values
        x = x @ x / 2048
    expected = (x + 1).cpu()

    def take(y: torch.Tensor, computed: torch.cuda.Event | None) -> torch.Tensor:
        with side.after(computed):
            return y.cpu()

    with ThreadPoolExecutor(1) as codec_thread:  # whose own current stream is another
        y = x + 1
        assert torch.equal(codec_thread.submit(take, y, side.now()).result(), expected)


@pytest.mark.gpu
@GPU
def test_handing_a_tensor_over_blocks_nothing() -> None:
    """All that the schedule's thread does returns while the GPU is still at work."""
    device = torch.device("cuda", 0)
    side, x = SideStream(device), torch.zeros(4, device=device)
    with side.after(None):
        moved, copied = torch.ones(4, device=device), side.now()
    torch.ones(4, device=device) + x  # a first addition is loaded, which may wait
    torch.cuda.synchronize(device)
    work = torch.zeros(8192, 8192, device=device)
    for _ in range(50):
        work = work @ work
    computed = side.now()
    y = side.hand_over(moved, copied) + x
    assert computed is not None
    assert not computed.query()
    assert torch.equal(y.cpu(), torch.ones(4))
    assert computed.query()


@pytest.mark.gpu
@GPU
def test_bytes_written_on_a_gpu_arrive_in_pinned_memory() -> None:
    device = torch.device("cuda", 0)
    message = host_bytes(5, device)
    assert message.is_pinned()
    with written_on(device, message[1:]) as near:
        assert near.device == device
        near.fill_(7)
    assert message[1:].tolist() == [7] * 4
    assert torch.equal(brought_to(device, message[1:]).cpu(), message[1:])
