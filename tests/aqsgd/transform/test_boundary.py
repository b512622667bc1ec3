"""Transform coding with memories: both ends hold the same whole numbers, in fewer bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.aqsgd.transform.ends import (
    TOKENS,
    WIDTH,
    Source,
    assert_alike,
    ends,
    finish,
    send,
    train,
    visit,
)
from tests.ranks import run_ranks
from tests.training import batch, config, share, start
from thinpipe.aqsgd.transform import boundary, proposals
from thinpipe.aqsgd.transform.basis import Basis, step_sizes
from thinpipe.aqsgd.transform.config import TransformConfig
from thinpipe.aqsgd.transform.evaluation import FirstVisits
from thinpipe.aqsgd.transform.rows import StoredSample, pack, unpack
from thinpipe.aqsgd.transform.steps import Steps
from thinpipe.pipeline.wire.coding.entropy import CodingError

BOTH: Any = [{"forward": {"kind": "transform"}, "backward": {"kind": "transform"}}]
EPOCH = [batch([0, 1, 2, 3, 4, 5, 6, 7]), batch([8, 9, 10, 11])]


def size_of(index: int) -> float:
    return float(step_sizes(torch.tensor(index)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory": False},
        {"first_step": 0.02},
        {"dimensions": 0.75},
        {"dimensions": 0.5, "memory": False},
    ],
)
def test_both_ends_are_alike_after_every_step(options: Any) -> None:
    found = train(*ends(**options), range(12))
    assert all(error < 0.1 for _, error in found)
    assert found[-1][0] < 0.7 * found[0][0]  # a basis was found


def test_changes_take_fewer_bits_than_values() -> None:
    with_memory, without = (train(*ends(memory=m), range(12))[-1] for m in (True, False))
    assert with_memory[0] < without[0] - 0.5
    assert with_memory[1] < without[1] * 2


def test_only_whole_numbers_need_to_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver's products are another machine's: what it caches is still the same."""
    sender, receiver = ends()
    clean = train(*ends(), range(12))
    restore = Basis.restore
    project = Basis.project
    noise = torch.Generator().manual_seed(1)

    def other_restore(basis: Basis, y_NK: Tensor) -> Tensor:
        value_ND = restore(basis, y_NK)
        return value_ND * (1 + 1e-3 * torch.randn(value_ND.shape, generator=noise))

    def other_project(basis: Basis, x_ND: Tensor) -> Tensor:
        y_NK = project(basis, x_ND)
        return y_NK * (1 + 1e-3 * torch.randn(y_NK.shape, generator=noise))

    monkeypatch.setattr(Basis, "restore", other_restore)
    monkeypatch.setattr(Basis, "project", other_project)
    perturbed = train(sender, receiver, range(12))  # asserts that both ends are alike
    assert perturbed != clean
    assert sender.learned.version > 0


def test_a_step_that_does_not_count_leaves_nothing_behind() -> None:
    left, right = ends(), ends()
    source = Source()
    ids = list(range(8))
    for step in range(8):
        x_BTD, lost_BTD = source.visit(ids), 3 * source.visit(ids)
        send(*left, x_BTD, ids, step)
        send(*right, lost_BTD, ids, step)
        finish(*right, keep=False)
        send(*right, x_BTD, ids, step)
        finish(*left, *right)
        assert_alike(*right)
        assert left[0].learned.digest() == right[0].learned.digest()
    assert left[0].memory is not None
    assert right[0].memory is not None
    assert left[0].memory.digest() == right[0].memory.digest()


@pytest.mark.parametrize(("stop", "dimensions"), [(1, 1.0), (2, 0.6), (5, 1.0), (9, 0.6)])
def test_state_survives_a_restart_bit_for_bit(stop: int, dimensions: float) -> None:
    whole = ends(dimensions=dimensions)
    train(*whole, range(stop))
    again = ends(dimensions=dimensions)
    for old, new in zip(whole, again, strict=True):
        new.load_state_dict(old.state_dict())
    rest = [train(*pair, range(stop, 14)) for pair in (whole, again)]
    assert rest[0] == rest[1]
    assert_alike(whole[0], again[0])


