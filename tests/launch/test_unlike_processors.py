"""Hosts with unlike processors in one run: no end of a cut and no digest depends on the kernels.

The second of two ranks computes as an old processor would: without AVX2 and fused multiply-add, in
torch, MKL, oneDNN and numba. Nothing may compute before that is set, so batches are made late.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.training import TORCH_2_13, batch, config, exchange, share, start, weights
from thinpipe.gradcomp.registry import method_names
from thinpipe.launch.host.resources import arithmetic
from thinpipe.launch.run.first_weights import begin_alike
from thinpipe.launch.run.proof import Proof

pytestmark = pytest.mark.dist

OLD = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""Each library reads its own when it first computes."""


def _unlike(rank: int) -> str:
    """Make rank 1's processor an old one; what computes here."""
    if rank == 1:
        from numba import config as numba
        from numba.core.codegen import JITCPUCodegen
        from numba.core.registry import cpu_target

        os.environ |= OLD
        numba.CPU_NAME, numba.CPU_FEATURES = "ivybridge", ""  # the first with F16C
        cpu_target.target_context._internal_codegen = JITCPUCodegen("numba.exec")  # had the host's
        assert torch.backends.cpu.get_cpu_capability() == "DEFAULT", "torch has computed before"
    return arithmetic(torch.device("cpu"))


def _ways(**spec: Any) -> Any:
    """Both directions of a cut."""
    return [{"forward": spec, "backward": spec}]


CUTS: dict[str, Any] = {
    "aqsgd": _ways(kind="aqsgd", bits=4),
    "transform": _ways(kind="transform"),
    "packed": _ways(kind="aqsgd", bits=2, memory=8),
    "tiles": _ways(kind="aqsgd", bits=3, delta="tiles", memory=4),
    "fp16": _ways(kind="aqsgd", first_visit="fp16", memory="fp32", rounding="stochastic"),
    "stateless": _ways(kind="stateless", bits=4),
}
REMEMBER = ("aqsgd", "transform")
QUICK_METHODS = ["allreduce", "diloco"]


def _batches() -> list[Any]:
    return [batch(list(range(8))), batch(list(range(8, 16)))] * 2


def _cuts(names: Sequence[str]) -> Any:
    """Of each kind: losses, what was wrong, and digests of what is remembered; and a tied copy."""
    found, batches, tied = {}, _batches(), None
    for name in names:
        built = start(config(model={"tie_embeddings": "exact"}, boundary=CUTS[name]))
        begin_alike(built, built.engine.transport)
        proof, losses, wrong = Proof(built, built.engine.transport, 1), [], []
        built.engine.begin(torch.arange(16), batches[0].ids_B)
        for step, item in enumerate(batches):
            coming = batches[(step + 1) % len(batches)].ids_B
            totals = built.engine.train_step(item, step, coming)
            losses.append(totals.loss)
            wrong += [totals.skipped, totals.repaired, proof.compare(step + 1)]
        memories = [channel.codec.memory for channel in built.engine.channels]
        found[name] = (losses, wrong, [m.digest() for m in memories if m is not None])
        (tied,) = (w for key, w in weights(built).items() if key in TIED)
    return found, tied


TIED = ("token_embedding.weight", "head.weight")
SMALL: dict[str, Any] = {"bucket_mb": 0.01, "interval": 2, "overlap": 0, "warmup_steps": 2}


def _replicas(rank: int, methods: Sequence[str]) -> Any:
    """Of each method: losses, and the weights that the replicas have begun with."""
    found = {}
    for method in methods:
        pipeline = {"cuts": [], "replicas": 2}
        run = config(pipeline=pipeline, gradcomp=exchange(method, **SMALL), train={"lr": 1e-3})
        built = start(run)
        begin_alike(built, built.engine.transport)
        first, proof, losses = weights(built), Proof(built, built.engine.transport, 1), []
        for step, item in enumerate(_batches() + _batches()[:1]):
            totals = built.engine.train_step(share(item, rank, 2), step)
            assert not totals.skipped
            losses.append(totals.loss)
            proof.compare(step + 1)
        built.sync.finish()
        found[method] = (losses, first)
    return found


def _shards() -> Any:
    """Losses, and the weights that a shard remembers."""
    qsdp = {"method": "qsdp", "weights": "differences", "keep_below": 64, "bucket": 64}
    built = start(config(pipeline={"cuts": [], "shards": 2}, shards=qsdp))
    proof, losses = Proof(built, built.engine.transport, 1), []
    for step, item in enumerate(_batches()):
        losses.append(built.engine.train_step(item, step).loss)
        assert proof.compare(step + 1) == {}
    assert built.shards is not None
    return losses, built.shards.remembered


def _train(rank: int, names: Sequence[str], methods: Sequence[str]) -> Any:
    kind = _unlike(rank)
    return kind, _cuts(names), _replicas(rank, methods), _shards() if SHARDS else None


SHARDS = not TORCH_2_13.args[0]


QUICK = pytest.param(([], QUICK_METHODS), id="quick")
"""Without cuts, whose kernels take a minute to be compiled for an old processor."""
WHOLE = pytest.param(([*CUTS], method_names()), marks=pytest.mark.slow, id="whole")
BOTH = pytest.mark.parametrize("trained", [QUICK, WHOLE], indirect=True, scope="module")


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Any:
    """What both ranks have found."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("needs a CPU with AVX2")
    one, other = run_ranks(2, _train, *request.param)
    assert one[0] != other[0]
    return one[1:], other[1:]


@pytest.mark.parametrize("trained", [WHOLE], indirect=True, scope="module")
def test_both_ends_of_a_cut_hold_the_same_bits(trained: Any) -> None:
    ((upper, embedding), *_), ((lower, head), *_) = trained
    for name, (losses, wrong, memories) in upper.items():
        assert (losses, memories) == (lower[name][0], lower[name][2]), name
        assert not any([*wrong, *lower[name][1]]), name
        remembers = [way["kind"] in REMEMBER for way in CUTS[name][0].values()]
        assert len(memories) == sum(remembers), name
    # each copy is moved by its own host's optimizer, whose steps are of 1e-3
    torch.testing.assert_close(embedding, head, rtol=0, atol=1e-6)


@BOTH
def test_replicas_begin_alike_and_train_to_the_end(trained: Any) -> None:
    (_, one, _), (_, other, _) = trained
    for method, (losses, first) in one.items():
        assert all(map(math.isfinite, [*losses, *other[method][0]])), method
        for name, weight in first.items():
            assert torch.equal(weight, other[method][1][name]), (method, name)


@BOTH
@TORCH_2_13
def test_shards_remember_the_same_bits(trained: Any) -> None:
    (*_, (losses, mine)), (*_, (others, theirs)) = trained
    assert losses == others
    assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
