"""AQ-SGD at one cut: two ends in one process, and in a pipeline under random delays."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.single_process import in_process
from tests.aqsgd.delays import delay
from tests.pipeline.wire.codecs import rows
from tests.ranks import run_ranks
from tests.training import TOKENS, WIDTH, batch, config, start
from thinpipe.aqsgd.coded_memory import CodedMemory
from thinpipe.aqsgd.config import AqsgdConfig, build_delta
from thinpipe.aqsgd.delta import DeltaBoundary
from thinpipe.aqsgd.disk import DiskStore
from thinpipe.launch.components import Built
from thinpipe.pipeline.wire.cast import Cast
from thinpipe.pipeline.wire.codec import Cached
from thinpipe.pipeline.wire.header import HEADER_NBYTES
from thinpipe.pipeline.wire.uniform import Uniform

SHAPE = (6, 16)


def visit(
    sender: DeltaBoundary, receiver: DeltaBoundary, x: torch.Tensor, ids: list[int], step: int = 0
) -> torch.Tensor:
    ids_B = torch.tensor(ids)
    plan, other_plan = (end.plan(ids_B, x.shape, step=step) for end in (sender, receiver))
    assert (plan.capacity, plan.checksum) == (other_plan.capacity, other_plan.checksum)
    wire, out = torch.empty(plan.capacity, dtype=torch.uint8), torch.empty_like(x)
    assert sender.encode(plan, x, wire) == plan.capacity
    receiver.decode(other_plan, wire, out)
    for end in (sender, receiver):
        end.finish_step(keep=True)
    return out


def test_first_visit_is_per_sample_not_per_epoch() -> None:
    spec = AqsgdConfig(bits=2, first_visit="fp32", memory="fp32")
    sender, receiver = (build_delta(spec, width=16, key=3) for _ in range(2))
    x = torch.randn(2, *SHAPE)
    assert torch.equal(visit(sender, receiver, x, [1, 2]), x)
    both = torch.randn(2, *SHAPE)
    out = visit(sender, receiver, both, [2, 7])  # 2 is known, 7 is new
    assert torch.equal(out[1], both[1])
    assert not torch.equal(out[0], both[0])


@settings(max_examples=25)
@given(
    bits=st.integers(2, 7),
    delta=st.sampled_from(["uniform", "tiles"]),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 77)),
    exponent=st.integers(-40, 20),
    outlier=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_further_visit_of_a_value_contracts_the_error(
    bits: int, delta: str, shape: tuple[int, int], exponent: int, outlier: bool, seed: int
) -> None:
    """By a quarter at least, down to what fp32 can tell; the theory asks for less than 0.707."""
    spec = AqsgdConfig.model_validate({"bits": bits, "delta": delta, "memory": "fp32"})
    sender, receiver = (build_delta(spec, width=shape[1], key=3) for _ in range(2))
    x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    if outlier:
        x[0, 0, 0] *= 50
    size = float(x.norm())
    visit(sender, receiver, torch.zeros_like(x), [1])
    for number in range(1, 7):
        error = float((visit(sender, receiver, x, [1], number) - x).norm())
        assert error <= max(0.75**number, 2.0**-20) * size, number
        assert sender.memory.digest() == receiver.memory.digest()


def test_tiles_code_a_change_with_a_smaller_error() -> None:
    x, memory = rows(2, 4096, 1), rows(2, 4096, 2)
    x[:, 5::64] += 9.0
    found = {}
    for name in ("uniform", "tiles"):
        codec = AqsgdConfig(bits=2, delta=name).change_codec(64)
        wire = torch.empty(2, codec.capacity(4096), dtype=torch.uint8)
        sent, received, out = (torch.full_like(x, torch.nan) for _ in range(3))
        finite = codec.encode_change(x, Cached(memory, sent), wire, noise=None)
        assert torch.equal(finite, codec.decode_change(wire, Cached(memory, received), out))
        assert torch.equal(sent, received)
        assert torch.equal(sent, out)
        found[name] = float((out - x).norm() / (x - memory).norm())
    assert found["tiles"] < 0.9 * found["uniform"]


@pytest.mark.parametrize(("key", "value"), [("scale_per", 64), ("rounding", "stochastic")])
def test_settings_that_tiles_do_not_have_are_rejected(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f'{key}: has no meaning with delta = "tiles"'):
        AqsgdConfig.model_validate({"delta": "tiles", key: value})
    with pytest.raises(ValueError, match="bits = 8: use 2 to 7"):
        AqsgdConfig(delta="tiles", bits=8)


@pytest.mark.parametrize(
    "memory", [Uniform(8, 24), Uniform(4, 24 * 70), Uniform(8, 40), Cast("bf16")]
)
def test_a_stored_memory_changes_as_if_it_were_decoded(memory: Uniform | Cast) -> None:
    delta, numel = Uniform(3, 64), 24 * 70
    values, x = rows(1, numel, 0), rows(1, numel, 0) + 0.1 * rows(1, numel, 1)
    kept, wire = CodedMemory(memory), torch.empty(1, delta.capacity(numel), dtype=torch.uint8)
    kept.stage(torch.tensor([3]), values, wire)
    kept.commit()
    visit = kept.open(3, numel, torch.device("cpu"))
    assert delta.encode_change(x, visit.cached, wire, noise=None).all()
    kept.close(visit, wire[0], keep=True)
    kept.commit()
    row = torch.empty(1, memory.capacity(numel), dtype=torch.uint8)
    memory.encode(values, row, values, noise=None)
    expected, fresh = torch.empty_like(wire), torch.empty_like(x)
    delta.encode_change(x, Cached(values, fresh), expected, noise=None)
    memory.encode(fresh, row, fresh, noise=None)
    assert torch.equal(wire, expected)
    assert torch.equal(kept.read(torch.tensor([3]), numel), fresh)


AQSGD: Any = [
    {
        "forward": {"kind": "aqsgd", "bits": 3, "memory": 8},
        "backward": {"kind": "direct", "bits": 6},
    }
]
EPOCHS = [batch(ids) for _ in range(3) for ids in ([0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12])]


def slow_down(built: Built) -> None:
    """Make every send, receive and access to the disk of this rank take a random time."""
    dice = random.Random(id(built))
    for channel in built.engine.channels:
        delay(channel._link, "send", "take", dice=dice, most_s=0.02)
        store = getattr(channel.codec.memory, "_store", None)
        if isinstance(store, DiskStore):
            delay(store._file, "read", "write", dice=dice, most_s=0.02)


def digests_in_every_tier(rank: int, runs: list[Any]) -> list[list[dict[int, str]]]:
    return [digests_after_steps(run) for run in runs]


def digests_after_steps(run: Any) -> list[dict[int, str]]:
    built, found = start(run), []
    slow_down(built)
    built.engine.begin(torch.arange(13), EPOCHS[0].ids_B)
    for step, item in enumerate(EPOCHS):
        upcoming = EPOCHS[min(step + 1, len(EPOCHS) - 1)].ids_B
        built.engine.train_step(item, step, upcoming)
        if step % 3 == 2:  # not always: a digest reads all rows, and reading hides a late fetch
            found.append(memory_digests(built))
    built.engine.close()
    return found


def memory_digests(built: Built) -> dict[int, str]:
    found = {}
    for channel in built.engine.channels:
        boundary = channel.codec.training
        if isinstance(boundary, DeltaBoundary):
            found[channel.codec.cut] = boundary.memory.digest()
    return found


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("schedule", "memory"), [("Deep1F1B", 8), ("GPipe", "bf16")])
def test_pipeline_memories_stay_equal_under_random_delays(
    schedule: str, memory: Any, tmp_path: Path
) -> None:
    """At both ends of every cut and, but for the time it takes, in every tier."""
    runs = [
        config(
            pipeline={"cuts": [1, 2, 3], "schedule": schedule},
            boundary=[{**AQSGD[0], "forward": {"kind": "aqsgd", "bits": 3, "memory": memory}}],
            memory={"tier": tier, "folder": str(tmp_path)},
        )
        for tier in ("ram", "disk")
    ]
    everyone = run_ranks(4, digests_in_every_tier, runs)
    for in_ram, on_disk in everyone:
        assert in_ram == on_disk
    for step in range(2):
        for cut in (1, 2, 3):
            assert everyone[cut - 1][0][step][cut] == everyone[cut][0][step][cut]


def test_bytes_on_the_wire_equal_the_formula() -> None:
    """That of gradients codes first visits as it codes changes."""
    forward = {**AQSGD[0]["forward"], "delta": "uniform", "first_visit": 8}
    backward = {"kind": "aqsgd", "bits": 4, "delta": "uniform"}
    boundary: Any = [{"forward": forward, "backward": backward}]
    run = config(pipeline={"cuts": [2]}, boundary=boundary)
    with in_process(run, total_steps=len(EPOCHS)) as built:
        totals = [built.engine.train_step(item, step) for step, item in enumerate(EPOCHS)]
    steps = [[(w.cut, w.direction, w.nbytes, w.messages) for w in step.wire] for step in totals]
    numel, headers = TOKENS * WIDTH, 4 * HEADER_NBYTES
    scales = 2 * TOKENS
    for step, found in enumerate(steps):
        samples = len(EPOCHS[step].ids_B)
        bits = 8 if step < 2 else 3  # the first epoch visits every sample for the first time
        assert found == [
            (2, "forward", headers + samples * (bits * numel // 8 + scales), 4),
            (2, "backward", headers + samples * (4 * numel // 8 + scales), 4),
        ]


def test_evaluation_never_touches_memories() -> None:
    run, losses = config(pipeline={"cuts": [2]}, boundary=AQSGD), []
    for evaluated in (False, True):
        with in_process(run, total_steps=4) as built:
            for step, item in enumerate(EPOCHS[:3]):
                built.engine.train_step(item, step)
            if evaluated:
                before = memory_digests(built)
                plain, compressed = (
                    built.engine.eval_step(EPOCHS[3], 3, compressed=on) for on in (False, True)
                )
                assert memory_digests(built) == before
            losses.append(built.engine.train_step(EPOCHS[3], 3).loss)
    assert losses[0] == losses[1]
    assert plain[1] == compressed[1] == EPOCHS[3].targets.numel()
    assert plain[0] != compressed[0]
    assert plain[0] == pytest.approx(compressed[0], rel=1e-2)


def with_a_broken_step(rank: int, run: Any) -> list[Any]:
    built = start(run)
    found = []
    for step, item in enumerate(EPOCHS[:4]):
        module: Any = built.stages[0].submod
        before = {n: w.clone() for n, w in module.state_dict().items()}
        if step == 2 and rank == 1:
            hook = module.final_norm.register_forward_hook(lambda m, a, out: out * torch.nan)
        totals = built.engine.train_step(item, step)
        if step == 2 and rank == 1:
            hook.remove()
        moved = any(not torch.equal(w, before[n]) for n, w in module.state_dict().items())
        found.append((totals.skipped, moved, memory_digests(built)[2]))
    return found


@pytest.mark.dist
def test_a_step_that_is_not_finite_is_skipped_on_every_stage_alike() -> None:
    run = config(pipeline={"cuts": [2]}, boundary=AQSGD)
    first, second = run_ranks(2, with_a_broken_step, run)
    for step in range(4):
        assert first[step] == second[step]
        assert first[step][:2] == ((True, False) if step == 2 else (False, True))
    assert first[2][2] == first[1][2]  # its activations are not in the memories