def test_what_an_earlier_version_cached_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    old, new = ends(), ends()
    train(*old, range(2))
    state = old[0].state_dict()
    del state["weights"]
    for end in new:
        end.load_state_dict(state)
    assert "all starts anew" in caplog.text
    assert train(*new, range(3)) == train(*ends(), range(3))


@pytest.mark.parametrize("stop", [1, 6])
def test_ends_that_start_again_find_a_basis_again(
    monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """Even when pieces of one were under way."""
    for module in (proposals, boundary):
        monkeypatch.setattr(module, "PIECE_NBYTES", 900)
    sender, receiver = ends()
    train(sender, receiver, range(stop))
    for end in (sender, receiver):
        assert end.memory is not None
        end.memory.reset()
        assert (len(end.memory), end.learned.version) == (0, 0)
    found = train(sender, receiver, range(stop, stop + 6))
    assert sender.learned.version == receiver.learned.version > 0
    assert found[-1][0] < 0.5 * found[0][0]
    assert len(receiver.memory or ()) == 8


def test_a_sample_that_is_not_finite_reaches_the_peer_but_no_memory() -> None:
    sender, receiver = ends()
    train(sender, receiver, range(3))
    x_BTD = Source().visit([0, 1, 2])
    x_BTD[1, 3, 5] = torch.inf
    out_BTD, _ = visit(sender, receiver, x_BTD, [100, 101, 102], 3)
    assert bool(out_BTD[1].isnan().all())
    assert bool(out_BTD[[0, 2]].isfinite().all())
    assert receiver.memory is not None
    assert receiver.memory.fingerprints(torch.tensor([100, 101, 102])).bool().tolist() == [1, 0, 1]
    out_BTD, _ = send(sender, receiver, x_BTD.fill_(torch.nan), [103, 104, 105], 4)
    assert bool(out_BTD.isnan().all())


@pytest.mark.parametrize("dimensions", [1.0, 0.25])
def test_a_basis_of_few_tokens_leaves_nothing_out_of_others(dimensions: float) -> None:
    """The first step shows 12 tokens of 32 channels, which span a third of what others fill."""
    sender, receiver = ends(first_step=0.05, dimensions=dimensions)
    source = torch.Generator().manual_seed(0)
    size_D = 2.0 ** (-torch.arange(WIDTH) / 3)
    for step in range(6):
        x_BTD = size_D * torch.randn(1, 12, WIDTH, generator=source)
        out_BTD, _ = visit(sender, receiver, x_BTD, [step], step)
        assert float((out_BTD - x_BTD).norm() / x_BTD.norm()) < 0.03
    assert sender.learned.version > 0
    assert sender.learned.basis.dimensions == WIDTH


def test_directions_that_come_up_later_are_coded_as_well() -> None:
    """Values fill four dimensions at first, then others."""
    sender, receiver = ends(step=0.1, first_step=0.02)
    generator = torch.Generator().manual_seed(0)
    ids = list(range(8))
    for step in range(40):
        x_BTD = torch.zeros(8, TOKENS, WIDTH)
        part = slice(0, 4) if step < 20 else slice(4, 10)
        shape = x_BTD[..., part].shape
        x_BTD[..., part] = torch.randn(shape, generator=generator)
        out_BTD, _ = visit(sender, receiver, x_BTD, ids, step)
        assert float((out_BTD - x_BTD).norm() / x_BTD.norm()) < 0.05


@pytest.mark.parametrize("zeros", [0.3, 0.9])
def test_tokens_that_are_zero_do_not_make_the_others_finer(zeros: float) -> None:
    """As gradients of padding are, often most tokens of a batch of sentences."""
    ids, used, error = list(range(8)), {}, {}
    dead_BT = torch.rand(8, TOKENS, generator=torch.Generator().manual_seed(0)) < zeros
    for some in (False, True):
        source, (sender, receiver) = Source(), ends()
        for step in range(8):
            x_BTD = source.visit(ids)
            if some:
                x_BTD[dead_BT] = 0
            out_BTD, used[some] = visit(sender, receiver, x_BTD, ids, step)
        error[some] = float((out_BTD - x_BTD)[~dead_BT].norm() / x_BTD[~dead_BT].norm())
    assert used[True] < (1.1 - 0.8 * zeros) * used[False]
    assert error[True] == pytest.approx(error[False], rel=0.3)


def test_zeros_and_extremes_are_coded() -> None:
    for size in (0.0, 1e-30, 1e30):
        sender, receiver = ends()
        for step in range(3):
            x_BTD = size * Source().visit([0, 1, 2, 3])
            out_BTD, used = visit(sender, receiver, x_BTD, [0, 1, 2, 3], step)
            assert float((out_BTD - x_BTD).abs().max()) <= 0.3 * float(x_BTD.abs().max())
            assert used <= sender.capacity(x_BTD.shape)


@pytest.mark.parametrize(("own", "largest"), [({}, 0.15), ({"largest_step": 0.4}, 0.4)])
def test_steps_that_follow_changes_are_not_over_the_largest(own: Any, largest: float) -> None:
    x_ND = Source().visit(list(range(8))).flatten(0, 1)
    steps = TransformConfig(step=0.6, first_step=0.05, **own).steps
    small, large = (
        size_of(steps.choose(True, *[change * x_ND] * 2, *[x_ND] * 2)) for change in (0.1, 1.4)
    )
    size = float(x_ND.square().mean().sqrt())
    assert small == pytest.approx(0.06 * size, rel=0.3)
    assert large == pytest.approx(largest * size, rel=0.2)


def test_massive_directions_do_not_coarsen_the_others() -> None:
    """Energy that grows in one direction of many channels: steps follow the rest."""
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(256, WIDTH, generator=generator)
    turn_DD = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
    sizes = []
    for size in (0.0, 5.0, 30.0, 100.0, 1e6):
        y_NK = x_ND.clone()
        y_NK[:, 0] += size
        sizes.append(size_of(Steps(0.8, 0.1, 0.3).choose(False, *[y_NK @ turn_DD, y_NK] * 2)))
    assert max(sizes) < 3 * sizes[0]
    assert min(sizes) > sizes[0] / 2


def test_massive_channels_do_not_coarsen_the_others() -> None:
    x_BTD = Source().visit(list(range(8)))
    plain = Steps(0.8, 0.1, 0.3).choose(False, *[x_BTD.flatten(0, 1)] * 4)
    x_BTD[..., 3] += 1000.0
    massive = Steps(0.8, 0.1, 0.3).choose(False, *[x_BTD.flatten(0, 1)] * 4)
    assert abs(size_of(massive) / size_of(plain) - 1) < 0.2
    sender, receiver = ends()
    for step in range(6):
        out_BTD, _ = visit(sender, receiver, x_BTD, list(range(8)), step)
        others = [channel for channel in range(WIDTH) if channel != 3]
        error = (out_BTD - x_BTD)[..., others].norm() / x_BTD[..., others].norm()
        assert float(error) < 0.2


def test_evaluation_learns_nothing_and_is_like_a_first_visit() -> None:
    sender, receiver = ends()
    train(sender, receiver, range(6))
    before = sender.learned.digest()
    x_BTD = Source(seed=0).visit([0, 1])
    out_BTD, used = send(FirstVisits(sender), FirstVisits(receiver), x_BTD, [0, 1])
    assert before == sender.learned.digest()
    assert float((out_BTD - x_BTD).norm() / x_BTD.norm()) < 0.1
    again_BTD, more = send(sender, receiver, x_BTD, [100, 101], 6)
    assert torch.equal(out_BTD, again_BTD)
    assert used == more


def test_a_row_holds_a_byte_per_value() -> None:
    basis = Basis(
        torch.zeros(WIDTH, WIDTH - 4, dtype=torch.int16), torch.zeros(WIDTH - 4, dtype=torch.uint8)
    )
    q_TK = torch.randint(-127, 128, (TOKENS, WIDTH - 4), dtype=torch.int32)
    coarse_T = torch.arange(TOKENS) % 8
    row = pack(StoredSample(3, -17, coarse_T, q_TK), basis, WIDTH)
    assert row.numel() == 8 + TOKENS * (1 + WIDTH + 2 * 2)
    found = unpack(row, {3: basis}, TOKENS)
    assert (found.version, found.step) == (3, -17)
    assert torch.equal(found.coarse_T, coarse_T)
    assert torch.equal(found.q_TK, q_TK)


def test_damaged_payloads_end_in_errors() -> None:
    """What a checksum would have caught: nothing but `CodingError`, or other values, comes out."""
    sender, receiver = ends()
    train(sender, receiver, range(4))
    ids, x_BTD = list(range(8)), Source().visit(list(range(8)))
    plan = sender.plan(torch.tensor(ids), x_BTD.shape, step=4)
    wire = torch.empty(plan.capacity, dtype=torch.uint8)
    wire = wire[: sender.encode(plan, x_BTD, wire)]
    generator, rejected = torch.Generator().manual_seed(0), 0
    for turn in range(200):
        hurt = wire.clone()
        place = turn if turn < 60 else int(torch.randint(len(wire), (1,), generator=generator))
        hurt[place] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        if turn % 10 == 0:
            hurt = hurt[:place]
        try:
            receiver.read(plan, hurt, torch.empty_like(x_BTD))
        except CodingError:
            rejected += 1
    assert rejected > 100


@pytest.mark.parametrize(("place", "value"), [(4, 200), (6, 200), (6, 0)])
def test_pieces_that_cannot_be_of_a_basis_are_rejected(place: int, value: int) -> None:
    """Index and number of pieces are bounded: no peer fills memory with them."""
    sender, receiver = ends()
    train(sender, receiver, range(1))
    x_BTD = Source().visit([0, 1])
    plan = sender.plan(torch.tensor([0, 1]), x_BTD.shape, step=1)
    wire = torch.empty(plan.capacity, dtype=torch.uint8)
    wire = wire[: sender.encode(plan, x_BTD, wire)]
    wire[place] = value
    with pytest.raises(CodingError, match="of a basis"):
        receiver.read(plan, wire, torch.empty_like(x_BTD))


def digests(rank: int, run: Any) -> list[dict[str, tuple[str, int]]]:
    built, found = start(run), []
    replica = rank // run.pipeline.pipeline_ranks
    own = [share(whole, replica, run.pipeline.replicas).ids_B for whole in EPOCH]
    built.engine.begin(torch.cat(own), own[0])
    for step, whole in enumerate(EPOCH * 3):
        part = share(whole, replica, run.pipeline.replicas)
        totals = built.engine.train_step(part, step, own[(step + 1) % 2])
        assert not totals.skipped
        ends = {c.codec.name: c.codec.training for c in built.engine.channels}
        found.append({name: _digest(end) for name, end in ends.items()})
    built.engine.close()
    return found


def _digest(end: Any) -> tuple[str, int]:
    return end.memory.digest() if end.memory is not None else "", end.learned.digest()


@pytest.mark.dist
def test_both_ends_of_a_pipeline_are_alike(tmp_path: Path) -> None:
    run = config(
        pipeline={"cuts": [2], "schedule": "Deep1F1B", "replicas": 2},
        boundary=BOTH,
        memory={"tier": "disk", "folder": str(tmp_path)},
    )
    everyone = run_ranks(4, digests, run)
    for step in range(6):
        for first in (0, 2):
            assert everyone[first][step] == everyone[first + 1][step]
