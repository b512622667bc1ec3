"""Stages on a GPU: what they train, what their memories hold, and that a CPU understands them."""

import itertools
from typing import Any

import pytest
import torch

from benchmarks.single_process import in_process
from tests.training import batch, config, weights
from thinpipe.aqsgd.config import AqsgdConfig, build_delta
from thinpipe.aqsgd.delta import DeltaBoundary
from thinpipe.launch.components import Built
from thinpipe.launch.config.run import RunConfig
from thinpipe.pipeline.comm.boundary import Boundary, Stateless
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.hadamard import Hadamard
from thinpipe.pipeline.wire.pinned import host_bytes
from thinpipe.pipeline.wire.uniform import Uniform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
WIDTH, TOKENS = 48, 32


def losses(run: RunConfig, steps: int = 3) -> tuple[list[float], Built]:
    with in_process(run, total_steps=10) as built:
        found = [
            built.engine.train_step(batch([8 * (step % 2) + i for i in range(8)]), step).loss
            for step in range(steps)
        ]
        return found, built


@pytest.mark.parametrize("kind", ["raw", "direct", "stateless", "aqsgd", "transform"])
def test_a_gpu_trains_what_the_cpu_does(kind: str) -> None:
    results = {}
    for device in ("cpu", "cuda"):
        run = config(pipeline={"device": device}, boundary=[{"forward": {"kind": kind}}])
        results[device], built = losses(run)
        assert all(tensor.device.type == device for tensor in weights(built).values())
    assert results["cuda"] == pytest.approx(results["cpu"], rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
def test_what_lies_in_ram_trains_the_same_bits_in_less_memory(
    optimizer: str, precision: str
) -> None:
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    found, peaks = [], []
    for offload in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run = config(
            model={"layers": 8, "width": 512, "heads": 8},
            pipeline={"device": "cuda", "precision": precision, "offload": offload},
            train={"optimizer": optimizer},
        )
        found.append(losses(run)[0])
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert found[1] == found[0]
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("memory", ["bf16", 8])
def test_every_tier_trains_alike_and_both_ends_agree(memory: Any, tmp_path: Any) -> None:
    digests, trained = set(), []
    for tier in ("ram", "disk"):
        run = config(
            run={"folder": str(tmp_path / tier)},
            pipeline={"device": "cuda"},
            memory={"tier": tier},
            boundary=[{"forward": {"kind": "aqsgd", "bits": 3, "memory": memory}}],
        )
        with in_process(run, total_steps=10) as built:
            trained.append([built.engine.train_step(batch([0, 1, 2, 3]), i).loss for i in range(4)])
            for channel in built.engine.channels:
                held: Any = channel.codec.memory
                digests |= set() if held is None else {held.digest()}
            built.engine.close()
    assert len(digests) == 1
    assert all(other == trained[0] for other in trained)


def boundaries(seed: int) -> list[tuple[Boundary, Boundary]]:
    """Two equal ends of every kind."""
    specs: list[AqsgdConfig] = [
        AqsgdConfig(bits=bits, memory=memory, rounding=rounding)
        for bits, memory, rounding in itertools.product(
            (2, 3, 4), ("bf16", 8), ("nearest", "stochastic")
        )
    ]
    specs += [AqsgdConfig(bits=2, delta="tiles")]
    pairs: list[tuple[Boundary, Boundary]] = [
        (build_delta(spec, width=WIDTH, key=seed), build_delta(spec, width=WIDTH, key=seed))
        for spec in specs
    ]
    for codec in (Cast("bf16"), Uniform(4, WIDTH), Hadamard(3)):
        pairs.append((Stateless(codec, seed), Stateless(codec, seed)))
    return pairs


@pytest.mark.parametrize(("source", "target"), [(GPU, CPU), (CPU, GPU), (GPU, GPU)])
def test_a_gpu_and_a_cpu_join_one_cut_bit_for_bit(
    source: torch.device, target: torch.device
) -> None:
    for sender, receiver in boundaries(5):
        generator, ids_B = torch.Generator().manual_seed(1), torch.tensor([3, 2**40, 7])
        for visit in range(4):
            x_BTD = torch.randn(3, TOKENS, WIDTH, generator=generator)
            plans = [end.plan(ids_B, x_BTD.shape, step=visit) for end in (sender, receiver)]
            wire = host_bytes(plans[0].capacity, source)
            used = sender.encode(plans[0], x_BTD.to(source), wire)
            out_BTD = torch.full(x_BTD.shape, torch.nan, device=target)
            receiver.decode(plans[1], wire[:used], out_BTD)
            for end in (sender, receiver):
                end.finish_step(keep=True)
            assert torch.isfinite(out_BTD).all()
            if isinstance(sender, DeltaBoundary) and isinstance(receiver, DeltaBoundary):
                assert sender.memory.digest() == receiver.memory.digest()
